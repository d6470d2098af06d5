"""What tokens cost on rented GPUs, against what an API asks: arithmetic, no simulation.

Everything follows from the rate of one replica with all its requests together, at its objective:
how it is found (a simulation, a benchmark, a guess) is the caller's business. The rate of a single
stream is refused, because a server runs many at once and its hour is paid for once. Money is None
where no price is known; GPU-hours are always there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import ApiPrice

HOURS_A_MONTH = 720.0  # 30 days
_HOUR_S = 3600.0
_MILLION = 1e6
_SLACK = 1e-9  # of a replica: what rounding may add


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Mean tokens of a request, and the share of its input that a prefix cache holds."""

    input_tokens: float
    output_tokens: float
    cached_share: float = 0.0

    def __post_init__(self) -> None:
        _check("input", self.input_tokens, least=0.0)
        _check("output", self.output_tokens, above=0.0)
        _check("cached", self.cached_share, least=0.0, most=1.0)

    @property
    def total_tokens(self) -> float:
        return self.input_tokens + self.output_tokens

    @property
    def parts(self) -> tuple[float, float, float]:
        """Tokens of a request: input that is computed, input from the cache, output."""
        cached = self.input_tokens * self.cached_share
        return self.input_tokens - cached, cached, self.output_tokens

    def blended_usd(self, api: ApiPrice) -> float:
        """Of a million tokens in this mix."""
        cached = api.input_usd if api.cached_input_usd is None else api.cached_input_usd
        prices = (api.input_usd, cached, api.output_usd)
        return sum(n * p for n, p in zip(self.parts, prices, strict=True)) / self.total_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Replicas of one kind for a month, and what they cost apart from their GPUs."""

    output_tokens_s: float  # of one replica, all its requests together, at the objective
    mix: Mix
    gpus: int = 1  # of a replica
    usd_per_gpu_hour: float | None = None
    hours: float = HOURS_A_MONTH  # that are paid for
    utilization: float = 1.0  # the most of a replica's capacity that is planned with
    engineering_hours: float = 0.0
    engineering_usd_per_hour: float = 0.0
    prefill_share: float | None = None  # of a replica's time; None: not known

    def __post_init__(self) -> None:
        _check("rate", self.output_tokens_s, above=0.0)
        _check("gpus", self.gpus, least=1)
        _check("hours", self.hours, above=0.0)
        _check("utilization", self.utilization, above=0.0, most=1.0)
        _check("engineering_hours", self.engineering_hours, least=0.0)
        _check("engineering_usd", self.engineering_usd_per_hour, least=0.0)
        if self.usd_per_gpu_hour is not None:
            _check("price", self.usd_per_gpu_hour, least=0.0)
        if self.prefill_share is not None:
            _check("prefill_share", self.prefill_share, least=0.0, most=1.0)

    @property
    def tokens_s(self) -> float:
        """Input and output of one replica."""
        return self.output_tokens_s * self.mix.total_tokens / self.mix.output_tokens

    @property
    def full_tokens(self) -> float:
        """A month of one replica that is never idle."""
        return self.tokens_s * self.hours * _HOUR_S

    @property
    def capacity_tokens(self) -> float:
        """A month of one replica, as much of it as is planned with."""
        return self.full_tokens * self.utilization

    @property
    def replica_gpu_hours(self) -> float:
        return self.gpus * self.hours

    @property
    def replica_usd(self) -> float | None:
        return None if self.usd_per_gpu_hour is None else self._replica_usd(self.usd_per_gpu_hour)

    @property
    def engineering_usd(self) -> float:
        return self.engineering_hours * self.engineering_usd_per_hour

    def _replica_usd(self, usd_per_gpu_hour: float) -> float:
        return self.replica_gpu_hours * usd_per_gpu_hour

    def replicas_for(self, tokens: float) -> int:
        """The fewest that have the capacity; one stands there even without traffic."""
        return max(1, math.ceil(tokens / self.capacity_tokens - _SLACK))

    def usd_for(self, tokens: float) -> float | None:
        """A month with so many tokens, input and output together."""
        each = self.replica_usd
        return None if each is None else self.replicas_for(tokens) * each + self.engineering_usd

    def tokens_for(self, requests_s: float) -> float:
        return requests_s * self.mix.total_tokens * self.hours * _HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """US dollars per million tokens of each kind; together they make the blended price."""

    input_usd: float
    cached_input_usd: float
    output_usd: float
    basis: str  # how the hour was divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """One month at one volume."""

    tokens: float
    replicas: int
    gpu_hours: float
    busy_share: float  # of all replicas' hours
    gpu_usd: float | None
    engineering_usd: float
    usd: float | None
    usd_per_million: float | None  # blended
    gpu_hours_per_million: float
    parts: Parts | None

    @property
    def idle_gpu_hours(self) -> float:
        return self.gpu_hours * (1 - self.busy_share)


def bill(hosting: Hosting, tokens: float, like: ApiPrice | None = None) -> Bill:
    """`like`: an API whose ratio of prices divides the hour between input and output, where the
    replica's own time is not known."""
    _check("tokens", tokens, above=0.0)
    replicas = hosting.replicas_for(tokens)
    usd = hosting.usd_for(tokens)
    gpu_hours = replicas * hosting.replica_gpu_hours
    per_million = None if usd is None else usd / tokens * _MILLION
    return Bill(
        tokens=tokens,
        replicas=replicas,
        gpu_hours=gpu_hours,
        busy_share=tokens / (replicas * hosting.full_tokens),
        gpu_usd=None if usd is None else usd - hosting.engineering_usd,
        engineering_usd=hosting.engineering_usd,
        usd=usd,
        usd_per_million=per_million,
        gpu_hours_per_million=gpu_hours / tokens * _MILLION,
        parts=None if per_million is None else divide(hosting, per_million, like),
    )


def divide(hosting: Hosting, usd_per_million: float, like: ApiPrice | None) -> Parts | None:
    """A blended price into input, cached input and output. None: nothing to divide by."""
    mix = hosting.mix
    computed, _, output = mix.parts
    if hosting.prefill_share is not None and computed > 0:
        share = hosting.prefill_share
        each = usd_per_million * mix.total_tokens
        basis = f"by time: {share:.0%} of it is prefill, and cached input takes none"
        return Parts(
            input_usd=each * share / computed,
            cached_input_usd=0.0,
            output_usd=each * (1 - share) / output,
            basis=basis,
        )
    if like is None or mix.blended_usd(like) <= 0:
        return None
    factor = usd_per_million / mix.blended_usd(like)
    cached_usd = like.input_usd if like.cached_input_usd is None else like.cached_input_usd
    return Parts(
        input_usd=like.input_usd * factor,
        cached_input_usd=cached_usd * factor,
        output_usd=like.output_usd * factor,
        basis=f"in the ratio of {like.name}'s prices",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where hosting becomes cheaper than an API, in tokens a month.

    `tokens` is the first such volume and `lasting_tokens` the one from which on it stays so: where
    a further replica is needed, the cost jumps and the API may be cheaper again for a while.
    """

    api: ApiPrice
    api_usd_per_million: float  # in this mix
    one_replica_tokens: float | None  # where one replica would, if it had the capacity
    tokens: float | None  # None: never
    replicas: int | None  # that are needed there
    lasting_tokens: float | None
    lasting_replicas: int | None
    most_usd_per_gpu_hour: float | None  # at which full replicas cost as much as the API


def break_even(hosting: Hosting, api: ApiPrice) -> BreakEven:
    price = hosting.mix.blended_usd(api) / _MILLION  # a token
    capacity, fixed, each = hosting.capacity_tokens, hosting.engineering_usd, hosting.replica_usd
    first = lasting = None
    if each is not None and price > 0:
        gain = price * capacity - each  # what a full replica saves
        # n replicas cost n * each + fixed, which the API asks for that / price tokens: it has to be
        # within n * capacity, so n * gain >= fixed.
        if gain > 0 or (gain == 0 and fixed == 0):
            first = 1 if fixed == 0 else max(1, math.ceil(fixed / gain - _SLACK))
        # Where replica n + 1 is added, its cost must be covered at once: n * gain >= each + fixed.
        if gain > 0:
            lasting = max(1, math.ceil((each + fixed) / gain - _SLACK))

    def crossing(replicas: int | None) -> float | None:
        if each is None or replicas is None:
            return None
        return (replicas * each + fixed) / price

    return BreakEven(
        api=api,
        api_usd_per_million=price * _MILLION,
        one_replica_tokens=None if price <= 0 else crossing(1),
        tokens=crossing(first),
        replicas=first,
        lasting_tokens=crossing(lasting),
        lasting_replicas=lasting,
        most_usd_per_gpu_hour=price * capacity / hosting.replica_gpu_hours,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`is_cheaper`: hosting is (or, without a volume, can be) cheaper than every API; None: without
    a price nobody can say."""

    is_cheaper: bool | None
    text: str


def judge(hosting: Hosting, breaks: Sequence[BreakEven], tokens: float | None) -> Verdict:
    """Against the cheapest of the APIs, at a volume if there is one."""
    if not breaks:
        return Verdict(is_cheaper=None, text="There is no API to compare with.")
    least = min(breaks, key=lambda each: each.api_usd_per_million)
    usd = None if tokens is None else hosting.usd_for(tokens)
    if hosting.replica_usd is None:
        most = f"${least.most_usd_per_gpu_hour:,.2f}" if least.most_usd_per_gpu_hour else "$0"
        return Verdict(
            is_cheaper=None,
            text=f"Without a price of the GPU nobody can say; against {least.api.name} an hour of "
            f"it may cost at most {most}, with replicas that are never idle.",
        )
    if tokens is None or usd is None:
        return _judge_any_volume(hosting, least)
    asked = least.api_usd_per_million * tokens / _MILLION
    cheaper = usd < asked
    winner = "Host it yourself" if cheaper else f"Use {least.api.name}"
    reason = (
        f"{show_tokens(tokens)} tokens a month cost ${usd:,.0f} on "
        f"{_replicas(hosting.replicas_for(tokens))} and ${asked:,.0f} from {least.api.name}"
    )
    return Verdict(is_cheaper=cheaper, text=f"{winner}: {reason}; {_turning_point(hosting, least)}")


def _judge_any_volume(hosting: Hosting, least: BreakEven) -> Verdict:
    can = least.tokens is not None
    start = "It depends on the volume" if can else f"Use {least.api.name}"
    return Verdict(is_cheaper=can, text=f"{start}: {_turning_point(hosting, least)}")


def _turning_point(hosting: Hosting, against: BreakEven) -> str:
    full = hosting.replica_usd
    assert full is not None
    per_million = full / hosting.capacity_tokens * _MILLION
    if against.tokens is None:
        beyond = ""
        if against.one_replica_tokens is not None:
            beyond = (
                f" (one replica would need {show_tokens(against.one_replica_tokens)} tokens, "
                f"above its capacity of {show_tokens(hosting.capacity_tokens)})"
            )
        return (
            f"hosting never breaks even{beyond}, because a replica that is used fully costs "
            f"${per_million:,.2f} a million and the API ${against.api_usd_per_million:,.2f}."
        )
    text = f"break-even is at {show_tokens(against.tokens)} tokens a month"
    text += f" with {_replicas(against.replicas or 1)}"
    if against.lasting_tokens is None:
        return text + ", and not beyond a whole number of full replicas."
    if against.lasting_replicas != against.replicas:
        text += f", and for good at {show_tokens(against.lasting_tokens)}"
    return text + "."


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"


def show_tokens(tokens: float) -> str:
    """For a person: 557.3M, 1.115B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit * (1 - 5e-5):  # 999.96M is shown as 1B
            return f"{tokens / unit:.4g}{name}"
    return f"{tokens:.4g}"


def stream_usd_per_million(tokens_s: float, usd_per_hour: float) -> float:
    """What the rate of one stream would make of a million: for a comparison, never a cost."""
    return usd_per_hour / (tokens_s * _HOUR_S) * _MILLION


def refuse_stream(tokens_s: float, usd_per_hour: float | None) -> ConfigError:
    """The error for a rate that is one stream's."""
    would = ""
    if usd_per_hour is not None:
        found = stream_usd_per_million(tokens_s, usd_per_hour)
        would = f" (it would make ${found:,.2f} a million)"
    return ConfigError(
        f"{tokens_s:g} tokens/s is the rate of one stream, not what an hour yields{would}: a "
        "server runs many requests at once, and its hour is paid for once.",
        "Give the rate of all requests together at your objective: --rate, or --measured with a "
        "benchmark under load.",
        param="rate",
    )


def _check(
    param: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> None:
    too_low = (least is not None and value < least) or (above is not None and value <= above)
    if math.isfinite(value) and not too_low and (most is None or value <= most):
        return
    expected = f"above {above:g}" if above is not None else f"{least:g} or more"
    if most is not None:
        expected = f"{'above ' if above is not None else ''}{(above or least or 0):g} to {most:g}"
    raise ConfigError(
        f"{param} is {value:g}; expected {expected}.", f"Set {param} to {expected}.", param=param
    )
