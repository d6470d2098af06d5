"""The host beside the device: one core that is full, masks and penalties, adapters."""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import word
from headrace.doctor.observation import Answer, Observation, tpot_of, ttft_of
from headrace.doctor.rules.words import ms, percent

_FULL_CORE = 0.9
_SLOWER = 1.5
_MASKED = 1.2
_COMPILING_S = 0.1  # what a person notices
_MASK_S = 0.002  # below that a step hides it
_SIMPLER = "a simpler schema: no patterns with counted repetitions, fewer alternatives"
_TOLD_S = 0.0005  # half of what the engine must count for it to be believed


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


def slow_grammar(seen: Observation) -> Finding | None:
    """Row 34: what compiling a grammar takes, what following it takes by the probes, or by the
    endpoint's own traffic."""
    return _refused(seen) or _compiled_in_probes(seen) or _masks(seen) or _followed_in_traffic(seen)


def _refused(seen: Observation) -> Finding | None:
    """The user's own schema is given up, where a small one is followed: engines bound what a mask
    may take, and end the answer there."""
    probe = seen.probe
    if probe is None or not any(a.is_good for a in probe.grammar_small):
        return None
    said = [probe.skipped[name] for name in ("grammar", "grammar_new") if name in probe.skipped]
    said += [a.error for a in (*probe.grammar, *probe.grammar_new) if a.error is not None]
    if not said:
        return None
    return Finding(
        rule=34,
        kind=Kind.FAULT,
        symptom="answers with this JSON schema fail",
        evidence=(*said[:1], "answers with a small schema do not"),
        cause="the schema's masks take more than the engine allows: they are computed on the host, "
        "step by step",
        fix=(_SIMPLER,),
        gain=no_gain("those answers fail now"),
        confidence=Confidence.HIGH,
        unless="the endpoint refuses it for another reason, which its own words above say",
    )


def _followed_in_traffic(seen: Observation) -> Finding | None:
    """Headrace counts the CPU time of grammars. A token waits for its mask."""
    spent, tokens = seen.deltas.get("grammar_s"), seen.deltas.get("generation_tokens")
    gap = seen.mean("itl")
    if not spent or not tokens or tokens < 50 or gap is None:
        return None
    each = spent / tokens
    if each < _MASK_S or each < (1 - 1 / _SLOWER) * gap:
        return None
    gain = Gain(of="speed of answers with a JSON schema", low=1.0, high=gap / max(gap - each, 0.1 *
                gap), basis="tokens that wait for no mask")  # fmt: skip
    return _following(
        seen,
        "a JSON schema",
        (f"grammars take {ms(each)} of CPU time a token; tokens come every {ms(gap)}",),
        gain,
    )


def _compiled_in_probes(seen: Observation) -> Finding | None:
    probe = seen.probe
    if probe is None:
        return None
    kept, fresh = ttft_of(probe.grammar), ttft_of(probe.grammar_new)
    if not kept or not fresh or fresh - kept < _COMPILING_S or fresh < _SLOWER * kept:
        return None
    times = sorted(a.ttft_s for a in probe.grammar_new if a.is_good and a.ttft_s is not None)
    again = sorted(a.ttft_s for a in probe.grammar if a.is_good and a.ttft_s is not None)
    if len(again) > 1 and times[0] <= again[-2]:  # the first of the same text is new as well
        return None
    evidence = (
        f"with a schema whose text is new TTFT is {ms(fresh)}, with the same text again {ms(kept)}",
    )
    gain = Gain(of="TTFT with a new schema, as speed,", low=times[0] / kept, high=times[-1] / kept,
                basis="the same text again")  # fmt: skip
    return _compiling(seen, evidence, gain)


def _compiling(seen: Observation, evidence: tuple[str, ...], gain: Gain) -> Finding:
    return Finding(
        rule=34,
        kind=Kind.FAULT,
        symptom="answers with a JSON schema begin late",
        evidence=evidence,
        cause="grammars are compiled anew for each request, and this one takes long",
        fix=(
            "the same schema text in every request, so that it is compiled once; what changes from "
            "request to request belongs into the prompt",
            word(seen, "grammar", "a smaller schema, or another backend for grammars"),
        ),
        gain=gain,
        confidence=Confidence.HIGH,
        unless="every request really needs another schema",
    )


def _masks(seen: Observation) -> Finding | None:
    """The same request with a grammar, with penalties, and plain. Beside others' requests these
    differ by what the others do."""
    probe = seen.probe
    if probe is None or (seen.highest("running") or 0) >= 1:
        return None
    plain, first = tpot_of(probe.plain), ttft_of(probe.plain)
    worst: tuple[float, str] | None = None
    evidence = []
    schema = (*probe.grammar, *probe.grammar_new)
    for name, group in (("a JSON schema", schema), ("penalties", probe.penalty)):
        tpot, ttft = tpot_of(group), ttft_of(group)
        told = _told_masks_s(seen) if group is schema else 0.0
        is_told = plain is not None and tpot is not None and tpot - plain > 0.5 * told > _TOLD_S
        if (
            plain
            and tpot
            and tpot > _MASKED * plain
            and (is_told or (_is_slower(group, probe.plain) and tpot - plain > _MASK_S))
        ):
            evidence.append(f"with {name} a token takes {ms(tpot)}, without {ms(plain)}")
            if is_told:
                evidence.append(f"the engine counts {ms(told)} of CPU time for grammars a token")
            worst = max(worst or (0.0, ""), (tpot / plain, name))
        if first and ttft and ttft - first > 0.3 and ttft > _SLOWER * first:
            evidence.append(f"with {name} TTFT is {ms(ttft)}, without {ms(first)}")
            worst = max(worst or (0.0, ""), (ttft / first, name))
    if worst is None:
        return None
    ratio, name = worst
    small = tpot_of(probe.grammar_small)
    slow = tpot_of(schema)
    low, basis = 1.0, "at most as fast as a plain answer"
    if name == "a JSON schema" and small and slow:
        low, basis = slow / small, "a small schema, and a plain answer"
    gain = Gain(of=f"speed of answers with {name}", low=max(1.0, min(low, ratio)), high=ratio,
                basis=basis)  # fmt: skip
    return _following(seen, name, tuple(evidence), gain)


def _told_masks_s(seen: Observation) -> float:
    """What a token's mask takes by the engine's own count, where there is one, in the probes."""
    probe = seen.probe
    if probe is None:
        return 0.0
    answers = (*probe.grammar, *probe.grammar_new, *probe.grammar_small)
    tokens = sum(a.tokens for a in answers if a.is_good)
    return probe.deltas.get("grammar_s", 0.0) / tokens if tokens else 0.0


def _is_slower(group: tuple[Answer, ...], plain: tuple[Answer, ...]) -> bool:
    """Every one of them than every plain one."""
    slow, fast = ([a.tpot_s for a in side if a.is_good and a.tpot_s] for side in (group, plain))
    return min(len(slow), len(fast)) >= 2 and min(slow) > max(fast)


def _following(seen: Observation, name: str, evidence: tuple[str, ...], gain: Gain) -> Finding:
    is_schema = name == "a JSON schema"
    return Finding(
        rule=34,
        kind=Kind.FAULT,
        symptom=f"answers with {name} are slow",
        evidence=evidence,
        cause="the schema's masks take long: they are computed on the host, step by step"
        if is_schema
        else "penalties are applied on the host",
        fix=(word(seen, "grammar", f"{_SIMPLER}; or another backend for grammars")
             if is_schema else "no penalties, or a newer engine",),
        gain=gain,
        confidence=Confidence.HIGH,
        unless="the schema has to be as it is" if is_schema else "they are needed",
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


RULES: dict[int, Rule] = {33: one_core, 34: slow_grammar, 35: adapters}
