"""What one replica of `headrace simulate` is: the machine of a profile, or GPUs of the table.

Of GPUs the ledger says how many tokens the KV pool holds and the roofline how long a step takes, as
for `headrace plan`, with the same error band. Flags in, a machine out; simulates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError, MemoryFitError

if TYPE_CHECKING:
    from headrace.cli.simulate_asked import Fleet
    from headrace.hardware.profile import Profile
    from headrace.search.answer import Loss
    from headrace.search.candidate import Candidate
    from headrace.search.machine import Machines
    from headrace.search.models import PlannedModel
    from headrace.search.replica import ErrorBand
    from headrace.simulate.fleet import FleetSetup
    from headrace.simulate.handover import Handover
    from headrace.simulate.replica import Setup
    from headrace.workload.slo import Slo
    from headrace.workload.workload import Workload

MAX_SEQUENCES, MAX_BATCH_TOKENS = 256, 8192  # of a GPU, where nothing is asked for
_EXPLAINED_ROWS = (1, 32, 256)


class DoesNotFitError(MemoryFitError):
    """An answer, and not a mistake in what was asked."""

    exit_status = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGpu:
    """The flags that only GPUs have, as they were given."""

    gpu: str
    quant: str | None = None
    kv_dtype: str | None = None
    engine: str | None = None
    max_sequences: int | None = None
    max_batch_tokens: int | None = None
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One replica."""

    label: str
    setup: Callable[[float], Setup]  # with step times multiplied by a number within the band
    band: ErrorBand | None  # of step times; None: they were measured on the machine itself
    handover: Handover | None  # of a prompt to another pool; None: not known how
    facts: dict[str, Any]
    explained: tuple[str, ...]
    impossible: str | None = None  # the bound that rules the objective out, whatever the load


def guessing(machine: Machine, acceptance: float) -> Machine:
    """The same machine with speculation, where this share of the guesses is right."""
    return replace(
        machine,
        setup=lambda slowness: replace(machine.setup(slowness), acceptance=acceptance),
    )


def fleet_setup(machine: Machine, fleet: Fleet, slowness: float, seed: int, slo: Slo) -> FleetSetup:
    from headrace.simulate.fleet import DecodePool, FleetSetup

    setup = machine.setup(slowness)
    decode = None
    if fleet.decode:
        if machine.handover is None:
            raise ConfigError(
                "How keys and values go from one pool to the other is not known.",
                "Give bytes a second in one direction, as in --link 50GB/s, with --gpu.",
                param="link",
            )
        decode = DecodePool(setup=setup, replicas=fleet.decode, handover=machine.handover)
    return FleetSetup(
        setup=setup,
        replicas=fleet.replicas,
        routing=fleet.routing,
        decode=decode,
        scaling=fleet.scaling,
        cold_start_s=fleet.cold_start_s,
        ttft_s=slo.ttft_s,
        seed=seed,
    )


# -- a profile ---------------------------------------------------------------------------------


def load(path: Path, model: str | None) -> Profile:
    from headrace.hardware.profile import load_profile

    found = load_profile(path)
    name = str(found.model.get("name", ""))
    if model is not None and Path(model).name.lower() not in name.lower():
        raise ConfigError(
            f"{path} is a profile of {name}, not of {model}.",
            f"Run headrace calibrate {model} --out FILE, and give that file as --profile; or name "
            "a GPU with --gpu.",
        )
    return found


def measured_machine(found: Profile) -> Machine:
    from headrace.simulate.profiled import setup_of

    edge, limits = setup_of(found).edge, found.limits
    name = str(found.model.get("name", ""))
    return Machine(
        label=f"{name} on {found.machine.get('cpu')}, measured {found.date[:10]}",
        setup=lambda _: setup_of(found),
        band=None,
        handover=None,
        facts={
            "model": name,
            "gpu": None,
            "tp": 1,
            "precision": None,
            "kv_dtype": None,
            "engine": "headrace",
            "max_sequences": limits.max_sequences,
            "max_batch_tokens": limits.max_batch_tokens,
            "kv_tokens": limits.total_blocks * limits.block_tokens,
        },
        explained=(
            f"machine      {found.machine.get('cpu')}, measured {found.date}",
            f"step         {len(found.steps)} measured ones, interpolated; + what serving adds",
            f"way in       {(edge.before_s + edge.busy_s) * 1e3:.2f} ms + "
            f"{(edge.before_token_s + edge.busy_token_s) * 1e6:.2f} us a prompt token",
            f"way out      {edge.after_s * 1e3:.2f} ms",
        ),
    )


# -- GPUs --------------------------------------------------------------------------------------


def planned_model(name: str, quant: str | None) -> PlannedModel:
    from headrace.cli.plan_asked import planned

    found = planned(name, () if quant is None else (quant,))
    return found if quant is not None else replace(found, precisions=(found.precision,))


def gpu_machine(
    asked: AskedGpu, model: PlannedModel, workload: Workload, slo: Slo, fleet: Fleet, seed: int
) -> Machine:
    machines, candidate, loss = _candidate(asked, model, workload, slo, fleet, seed)
    bounded = machines.space.engine == "headrace"

    def setup(slowness: float) -> Setup:
        from headrace.simulate.replica import UNBOUNDED, QueueLimits

        made = machines.build(candidate, slowness).recipe.setup()
        # The bounds of this server's queue; other engines let everybody wait.
        return replace(made, queue=QueueLimits() if bounded else UNBOUNDED)

    return Machine(
        label=f"{candidate.model} on {candidate.label}; {machines.space.engine}'s step times",
        setup=setup,
        band=machines.band(candidate),
        handover=_handover(machines, candidate, fleet),
        facts={
            "model": candidate.model,
            "gpu": candidate.gpu,
            "tp": candidate.tp,
            "precision": candidate.precision,
            "kv_dtype": candidate.kv_dtype,
            "engine": machines.space.engine,
            "max_sequences": candidate.max_sequences,
            "max_batch_tokens": candidate.batch_tokens,
            "kv_tokens": machines.kv_tokens(candidate),
        },
        explained=tuple(_explained(machines, candidate, fleet)),
        impossible=None if loss is None else loss.text,
    )


def _candidate(
    asked: AskedGpu, model: PlannedModel, workload: Workload, slo: Slo, fleet: Fleet, seed: int
) -> tuple[Machines, Candidate, Loss | None]:
    """The one that was asked for; refuses what a GPU, its memory or the model's shape rules out. An
    objective that its peak rules out is said, and simulated."""
    from headrace.cli.plan_asked import Asked, space_for
    from headrace.search.answer import Why
    from headrace.search.demand import lengths_of
    from headrace.search.machine import Machines
    from headrace.search.question import Question

    question = Question(
        workload=workload, lengths=lengths_of(workload, seed), rate=1.0, slo=slo, seed=seed
    )
    space, _ = space_for(
        Asked(
            models=(model.name,),
            gpus=(asked.gpu,),
            quants=() if asked.quant is None else (asked.quant,),
            kv_dtypes=(asked.kv_dtype or "bf16",),
            tps=(fleet.tp,),
            engine=asked.engine or "vllm",
        ),
        question,
        (model,),
    )
    space = replace(
        space,
        sequences=(asked.max_sequences or MAX_SEQUENCES,),
        batch_tokens=(asked.max_batch_tokens or MAX_BATCH_TOKENS,),
    )
    machines = Machines(space, question)
    candidate = replace(machines.candidates()[0], prefix_cache=asked.prefix_cache)
    loss = machines.refuse(candidate)
    if loss is None or loss.why in (Why.TTFT, Why.TPOT):
        return machines, candidate, loss
    kind = DoesNotFitError if loss.why is Why.MEMORY else ConfigError
    raise kind(
        f"{candidate.model} can't be served on {candidate.label}: {loss.text}.",
        "Choose more or other GPUs (--gpus, --tp), or another type (--quant); `headrace fit` shows "
        "why.",
    )


def _handover(machines: Machines, candidate: Candidate, fleet: Fleet) -> Handover | None:
    """Each GPU of a replica sends its part of the keys and values, over its own link."""
    from headrace.hardware.gpus import find_gpu
    from headrace.simulate.handover import Handover

    gpu = find_gpu(candidate.gpu)
    link = fleet.link_bytes_s or gpu.link_bytes_s or gpu.pcie_bytes_s
    if link is None:
        return None
    demand = machines.part(candidate).sizes.demand

    def kv_bytes(tokens: int) -> float:
        return demand.sequence_bytes(demand.held_tokens(tokens)) + demand.state_bytes

    return Handover(kv_bytes=kv_bytes, link_bytes_s=link)


def _explained(machines: Machines, candidate: Candidate, fleet: Fleet) -> list[str]:
    from headrace.core.sizes import show_bytes
    from headrace.search.machine import MEMORY_SHARE
    from headrace.search.steady import Batch

    part, band = machines.part(candidate), machines.band(candidate)
    sizes, share = part.sizes, part.profile.efficiencies
    built = machines.build(candidate, 1.0)
    context = machines.question.lengths.decode_context_tokens
    steps = ", ".join(
        f"{built.step_s(Batch(decodes=rows, decode_context_tokens=context)) * 1e3:.3g} ms of {rows}"
        for rows in _EXPLAINED_ROWS
        if rows <= candidate.max_sequences
    )
    lines = [
        f"memory       {MEMORY_SHARE:g} of a GPU, {show_bytes(part.budget_bytes)}, - "
        f"{show_bytes(sizes.fixed_bytes)} for weights and buffers = "
        f"{show_bytes(part.budget_bytes - sizes.fixed_bytes)} for KV",
        f"KV pool      that / {show_bytes(sizes.each_bytes)} for a request of "
        f"{sizes.held_tokens:,} tokens = {built.kv_tokens:,} tokens",
        f"step         bytes / (bandwidth x {share.memory:.2f}) and operations / (peak x "
        f"{share.compute:.2f}), the larger almost alone, by part; + {share.host_s * 1e3:.2f} ms",
        f"decode step  of sequences of {context:,.0f} tokens: {steps}",
        f"way in       {part.profile.waits.request_s * 1e3:.2f} ms a request",
        f"band         step times x {band.fast:.2f} to {band.slow:.2f}, first tokens x "
        f"{band.fast * band.first_fast:.2f} to {band.slow * band.first_slow:.2f}: {band.source}",
    ]
    way = _handover(machines, candidate, fleet)
    if fleet.decode and way is not None:
        tokens = round(machines.question.lengths.prompt_tokens)
        lines.append(
            f"handover     {show_bytes(int(way.kv_bytes(tokens)))} of {tokens:,} tokens on a GPU / "
            f"{way.link_bytes_s / 1e9:,.0f} GB/s = {way.seconds(tokens) * 1e3:.3g} ms, one "
            "sequence after the other"
        )
    return lines
