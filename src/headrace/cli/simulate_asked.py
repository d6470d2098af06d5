"""Flags of `headrace simulate` as a workload and a fleet: which requests, how many replicas, which
router, pools and scaling.

Every refusal names the flag. Looks no model and no GPU up: simulate_machine.py does.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.policies.routing import Routing
from headrace.policies.scaling import ScalingRules
from headrace.workload.slo import parse_share, parse_time

if TYPE_CHECKING:
    from headrace.workload.workload import Workload

MOST_REPLICAS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedWorkload:
    """Which requests, before anything is checked."""

    workload: str | None = None
    trace: Path | None = None
    input: str | None = None
    output: str | None = None
    arrivals: str | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedFleet:
    """How many machines and how they share the requests, before anything is checked."""

    gpus: int | None = None
    tp: int | None = None
    replicas: int | None = None
    prefill_replicas: int | None = None
    decode_replicas: int | None = None
    router: str | None = None
    link: str | None = None
    autoscale: str | None = None
    cold_start: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What was asked for, checked. With `decode`, `replicas` are those that compute prompts."""

    tp: int
    replicas: int
    decode: int = 0
    routing: Routing = Routing.LEAST_PENDING
    link_bytes_s: float | None = None  # between the two pools; None: the GPU's own
    scaling: ScalingRules | None = None
    cold_start_s: float = 0.0

    @property
    def is_one(self) -> bool:
        return self.replicas == 1 and not self.decode and self.scaling is None

    @property
    def gpus(self) -> int:
        """At the start."""
        return self.tp * (self.replicas + self.decode)


def make_workload(asked: AskedWorkload, context_tokens: int) -> Workload:
    """From a name, a trace or lengths: one of them."""
    from headrace.workload.arrivals import parse_arrivals
    from headrace.workload.named import find_workload
    from headrace.workload.trace import read_trace
    from headrace.workload.workload import Synthetic, parse_lengths

    lengths = asked.input is not None or asked.output is not None
    if sum((asked.workload is not None, asked.trace is not None, lengths)) != 1:
        raise ConfigError(
            "Expected one of --workload, --trace, or --input and --output.", "Give one of them."
        )
    if asked.trace is not None:
        if asked.arrivals is not None:
            raise ConfigError(
                "--arrivals and --trace are given; a trace has its own arrivals.",
                "Leave --arrivals out; --rate makes a trace faster or slower.",
            )
        read = read_trace(asked.trace)
        return read if asked.rate is None else read.at_rate(asked.rate)
    if asked.workload is not None:
        named = find_workload(asked.workload)
        made = replace(named, context_tokens=min(named.context_tokens, context_tokens))
        if asked.arrivals is not None:
            made = replace(made, arrivals=parse_arrivals(asked.arrivals, asked.rate))
        return made if asked.rate is None else made.at_rate(asked.rate)
    if asked.input is None or asked.output is None:
        raise ConfigError("One of --input and --output is missing.", "Give both.")
    prompts, outputs = (
        parse_lengths(asked.input, "input"),
        parse_lengths(asked.output, "output"),
    )
    mean_tokens = prompts.mean + outputs.mean
    if mean_tokens > context_tokens:
        raise ConfigError(
            f"A request has {mean_tokens:,.0f} tokens on average; the context is "
            f"{context_tokens:,}.",
            "Give shorter --input or --output, or another model.",
            param="input",
        )
    return Synthetic(
        prompts=prompts,
        outputs=outputs,
        arrivals=parse_arrivals(asked.arrivals or "poisson", asked.rate),
        context_tokens=context_tokens,
    )


def make_fleet(asked: AskedFleet) -> Fleet:
    tp, replicas, decode = _sizes(asked)
    scaling, cold_start_s = _scaling(asked, replicas)
    if asked.link is not None and not decode:
        raise ConfigError(
            "--link is given without --prefill-replicas and --decode-replicas: nothing is sent.",
            "Leave it out, or set both.",
            param="link",
        )
    return Fleet(
        tp=tp,
        replicas=replicas,
        decode=decode,
        routing=find_router(asked.router),
        link_bytes_s=None if asked.link is None else _bytes_s(asked.link),
        scaling=scaling,
        cold_start_s=cold_start_s,
    )


def find_router(name: str | None) -> Routing:
    if name is None:
        return Routing.LEAST_PENDING
    wanted = name.strip().lower().replace("_", "-")
    names = [each.value for each in Routing]
    if wanted in names:
        return Routing(wanted)
    near = difflib.get_close_matches(wanted, names, n=1)
    raise ConfigError(
        f"--router is {name[:40]!r}; expected one of {', '.join(names)}.",
        f"Did you mean {near[0]}?" if near else "Choose one of them.",
        param="router",
    )


def _sizes(asked: AskedFleet) -> tuple[int, int, int]:
    """(GPUs of a replica, replicas, replicas that decode): GPUs = the first x the others."""
    first, decode = asked.prefill_replicas, asked.decode_replicas
    if (first is None) != (decode is None):
        raise ConfigError(
            "One of --prefill-replicas and --decode-replicas is given; pools apart need both.",
            "Set both.",
            param="prefill_replicas" if first is None else "decode_replicas",
        )
    if first is not None and asked.replicas is not None:
        raise ConfigError(
            "--replicas is given beside --prefill-replicas: all replicas would do both.",
            "Leave --replicas out.",
            param="replicas",
        )
    replicas = asked.replicas if first is None or decode is None else first + decode
    tp = asked.tp
    if asked.gpus is None:
        tp, replicas = tp or 1, replicas or 1
    elif tp is None:
        replicas = replicas or 1
        tp = asked.gpus // replicas
    else:
        replicas = replicas or asked.gpus // tp
    if asked.gpus is not None and (tp * replicas != asked.gpus or not tp):
        raise ConfigError(
            f"--gpus is {asked.gpus}, and {_count(replicas, 'replica')} of {tp or 1} are "
            f"{(tp or 1) * replicas}.",
            "Set --gpus to --tp x the number of replicas, or leave one of them out.",
            param="gpus",
        )
    if replicas > MOST_REPLICAS:
        raise ConfigError(
            f"There would be {replicas:,} replicas; at most {MOST_REPLICAS:,} are simulated.",
            "Simulate a part of them with its part of the rate.",
            param="replicas",
        )
    return tp, (replicas if decode is None else replicas - decode), decode or 0


def _scaling(asked: AskedFleet, replicas: int) -> tuple[ScalingRules | None, float]:
    """ "1:8", or "1:8,waiting=250ms,busy=85%,idle=50%,calm=60s,interval=5s"."""
    if asked.autoscale is None:
        if asked.cold_start is not None:
            raise ConfigError(
                "--cold-start is given without --autoscale: no replica is added.",
                "Add --autoscale LEAST:MOST, such as 1:8, or leave it out.",
                param="cold_start",
            )
        return None, 0.0
    if asked.cold_start is None:
        raise ConfigError(
            "--autoscale is given without --cold-start: how long a new replica takes to start is "
            "not known, and decides what scaling is worth.",
            "Give the time from asking for a replica to its first request, as in --cold-start 90s "
            "(0s: at once).",
            param="cold_start",
        )
    rules = parse_autoscale(asked.autoscale)
    if not rules.least <= replicas <= rules.most:
        raise ConfigError(
            f"{_count(replicas, 'replica')} at the start, and --autoscale is {rules.least} to "
            f"{rules.most}.",
            f"Set --replicas {min(max(replicas, rules.least), rules.most)}.",
            param="replicas",
        )
    return rules, parse_time("cold-start", asked.cold_start)


def parse_autoscale(text: str) -> ScalingRules:
    range_, *rest = (part.strip() for part in text.split(","))
    least, colon, most = range_.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal():
        raise ConfigError(
            f"--autoscale is {text[:60]!r}; expected LEAST:MOST replicas, such as 1:8.",
            "Rules may follow: 1:8,waiting=250ms,busy=85%,idle=50%,calm=60s,interval=5s.",
            param="autoscale",
        )
    found: dict[str, float] = {}
    for part in rest:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name in _TIMES and equals:
            found[f"{name}_s"] = parse_time(f"autoscale's {name}", value)
        elif name in _SHARES and equals:
            found[name] = parse_share(f"autoscale's {name}", value)
        else:
            near = difflib.get_close_matches(name, (*_TIMES, *_SHARES), n=1)
            raise ConfigError(
                f"--autoscale has {part[:40]!r}; known are {', '.join((*_TIMES, *_SHARES))}.",
                f"Did you mean {near[0]}?" if near else "Write them as waiting=250ms,busy=85%.",
                param="autoscale",
            )
    return ScalingRules(least=int(least), most=int(most), **found)


_TIMES, _SHARES = ("waiting", "calm", "interval"), ("busy", "idle")


def _bytes_s(text: str) -> float:
    from headrace.core.sizes import parse_bytes

    return float(parse_bytes(text.strip().removesuffix("/s"), "link"))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
