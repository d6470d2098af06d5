"""Every error Headrace raises on purpose: a cause, a remedy, and the HTTP status it maps to.

The cause says what was found and what was expected; the remedy says what to do. This file knows
nothing of HTTP beyond the number.
"""

from __future__ import annotations

import re


class HeadraceError(Exception):
    """Base of all deliberate errors; `str()` is one line to show a user, followed by the detail if
    there is any."""

    status = 500
    exit_status = 2  # of a command that ends with it

    def __init__(
        self, cause: str, remedy: str = "", *, param: str | None = None, detail: str = ""
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.param = param  # the request or config field at fault, where there is one
        self.detail = detail  # lines that show why, such as a table

    def __str__(self) -> str:
        line = f"{self.cause} {self.remedy}".rstrip()
        return f"{line}\n{self.detail}" if self.detail else line


def remedy_for(param: str, expected: str) -> str:
    """The remedy for a wrong value, from what was expected: "1 or more", "0 to 1", "some text"."""
    if re.match(r"(-?[\d.]+.* to |above )", expected):
        expected = f"a value {'' if expected.startswith('above') else 'from '}{expected}"
    return f"Set {param} to {expected}."


class InvalidRequestError(HeadraceError):
    """A request asks for something that can't be done; `param` names the field."""

    status = 400


class BoundError(InvalidRequestError):
    """A request has too much of something; `bound` is the name of the bound in core/bounds.py."""

    def __init__(
        self, cause: str, remedy: str = "", *, param: str | None = None, bound: str
    ) -> None:
        super().__init__(cause, remedy, param=param)
        self.bound = bound


class ContextLengthError(InvalidRequestError):
    """A prompt (plus what it may generate) does not fit the context. Never cut silently.

    `prompt_tokens` (or a lower bound of it) and `most_tokens` are set where they are known."""

    def __init__(
        self,
        cause: str,
        remedy: str = "",
        *,
        param: str | None = None,
        prompt_tokens: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        super().__init__(cause, remedy, param=param)
        self.prompt_tokens = prompt_tokens
        self.most_tokens = most_tokens


class PayloadTooLargeError(HeadraceError):
    """A request's body is larger than the server accepts."""

    status = 413


class AuthenticationError(HeadraceError):
    """The key is missing or unknown."""

    status = 401


class ClientTimeoutError(HeadraceError):
    """A client began a request and did not send the rest."""

    status = 408


class RetryLaterError(HeadraceError):
    """The request can't be served now; `retry_after_s` says when it may work."""

    status = 503

    def __init__(
        self, cause: str, remedy: str = "", *, retry_after_s: float, param: str | None = None
    ) -> None:
        super().__init__(cause, remedy, param=param)
        self.retry_after_s = retry_after_s


class UnavailableError(RetryLaterError):
    """No engine is ready: it is starting or restarting, or the server is shutting down."""


class TooManyRequestsError(RetryLaterError):
    """A limit of the queue or of an API key is reached."""

    status = 429


class QueueTimeoutError(RetryLaterError):
    """A request's timeout passed, or would pass, while it waited in the queue."""

    status = 503


class DeviceLostError(HeadraceError):
    """The device failed and can't be used again: running requests end, and so does the process."""


class ModelNotFoundError(HeadraceError):
    """The MODEL argument is not in the catalog, not on disk and not in the cache."""

    status = 404


class OfflineError(HeadraceError):
    """Something must be fetched, and fetching did not work."""

    status = 503


class TermsError(HeadraceError):
    """A model's terms of use were not accepted, so it was not fetched."""

    status = 403


class WeightsError(HeadraceError):
    """A weights file is truncated, malformed, or lacks what its model needs."""

    status = 422


class UnsupportedModelError(HeadraceError):
    """A well-formed model that Headrace can't run: its architecture, feature or quantization."""

    status = 422


class TemplateError(HeadraceError):
    """A chat template is malformed, refused the messages, or ran past its limits."""

    status = 400


class ConfigError(HeadraceError):
    """A flag or configuration field has a value that can't work; `param` names the field."""

    status = 400


class DeviceError(ConfigError):
    """This machine lacks what a device needs; `--device auto` takes another one."""


class MemoryFitError(ConfigError):
    """The requested sizes do not fit into memory; `detail` is the ledger."""
