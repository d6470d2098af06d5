"""An installed wheel works: every kernel path of this machine draws the tokens of the reference.

    python tests/wheel_check.py      # in an environment that has the wheel; cibuildwheel runs it

Needs nothing but the wheel: a tiny model of random weights, made from a config.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import headrace
from headrace.backends.cpu import _native
from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import DrawParams, Runner, StepPlan
from headrace.core.version import headrace_version
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PROMPT, LENGTH = [1, 2, 3], 8


def greedy(runner: Runner) -> list[int]:
    draw, tokens, table = DrawParams(temperature=0.0), list(PROMPT), [0]
    start = 0
    while len(tokens) < len(PROMPT) + LENGTH:
        plan = StepPlan()
        plan.add(0, tokens[start:], start, table, draw=draw)
        start = len(tokens)
        runner.submit(plan)
        tokens += runner.collect().tokens[0]
    return tokens[len(PROMPT) :]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        with open_weights(folder, "dummy") as file:
            spec, refs = describe_file(file)
            weights = find_weights(refs, file)
    expected = greedy(ReferenceRunner(spec, weights, total_blocks=1))
    paths = _native.paths()
    for path in paths:
        with CpuRunner(spec, weights, total_blocks=1, kv_dtype="f32", path=path) as runner:
            found = greedy(runner)
        assert found == expected, f"{path}: {found}; the reference: {expected}"
    where = Path(headrace.__file__).parent
    print(f"headrace {headrace_version()} in {where}: {', '.join(paths)} drew {expected}")


if __name__ == "__main__":
    main()
