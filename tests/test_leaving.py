"""A process that leaves without close() ends by itself, with its own status and in silence.

Nanobind tells on standard error of every native object that outlives the interpreter, so silence
says that nothing did.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LLM = "from headrace import LLM, SamplingParams\nllm = LLM({path!r}, kv_tokens=256)\n"
ENGINE = (
    "import asyncio, sys, threading\n"
    "from headrace import AsyncEngine, SamplingParams\n"
    "engine = AsyncEngine({path!r}, kv_tokens=512)\n"
    "async def ask(count):\n"
    "    params = SamplingParams(max_tokens=count, ignore_eos=True)\n"
    "    async for event in engine.generate('Go on.', params):\n"
    "        yield event\n"
    "async def all_of(count):\n"
    "    return [event async for event in ask(count)]\n"
)
# A request that runs in a thread of its own while the interpreter ends.
BUSY = (
    "began = threading.Event()\n"
    "async def go():\n"
    "    async for event in ask(400):\n"
    "        began.set()\n"
    "threading.Thread(target=lambda: asyncio.run(go()), daemon=True).start()\n"
    "assert began.wait(60)\n"
)
SCRIPTS = {
    "llm": LLM + "llm.generate('1 2', SamplingParams(max_tokens=2))",
    "llm with steps that overlap": LLM.replace("256", "256, overlap=True")
    + "llm.generate('1 2', SamplingParams(max_tokens=2))",
    "llm in the middle of a stream": LLM
    + "stream = llm.stream([1, 2], SamplingParams(max_tokens=9))\nnext(stream)",
    "llm that something never frees": LLM
    + "import ctypes\nctypes.pythonapi.Py_IncRef(ctypes.py_object(llm))",
    "engine that was never asked": ENGINE,
    "engine": ENGINE + "asyncio.run(all_of(3))",
    "engine in the middle of a request": ENGINE
    + "async def leave():\n    async for event in ask(400):\n        return\n"
    + "asyncio.run(leave())",
    "busy engine": ENGINE + BUSY,
    "busy engine with steps that overlap": ENGINE.replace("512", "512, overlap=True") + BUSY,
}
RAISES = {
    "llm": LLM + "raise KeyError('mine')",
    "engine": ENGINE
    + "async def fail():\n    async for event in ask(400):\n        raise KeyError('mine')\n"
    + "asyncio.run(fail())",
}


def run_script(
    script: str, path: Path, *flags: str, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    text = script.replace("{path!r}", repr(str(path)))
    command = [sys.executable, *flags, *(() if typed else ("-c", text))]
    return subprocess.run(
        command,
        input=typed.replace("{path!r}", repr(str(path))) if typed else None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_comes_to_its_end(name: str, default_model_path: Path) -> None:
    done = run_script(SCRIPTS[name], default_model_path)
    assert (done.stderr, done.stdout, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("name", RAISES)
def test_a_script_that_raises(name: str, default_model_path: Path) -> None:
    done = run_script(RAISES[name], default_model_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("\nKeyError: 'mine'\n")
    assert "nanobind" not in done.stderr


def test_a_script_that_exits_by_its_own_status(default_model_path: Path) -> None:
    done = run_script(ENGINE + BUSY + "sys.exit(7)", default_model_path)
    assert (done.stderr, done.returncode) == ("", 7)


@pytest.mark.parametrize("made", [LLM, ENGINE], ids=["llm", "engine"])
def test_a_session_at_the_prompt(made: str, default_model_path: Path) -> None:
    """The prompt remembers the last exception, and with it the frames that had the model."""
    typed = made.replace("\nasync def all_of", "\n\nasync def all_of")
    typed += "\ndef lose(model):\n    kept = model\n    return 1 // 0\n\n"
    typed += f"lose({'llm' if made is LLM else 'engine'})\n"
    done = run_script("", default_model_path, "-i", "-q", typed=typed)
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "nanobind" not in done.stderr
    assert "SyntaxError" not in done.stderr
