"""What can be chosen about Headrace on Ray Serve: frozen, checked once. Knows no Ray.

A Serve configuration file gives the same names as JSON (`args:` of an application).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headrace.core.checks import check_fields, refusal, within
from headrace.core.errors import ConfigError
from headrace.policies.routing import BOUND, Routing
from headrace.policies.scaling import ScalingRules

# Of `headrace serve`: decided here, for every replica.
_OURS = ("--host", "--port", "--log-format", "--admin-port", "--metrics-key", "--tensor-parallel")

_RULES = ScalingRules()  # the defaults


_RULES = ScalingRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    model: str | None = None  # as `headrace serve MODEL`; None: the default one
    serve_flags: tuple[str, ...] = ()  # more flags of `headrace serve`, for every replica
    min_replicas: int = field(default=1, metadata=within(at_least=1))
    max_replicas: int = field(default=4, metadata=within(at_least=1))
    cpus: float = field(default=1.0, metadata=within(above=0))  # of one replica
    gpus: int = field(default=0, metadata=within(at_least=0))  # of one replica
    tensor_parallel: int = field(default=1, metadata=within(at_least=1))
    ingress_replicas: int = field(default=1, metadata=within(at_least=1))
    policy: str = Routing.PREFIX.value
    bound: float = field(default=BOUND, metadata=within(at_least=1))
    prefix_bytes: int = field(default=1024, metadata=within(at_least=1))
    session_header: str = "x-session-id"
    tries: int = field(default=8, metadata=within(at_least=1))
    max_body_bytes: int = field(default=8 << 20, metadata=within(at_least=1))
    max_ongoing: int = field(default=1024, metadata=within(at_least=1))  # at one replica
    drain_s: float = field(default=30.0, metadata=within(at_least=0))
    start_s: float = field(default=600.0, metadata=within(above=0))  # for a replica to be ready
    # When one is added or taken away: policies/scaling.py.
    waiting_s: float = _RULES.waiting_s
    busy: float = _RULES.busy
    idle: float = _RULES.idle
    calm_s: float = _RULES.calm_s
    interval_s: float = _RULES.interval_s

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.max_replicas < self.min_replicas:
            words = f"{self.min_replicas} or more, which is min_replicas"
            raise refusal(ConfigError, "max_replicas", self.max_replicas, words)
        if self.policy not in {each.value for each in Routing}:
            known = ", ".join(each.value for each in Routing)
            raise ConfigError(f"policy is {self.policy!r}; expected one of {known}.")
        for flag in self.serve_flags:
            name = flag.partition("=")[0]
            if name in _OURS:
                raise ConfigError(
                    f"{name} is set for each replica by Ray Serve.",
                    "Leave it out; --tensor-parallel is a flag of `headrace ray` itself.",
                )
        if self.gpus and self.tensor_parallel not in (1, self.gpus):
            raise ConfigError(
                f"tensor_parallel is {self.tensor_parallel} and gpus is {self.gpus}.",
                "Give one of them: a rank has one GPU.",
            )
        self.rules()  # checks them

    def rules(self) -> ScalingRules:
        return ScalingRules(
            least=self.min_replicas,
            most=self.max_replicas,
            waiting_s=self.waiting_s,
            busy=self.busy,
            idle=self.idle,
            calm_s=self.calm_s,
            interval_s=self.interval_s,
        )

    def bundle(self) -> dict[str, float]:
        """What one replica needs, all of it on one node: its ranks are processes of one host."""
        needs: dict[str, float] = {"CPU": self.cpus}
        if self.gpus:
            needs["GPU"] = float(self.gpus)
        return needs

    def command(self, node_cpus: int) -> list[str]:
        """The arguments of `headrace` that start a replica's server, without an address."""
        words = ["serve", *([self.model] if self.model else []), "--log-format", "json"]
        words += ["--drain-timeout", f"{self.drain_s:g}"]
        if self.tensor_parallel > 1:
            words += ["--tensor-parallel", str(self.tensor_parallel)]
        given = {flag.partition("=")[0] for flag in self.serve_flags}
        if not self.gpus and self.cpus >= 1 and "--threads" not in given:
            words += ["--threads", str(int(self.cpus))]
        # Replicas that share a node's processors share its memory in the same way.
        if not self.gpus and not given & {"--kv-memory", "--kv-tokens", "--kv-fraction"}:
            words += ["--kv-fraction", f"{min(0.5, 0.5 * self.cpus / node_cpus):.4g}"]
        return [*words, *self.serve_flags]

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "serve_flags": list(self.serve_flags)}


def read_settings(given: Mapping[str, Any]) -> RaySettings:
    """Raises ConfigError for a name that there is not. Text is taken for numbers, as `serve run
    name=value` gives nothing else."""
    types = {each.name: each.type for each in fields(RaySettings)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in types:
            raise ConfigError(
                f"Headrace on Ray has no setting {name!r}; expected one of {', '.join(types)}."
            )
        if name == "serve_flags":
            value = tuple(value.split() if isinstance(value, str) else map(str, value))
        elif isinstance(value, str) and types[name] in ("int", "float"):
            try:
                value = {"int": int, "float": float}[str(types[name])](value)
            except ValueError:
                raise ConfigError(f"{name} is {value!r}; expected a number.") from None
        elif types[name] == "float" and isinstance(value, int):
            value = float(value)
        values[name] = value
    return RaySettings(**values)
