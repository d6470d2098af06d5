"""`headrace serve --dry-run`: the resolved settings, and the memory that the model would need.

Prints only; fetches and loads nothing. An error comes after everything that was found before it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from headrace.cli.info import gpu_facts, model_facts, shown_lines
from headrace.cli.serve_replicas import shares_of
from headrace.core.config import Device, EngineConfig, StepSizes
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.settings import Settings, all_settings, shown_value
from headrace.core.sizes import show_bytes
from headrace.fetch.resolve import name_model, resolve_model
from headrace.server.edge.listen import bind, bind_admin

if TYPE_CHECKING:  # they take time to import
    from headrace.backends.backend import Backend
    from headrace.plan.sizing import Sizing
    from headrace.weights.load import OpenFile


def show_dry_run(settings: Settings, *, as_json: bool) -> None:
    """Raises the error that a real start would raise, after printing what was found before it."""
    report: dict[str, Any] = {"settings": settings.facts()}
    error = None
    try:
        _examine(settings, report)
    except HeadraceError as found:
        error = found
        report["error"] = {"cause": found.cause, "remedy": found.remedy, "detail": found.detail}
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    if error is not None:
        raise error


def _examine(settings: Settings, report: dict[str, Any]) -> None:
    from headrace.assemble import check_draft, find_draft, plan_memory
    from headrace.backends.registry import choose_backend
    from headrace.server.access.keys_file import read_keys
    from headrace.server.access.operators import operator_warnings
    from headrace.server.edge.browsers import browser_warnings
    from headrace.server.start.fingerprint import complete, fingerprint
    from headrace.server.start.model import read_model
    from headrace.store_loader import check_store, describe_store
    from headrace.weights.load import open_weights

    report["notes"] = _port_notes(settings)
    keys, warnings = read_keys(settings.server)  # raises if the file is not valid
    report["notes"] += warnings + browser_warnings(settings.server, has_keys=len(keys) > 0)
    report["notes"] += operator_warnings(settings.server, keys)
    path = resolve_model(settings.model, offline=True)
    report["model"] = model_facts(path, settings.engine.load_format)
    engine = settings.engine
    if settings.server.replicas is not None:
        shares = shares_of(settings)
        report["replicas"] = [asdict(share) | {"shown": share.shown} for share in shares]
        engine = replace(engine, threads=shares[0].threads, memory_share=shares[0].memory_bytes)
    with ExitStack() as opened:
        file = opened.enter_context(closing(open_weights(path, settings.engine.load_format)))
        if _may_use_a_gpu(settings.engine.device):
            report["gpu"] = gpu_facts()  # also for a GPU that is not used, with the reason
        backend = choose_backend(settings.engine)
        _show_sizes(settings, report, backend.defaults)
        draft = find_draft(settings.engine, backend, offline=True)
        if draft is not None:
            opened.callback(draft.file.close)
            check_draft(path, file, draft, settings.engine)
        _, _, sizing = plan_memory(file, backend, engine, draft)
        sizing = _show_ranks(file, backend, engine, sizing, report)
    report["ledger"] = {**sizing.ledger.facts(), "shown": sizing.ledger.render()}
    report["context_tokens"] = sizing.context_tokens
    report["notes"] += sizing.notes
    check_store(settings.engine, sizing.ledger)
    report["notes"] += describe_store(settings.engine, sizing.ledger)
    served = read_model(
        path,
        name_model(path, settings.model),
        server=settings.server,
        engine=settings.engine,
    )
    report["served_model_name"] = served.model.name
    report["identity"] = complete(served.identity, backend.facts(settings.engine))
    report["fingerprint"] = fingerprint(report["identity"])


def _show_ranks(
    file: OpenFile, backend: Backend, config: EngineConfig, sizing: Sizing, report: dict[str, Any]
) -> Sizing:
    """Memory of each stage's first rank: those of one stage have equal shares. Returns the leading
    rank's, with as many blocks as fit everywhere."""
    from headrace.assemble import plan_share
    from headrace.plan.sizing import agreed

    if config.ranks == 1:
        return sizing
    firsts = range(0, config.ranks, config.tensor_parallel)
    sizings = agreed([sizing, *(plan_share(file, backend, config, at)[2] for at in firsts[1:])])
    report["ranks"] = [
        {
            "ranks": list(range(first, first + config.tensor_parallel)),
            "stage": config.pipeline_parallel - number,
            "ledger": each.ledger.facts(),
        }
        for number, (first, each) in enumerate(zip(firsts, sizings, strict=True))
    ]
    return sizings[0]


def _may_use_a_gpu(device: Device) -> bool:
    from headrace.backends.cuda.device import driver_is_present

    return device is Device.CUDA or (device is Device.AUTO and driver_is_present())


def _show_sizes(settings: Settings, report: dict[str, Any], defaults: StepSizes) -> None:
    """The values that the backend chose for settings that were not given."""
    for name, value in asdict(settings.engine.sizes(defaults)).items():
        found = report["settings"].get(name)
        if found is not None and found["value"] is None:
            found["value"] = shown_value(name, value)


def _port_notes(settings: Settings) -> list[str]:
    """Only a note: the port may be taken by a running copy of this server, and be free later."""
    try:
        bind(settings.server.host, settings.server.port).close()
        if admin := bind_admin(settings.server):
            admin.close()
    except ConfigError as error:
        if error.param not in ("port", "admin_port"):
            raise
        return [f"{error.cause[0].lower()}{error.cause[1:]}"]
    return []


def _lines(report: dict[str, Any]) -> list[str]:
    lines = ["settings"]
    for setting in all_settings():
        found = report["settings"][setting.name]
        value = "none" if found["value"] in (None, []) else found["value"]
        value = ",".join(value) if isinstance(value, list) else value
        lines.append(f"  {setting.name:<24}{value!s:<23} {found['origin']}".rstrip())
    if "model" in report:
        lines += shown_lines({"model": report["model"]})
    if "gpu" in report:
        lines += shown_lines({"gpu": report["gpu"]})
    if "replicas" in report:
        lines += ["replicas", *_replica_lines(report)]
    if "ledger" in report:
        whose = " of each replica" if "replicas" in report else ""
        lines.append(f"ledger{whose}")
        lines += [f"  {line}" for line in report["ledger"]["shown"].splitlines()]
        lines.append(f"  a context of {report['context_tokens']:,} tokens")
    for each in report.get("ranks", ()):
        ledger, ranks = each["ledger"], ", ".join(map(str, each["ranks"]))
        lines.append(
            f"  each of ranks {ranks} (stage {each['stage']}): "
            f"{show_bytes(ledger['total_bytes'])}, of it weights "
            f"{show_bytes(ledger['weights_bytes'])}, KV pool {show_bytes(ledger['kv_pool_bytes'])}"
        )
    if "fingerprint" in report:
        lines += _identity_lines(report)
    return lines + [f"note: {note}" for note in report.get("notes", ())]


def _replica_lines(report: dict[str, Any]) -> list[str]:
    shares = report["replicas"]
    lines = [f"  {f'replica {n}':<24}{share['shown']}" for n, share in enumerate(shares, start=1)]
    if "ledger" in report:
        each = report["ledger"]["total_bytes"]
        lines.append(
            f"  {'memory':<24}{len(shares)} x {show_bytes(each)} = {show_bytes(len(shares) * each)}"
        )
        if shares[0]["memory_bytes"] is not None:
            whole = show_bytes(len(shares) * shares[0]["memory_bytes"])
            lines[-1] += f" of {whole} free; each may plan with an equal share"
    return lines


def _identity_lines(report: dict[str, Any]) -> list[str]:
    identity = report["identity"]
    rows = {
        "served as": report["served_model_name"],
        "headrace": identity["headrace"],
        "model": identity["model"]["sampled_sha256"],
        "tokenizer": identity["tokenizer_sha256"],
        "chat template": identity["chat_template_sha256"] or "none",
        "backend": f"{identity['backend']['name']}, {identity['backend']['path']}",
    }
    shown = [f"  {name:<24}{value}" for name, value in rows.items()]
    return [f"fingerprint {report['fingerprint']}", *shown]
