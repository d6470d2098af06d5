"""Which endpoint answers at which path."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import UnavailableError
from headrace.server.call import AnyReply, Call, Endpoint, Reply, json_reply
from headrace.server.chat import chat_completions
from headrace.server.completions import completions
from headrace.server.embeddings import embeddings
from headrace.server.models import list_models, show_model
from headrace.server.responses import responses
from headrace.server.service import Service
from headrace.server.supervisor import State
from headrace.server.tokenize import detokenize, tokenize
from headrace.server.version import version


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    path: str  # its end may be open: /v1/models/{model} takes whatever follows
    endpoint: Endpoint
    methods: tuple[str, ...] = ("GET",)
    is_open: bool = False  # answers without a key


async def health(service: Service, call: Call) -> AnyReply:
    return json_reply({"status": "ok"})


async def ready(service: Service, call: Call) -> AnyReply:
    good = service.supervisor.state is State.READY and not service.draining
    return json_reply({"ready": good}, 200 if good else 503)


async def metrics(service: Service, call: Call) -> AnyReply:
    if service.exposition is None:
        raise UnavailableError("Nothing is being counted yet.", retry_after_s=1.0)
    text, content_type = service.exposition.write(call.headers.get("accept", ""))
    return Reply(body=text, content_type=content_type)


def all_routes() -> list[Route]:
    return [
        Route(path="/health", endpoint=health, is_open=True),
        Route(path="/ready", endpoint=ready, is_open=True),
        Route(path="/version", endpoint=version),
        Route(path="/metrics", endpoint=metrics),
        Route(path="/v1/models", endpoint=list_models),
        Route(path="/v1/models/{model}", endpoint=show_model),
        Route(path="/v1/chat/completions", endpoint=chat_completions, methods=("POST",)),
        Route(path="/v1/completions", endpoint=completions, methods=("POST",)),
        Route(path="/v1/embeddings", endpoint=embeddings, methods=("POST",)),
        Route(path="/v1/responses", endpoint=responses, methods=("POST",)),
        Route(path="/tokenize", endpoint=tokenize, methods=("POST",)),
        Route(path="/detokenize", endpoint=detokenize, methods=("POST",)),
    ]
