"""Which endpoint answers at which path."""

from __future__ import annotations

from headrace.core.errors import UnavailableError
from headrace.server.api import shapes
from headrace.server.api.chat import ChatCompletion, chat_completions
from headrace.server.api.completions import Completion, completions
from headrace.server.api.embeddings import EmbeddingList, embeddings
from headrace.server.api.fit import FitQuery, fit
from headrace.server.api.handover import handover
from headrace.server.api.history import HistoryQuery, diagnosis, history
from headrace.server.api.messages.endpoint import TokenCount, count_tokens, messages
from headrace.server.api.messages.errors import MESSAGES_ERRORS
from headrace.server.api.messages.events import Message
from headrace.server.api.messages.schema import CountTokensRequest, MessagesRequest
from headrace.server.api.models import list_models, show_model
from headrace.server.api.openapi import describing
from headrace.server.api.page.endpoint import page
from headrace.server.api.responses.endpoint import responses
from headrace.server.api.responses.schema import ResponsesRequest
from headrace.server.api.responses.stored import (
    ItemsQuery,
    RetrieveQuery,
    delete_response,
    list_input_items,
    retrieve_response,
)
from headrace.server.api.route import Route
from headrace.server.api.tokenize import detokenize, tokenize, tokenizer_info
from headrace.server.api.version import version
from headrace.server.request.call import AnyReply, Call, Reply, json_reply
from headrace.server.request.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headrace.server.request.service import Service

PROBES = frozenset({"/health", "/ready", "/ping"})  # health checks: always open


async def health(service: Service, call: Call) -> AnyReply:
    """This process lives."""
    return json_reply({"status": "ok"})


async def ready(service: Service, call: Call) -> AnyReply:
    """Whether requests would be answered now."""
    service.check_accepting()
    _ = service.supervisor.engine  # raises, with a Retry-After, while the engine is not ready
    return json_reply({"ready": True})


async def ping(service: Service, call: Call) -> AnyReply:
    """As SageMaker asks, who sends requests once this succeeds: /ready in other words."""
    await ready(service, call)
    return await health(service, call)


async def load(service: Service, call: Call) -> AnyReply:
    """How many requests wait or run now, as vLLM says it, and how full the engine is."""
    history = service.history
    levels = {} if history is None else history.load()
    return json_reply({"server_load": service.open_requests(), **levels})


async def metrics(service: Service, call: Call) -> AnyReply:
    """Counts and times, as Prometheus reads them."""
    if service.exposition is None:
        raise UnavailableError("Metrics are not available yet.", retry_after_s=1.0)
    text, content_type = service.exposition.write(call.headers.get("accept", ""))
    return Reply(body=text, content_type=content_type)


def all_routes() -> list[Route]:
    routes = [
        Route(path="/health", endpoint=health, is_open=True, response=shapes.Health),
        Route(path="/ready", endpoint=ready, is_open=True, response=shapes.Ready, statuses=(503,)),
        Route(
            path="/ping",
            endpoint=ping,
            methods=("GET", "POST"),
            is_open=True,
            response=shapes.Health,
            statuses=(503,),
        ),
        Route(path="/load", endpoint=load, is_operators=True, response=shapes.Load),
        Route(
            path="/version", endpoint=version, tells_operators_more=True, response=shapes.Version
        ),
        Route(
            path="/metrics",
            endpoint=metrics,
            is_operators=True,
            content_type="text/plain",
            statuses=(503,),
        ),
        Route(
            path="/history",
            endpoint=history,
            is_operators=True,
            query=HistoryQuery,
            response=shapes.History,
            statuses=(503,),
        ),
        Route(
            path="/diagnosis",
            endpoint=diagnosis,
            is_operators=True,
            response=shapes.Diagnosis,
            statuses=(503,),
        ),
        Route(path="/fit", endpoint=fit, is_operators=True, query=FitQuery, statuses=(503,)),
        Route(path="/handover", endpoint=handover, response=shapes.Handover, statuses=(403, 503)),
        Route(path="/", endpoint=page, is_open=True, content_type="text/html"),
        Route(path="/v1/models", endpoint=list_models, response=shapes.ModelList),
        Route(path="/v1/models/{model}", endpoint=show_model, response=shapes.ModelCard),
        Route(
            path="/v1/chat/completions",
            endpoint=chat_completions,
            methods=("POST",),
            request=ChatRequest,
            response=ChatCompletion,
            streams=True,
        ),
        Route(
            path="/v1/completions",
            endpoint=completions,
            methods=("POST",),
            request=CompletionRequest,
            response=Completion,
            streams=True,
        ),
        Route(
            path="/v1/embeddings",
            endpoint=embeddings,
            methods=("POST",),
            request=EmbeddingRequest,
            response=EmbeddingList,
        ),
        Route(
            path="/v1/responses",
            endpoint=responses,
            methods=("POST",),
            request=ResponsesRequest,
            response=shapes.Response,
            streams=True,
        ),
        Route(
            path="/v1/responses/{response_id}",
            endpoint=retrieve_response,
            query=RetrieveQuery,
            response=shapes.Response,
        ),
        Route(
            path="/v1/responses/{response_id}",
            endpoint=delete_response,
            methods=("DELETE",),
            response=shapes.Deleted,
        ),
        Route(
            path="/v1/responses/{response_id}/input_items",
            endpoint=list_input_items,
            query=ItemsQuery,
            response=shapes.ItemList,
        ),
        Route(
            path="/v1/messages",
            endpoint=messages,
            methods=("POST",),
            request=MessagesRequest,
            response=Message,
            streams=True,
            error_shape=MESSAGES_ERRORS,
        ),
        Route(
            path="/v1/messages/count_tokens",
            endpoint=count_tokens,
            methods=("POST",),
            request=CountTokensRequest,
            response=TokenCount,
            error_shape=MESSAGES_ERRORS,
        ),
        Route(
            path="/tokenize",
            endpoint=tokenize,
            methods=("POST",),
            request=TokenizeRequest,
            response=shapes.Tokens,
        ),
        Route(
            path="/detokenize",
            endpoint=detokenize,
            methods=("POST",),
            request=DetokenizeRequest,
            response=shapes.Text,
        ),
        Route(path="/tokenizer_info", endpoint=tokenizer_info, response=shapes.TokenizerInfo),
    ]
    routes.append(Route(path="/openapi.json", endpoint=describing(routes)))
    return routes
