"""llama.cpp's adapter: llama-batched-bench for prefill and decode, llama-server over HTTP.

Both come from the sources inside llama-cpp-python's sdist (environments.py builds them). Needs
nothing but the standard library; $PEERS_LLAMA_BIN is the folder of the programs. The batched
benchmark feeds random tokens and draws none, which is in its favour.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from peers.adapter import Answer, HttpServer, free_port, run_adapter
from peers.workloads import CLIENTS, DECODE_STEPS


class LlamaCpp:
    def __init__(self) -> None:
        self._programs = Path(os.environ["PEERS_LLAMA_BIN"])
        self._model = ""
        self._flags: list[str] = []
        self._server: HttpServer | None = None

    def load(self, model: str, threads: int) -> Answer:
        self._model = model
        self._flags = ["-m", model, "-t", str(threads), "-tb", str(threads), "-fa", "on"]
        return {"note": f"{os.environ.get('PEERS_LLAMA_NOTE', '')}, -t {threads} -fa on"}

    def prefill(self, tokens: int, seed: str) -> Answer:
        # Twice in one process: its own warm-up is 16 tokens.
        return {"value": self._bench(tokens, 1, "1,1")[-1]["speed_pp"]}

    def decode(self, sequences: int, context: int, seed: str) -> Answer:
        return {"value": self._bench(context, DECODE_STEPS, str(sequences))[-1]["speed_tg"]}

    def _bench(self, prompt_tokens: int, steps: int, sequences: str) -> list[dict[str, Any]]:
        most = max(int(part) for part in sequences.split(","))
        # -pps: the prompt is computed once and copied to each sequence; only decoding is timed.
        command = [
            *(str(self._programs / "llama-batched-bench"), *self._flags, "-pps"),
            *("-c", str(most * (prompt_tokens + steps + 64)), "-b", "2048", "-ub", "512"),
            *("-npp", str(prompt_tokens), "-ntg", str(steps), "-npl", sequences),
            *("--output-format", "jsonl"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RuntimeError(f"llama-batched-bench: status {done.returncode}, said {said}")
        return [json.loads(line) for line in lines]

    def serve(self) -> Answer:
        if self._server is None:
            port = free_port()
            self._server = HttpServer(
                [
                    *(str(self._programs / "llama-server"), *self._flags, "--port", str(port)),
                    *("-np", str(CLIENTS), "-c", "16384"),
                ],
                port,
                "/health",
            )
        return {"port": self._server.port}

    def stop(self) -> None:
        if self._server:
            self._server.stop()


if __name__ == "__main__":
    run_adapter(LlamaCpp())
