"""Everything that is known about an endpoint at one time, as values: what rules decide from.

Missing is not zero: a value that an engine does not give is absent here, and `unknown` says why.
Nothing in this file reads, asks or measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.doctor.buckets import Buckets
from headrace.workload.slo import Slo

# Usual objectives for a chat: what "slow" means where nobody said.
CHAT = Slo(ttft_s=0.5, tpot_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineId:
    name: str  # as dialects/ names it, "triton", or "" where nothing told
    label: str
    version: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.label} {self.version}" if self.version else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """One GPU as nvidia-smi reports it, or as Triton's page does."""

    name: str
    used_bytes: float | None
    memory_bytes: float | None
    busy_share: float | None  # 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    name: str
    running: float
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request of a probe, timed by the client. Times are seconds since `scheduled_s`."""

    scheduled_s: float  # on the probe's own clock
    sent_s: float | None = None  # when its first byte left; a difference is the client's delay
    connect_s: float | None = None
    ttft_s: float | None = None  # first non-empty token
    end_s: float | None = None  # last token
    tokens: int = 0
    is_counted: bool = False  # by the endpoint's usage; else chunks were counted
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    arrivals_s: tuple[float, ...] = ()  # of each chunk with text
    finish_reason: str | None = None
    error: str | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None and self.ttft_s is not None

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.end_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """Whether the client itself was in the way."""

    lag_p99_s: float | None = None  # of a thread that only wants to wake up every 5 ms,
    lag_mean_s: float | None = None  # and how late it is on average
    dispatch_p99_s: float | None = None  # a request's first byte after its scheduled time
    cpu_share: float | None = None  # of one core
    dns_s: float | None = None
    connect_s: float | None = None  # the least of several: about one round trip
    tls_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the active probes found; a probe that was left out is empty, and `skipped` says why."""

    short: tuple[Answer, ...] = ()
    medium: tuple[Answer, ...] = ()
    long: tuple[Answer, ...] = ()
    cold: tuple[Answer, ...] = ()  # a prefix for the first time,
    warm: tuple[Answer, ...] = ()  # and the same again, in the same order
    beside: tuple[Answer, ...] = ()  # a short prompt just before each of these pairs,
    question: tuple[Answer, ...] = ()  # and what follows the prefix, as a bare prompt
    bursts: tuple[tuple[Answer, ...], ...] = ()
    references: tuple[Answer, ...] = ()  # one stream just before each burst
    stream: Answer | None = None  # one long answer; halfway through, `intruder` arrives
    intruder: Answer | None = None
    intruder_at_s: float | None = None  # on the clock of `stream`
    plain: tuple[Answer, ...] = ()
    grammar: tuple[Answer, ...] = ()  # with a schema whose text is always the same,
    grammar_small: tuple[Answer, ...] = ()  # beside a schema of the user's own, a small one
    grammar_new: tuple[Answer, ...] = ()  # and with a text that nobody has sent before
    sizes: tuple[Answer, ...] = ()  # bare prompts of a few tokens, of several lengths
    penalty: tuple[Answer, ...] = ()
    deltas: Mapping[str, float] = field(default_factory=dict)  # of counters, over all probes
    warm_deltas: Mapping[str, float] = field(default_factory=dict)  # over the prefix probe
    burst_levels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    gpus: tuple[GpuNow, ...] = ()  # during the bursts
    client: ClientHealth = ClientHealth()
    spent_tokens: int = 0
    spent_s: float = 0.0
    skipped: Mapping[str, str] = field(default_factory=dict)
    cpu_s: float | None = None  # of this process, for the requests alone
    stopped: str | None = None  # where the endpoint went away in the middle, and how

    @property
    def answers(self) -> tuple[Answer, ...]:
        one = [each for each in (self.stream, self.intruder) if each is not None]
        groups = (self.short, self.medium, self.long, self.cold, self.warm, self.beside,
                  self.question, self.plain, self.grammar, self.grammar_small, self.grammar_new,
                  self.sizes, self.penalty, self.references,
                  *self.bursts, one)  # fmt: skip
        return tuple(answer for group in groups for answer in group)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(answer.error for answer in self.answers if answer.error is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What the model needs at least on this GPU, from the ledger (plan/fit_work.py)."""

    tpot_s: float  # of one sequence alone: bytes over bandwidth
    weight_bytes: int
    memory_bytes: int  # of one GPU
    source: str  # which model, which GPU, which precision
    narrower_ratio: float | None = None  # weight bytes now / weight bytes in 8 bits
    long_ratio: float | None = None  # work of a token in the long prompt / in the medium one


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Step times of this model on this machine, from a profile of `headrace calibrate`."""

    decode_s: tuple[tuple[float, float], ...]  # by sequences that decode a token each
    prompt_s: tuple[tuple[float, float], ...]  # by tokens of a prompt: what they add to a step
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What an earlier report of the same endpoint measured, for comparison."""

    uptime_s: float | None
    rate: float  # tokens/s of one stream
    config: Mapping[str, object]
    when: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    url: str
    engine: EngineId
    model: str | None = None
    levels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # gauges, each sample
    deltas: Mapping[str, float] = field(default_factory=dict)  # counters, over `period_s`
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # counters by label
    histograms: Mapping[str, Buckets] = field(default_factory=dict)  # what was added
    period_s: float = 0.0
    unknown: Mapping[str, str] = field(default_factory=dict)  # standard name -> why
    config: Mapping[str, object] = field(default_factory=dict)
    gpus: tuple[GpuNow, ...] = ()
    links: str | None = None  # "nvlink" or "pcie", where nvidia-smi told
    replicas: tuple[Replica, ...] = ()
    probe: Probe | None = None
    direct: Probe | None = None  # the same probes past the proxy
    floor: Floor | None = None
    steps: MeasuredSteps | None = None
    long_ratio: float | None = None  # work of a token in the long prompt / in the medium one
    row_ratio: float | None = (
        None  # products of a decoded token / of a prompt's token, by the ledger
    )
    carry_s: float | None = None  # CPU time of a token's way to its client, on cores that compute
    cores: int | None = None  # of this machine, where that is the endpoint's too
    earlier: Earlier | None = None
    about: str | None = None  # what the user wants to tune
    objective: Slo = CHAT
    was_restarted: bool = False
    notes: tuple[str, ...] = ()

    def level(self, name: str) -> float | None:
        """The mean of a gauge's samples, without those of the probes."""
        samples = self.levels.get(name)
        return statistics.fmean(samples) if samples else None

    def highest(self, name: str) -> float | None:
        samples = self.levels.get(name)
        return max(samples) if samples else None

    def lowest(self, name: str) -> float | None:
        samples = self.levels.get(name)
        return min(samples) if samples else None

    def rate(self, name: str) -> float | None:
        added = self.deltas.get(name)
        return None if added is None or self.period_s <= 0 else added / self.period_s

    def mean(self, name: str) -> float | None:
        found = self.histograms.get(name)
        return None if found is None else found.mean

    def number(self, name: str) -> float | None:
        """A number of the configuration."""
        value = self.config.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number else None  # type: ignore[arg-type]

    @property
    def gpu_busy(self) -> float | None:
        """The mean use of the GPUs: under the probes' load where there is some."""
        under_load = self.probe.gpus if self.probe is not None else ()
        shares = [g.busy_share for g in under_load or self.gpus if g.busy_share is not None]
        return statistics.fmean(shares) if shares else None


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def ttft_of(answers: tuple[Answer, ...]) -> float | None:
    return median([a.ttft_s for a in answers if a.is_good and a.ttft_s is not None])


def tpot_of(answers: tuple[Answer, ...]) -> float | None:
    return median([a.tpot_s for a in answers if a.is_good and a.tpot_s is not None])


def prompt_of(answers: tuple[Answer, ...]) -> float | None:
    return median([float(a.prompt_tokens) for a in answers if a.prompt_tokens is not None])


def computed_of(answers: tuple[Answer, ...]) -> float | None:
    """Tokens of the prompt that were computed: a template that all prompts share is found."""
    return median(
        [
            float(a.prompt_tokens - (a.cached_tokens or 0))
            for a in answers
            if a.prompt_tokens is not None
        ]
    )
