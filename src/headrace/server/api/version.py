"""/version: Headrace's version, the fingerprint, and what that is a hash of."""

from __future__ import annotations

from headrace.core.settings import Setting, all_settings, shown_value
from headrace.core.version import headrace_version
from headrace.server.request.call import AnyReply, Call, json_reply
from headrace.server.request.service import Service


async def version(service: Service, call: Call) -> AnyReply:
    """Which Headrace this is; for operators also its settings, and what its fingerprint means."""
    if not call.is_operators:
        return json_reply({"version": headrace_version(), "fingerprint": service.fingerprint})
    return json_reply(version_facts(service))


def version_facts(service: Service) -> dict[str, object]:
    """All of it, as operators may see it."""
    facts = service.supervisor.facts
    return {
        "version": headrace_version(),
        "fingerprint": service.fingerprint,
        "identity": service.identity,
        "config": _config(service),
        "origins": dict(service.origins),  # of each setting: a flag, a variable, a line, default
        # The resolved value on this machine; None until the engine is ready.
        "context_tokens": facts and facts.context_tokens,
        "kv_tokens": facts and facts.total_blocks * facts.block_tokens,
        "max_sequences": facts and facts.max_sequences,
        "block_tokens": facts and facts.block_tokens,
        "max_batch_tokens": facts and facts.max_batch_tokens,
        "max_step_growth": facts and facts.max_step_growth,
        "ledger_bytes": facts and facts.ledger_bytes,
        "speculate": facts and facts.speculate,
    }


def _config(service: Service) -> dict[str, dict[str, object]]:
    tables: dict[str, list[Setting]] = {"server": [], "engine": []}
    for setting in all_settings():
        if setting.table:
            tables[setting.table].append(setting)
    owners = {"server": service.config, "engine": service.engine_config}
    return {
        table: {s.name: shown_value(s.name, getattr(owners[table], s.name)) for s in settings}
        for table, settings in tables.items()
    }
