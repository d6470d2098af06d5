"""`headrace bench`'s flags as a workload and a way to measure it; refuses what contradicts."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.session import Asked
    from headrace.bench.spend import Purse
    from headrace.workload.arrivals import Arrivals
    from headrace.workload.workload import Synthetic, Workload

_CLIENTS = 8
_REQUESTS = 100
_LENGTHS = {"input": "prompts", "output": "outputs", "turns": "turns", "follow_ups": "follow_ups"}
_SHAPE = (*_LENGTHS, "wait", "prefixes", "prefix_tokens")
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Those that describe the workload."""

    workload: str | None = None
    trace: Path | None = None
    prompts: Path | None = None
    input: str | None = None
    output: str | None = None
    prefixes: int = 0
    prefix_tokens: int = 0
    turns: str | None = None
    follow_ups: str | None = None
    wait: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    arrivals: str | None = None


def workload_of(flags: Flags) -> Workload:
    from headrace.workload.named import find_workload
    from headrace.workload.trace import read_trace

    given = [name for name in ("workload", "trace", "prompts") if getattr(flags, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} are given; expected one of them.")
    if flags.concurrency is not None and flags.rate is not None:
        raise ConfigError(
            "--concurrency and --rate are given: a closed loop has no rate.",
            "Give one; --max-concurrency limits an open loop.",
        )
    if flags.trace is not None:
        if flags.arrivals is not None or flags.concurrency is not None:
            raise ConfigError("--trace is given with arrivals; a trace has its own.")
        given = [name for name in _SHAPE if getattr(flags, name)]
        if given:
            raise ConfigError(
                f"--trace and --{given[0].replace('_', '-')} are given; a trace has its own."
            )
        read = read_trace(flags.trace)
        return read if flags.rate is None else read.at_rate(flags.rate)
    if flags.workload is not None:
        made = _changed(find_workload(flags.workload), flags)
        if flags.concurrency is not None:
            return made.with_clients(flags.concurrency)
        if flags.arrivals is not None:
            return replace(made, arrivals=_arrivals(flags)).at_rate(flags.rate or 1.0)
        return made if flags.rate is None else made.at_rate(flags.rate)
    return _synthetic(flags)


def _changed(made: Synthetic, flags: Flags) -> Synthetic:
    """A workload by name with what was given in place of its own."""
    from headrace.workload.distribution import parse_distribution
    from headrace.workload.workload import parse_lengths

    parts: dict[str, Any] = {}
    for flag, field in _LENGTHS.items():
        if text := getattr(flags, flag):
            parts[field] = parse_lengths(text, flag.replace("_", "-"))
    if flags.wait:
        parts["waits"] = parse_distribution(flags.wait, "wait")
    if flags.prefixes or flags.prefix_tokens:
        parts["prefixes"] = flags.prefixes or made.prefixes or 1
        parts["prefix_tokens"] = flags.prefix_tokens or made.prefix_tokens
    return replace(made, **parts)


def _arrivals(flags: Flags) -> Arrivals:
    from headrace.workload.arrivals import ClosedLoop, parse_arrivals

    if flags.rate is None and flags.arrivals is None:
        return ClosedLoop(clients=flags.concurrency or _CLIENTS)
    return parse_arrivals(flags.arrivals or "poisson", flags.rate)


def _synthetic(flags: Flags) -> Workload:
    from headrace.workload.distribution import Constant, parse_distribution
    from headrace.workload.workload import Synthetic, fixed, parse_lengths

    if bool(flags.prefixes) != bool(flags.prefix_tokens):
        raise ConfigError("One of --prefixes and --prefix-tokens is missing.", "Give both.")
    made = Synthetic(
        name="prompts" if flags.prompts else "custom",
        prompts=parse_lengths(flags.input or _default_input(flags), "input"),
        outputs=parse_lengths(flags.output or "128", "output"),
        arrivals=_arrivals(flags),
        prefixes=flags.prefixes,
        prefix_tokens=flags.prefix_tokens,
        turns=parse_lengths(flags.turns, "turns") if flags.turns else fixed(1),
        follow_ups=parse_lengths(flags.follow_ups, "follow-ups") if flags.follow_ups else None,
        waits=parse_distribution(flags.wait, "wait") if flags.wait else Constant(0.0),
    )
    return made if flags.rate is None else made.at_rate(flags.rate)


def _default_input(flags: Flags) -> str:
    """Of prompts from a file only a bound matters, for --spend-limit: two tokens a word."""
    if flags.prompts is None:
        return "512"
    from headrace.bench.prompts import flat, read_prompts

    return str(max(2 * len(flat(each).split()) + 50 for each in read_prompts(flags.prompts)))


def asked_of(
    workload: Workload,
    flags: Flags,
    *,
    url: str,
    model: str | None,
    api: str,
    extra: str | None,
    key_variable: str | None,
    requests: int | None,
    duration: float | None,
    precision: float | None,
    warm_up: int | None,
    slo: str | None,
    max_concurrency: int | None,
    timeout: float,
    seed: int,
    salt: str | None,
    price: str | None,
    spend_limit: float | None,
) -> Asked:
    from headrace.bench.feed import clients_of
    from headrace.bench.prompts import read_prompts
    from headrace.bench.run import Stop
    from headrace.bench.session import Asked
    from headrace.bench.target import check_extra
    from headrace.client.connection import parse_address
    from headrace.workload.slo import parse_slo

    if api not in _PATHS:
        raise ConfigError(f"--api is {api!r}; expected chat or completions.")
    clients = clients_of(workload)
    is_bounded = requests is not None or duration is not None
    if precision is not None and not is_bounded:
        requests = 100 * _REQUESTS
    elif not is_bounded and flags.trace is None:
        requests = _REQUESTS
    more: dict[str, Any] = check_extra(extra) if extra else {}
    return Asked(
        address=parse_address(url),
        model=model,
        path=_PATHS[api],
        key=_key(key_variable),
        extra=more,
        stop=Stop(requests=requests, duration_s=duration),
        precision=precision,
        warm_up=(2 * clients if clients else 2) if warm_up is None else warm_up,
        most_at_once=max_concurrency,
        timeout_s=timeout,
        seed=seed,
        salt=salt or secrets.token_hex(4),
        slo=parse_slo(slo) if slo else workload.slo,
        prompts=read_prompts(flags.prompts) if flags.prompts else (),
        purse=_purse(price, spend_limit),
    )


def _purse(price: str | None, limit_usd: float | None) -> Purse | None:
    from headrace.bench.spend import Purse
    from headrace.hardware.api_prices import parse_api

    if limit_usd is None and price is None:
        return None
    if price is None:
        raise ConfigError(
            "--spend-limit needs to know what tokens cost.",
            "Give --price, such as --price gpt-4o or --price mine=2.5/10.",
        )
    if limit_usd is None:
        return Purse(parse_api(price))
    if not limit_usd > 0:
        raise ConfigError(f"--spend-limit is {limit_usd:g}; expected dollars above 0.")
    return Purse(parse_api(price), limit_usd)


def counter_of(model: str | None) -> Callable[[str], int] | None:
    """Counts a text's tokens by the tokenizer of this model, which is here already."""
    if model is None:
        return None
    from headrace.assemble import read_tokenizer
    from headrace.fetch.resolve import resolve_model
    from headrace.weights.load import open_weights

    file = open_weights(resolve_model(model, offline=True))
    try:
        tokenizer = read_tokenizer(file)
    finally:
        file.close()
    return lambda text: len(tokenizer.encode(text, add_bos=False))


def _key(variable: str | None) -> str | None:
    """By the name of its variable, never on the command line."""
    import os

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"${variable} is not set.", "Set it, or leave --key-variable out.")
    return key
