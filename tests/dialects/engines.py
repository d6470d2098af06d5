"""Where real engines are, for their own parsers: an environment in the cache folder.

`make test-engines` makes it; the tests use it where it is and are skipped elsewhere. Only what a
parser needs is installed: the engines' wheels without what they ask for, and the few packages that
their modules import on the way to a parser.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.foreign.engines import ENGINES
from headrace.fetch.model_folder import cache_folder

PARSERS = ("vllm", "sglang", "lmdeploy")
# A bare "torch" takes a CUDA build of several gigabytes on some indexes.
PACKAGES = (
    "torch==2.13.0", "transformers", "aiohttp", "anthropic", "blake3", "cachetools", "cbor2",
    "cloudpickle", "depyf", "einops", "fastapi", "gguf", "ijson", "ipython", "lark",
    "mcp", "mistral_common[image]", "mmengine-lite", "model-hosting-container-standards", "msgspec",
    "numpy", "openai", "opentelemetry-api", "orjson", "oss-harmony", "partial-json-parser",
    "pillow", "prometheus-client", "prometheus-fastapi-instrumentator", "psutil", "py-cpuinfo",
    "pybase64", "pydantic", "python-json-logger", "pyzmq", "requests", "safetensors",
    "sentencepiece", "setproctitle", "shortuuid", "tiktoken", "uvicorn", "uvloop",
    "watchfiles",
)  # fmt: skip
# Those that bring along what no parser needs.
ALONE = (
    "apache-tvm-ffi==0.1.11", "compressed-tensors==0.17.0", "lm-format-enforcer==0.11.3",
    "llguidance", "outlines_core==0.2.14", "triton", "xgrammar==0.2.8",
)  # fmt: skip


def engines_folder() -> Path:
    return cache_folder() / "engines"


def python_with(engine: str) -> Path:
    """The environment's Python; skips the test where the engine is not installed."""
    folder = engines_folder()
    python = folder / "bin" / "python"
    wanted = ENGINES[engine].version
    found = sorted(folder.glob(f"lib/python*/site-packages/{engine}-{wanted}.dist-info"))
    if not found:
        pytest.skip(f"{engine} {wanted} is not in {folder}: make test-engines installs it")
    return python


def install(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    pinned = [f"{name}=={ENGINES[name].version}" for name in PARSERS]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE, *pinned], check=True)


if __name__ == "__main__":
    install(engines_folder())
