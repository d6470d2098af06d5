"""What every endpoint can use: the served model, the engine, the bounds.

A plain holder, made once by server/start/run.py. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.core.config import EngineConfig
from headrace.core.errors import TemplateError, UnavailableError
from headrace.core.sampling import NEUTRAL, DrawNumbers
from headrace.core.server_config import ServerConfig
from headrace.policies.queue import QueueBounds
from headrace.server.access.keys import Keys
from headrace.server.api.responses.store import ResponseStore
from headrace.server.edge.bodies import Bodies
from headrace.server.link.supervisor import Supervisor
from headrace.server.observe.device import DeviceWatch
from headrace.server.observe.diagnosis import Diagnoser
from headrace.server.observe.exposition import Exposition
from headrace.server.observe.history import History
from headrace.server.observe.objective import Objective
from headrace.server.observe.record import HttpWatcher, Watcher
from headrace.server.request.turns import Turns
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it: text in, text out."""

    name: str  # the name in answers
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    hidden_size: int  # of its embeddings
    sampling_defaults: DrawNumbers = NEUTRAL  # for values that a request does not give
    created_s: int = field(default_factory=lambda: int(time.time()))
    other_names: tuple[str, ...] = ()  # served under these too
    aliases: frozenset[str] = frozenset()  # accepted, but not listed

    @property
    def names(self) -> tuple[str, ...]:
        """The listed names, the one in answers first."""
        return (self.name, *self.other_names)

    def answers_to(self, name: str) -> bool:
        return name in self.names or name in self.aliases

    @property
    def chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise TemplateError(
                f"{self.name} has no chat template.", "Use /v1/completions with a plain prompt."
            )
        return self.template


@dataclass(slots=True, kw_only=True)
class Service:
    config: ServerConfig
    engine_config: EngineConfig
    model: ServedModel
    supervisor: Supervisor
    queue: QueueBounds
    keys: Keys = field(default_factory=Keys)
    responses: ResponseStore = field(
        default_factory=lambda: ResponseStore.from_config(ServerConfig())
    )
    bodies: Bodies = field(default_factory=lambda: Bodies(ServerConfig().max_bodies_bytes))
    dropped: Counter[str] = field(default_factory=Counter)  # connections by reason: room.DROPS
    open_connections: Callable[[], int] = lambda: 0
    watchers: list[Watcher] = field(default_factory=list)
    http_watchers: list[HttpWatcher] = field(default_factory=list)
    exposition: Exposition | None = None  # the text of /metrics
    history: History | None = None
    objective: Objective | None = None  # set by --slo
    device: DeviceWatch | None = None
    diagnoser: Diagnoser | None = None
    fits: Turns = field(default_factory=Turns)
    origins: Mapping[str, str] = field(default_factory=dict)  # where each setting came from
    draining: bool = False
    fingerprint: str = ""  # empty until the engine has reported its backend
    identity: dict[str, object] = field(default_factory=dict)  # what the fingerprint is a hash of
    open_requests: Callable[[], int] = lambda: (
        0
    )  # waiting and running; server/observe/watching.py knows

    def check_accepting(self) -> None:
        if self.draining:
            raise UnavailableError(
                "The server is shutting down.",
                "Send the request to another replica, or again when this one is back.",
                retry_after_s=self.config.drain_timeout_s,
            )

    @property
    def context_tokens(self) -> int:
        facts = self.supervisor.facts
        if facts is None:
            raise UnavailableError(
                "The engine is starting.",
                "Try again shortly.",
                retry_after_s=self.supervisor.retry_after_s(),
            )
        return facts.context_tokens
