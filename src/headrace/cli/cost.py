"""`headrace cost`: what a million tokens cost on rented GPUs, and against APIs.

Reads flags; the arithmetic is search/cost.py's and the printing cost_tables.py's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import AsJson, check_folder
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.hardware.api_prices import ApiPrice
    from headrace.search.cost import Hosting, Mix
    from headrace.search.cost_report import Report

DEFAULT_APIS = ("gpt-4o", "gpt-5-mini", "llama-3.3-70b@together")
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmbKMB]?)\s*")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}

Number = float | None


def cost(
    rate: Annotated[
        Number,
        typer.Option(help="Output tokens/s of one replica: all requests together, at the SLO."),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Rate and lengths from a result of `vllm bench serve`.")
    ] = None,
    stream_rate: Annotated[
        Number, typer.Option(help="The rate of one stream: refused, with what it would make.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Simulate a replica of it on --gpus of --gpu, where nothing is measured."
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="With --model: ttft=500ms,tpot=50ms; default: the workload's."),
    ] = None,
    quant: Annotated[
        str | None, typer.Option(help="With --model: the type of its weights.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="With --model: the type of keys and values.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="As `headrace gpus` names it.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of one replica.")] = 1,
    price: Annotated[Number, typer.Option(help="US dollars per GPU and hour.")] = None,
    price_kind: Annotated[
        str, typer.Option(help="Of the table's prices: on-demand, spot or reserved.")
    ] = "on-demand",
    input_tokens: Annotated[
        Number, typer.Option("--input", help="Mean tokens of a prompt.")
    ] = None,
    output_tokens: Annotated[
        Number, typer.Option("--output", help="Mean tokens of an answer.")
    ] = None,
    cached: Annotated[
        Number, typer.Option(help="Share of the input that a prefix cache holds, 0 to 1.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Lengths of a named workload: chat, rag, code, batch, agent.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Input and output a month, such as 80M or 1.5B.")
    ] = None,
    rps: Annotated[Number, typer.Option(help="Requests a second, in place of --tokens.")] = None,
    utilization: Annotated[
        float, typer.Option(help="The most of a replica's capacity to plan with.")
    ] = 1.0,
    hours: Annotated[float, typer.Option(help="Hours a month that are paid for.")] = 720.0,
    engineering_hours: Annotated[float, typer.Option(help="Hours of work a month.")] = 0.0,
    engineering_usd: Annotated[float, typer.Option(help="US dollars per hour of work.")] = 0.0,
    prefill_share: Annotated[
        Number, typer.Option(help="Share of a replica's time that prefill takes, if known.")
    ] = None,
    api: Annotated[
        list[str] | None,
        typer.Option(help="To compare with: NAME, or NAME=IN/OUT[/CACHED] in $ per million."),
    ] = None,
    api_prices: Annotated[
        Path | None, typer.Option(help="A TOML file of prices that replace the table's.")
    ] = None,
    apis: Annotated[bool, typer.Option("--apis", help="List the known API prices.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the break-even plot there.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every formula with its numbers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What a million tokens cost on rented GPUs, from the rate of all requests together, and where
    that breaks even with an API. Exit status 1: an API is cheaper."""
    from headrace.cli.cost_tables import show, show_apis
    from headrace.hardware.api_prices import parse_api, read_api_prices

    check_folder(svg, "--svg")
    own = read_api_prices(api_prices) if api_prices is not None else {}
    if apis:
        show_apis(own, as_json=as_json)
        return
    compared = [parse_api(each, own) for each in api or DEFAULT_APIS]
    usd, price_source, notes = _price(gpu, price, price_kind)
    if model is not None:
        from headrace.cli.cost_simulated import simulated_rate

        _check_simulated(rate, measured, stream_rate)
        rate, held, note = simulated_rate(
            model=model, gpu=gpu, gpus=gpus, input_tokens=input_tokens,
            output_tokens=output_tokens, workload=workload, quant=quant, kv_dtype=kv_dtype, slo=slo,
        )  # fmt: skip
        cached, notes = (held if cached is None else cached), (*notes, note)
    hosting, more = _hosting(
        rates=(rate, measured, stream_rate),
        mix=_mix(input_tokens, output_tokens, cached, workload),
        gpus=gpus,
        usd=usd,
        hours=hours,
        utilization=utilization,
        engineering=(engineering_hours, engineering_usd),
        prefill_share=prefill_share,
    )
    volume = _volume(tokens, rps, hosting)
    report = _report(hosting, compared, volume, gpu, price_source, (*notes, *more))
    show(report, volume, svg=svg, explained=explain, as_json=as_json)
    if report.verdict.is_cheaper is False:
        raise typer.Exit(1)


def _check_simulated(rate: Number, measured: Path | None, stream_rate: Number) -> None:
    if (rate, measured, stream_rate) != (None, None, None):
        raise ConfigError(
            "Both --model and a rate were given; a rate that is known needs no simulation.",
            "Keep --model, or --rate or --measured.",
            param="model",
        )


def _report(
    hosting: Hosting,
    compared: list[ApiPrice],
    volume: float | None,
    gpu: str | None,
    price_source: str | None,
    notes: tuple[str, ...],
) -> Report:
    from headrace.search.cost import bill, break_even, judge
    from headrace.search.cost_report import Report, sorted_breaks

    breaks = sorted_breaks([break_even(hosting, each) for each in compared])
    return Report(
        hosting=hosting,
        gpu=gpu,
        price_source=price_source,
        bill=bill(hosting, volume or hosting.capacity_tokens, breaks[0].api),
        is_full_replica=volume is None,
        breaks=breaks,
        verdict=judge(hosting, breaks, volume),
        notes=notes,
    )


def _price(gpu: str | None, price: Number, kind: str) -> tuple[Number, str | None, tuple[str, ...]]:
    """(US dollars per GPU and hour, where that is from, what to say about it)."""
    from headrace.hardware.gpus import find_gpu, find_price_kind

    wanted = find_price_kind(kind)
    row = None if gpu is None else find_gpu(gpu)
    if price is not None:
        return price, "given by the user", ()
    found = None if row is None else row.price(wanted)
    if found is not None:
        where = f"{found.provider}, {found.kind}, {found.date}"
        return found.usd_per_hour, where, ()
    missing = "no GPU was named" if row is None else f"no {wanted} price of {row.name} is known"
    return None, None, (f"{missing}: GPU-hours without money; --price gives one",)


def _mix(
    input_tokens: Number, output_tokens: Number, cached: Number, workload: str | None
) -> Mix | None:
    """None: neither lengths nor a workload were given."""
    from headrace.search.cost import Mix

    if workload is not None:
        from headrace.workload.named import find_workload
        from headrace.workload.workload import summarize

        if input_tokens is not None or output_tokens is not None:
            raise ConfigError(
                "Both --workload and --input or --output were given; expected one of them.",
                "Keep --workload, or the lengths.",
                param="workload",
            )
        means = summarize(find_workload(workload).asks(seed=0, count=2000))
        return Mix(
            input_tokens=means.prompt_tokens,
            output_tokens=means.output_tokens,
            cached_share=means.shared_share if cached is None else cached,
        )
    if input_tokens is None and output_tokens is None:
        return None
    if output_tokens is None:
        raise ConfigError(
            "--input was given without --output.", "Give the tokens of an answer.", param="output"
        )
    return Mix(
        input_tokens=input_tokens or 0.0,
        output_tokens=output_tokens,
        cached_share=cached or 0.0,
    )


def _hosting(
    *,
    rates: tuple[Number, Path | None, Number],
    mix: Mix | None,
    gpus: int,
    usd: Number,
    hours: float,
    utilization: float,
    engineering: tuple[float, float],
    prefill_share: Number,
) -> tuple[Hosting, tuple[str, ...]]:
    from headrace.search.cost import Hosting, refuse_stream
    from headrace.search.measured import read_measured

    rate, measured, stream_rate = rates
    whole = None if usd is None else usd * gpus
    if stream_rate is not None:
        raise refuse_stream(stream_rate, whole)
    if (rate is None) == (measured is None):
        raise ConfigError(
            "Expected one of --rate and --measured"
            + (
                ", and both were given."
                if rate is not None
                else ": without a rate there is no cost."
            ),
            "Give the output tokens/s of one replica with all its requests, a benchmark's file, or "
            "--model to simulate one.",
            param="rate",
        )
    notes: tuple[str, ...] = ()
    if measured is not None:
        found = read_measured(measured, whole)
        rate, notes = found.output_tokens_s, found.notes
        mix = found.mix if mix is None else mix
    if mix is None:
        raise ConfigError(
            "The lengths of requests are not known; expected --input and --output, or --workload.",
            "Give the mean tokens of a prompt and an answer: --input 512 --output 300.",
            param="output",
        )
    if engineering[0] > 0 and engineering[1] == 0:
        notes += ("hours of work cost nothing without --engineering-usd",)
    return Hosting(
        output_tokens_s=rate or 0.0,
        mix=mix,
        gpus=gpus,
        usd_per_gpu_hour=usd,
        hours=hours,
        utilization=utilization,
        engineering_hours=engineering[0],
        engineering_usd_per_hour=engineering[1],
        prefill_share=prefill_share,
    ), notes


def _volume(tokens: str | None, rps: Number, hosting: Hosting) -> float | None:
    if tokens is not None and rps is not None:
        raise ConfigError(
            "Both --tokens and --rps were given; expected one.", "Keep one.", param="tokens"
        )
    if rps is not None:
        if rps <= 0:
            raise ConfigError(
                f"--rps is {rps:g}; expected above 0.", "Set --rps to above 0.", param="rps"
            )
        return hosting.tokens_for(rps)
    if tokens is None:
        return None
    found = _AMOUNT.fullmatch(tokens)
    amount = 0.0 if found is None else float(found[1]) * _UNITS[found[2].lower()]
    if amount <= 0:
        raise ConfigError(
            f"--tokens is {tokens!r}; expected a number above 0, such as 80M or 1.5B.",
            "Write the tokens of a month, input and output together.",
            param="tokens",
        )
    return amount
