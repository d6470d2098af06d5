"""What a token's way to its client takes of the cores that compute.

On a machine without a GPU the engine's threads, the HTTP process and a client on the same machine
share the cores: every token that is carried delays a step a little. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.doctor.observation import Observation

# Engines whose exported CPU time is that of the process that speaks HTTP, without computing.
_APART = frozenset({"headrace", "vllm", "sglang"})
_FEW = 50.0  # tokens: CPU time is counted in hundredths of a second


def carry_of(seen: Observation, *, is_here: bool) -> float | None:
    """CPU seconds of a token: by the endpoint's own traffic where there is some, else by the
    probes, whose client counts too if it runs on the same machine. None where a GPU computes, or
    nothing tells."""
    device = seen.config.get("device")
    on_cores = device == "cpu" or (device is None and is_here and not seen.gpus)
    if not on_cores:
        return None
    own = _server_s(seen, seen.deltas)
    if own is not None:
        return own
    probe = seen.probe
    if probe is None:
        return None
    received = sum(answer.tokens for answer in probe.answers if answer.is_good)
    client = probe.cpu_s / received if is_here and probe.cpu_s and received else 0.0
    return (_server_s(seen, probe.deltas) or 0.0) + client or None


def _server_s(seen: Observation, deltas: Mapping[str, float]) -> float | None:
    tokens, cpu_s = deltas.get("generation_tokens", 0.0), deltas.get("process_cpu_s")
    if seen.engine.name not in _APART or cpu_s is None or tokens < _FEW:
        return None
    return cpu_s / tokens
