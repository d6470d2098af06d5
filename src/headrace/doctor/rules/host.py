"""The host beside the device: one core that is full, masks and penalties, adapters."""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import word
from headrace.doctor.observation import Observation, tpot_of, ttft_of
from headrace.doctor.rules.words import ms, percent

_FULL_CORE = 0.9
_SLOWER = 1.5


def one_core(seen: Observation) -> Finding | None:
    """Row 33."""
    cores = seen.rate("process_cpu_s")
    if cores is None or not _FULL_CORE <= cores <= 1.3:
        return None
    busy = seen.gpu_busy
    parts = seen.groups.get("step_parts", {})
    if busy is None and parts and seen.period_s > 0:
        busy = sum(parts.values()) / seen.period_s
    if busy is None or busy >= 0.8:
        return None
    return Finding(
        rule=33,
        kind=Kind.FAULT,
        symptom="one CPU core is full, and the device waits for it",
        evidence=(f"the server's process uses {cores:.2g} cores; the device is {percent(busy)} "
                  "busy",),
        cause="one process tokenizes, detokenizes and answers for everyone",
        fix=(word(seen, "processes", "more processes for the API; fewer, larger chunks"),),
        gain=Gain(of="output tokens/s", low=1.0, high=1 / busy if busy > 0.05 else None,
                  basis="a device that never waits"),
        confidence=Confidence.HIGH,
        unless="the process is the engine itself, on a CPU",
    )  # fmt: skip


def masks(seen: Observation) -> Finding | None:
    """Row 34: the same request with a grammar, with penalties, and plain."""
    probe = seen.probe
    if probe is None:
        return None
    plain, first = tpot_of(probe.plain), ttft_of(probe.plain)
    worst: tuple[float, str] | None = None
    evidence = []
    for name, group in (("a JSON schema", probe.grammar), ("penalties", probe.penalty)):
        tpot, ttft = tpot_of(group), ttft_of(group)
        if plain and tpot and tpot > _SLOWER * plain and tpot - plain > 0.005:
            evidence.append(f"with {name} a token takes {ms(tpot)}, without {ms(plain)}")
            worst = max(worst or (0.0, ""), (tpot / plain, name))
        if first and ttft and ttft - first > 0.3 and ttft > _SLOWER * first:
            evidence.append(f"with {name} TTFT is {ms(ttft)}, without {ms(first)}")
            worst = max(worst or (0.0, ""), (ttft / first, name))
    if worst is None:
        return None
    ratio, name = worst
    return Finding(
        rule=34,
        kind=Kind.FAULT,
        symptom=f"answers with {name} are slow",
        evidence=tuple(evidence),
        cause="masks are computed on the host, step by step, or the grammar is compiled anew"
        if name == "a JSON schema"
        else "penalties are applied on the host",
        fix=(word(seen, "grammar", "another backend for grammars; the same schema text "
                          "each time, so that it is compiled once")
             if name == "a JSON schema" else "no penalties, or a newer engine",),
        gain=Gain(of=f"speed of answers with {name}", low=1.0, high=ratio,
                  basis="as fast as a plain answer"),
        confidence=Confidence.HIGH,
        unless="the first request with a schema paid for compiling it, and later ones do not",
    )  # fmt: skip


def adapters(seen: Observation) -> Finding | None:
    """Row 35."""
    if seen.config.get("adapters") is not True:
        return None
    used = seen.level("adapters_pool")
    if used:
        return None
    return Finding(
        rule=35,
        kind=Kind.FAULT,
        symptom="adapters are on, and the base model pays for them",
        evidence=("the engine exports metrics of LoRA, so its LoRA path is on",),
        cause="with LoRA enabled every step goes through its kernels, also without an adapter",
        fix=("merge the adapter into the weights, or serve adapters from a replica of their own",),
        gain=no_gain("a user saw 23 s become 15 s (vllm#10898); verify measures yours"),
        confidence=Confidence.LOW,
        unless="most requests use an adapter",
    )


RULES: dict[int, Rule] = {33: one_core, 34: masks, 35: adapters}
