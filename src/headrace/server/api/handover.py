"""/handover: what a router must know to have prompts computed here. Knows the engine's facts."""

from __future__ import annotations

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.server.access.keys import API_KEY_NAME
from headrace.server.request.call import AnyReply, Call, json_reply
from headrace.server.request.service import Service


class RouterOnlyError(HeadraceError):
    status = 403


async def handover(service: Service, call: Call) -> AnyReply:
    """This server's role, and where others fetch blocks. For the router."""
    config, facts = service.config, service.supervisor.facts
    if len(service.keys) and call.key_name != API_KEY_NAME:
        raise RouterOnlyError(
            "/handover is for the router, and this key is not that of --api-key.",
            "Send the key of --api-key.",
        )
    if facts is None:
        raise UnavailableError(
            "The engine is starting.", retry_after_s=service.supervisor.retry_after_s()
        )
    return json_reply(
        {
            "role": config.role,
            "host": config.handover_host if facts.handover_port else None,
            "port": facts.handover_port or None,
            "fingerprint": facts.handover_fingerprint,  # of engines that can exchange blocks
        }
    )
