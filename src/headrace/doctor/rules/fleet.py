"""Several GPUs and several replicas: too wide, over a slow link, or not evenly loaded."""

from __future__ import annotations

from headrace.doctor.finding import Confidence, Finding, Gain, Kind, Rule, no_gain
from headrace.doctor.fixes import setting
from headrace.doctor.observation import Observation
from headrace.doctor.rules.words import percent


def too_wide(seen: Observation) -> Finding | None:
    """Row 21."""
    ranks = seen.number("tensor_parallel")
    memory = seen.floor.memory_bytes if seen.floor is not None else None
    if memory is None:
        memory = max((int(g.memory_bytes or 0) for g in seen.gpus), default=0) or None
    weights = float(seen.floor.weight_bytes) if seen.floor is not None else None
    told = seen.highest("weight_bytes")
    if weights is None and told is not None and ranks is not None:
        weights = told * ranks  # each rank tells its own
    if ranks is None or ranks < 2 or memory is None or weights is None:
        return None
    if weights > 0.5 * memory:
        return None
    busy = seen.gpu_busy
    if busy is not None and busy > 0.7:
        return None
    evidence = [f"{ranks:g} ranks; the weights take {weights / 1e9:,.3g} GB and one GPU has "
                f"{memory / 1e9:,.3g} GB"]  # fmt: skip
    if busy is not None:
        evidence.append(f"the GPUs are {percent(busy)} busy")
    return Finding(
        rule=21,
        kind=Kind.FAULT,
        symptom="tensor parallelism is wider than the model needs",
        evidence=tuple(evidence),
        cause="ranks wait for each other twice a layer; one GPU holds the model",
        fix=(f"{setting(seen, tensor_parallel=1)}: {ranks:g} replicas of one GPU instead",),
        gain=Gain(of="output tokens/s of all GPUs", low=1.0, high=ranks,
                  basis="from no loss to all of the time lost in waiting"),
        confidence=Confidence.MEDIUM,
        unless="a single stream must be as fast as possible: then width is what helps",
    )  # fmt: skip


def over_pcie(seen: Observation) -> Finding | None:
    """Row 22."""
    ranks = seen.number("tensor_parallel")
    if ranks is None or ranks < 2 or seen.links != "pcie":
        return None
    return Finding(
        rule=22,
        kind=Kind.FAULT,
        symptom="tensor parallelism over PCIe",
        evidence=(f"{ranks:g} ranks; nvidia-smi topo shows no NVLink between the GPUs",),
        cause="every layer waits for two all-reduces over the slow link (84% of the time in NCCL "
        "was seen on V100s, vllm#2442)",
        fix=("replicas of one GPU if the model fits, else pipeline parallelism: "
             + setting(seen, pipeline_parallel=int(ranks)),),
        gain=no_gain("depends on the link: start one replica and verify"),
        confidence=Confidence.MEDIUM,
        unless="the model does not fit on fewer GPUs and requests are few",
    )  # fmt: skip


def one_is_hot(seen: Observation) -> Finding | None:
    """Row 23."""
    if len(seen.replicas) < 2:
        return None
    hot = max(seen.replicas, key=lambda each: each.waiting)
    idle = [r for r in seen.replicas if r.waiting == 0 and r.running < 0.5 * max(hot.running, 1)]
    if hot.waiting < 2 or not idle:
        return None
    total = sum(r.running + r.waiting for r in seen.replicas)
    even = total / len(seen.replicas)
    return Finding(
        rule=23,
        kind=Kind.FAULT,
        symptom="one replica queues while others idle",
        evidence=(
            f"{hot.name}: {hot.running:g} running, {hot.waiting:g} waiting",
            *(f"{r.name}: {r.running:g} running, none waiting" for r in idle[:3]),
        ),
        cause="round robin, load that is counted late, or ties that always fall on the first",
        fix=("a router that sends to the least pending tokens, counts them at dispatch, and breaks "
             "ties at random",),
        gain=Gain(of="the hot replica's share of requests, as speed,", low=1.0,
                  high=(hot.running + hot.waiting) / max(even, 1.0), basis="an even share"),
        confidence=Confidence.HIGH,
        unless="requests were sent there on purpose, for their prefix",
    )  # fmt: skip


RULES: dict[int, Rule] = {21: too_wide, 22: over_pcie, 23: one_is_hot}
