"""Where the router says that a prompt's blocks can be fetched: a header that only it may send.

Only a caller with the key of --api-key is believed: others could make this server connect to
anything. Knows a call's headers; not what is fetched.
"""

from __future__ import annotations

from headrace.core.server_config import Role, ServerConfig
from headrace.server.access.keys import API_KEY_NAME
from headrace.server.request.call import Call

HEADER = "x-headrace-prefill"  # HOST:PORT of an engine of --role prefill


def prefill_of(config: ServerConfig, call: Call) -> str:
    """Empty: nowhere."""
    if config.role is not Role.DECODE or call.key_name != API_KEY_NAME:
        return ""
    return call.headers.get(HEADER, "")
