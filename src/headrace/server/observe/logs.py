"""Logs of both processes: JSON lines, or readable ones for a terminal.

Text from a client can neither start a new line nor, in JSON, break out of its string. Prompts and
answers are never written unless --log-content is set; an unexpected exception is shown with its
traceback, and its message only if its type never quotes values. Knows how a line is written, not
when.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from headrace.core.errors import HeadraceError
from headrace.core.server_config import LogFormat, LogLevel

# Standard attributes of a LogRecord; all others were given as `extra` and are shown.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTINUED = "\n    | "
_TOLD = ("endpoint", "status", "e2e_s")  # already in a request's message
# Their messages name objects and files. Others (ValueError, KeyError …) quote the value that they
# failed on, which may be a prompt.
_SPEAKING = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
)


def set_up_logging(
    level: LogLevel | str,
    style: LogFormat | str,
    *,
    show_content: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Sets up logging for the whole process, uvicorn's and asyncio's loggers included."""
    stream = stream or sys.stderr
    pretty = style == LogFormat.PRETTY or (style == LogFormat.AUTO and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter((PrettyFormatter if pretty else JsonFormatter)(show_content))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    number = getattr(logging, str(level).upper())
    # What other packages log at debug level was not checked for content.
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("headrace").setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


class _Formatter(logging.Formatter):
    def __init__(self, show_content: bool = False) -> None:
        super().__init__()
        self._show_content = show_content

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = {k: v for k, v in vars(record).items() if k not in _USUAL and v is not None}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = self._exception(record.exc_info[1])
        if record.stack_info:
            fields["stack"] = record.stack_info
        return fields

    def _exception(self, error: BaseException) -> str:
        if self._show_content:
            return "".join(traceback.format_exception(error)).rstrip()
        lines, seen = [], set[int]()
        at: BaseException | None = error
        while at is not None and id(at) not in seen:  # the original exception comes last
            seen.add(id(at))
            lines += [f"{_name(at)}: {_text(at)}".rstrip(": ")]
            lines += [
                f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
                for frame in traceback.extract_tb(at.__traceback__)
            ]
            at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
            if at is not None:
                lines.append("from")
        return "\n".join(lines)


class JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            **{key: _plain(value) for key, value in self.fields(record).items()},
        }
        # ASCII only: no unusual line ends, no lone surrogates that the stream could not encode.
        return json.dumps(line, ensure_ascii=True, default=str, allow_nan=False)


class PrettyFormatter(_Formatter):
    """A line that does not begin with a time continues the one above it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        if fields.pop("event", None) == "request":
            for name in _TOLD:
                fields.pop(name, None)
        exception = fields.pop("exception", None)
        shown = "".join(f"  {key}={_escape(_short(value))}" for key, value in fields.items())
        head = f"{_time(record)} {record.levelname.lower():<8}"
        text = f"{head}{_continue(record.getMessage())}{shown}"
        return text if exception is None else text + _CONTINUED + _continue(exception)


# -- text ------------------------------------------------------------------------------------------


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> Any:
    """The value as JSON can represent it: JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _continue(text: str) -> str:
    return _CONTINUED.join(_escape(line) for line in text.split("\n"))


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _text(error: BaseException) -> str:
    if isinstance(error, HeadraceError):
        return error.cause if error.status >= 500 else "(not shown: it may quote a request)"
    if isinstance(error, _SPEAKING) and not isinstance(error, RecursionError):
        return str(error)
    return "(not shown: it may quote a request)"


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("headrace").critical("an uncaught error", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
