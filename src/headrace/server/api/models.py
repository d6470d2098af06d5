"""/v1/models: what is served here, as a list and by name."""

from __future__ import annotations

from headrace.server.request.call import AnyReply, Call, json_reply
from headrace.server.request.sampling import check_model
from headrace.server.request.service import Service

MODELS_PATH = "/v1/models"


def model_card(service: Service, name: str) -> dict[str, object]:
    """OpenAI's fields, and the context's length where vLLM has it: null while the engine starts."""
    model, facts = service.model, service.supervisor.facts
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "headrace",
        "root": model.name,
        "parent": None,
        "max_model_len": None if facts is None else facts.context_tokens,
    }


async def list_models(service: Service, call: Call) -> AnyReply:
    """What is served here: one model, under each of its names."""
    names = service.model.names
    return json_reply({"object": "list", "data": [model_card(service, name) for name in names]})


async def show_model(service: Service, call: Call) -> AnyReply:
    """Hub names contain a slash: the rest of the path is the name."""
    name = call.path.removeprefix(MODELS_PATH).removeprefix("/")
    check_model(service, name)
    model = service.model
    return json_reply(model_card(service, name if name in model.names else model.name))
