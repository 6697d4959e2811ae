"""The API's endpoints, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from aioengine.asgi.api.answers import Answer
from aioengine.asgi.api.asks import Ask
from aioengine.asgi.api.batches import Batches, Kinds, embedding, generating
from aioengine.asgi.api.chat import ChatAnswer, read_chat
from aioengine.asgi.api.completions import TextAnswer, read_completion
from aioengine.asgi.api.embeddings import (
    embed,
    read_embeddings,
    read_rerank,
    read_score,
    rerank,
    score,
)
from aioengine.asgi.api.fields import BATCH_LIST, FILE_LIST, KEPT_RESPONSE, Fields, known
from aioengine.asgi.api.files import Files, FileStore
from aioengine.asgi.api.generation import Generation
from aioengine.asgi.api.messages import MessagesAnswer, read_counted, read_messages
from aioengine.asgi.api.openapi import document
from aioengine.asgi.api.questions import Question
from aioengine.asgi.api.tokenize import count, read_text, read_tokenize, show, text_of
from aioengine.asgi.api.transcription import Transcription
from aioengine.asgi.endpoint import Handler, endpoint
from aioengine.asgi.responses.endpoint import KeptResponses, Responses, read_unkept
from aioengine.asgi.responses.events import ResponseAnswer
from aioengine.asgi.service import Service

__all__ = ["api_routes", "token_routes"]


def api_routes(service: Service, probes: Sequence[BaseRoute] = ()) -> list[BaseRoute]:
    """The routes of all endpoints, `probes` among them, below the path where the API is mounted."""
    routes = [
        *_generation_routes(service),
        *_response_routes(service),
        *_embedding_routes(service),
        *_model_routes(service),
        *token_routes(service),
        *probes,
    ]

    async def openapi(scope: Scope, receive: Receive, send: Send) -> None:
        found = document(routes, scope.get("root_path", ""), service.keys.are_asked_for)
        await JSONResponse(found)(scope, receive, send)

    routes.append(endpoint(service, "/openapi.json", openapi))
    return routes


def token_routes(service: Service) -> list[BaseRoute]:
    """The routes of what counts and shows tokens."""
    return [
        endpoint(service, "/tokenize", Question(service, read_tokenize, show), "POST"),
        endpoint(service, "/detokenize", Question(service, read_text, text_of), "POST"),
    ]


def _generation_routes(service: Service) -> list[BaseRoute]:
    kinds: Mapping[str, tuple[Callable[[Mapping[str, Any]], Ask], type[Answer]]] = {
        "/v1/chat/completions": (read_chat, ChatAnswer),
        "/v1/completions": (read_completion, TextAnswer),
    }
    anthropic: Mapping[str, Handler] = {
        "/messages": Generation(service, read_messages, MessagesAnswer),
        "/messages/count_tokens": Question(service, read_counted, count),
    }
    store = FileStore(service.max_files_bytes, service.keys.num_shares)
    files = Files(service, store)
    in_batches: Kinds = {
        **{path: (read, generating(kind)) for path, (read, kind) in kinds.items()},
        "/v1/responses": (read_unkept, generating(ResponseAnswer)),
        "/v1/embeddings": (read_embeddings, embedding),
    }
    batches = Batches(service, store, in_batches)
    return [
        *(endpoint(service, p[3:], Generation(service, *k), "POST") for p, k in kinds.items()),
        endpoint(service, "/audio/transcriptions", Transcription(service), "POST"),
        *(endpoint(service, p, h, "POST") for p, h in anthropic.items()),
        endpoint(service, "/files", files.upload, "POST"),
        endpoint(service, "/files", files.all, query=_reads(FILE_LIST)),
        endpoint(service, "/files/{name}", files.one, query=_reads({})),
        endpoint(service, "/files/{name}", files.one, "DELETE", query=_reads({})),
        endpoint(service, "/files/{name}/content", files.content, query=_reads({})),
        endpoint(service, "/batches", batches.create, "POST"),
        endpoint(service, "/batches", batches.all, query=_reads(BATCH_LIST)),
        endpoint(service, "/batches/{name}", batches.one, query=_reads({})),
        endpoint(service, "/batches/{name}/cancel", batches.cancel, "POST", needs_room=False),
    ]


def _reads(fields: Fields) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """Make what reads a query of these fields."""
    return partial(known, fields=fields)


def _response_routes(service: Service) -> list[BaseRoute]:
    store, path = service.response_store, "/responses/{response_id}"
    kept = None if store is None else KeptResponses(service, store)
    routes: list[BaseRoute] = [endpoint(service, "/responses", Responses(service, kept), "POST")]
    if kept is not None:
        routes += [
            endpoint(service, path, kept.get, query=_reads(KEPT_RESPONSE)),
            endpoint(service, path, kept.delete, "DELETE", query=_reads({})),
        ]
    return routes


def _embedding_routes(service: Service) -> list[BaseRoute]:
    return [
        endpoint(service, "/embeddings", Question(service, read_embeddings, embed), "POST"),
        endpoint(service, "/score", Question(service, read_score, score), "POST"),
        endpoint(service, "/rerank", Question(service, read_rerank, rerank), "POST"),
    ]


def _model_routes(service: Service) -> list[BaseRoute]:
    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        fields = {"object": "model", "created": service.created, "owned_by": "aioengine"}
        data = [{"id": name, **fields} for name in service.model_names]
        answer: dict[str, object] = {"object": "list", "data": data}
        if (name := scope["path_params"].get("name")) is not None:
            answer = {"id": service.check_model(name), **fields}
        await JSONResponse(answer)(scope, receive, send)

    return [
        endpoint(service, "/models", models, query=_reads({})),
        endpoint(service, "/models/{name:path}", models, query=_reads({})),
    ]
