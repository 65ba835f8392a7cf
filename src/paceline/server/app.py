"""The application: routes, errors, and a life that begins and ends with the engine's thread."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server import chat, completions, page
from paceline.server.chat_format import check_text, render
from paceline.server.errors import RESPONSES, APIError, on_error, on_http_error, on_invalid
from paceline.server.protocol import DetokenizeRequest, TokenizeRequest
from paceline.server.requestlog import RequestLog
from paceline.server.security import BodyLimit, HostGuard, KeyGuard, Security
from paceline.server.service import Service


def create_app(service: Service, security: Security | None = None) -> FastAPI:
    """The whole API around a service; its engine runs while the application does.

    ``security`` without keys lets anybody in.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        service.loop.stop()

    # The documentation pages load scripts from elsewhere; /openapi.json is enough.
    app = FastAPI(
        title="Paceline",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
    )
    app.include_router(completions.router(service))
    app.include_router(chat.router(service))
    app.include_router(_models(service))
    app.include_router(_tokens(service))
    app.include_router(_state(service))
    app.include_router(service.metrics.router())
    app.include_router(page.router())
    app.add_exception_handler(PacelineError, on_error)
    app.add_exception_handler(RecursionError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_error)
    _protect(app, security or Security())
    return app


def _protect(app: FastAPI, security: Security) -> None:
    """The guards of security.py. The last one added sees a request first."""
    app.add_middleware(BodyLimit, limit=security.max_request_bytes)
    if security.keys:
        app.add_middleware(KeyGuard, keys=security.keys)
    if security.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=security.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    if security.local:
        app.add_middleware(HostGuard)
    app.add_middleware(RequestLog)


def _models(service: Service) -> APIRouter:
    routes = APIRouter()

    def card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "paceline",
            "max_model_len": service.llm.max_model_len,
            "drafters": list(service.llm.drafters),
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card()

    return routes


def _tokens(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        tokenizer = service.llm.tokenizer
        if body.model is not None:
            service.check_model(body.model)
        if body.messages is not None:
            ids = render(tokenizer, body.messages)
        else:
            check_text(body.prompt or "", "prompt")
            ids = list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens))
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.llm.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
        return answer

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        tokenizer = service.llm.tokenizer
        if body.model is not None:
            service.check_model(body.model)
        wrong = [token for token in body.tokens if not 0 <= token < len(tokenizer)]
        if wrong:
            raise APIError(
                f"token {wrong[0]} is not in the vocabulary (0 to {len(tokenizer) - 1})",
                param="tokens",
            )
        return {"prompt": str(tokenizer.decode(body.tokens))}

    return routes


def _state(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    @routes.get("/health/live")
    async def live() -> Response:
        return _status(service.loop.alive, "ok", "the engine has stopped")

    @routes.get("/health/ready")
    async def ready() -> Response:
        return _status(service.loop.ready, "ready", "not ready: starting or shutting down")

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return routes


def _status(good: bool, yes: str, no: str) -> Response:
    return JSONResponse({"status": yes if good else no}, 200 if good else 503)
