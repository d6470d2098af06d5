"""OpenVINO GenAI's adapter: its continuous batching pipeline, in process, reading the GGUF itself.

It has no HTTP server on the package index: served rows are the same closed loop without HTTP, which
is in its favour. Some virtual machines announce AMX and hide the leaf of CPUID that describes it
(0x1d), which its kernels configure themselves by; the default precision then ends in SIGILL, so a
process of its own tries first, and float32 activations are the way out.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.adapter import Answer, answer_requests
from peers.workloads import CONTEXT_TOKENS, DECODE_STEPS, MAX_SEQUENCES, make_prompt

PRECISION_FILE = Path(sys.prefix) / "headrace-precision.txt"


def open_pipeline(model: str, threads: int, *, precision: str, prefix_caching: bool) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs = MAX_SEQUENCES
    # All prompts of a decode row in one step: then every later step is a decode of all sequences.
    scheduler.max_num_batched_tokens = MAX_SEQUENCES * CONTEXT_TOKENS
    scheduler.enable_prefix_caching = prefix_caching
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if precision:
        settings["INFERENCE_PRECISION_HINT"] = precision
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings)


def add_request(pipeline: Any, number: int, prompt: list[int], output_tokens: int) -> Any:
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
    return pipeline.add_request(number, ids, config)


def check_tokens(handles: list[Any], expected: int) -> None:
    """Nothing was left out: a request whose handle nobody holds is dropped without a word."""
    for handle in handles:
        came = sum(len(output.generated_ids) for output in handle.read_all())
        if came != expected:
            raise RuntimeError(f"{came} tokens came, not {expected}")


def choose_precision(model: str, threads: int) -> str:
    """'' is the engine's own choice. Found out once for an environment."""
    if PRECISION_FILE.exists():
        return PRECISION_FILE.read_text()
    command = [sys.executable, "-m", "peers.openvino", "try", model, str(threads)]
    tried = subprocess.run(command, stdout=2)
    precision = "" if tried.returncode == 0 else "f32"
    PRECISION_FILE.write_text(precision)
    return precision


class OpenVino:
    def __init__(self) -> None:
        self._open: Any = None
        self._caching: Any = None
        self._settings: dict[str, Any] = {}
        self._requests = 0

    def load(self, model: str, threads: int) -> Answer:
        precision = choose_precision(model, threads)
        self._settings = {"model": model, "threads": threads, "precision": precision}
        why = "f32 activations, as the default precision crashes here" if precision else "defaults"
        return {
            "note": f"openvino-genai {version('openvino-genai')}, {why}, INFERENCE_NUM_THREADS "
            f"{threads}; served rows in process, without HTTP"
        }

    def _pipeline(self, *, prefix_caching: bool) -> Any:
        if prefix_caching:
            self._caching = self._caching or open_pipeline(**self._settings, prefix_caching=True)
            return self._caching
        self._open = self._open or open_pipeline(**self._settings, prefix_caching=False)
        return self._open

    def _add(self, pipeline: Any, prompt: list[int], output_tokens: int) -> Any:
        self._requests += 1
        return add_request(pipeline, self._requests, prompt, output_tokens)

    def _run(self, pipeline: Any) -> int:
        steps = 0
        while pipeline.has_non_finished_requests():
            pipeline.step()
            steps += 1
        return steps

    def prefill(self, tokens: int, seed: str) -> Answer:
        pipeline = self._pipeline(prefix_caching=False)
        taken_s = 0.0
        for part in ("warm", seed):
            handle = self._add(pipeline, make_prompt(tokens, part), 1)
            began = time.perf_counter()
            self._run(pipeline)
            taken_s = time.perf_counter() - began
            check_tokens([handle], 1)
        return {"value": tokens / taken_s}

    def decode(self, sequences: int, context: int, seed: str) -> Answer:
        pipeline = self._pipeline(prefix_caching=False)
        handles = [
            self._add(pipeline, make_prompt(context, f"{seed} {number}"), DECODE_STEPS + 2)
            for number in range(sequences)
        ]
        pipeline.step()  # prompts, and a first token each
        pipeline.step()  # warms up
        began = time.perf_counter()
        steps = self._run(pipeline)
        taken_s = time.perf_counter() - began
        if steps != DECODE_STEPS:
            raise RuntimeError(f"{steps} decode steps where {DECODE_STEPS} were expected")
        check_tokens(handles, DECODE_STEPS + 2)
        return {"value": sequences * steps / taken_s}

    def closed_loop(
        self, warm: list[int], prompts: list[list[int]], clients: int, output_tokens: int
    ) -> Answer:
        """What the HTTP clients do, without HTTP: the next request when one has ended."""
        pipeline = self._pipeline(prefix_caching=True)
        handle = self._add(pipeline, warm, output_tokens)
        self._run(pipeline)
        check_tokens([handle], output_tokens)
        waiting = list(reversed(prompts))
        running: dict[int, tuple[Any, float, int]] = {}
        first_s: list[float] = []
        tokens = 0
        began = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < clients:
                handle = self._add(pipeline, waiting.pop(), output_tokens)
                running[self._requests] = (handle, time.perf_counter(), 0)
            pipeline.step()
            now = time.perf_counter()
            for number, (handle, sent, came) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        if not came:
                            first_s.append(now - sent)
                        came += len(output.generated_ids)
                running[number] = (handle, sent, came)
                if came >= output_tokens:
                    tokens += came
                    del running[number]
        return {"tokens": tokens, "taken_s": time.perf_counter() - began, "first_token_s": first_s}


def try_precision(model: str, threads: int) -> None:
    pipeline = open_pipeline(model, threads, precision="", prefix_caching=False)
    handle = add_request(pipeline, 0, make_prompt(CONTEXT_TOKENS, "try"), 2)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    check_tokens([handle], 2)


def main() -> None:
    if sys.argv[1:2] == ["try"]:
        return try_precision(sys.argv[2], int(sys.argv[3]))
    engine = OpenVino()
    answer_requests(
        {
            "load": engine.load,
            "prefill": engine.prefill,
            "decode": engine.decode,
            "closed_loop": engine.closed_loop,
        }
    )


if __name__ == "__main__":
    main()
