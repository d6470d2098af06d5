"""Logs of both processes: JSON lines, or pretty ones for a terminal; and one line a request.

Whatever a client sent can neither begin a line of its own nor, in JSON, leave its string. What a
request said and what was answered is never written unless asked for; an unexpected exception shows
where it came from, and its text only if its kind does not quote values. Knows no HTTP.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from headrace.core.errors import HeadraceError
from headrace.core.server_config import LogFormat, LogLevel
from headrace.server.metrics import is_refusal, refusal_reason, time_per_output_token_s
from headrace.server.record import HttpRecord, RequestRecord

log = logging.getLogger("headrace.server.requests")

# What a LogRecord has anyway; all else was given as `extra` and is shown.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Asked for so often, by machines, that they would drown the rest.
_QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics"})
_CONTINUED = "\n    | "
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
# Their texts name objects, files and places. Others (ValueError, KeyError …) quote what they failed
# on, and that may be a prompt.
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
    """For the whole process, from now on, uvicorn's and asyncio's loggers included."""
    stream = stream or sys.stderr
    pretty = style == LogFormat.PRETTY or (style == LogFormat.AUTO and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter((PrettyFormatter if pretty else JsonFormatter)(show_content))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    number = getattr(logging, str(level).upper())
    # Other packages at debug level say things that nobody here has looked at.
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
        while at is not None and id(at) not in seen:  # the innermost last: what began it
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
        # ASCII only: no odd line ends, no half characters that the stream could not write.
        return json.dumps(line, ensure_ascii=True, default=str, allow_nan=False)


class PrettyFormatter(_Formatter):
    """A line that does not begin with a time belongs to the one above it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        fields.pop("event", None)
        exception = fields.pop("exception", None)
        shown = "".join(f"  {key}={_escape(_short(value))}" for key, value in fields.items())
        head = f"{_time(record)} {record.levelname.lower():<8}"
        text = f"{head}{_continue(record.getMessage())}{shown}"
        return text if exception is None else text + _CONTINUED + _continue(exception)


class RequestLog:
    """One line for each HTTP request at its end."""

    def __init__(self, show_content: bool = False) -> None:
        self._show_content = show_content

    def on_http(self, record: HttpRecord) -> None:
        quiet = record.route in _QUIET_ROUTES and record.status != 500
        level = logging.DEBUG if quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        took_s = record.ended_s - record.arrived_s
        # The route, not the path: that is the client's text.
        log.log(
            level,
            "%s %s %d in %.3f s",
            record.method if record.method.isalpha() else "?",
            record.route,
            record.status,
            took_s,
            extra={
                "event": "request",
                "request_id": record.request_id,
                "endpoint": record.route,
                "status": record.status,
                "key": record.key_name,
                "e2e_s": round(took_s, 6),
                **_error_fields(record.error),
                **_work_fields(record.requests),
                **(_content_fields(record.requests) if self._show_content else {}),
            },
        )


def _error_fields(error: HeadraceError | None) -> dict[str, Any]:
    if error is None:
        return {}
    fields: dict[str, Any] = {"error": refusal_reason(error)}
    if error.param and _FIELD_NAME.fullmatch(error.param):
        fields["param"] = error.param
    # What is wrong with a request is told to its sender, with the value that is wrong.
    if not is_refusal(error) or error.status >= 429:
        fields["cause"] = error.cause
    return fields


def _work_fields(requests: list[RequestRecord]) -> dict[str, Any]:
    """Sums over the engine requests that one HTTP request made; of times, the longest."""
    if not requests:
        return {}
    times = {
        "queue_s": [_between(r.arrived_s, r.started_s, r.waited_s) for r in requests],
        "ttft_s": [_between(r.arrived_s, r.first_token_s) for r in requests],
        "tpot_s": [time_per_output_token_s(r) for r in requests],
    }
    return {
        "finish_reason": ",".join(sorted({r.finish_reason or "none" for r in requests})),
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "cached_tokens": sum(r.cached_tokens for r in requests),
        "output_tokens": sum(r.output_tokens for r in requests),
        **{
            name: round(max(s for s in found if s is not None), 6)
            for name, found in times.items()
            if any(s is not None for s in found)
        },
    }


def _content_fields(requests: list[RequestRecord]) -> dict[str, Any]:
    return {
        "prompt": [r.prompt for r in requests],
        "answer": [r.answer for r in requests],
    }


def _between(start_s: float, end_s: float | None, known_s: float | None = None) -> float | None:
    if known_s is not None or end_s is None:
        return known_s
    return max(0.0, end_s - start_s)


# -- text ------------------------------------------------------------------------------------------


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> Any:
    """As JSON can say it: it knows no NaN."""
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
