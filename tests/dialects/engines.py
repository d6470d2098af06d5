"""Where real engines are, for their own parsers: an environment in the cache folder.

`make test-engines` makes it; the tests use it where it is and are skipped elsewhere. Only what a
parser needs is installed: the engines' wheels without what they ask for, and the few packages that
their modules import on the way to a parser.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.foreign.engines import ENGINES
from headrace.fetch.model_folder import cache_folder

INSTALLS = "HEADRACE_TEST_ENGINES"  # a variable: if set, the environment is made
INSTALL_LIMIT_S = 1500
PARSERS = ("vllm", "sglang", "lmdeploy")
# A bare "torch" takes a CUDA build of several gigabytes on some indexes.
PACKAGES = (
    "torch==2.13.0", "transformers", "aiohttp", "anthropic", "blake3", "cachetools", "cbor2",
    "cloudpickle", "depyf", "einops", "fastapi", "gguf", "ijson", "ipython", "lark",
    "mcp", "mistral_common[image]", "mmengine-lite", "model-hosting-container-standards", "msgspec",
    "numpy", "openai", "opentelemetry-api", "orjson", "oss-harmony", "partial-json-parser",
    "pillow", "prometheus-client", "prometheus-fastapi-instrumentator", "psutil", "py-cpuinfo",
    "pybase64", "pydantic", "python-json-logger", "pyzmq", "requests", "safetensors",
    "sentencepiece", "setproctitle", "shortuuid", "tiktoken", "uvicorn", "watchfiles",
)  # fmt: skip
# Those that bring along what no parser needs.
ALONE = (
    "apache-tvm-ffi==0.1.11", "compressed-tensors==0.17.0", "lm-format-enforcer==0.11.3",
    "outlines_core==0.2.14", "xgrammar==0.2.8",
)  # fmt: skip


def engines_folder() -> Path:
    return cache_folder() / "engines"


def python_with(engine: str) -> Path:
    """The environment's Python; skips the test where the engine is not installed."""
    folder = engines_folder()
    python = folder / "bin" / "python"
    if os.environ.get(INSTALLS) and not python.exists():
        install(folder)
    wanted = ENGINES[engine].version
    found = sorted(folder.glob(f"lib/python*/site-packages/{engine}-{wanted}.dist-info"))
    if not found:
        pytest.skip(f"{engine} {wanted} is not in {folder}: make test-engines installs it")
    return python


def install(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _call([*pip, *PACKAGES])
    pinned = [f"{name}=={ENGINES[name].version}" for name in PARSERS]
    _call([*pip, "--no-deps", *ALONE, *pinned])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    if done.returncode:
        pytest.fail("\n".join(done.stderr.strip().splitlines()[-5:]), pytrace=False)
