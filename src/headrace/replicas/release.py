"""What all replicas serve: a model and its settings. A rolling change goes from one to another.

Knows settings and which of them can change while a router runs; starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.server_config import ServerConfig
from headrace.core.settings import all_settings, parse_value
from headrace.fetch.verify import Checked

# What the router itself uses, or has shared out: only a start of everything changes these.
ROUTERS = frozenset(
    {
        *("host", "port", "replicas", "api_key", "api_keys_file", "metrics_key", "admin_port"),
        *("admin_host", "cors_origin", "allowed_host", "max_connections", "max_body", "max_bodies"),
        *("max_headers", "client_timeout_s", "drain_timeout_s", "threads", "device", "mode"),
        *("tensor_parallel", "pipeline_parallel", "rank_address"),
        *("log_level", "log_format", "log_content"),
    }
)
NOT_CHECKED = Checked()
REPLICAS_DRAIN_S = 1.0  # the router has let requests end before a replica is told to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    number: int  # 1, and one more with each change
    path: str
    typed: str | None  # as the user named the model
    server: ServerConfig
    engine: EngineConfig
    checked: Checked = NOT_CHECKED
    keeps_names: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return self.typed or self.path


def change(release: Release, model: str | None, settings: Mapping[str, object]) -> Release:
    """The next release; its path is not known yet. Raises for what can't be changed, or is not
    valid."""
    known = {setting.name: setting for setting in all_settings() if setting.table}
    values: dict[str, dict[str, object]] = {"server": {}, "engine": {}}
    for name, value in settings.items():
        setting = known.get(name)
        if setting is None:
            raise ConfigError(
                f"Unknown setting {name[:100]!r}.", "headrace serve --help lists them.", param=name
            )
        if name in ROUTERS:
            raise ConfigError(
                f"{name} belongs to the router or to how the machine is shared out; it can't "
                "change while requests are served.",
                "Stop everything and start it with the new value.",
                param=name,
            )
        values[setting.table][name] = (
            None if value is None else parse_value(setting, _text(value), "the request")
        )
    pool = ("kv_memory", "kv_tokens", "kv_fraction")
    if any(values["engine"].get(name) is not None for name in pool):
        for name in pool:  # alternatives: the new one replaces the old one
            values["engine"].setdefault(name, None)
    return replace(
        release,
        number=release.number + 1,
        typed=release.typed if model is None else model,
        server=replace(release.server, **cast("dict[str, Any]", values["server"])),
        engine=replace(release.engine, **cast("dict[str, Any]", values["engine"])),
    )


def for_replicas(server: ServerConfig) -> ServerConfig:
    """The settings of a replica's server: the router has the clients, their keys and names."""
    default = ServerConfig()
    kept = {
        name: getattr(default, name)
        for name in (
            *("host", "port", "replicas", "api_key", "api_keys_file", "metrics_key"),
            *("admin_port", "admin_host", "cors_origin", "allowed_host"),
        )
    }
    return replace(server, **kept, drain_timeout_s=REPLICAS_DRAIN_S)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
