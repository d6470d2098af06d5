"""Rules × engines as a table of docs/doctor.md: `python -m tests.doctor.matrix` prints it.

Each rule's own case (cases.py) is reduced to what an engine exports and tells, and the rule
decides: without probes where it still fires, else with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.doctor.cases import CASES, MORE
from tests.doctor.fakes import has

from headrace.doctor.names import ENGINES
from headrace.doctor.observation import EngineId, Observation
from headrace.doctor.rules import RULES

# Settings that engine_config.py reads, by engine; test_matrix.py holds them against it.
_LABELS = {"block_tokens", "kv_tokens", "prefix_cache", "kv_dtype"}
TOLD: dict[str, set[str]] = {
    "headrace": _LABELS | {"max_sequences", "context_tokens", "max_batch_tokens", "quantization",
                           "policy", "device", "max_step_growth", "max_waiting", "gpu_memory",
                           "eager", "fingerprint", "speculation"},
    "vllm": _LABELS | {"context_tokens", "gpu_memory", "adapters"},
    "sglang": {"context_tokens", "max_sequences", "kv_tokens", "max_batch_tokens", "static_memory",
               "tensor_parallel", "kv_dtype", "quantization", "dtype", "prefix_cache", "eager",
               "speculation", "block_tokens", "max_waiting", "adapters", "is_hybrid"},
    "tgi": {"context_tokens", "kv_tokens", "max_sequences", "max_batch_tokens", "max_waiting",
            "dtype", "waiting_served_ratio", "max_waiting_tokens"},
    "llama.cpp": {"max_sequences", "context_tokens", "kv_tokens", "reserves_context"},
    "trtllm": {"context_tokens"},
    "triton": set(),
    "lmdeploy": {"context_tokens"},
    "ollama": {"reserves_context", "context_tokens", "quantization", "spilled_share", "model_bytes",
               "gpu_bytes"},
}  # fmt: skip
COLUMNS = [*((each.engine, each.label) for each in ENGINES), ("ollama", "Ollama"), ("", "others")]
METRICS, PROBES, NOTHING = "m", "p", "-"


def reduced(seen: Observation, name: str) -> Observation:
    """As if this engine had exported and told it."""
    names = next((each for each in ENGINES if each.engine == name), None)

    def exported(table: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in table.items() if names and has(names, {key})}

    told = TOLD.get(name, set()) | {"uptime_s"}
    parts: dict[str, Any] = {key: exported(dict(getattr(seen, key)))
             for key in ("levels", "deltas", "groups", "histograms")}  # fmt: skip
    label = dict(COLUMNS)[name]
    probe = seen.probe
    if probe is not None:
        kept: dict[str, Any] = {key: exported(dict(getattr(probe, key)))
                                for key in ("deltas", "warm_deltas", "burst_levels")}  # fmt: skip
        probe = replace(probe, **kept)
    return replace(
        seen, engine=EngineId(name=name, label=label), probe=probe,
        config={key: value for key, value in seen.config.items() if key in told},
        **parts,
    )  # fmt: skip


def cell(number: int, name: str) -> str:
    cases = [CASES[number][0], *(make for n, fires, make in MORE if n == number and fires)]
    seen = [reduced(make(), name) for make in cases]
    if any(RULES[number](replace(each, probe=None)) for each in seen):
        return METRICS
    return PROBES if any(RULES[number](each) for each in seen) else NOTHING


def table() -> list[str]:
    lines = [
        f"| # | {' | '.join(label for _, label in COLUMNS)} |",
        f"|{'---|' * (len(COLUMNS) + 1)}",
    ]
    for number in sorted(RULES):
        cells = (cell(number, name) for name, _ in COLUMNS)
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
