"""vLLM for CPU's adapter: its offline engine in process, its OpenAI server over HTTP.

It reads no GGUF by itself: the weights are the same numbers as float32 (model_files.py), several
times the bytes. A step's time is that of 33 tokens less that of one, over 32 steps.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version
from typing import Any

from peers.adapter import Answer, HttpServer, free_port, run_adapter
from peers.workloads import CLIENTS, DECODE_STEPS, MAX_SEQUENCES, make_prompt


def settings(threads: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Vllm:
    def __init__(self) -> None:
        self._model = ""
        self._threads = 0
        self._llm: Any = None
        self._server: HttpServer | None = None

    def load(self, model: str, threads: int) -> Answer:
        self._model, self._threads = model, threads
        os.environ.update(settings(threads))
        return {"note": f"vllm-cpu {version('vllm-cpu')}, float32, bound to {threads} cores"}

    def _engine(self) -> Any:
        if self._llm is None:
            from vllm import LLM

            self._llm = LLM(
                model=self._model,
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=MAX_SEQUENCES,
                enable_prefix_caching=False,
            )
        return self._llm

    def _generate(self, prompts: list[list[int]], tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        self._engine().generate(asked, params, use_tqdm=False)
        return time.perf_counter() - began

    def prefill(self, tokens: int, seed: str) -> Answer:
        self._engine()
        self._generate([make_prompt(tokens, "warm")], 1)
        return {"value": tokens / self._generate([make_prompt(tokens, seed)], 1)}

    def decode(self, sequences: int, context: int, seed: str) -> Answer:
        self._engine()
        prompts = [make_prompt(context, f"{seed} {number}") for number in range(sequences)]
        self._generate(prompts[:1], 2)
        one_s = self._generate(prompts, 1)
        many_s = self._generate(prompts, 1 + DECODE_STEPS)
        return {"value": sequences * DECODE_STEPS / (many_s - one_s)}

    def serve(self) -> Answer:
        if self._server is None:
            port = free_port()
            self._server = HttpServer(
                [
                    # Not `vllm serve`: that asks for the metadata of a package called vllm, and
                    # this one is called vllm-cpu.
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", self._model),
                    *("--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"),
                    *("--max-model-len", "1024", "--max-num-seqs", str(CLIENTS)),
                    *("--served-model-name", "peer"),
                ],
                port,
                "/health",
                env=settings(self._threads),
            )
        return {"port": self._server.port, "model": "peer"}

    def stop(self) -> None:
        if self._server:
            self._server.stop()


if __name__ == "__main__":
    run_adapter(Vllm())
