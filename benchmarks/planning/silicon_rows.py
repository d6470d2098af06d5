"""The rows of silicon.csv, with the layout of GPUs that the engine really had.

The columns of the file multiply degrees that describe the same GPUs twice: a row whose id says
tp8_ep8 has tp_size 64 although it ran on 8 GPUs. An id is right about GPUs and concurrency
wherever it names them, so that it is believed first. Knows the file; no model, no cost.

What is done with doubtful rows, in order:

- "tp8_ep8" with tp_size 64, or moe_tp 8 and moe_ep 8: 8 GPUs, experts spread over 8.
- attention_dp_size above 1 (or a concurrency in the id that is a multiple of batch_size): attention
  is not split but copied, each copy with its share of the concurrency; GPUs as the id says.
- GB200 with 12 to 72 GPUs of "tensor parallelism" (58 rows): no such degree divides the heads. They
  look like totals of a disaggregated run, which the columns do not describe. They are kept, as
  attention copied over all GPUs, and marked `odd`.
- Equal conditions measured more than once (`duplicate`): all are kept and judged, but all of them
  go into the same fold, so that no fold is fitted on a copy of what it is judged by.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PLACES = [folder / "shared/data/silicon.csv" for folder in Path(__file__).resolve().parents[3:]]
DEFAULT_ROWS = next((place for place in _PLACES if place.exists()), _PLACES[0])
_NAMED = re.compile(r"_tp(\d+)(?:_0)?_ep(\d+|none)")
_CONCURRENCY = re.compile(r"_c(\d+)_")
_MOST_GPUS = 8  # in one of these systems, GB200 excepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    id: str
    engine: str
    version: str
    model: str
    gpu: str
    precision: str  # of the matrix products
    expert_precision: str
    input_tokens: int
    output_tokens: int
    concurrency: int  # of all copies of attention together
    gpus: int
    attention_copies: int  # 1: attention is split over the GPUs, else copied
    expert_parallel: int
    odd: bool
    ttft_s: float
    tpot_s: float

    @property
    def conditions(self) -> tuple[object, ...]:
        """What was measured, without its outcome; the same in rows that repeat each other."""
        return (
            *(self.engine, self.version, self.model, self.gpu, self.precision),
            *(self.expert_precision, self.input_tokens, self.output_tokens, self.concurrency),
            *(self.gpus, self.attention_copies, self.expert_parallel),
        )


def read_rows(path: Path = DEFAULT_ROWS) -> list[Row]:
    with path.open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def duplicates(rows: Sequence[Row]) -> int:
    """How many rows repeat the conditions of an earlier one."""
    return len(rows) - len({row.conditions for row in rows})


def _row(line: dict[str, str]) -> Row:
    tp = int(line["tp_size"])
    copies = int(line["attention_dp_size"] or 1)
    expert_tp, expert_parallel = (int(line[f"moe_{kind}_size"] or 1) or 1 for kind in ("tp", "ep"))
    batch = int(line["batch_size"])
    named = _CONCURRENCY.search(line["id"])
    concurrency = int(named[1]) if named else batch * copies
    layout = _NAMED.search(line["id"])
    if layout:
        gpus = int(layout[1])
    elif expert_tp == expert_parallel > 1 and tp * copies == expert_tp * expert_parallel:
        gpus = expert_tp  # 64 = 8 x 8, on 8 GPUs
    elif copies == tp > 1:
        gpus = tp  # 4 copies on 4 GPUs, not on 16
    else:
        gpus = tp * copies
    dense = line["model_path"].startswith(("Qwen/Qwen3-32B", "nvidia/Qwen3-32B", "meta-llama/"))
    if dense:
        copies, concurrency = 1, batch  # a multiple in the id is that of independent replicas
    else:
        copies = min(gpus, max(copies, concurrency // batch))
    odd = gpus > _MOST_GPUS
    return Row(
        id=line["id"],
        engine=line["backend"],
        version=line["backend_version"],
        model=line["model_path"],
        gpu=line["system"],
        precision=line["gemm_quant_mode"] or "bf16",
        expert_precision=line["moe_quant_mode"] or line["gemm_quant_mode"] or "bf16",
        input_tokens=int(line["isl"]),
        output_tokens=int(line["osl"]),
        concurrency=concurrency,
        gpus=gpus,
        attention_copies=gpus if odd else copies,
        expert_parallel=gpus if odd else min(expert_parallel, gpus),
        odd=odd,
        ttft_s=float(line["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(line["silicon_tpot_ms"]) / 1e3,
    )
