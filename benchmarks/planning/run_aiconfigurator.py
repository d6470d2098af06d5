"""AIConfigurator's predictions for the rows of silicon.csv, as a file that outlives its install.

    python -m venv other && other/bin/pip install aiconfigurator==0.12.0
    PYTHONPATH=benchmarks other/bin/python -m planning.run_aiconfigurator > \
        benchmarks/planning/aiconfigurator_predictions.csv

Each row is asked for as its columns say and, where they count GPUs twice, as the engine really ran
(silicon_rows.py); the second answer is used where there is one, because it is about the same
conditions. A version of an engine that it has no data for is replaced by its newest, as its own
accuracy check does; where measured operators are missing, it may estimate them (its mode HYBRID).
A model whose config it does not carry is named as one of the same shape that it does. Runs in an
environment of its own: Headrace is not imported.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planning.silicon_rows import DEFAULT_ROWS, read_rows

# Names in the rows -> names of the same shape that AIConfigurator carries.
SAME_SHAPE = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-V3",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}
FIELDS = ("id", "ttft_ms", "tpot_ms", "layout", "version", "reason")
Answer = tuple[float, float, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=DEFAULT_ROWS)
    args = parser.parse_args()
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    logging.disable(logging.CRITICAL)
    os.environ["AIC_ALLOW_UNLISTED_VERSIONS"] = "1"
    ask = _remembering(cli_estimate)
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    with args.rows.open(newline="") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, read_rows(args.rows), strict=True):
        columns = _columns(line)
        real = columns | {
            "batch_size": max(1, row.concurrency // row.attention_copies),
            "tp_size": row.gpus // row.attention_copies,
            "attention_dp_size": row.attention_copies,
            "moe_tp_size": max(1, row.gpus // row.expert_parallel),
            "moe_ep_size": row.expert_parallel,
        }
        reasons = []
        for layout, asked in (("real", real), ("columns", columns)):
            if layout == "real" and row.odd:
                continue
            answer = ask(asked)
            if isinstance(answer, str):
                reasons.append(answer)
                continue
            ttft, tpot, version = answer
            writer.writerow(
                {
                    "id": row.id,
                    "ttft_ms": f"{ttft:.3f}",
                    "tpot_ms": f"{tpot:.3f}",
                    "layout": layout,
                    "version": version,
                    "reason": "",
                }
            )
            break
        else:
            writer.writerow({"id": row.id, "reason": reasons[0]})
        sys.stdout.flush()


def _columns(line: dict[str, str]) -> dict[str, Any]:
    degrees = ("batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size")
    return {
        "model_path": SAME_SHAPE.get(line["model_path"], line["model_path"]),
        "system_name": line["system"],
        "mode": line["mode"],
        "backend_name": line["backend"],
        "backend_version": line["backend_version"] or None,
        "isl": int(line["isl"]),
        "osl": int(line["osl"]),
        "gemm_quant_mode": line["gemm_quant_mode"] or None,
        "moe_quant_mode": line["moe_quant_mode"] or None,
        **{name: int(line[name]) for name in (*degrees, "moe_ep_size") if line[name]},
    }


def _attempts(asked: dict[str, Any], newest: str | None) -> Iterator[dict[str, Any]]:
    """Its own version, then the newest; experts as the row says, then in blocks, as the FP8
    checkpoints of these models are."""
    for version in dict.fromkeys((asked["backend_version"] or newest, newest)):
        yield {"backend_version": version}
        if asked["moe_quant_mode"] == "fp8":
            yield {"backend_version": version, "moe_quant_mode": "fp8_block"}
    yield {"backend_version": newest, "database_mode": "HYBRID"}


def _remembering(estimate: Callable[..., Any]) -> Callable[[dict[str, Any]], Answer | str]:
    known: dict[tuple[tuple[str, Any], ...], Answer | str] = {}

    newest: dict[tuple[str, str], str] = {}  # finding it takes the tool some seconds

    def once(asked: dict[str, Any]) -> Answer | str:
        reason = ""
        engine = asked["system_name"], asked["backend_name"]
        for change in _attempts(asked, newest.get(engine)):
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    result = estimate(**asked | change)
            except Exception as error:  # whatever it says is the reason that is written down
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                continue
            if change["backend_version"] is None:
                newest[engine] = result.backend_version
            if result.ttft > 0 and result.tpot > 0:
                return float(result.ttft), float(result.tpot), str(result.backend_version)
            reason = f"no estimate: TTFT {result.ttft}, TPOT {result.tpot}"
        return reason[:100]

    def ask(asked: dict[str, Any]) -> Answer | str:
        key = tuple(sorted(asked.items()))
        if key not in known:
            known[key] = once(asked)
        return known[key]

    return ask


if __name__ == "__main__":
    main()
