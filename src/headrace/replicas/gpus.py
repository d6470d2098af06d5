"""Which GPUs this process may use, as one line of JSON: run as a process of its own.

    python -m headrace.replicas.gpus DEVICE RANKS

Looking at a GPU takes some of its memory until the process ends, and the router's process, which
shares GPUs out, lives long. Prints names for CUDA_VISIBLE_DEVICES; none where the CPU computes.
"""

from __future__ import annotations

import json
import os
import sys

from headrace.backends.registry import choose_backend
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import HeadraceError

_TESTED = 8  # replicas, or ranks of all of them, on a machine where one GPU stands for several


def find_gpus(device: Device, ranks: int) -> list[str]:
    config = EngineConfig(device=device, tensor_parallel=ranks)
    if choose_backend(config).name is not Device.CUDA:
        return []
    from headrace.backends.cuda.device import count_gpus, ranks_share_a_gpu

    found = name_gpus(count_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return found[:1] * _TESTED if ranks_share_a_gpu() else found


def name_gpus(count: int, visible: str) -> list[str]:
    """`visible` is CUDA_VISIBLE_DEVICES as it is: numbers or UUIDs."""
    named = [part.strip() for part in visible.split(",") if part.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


if __name__ == "__main__":
    try:
        answer: dict[str, object] = {"gpus": find_gpus(Device(sys.argv[1]), int(sys.argv[2]))}
    except HeadraceError as error:
        answer = {"cause": error.cause, "remedy": error.remedy}
    print(json.dumps(answer))
