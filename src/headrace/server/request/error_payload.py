"""An error as OpenAI's clients expect it, with a remedy beside the message. Knows no HTTP."""

from __future__ import annotations

from headrace.core.errors import (
    AuthenticationError,
    ContextLengthError,
    HeadraceError,
    ModelNotFoundError,
    RetryLaterError,
    TooManyRequestsError,
)


def error_payload(error: HeadraceError, **more: object) -> dict[str, dict[str, object]]:
    """In OpenAI's shape, with a remedy beside the message."""
    kind, code = _kind(error)
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": error.param,
            "code": code,
            "remedy": error.remedy or None,
            **more,
        }
    }


def retry_after(error: RetryLaterError) -> str:
    """Whole seconds, for the header."""
    return str(max(1, round(error.retry_after_s + 0.5)))


def _kind(error: HeadraceError) -> tuple[str, str | None]:
    """OpenAI's `type` and `code`."""
    if isinstance(error, ContextLengthError):
        return "invalid_request_error", "context_length_exceeded"
    if isinstance(error, ModelNotFoundError):
        return "invalid_request_error", "model_not_found"
    if isinstance(error, AuthenticationError):
        return "authentication_error", "invalid_api_key"
    if isinstance(error, TooManyRequestsError):
        return "rate_limit_error", "rate_limit_exceeded"
    if isinstance(error, RetryLaterError):
        return "service_unavailable", "unavailable"
    if error.status < 500:
        return "invalid_request_error", None
    return "server_error", None
