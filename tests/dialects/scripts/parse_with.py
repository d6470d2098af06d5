"""Run in an environment that has an engine: parses command lines with that engine's own parser.

    python parse_with.py vllm < commands.json > answers.json

commands.json is a list of argument lists, without the words that begin the command. An answer is
{"values": ...} or {"error": ...}; the first one of all is {"flags": ...}, every flag of the parser
and whether it takes a value. Imports are by name, since no engine is in the environment of the
tests themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from typing import Any


def vllm() -> Any:
    # Its arguments depend on the kind of device; there is none here.
    platforms = importlib.import_module("vllm.platforms")
    cpu = importlib.import_module("vllm.platforms.cpu")
    platforms._current_platform = cpu.CpuPlatform()  # type: ignore[attr-defined]
    arguments = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parsers = importlib.import_module("vllm.utils.argparse_utils")
    return arguments.make_arg_parser(parsers.FlexibleArgumentParser())


def sglang() -> Any:
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def lmdeploy() -> Any:
    serve = importlib.import_module("lmdeploy.cli.serve").SubCliServe
    serve.add_parser_api_server()
    return serve.subparsers.choices["api_server"]


def flags(parser: Any) -> dict[str, bool]:
    """Whether each takes a value."""
    return {
        flag: not (action.nargs == 0 or "Boolean" in type(action).__name__)
        for action in parser._actions
        for flag in action.option_strings
        if flag not in ("-h", "--help")
    }


def parsed(parser: Any, arguments: list[str]) -> dict[str, Any]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            values = vars(parser.parse_args(arguments))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    return {"values": {name: plain(value) for name, value in values.items()}}


def plain(value: Any) -> Any:
    return (
        value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
    )


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # engines log to standard output
        parser = {"vllm": vllm, "sglang": sglang, "lmdeploy": lmdeploy}[sys.argv[1]]()
        answers = [{"flags": flags(parser)}]
        answers += [parsed(parser, command) for command in json.load(sys.stdin)]
    json.dump(answers, sys.stdout, default=str)
