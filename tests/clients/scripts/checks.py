"""What the Python scripts here share: where the server is, and how their checks are run.

Runs in each client's own environment, so it knows the standard library alone. A script defines
functions whose names begin with `check_`; `run()` calls each and prints a line of JSON for it,
which test_scripts.py reads. One check that fails does not stop the others.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ["CLIENTS_URL"]  # no key is asked for
KEYED_URL = os.environ["CLIENTS_KEYED_URL"]
KEY = os.environ["CLIENTS_KEY"]  # what KEYED_URL asks for
MODEL = os.environ["CLIENTS_MODEL"]
CONTEXT = int(os.environ["CLIENTS_CONTEXT"])  # tokens
TOO_LONG = "many words " * CONTEXT

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def raises(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The exception, which must be of this kind."""
    try:
        found = call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected; the answer was {found!r}")


def run() -> None:
    """All checks of the script that was started."""
    for name, check in vars(sys.modules["__main__"]).copy().items():
        if not name.startswith("check_"):
            continue
        print(json.dumps({"begun": name}), flush=True)
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check())
            else:
                check()
            error = None
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"done": name, "error": error}), flush=True)
