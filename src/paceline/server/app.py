"""The FastAPI application: routes, error handlers and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.api import anthropic, openai, responses, vllm
from paceline.server.errors import RESPONSES, on_error, on_http_error
from paceline.server.failures import APIError
from paceline.server.requestlog import RequestLog
from paceline.server.security import Gate, Keys, check_content_type
from paceline.server.service import Service


def create_app(service: Service, keys: Keys | None = None, local: bool = False) -> FastAPI:
    """Create the application, which starts and stops the engine. Without ``keys`` anybody may use
    it. A ``local`` server answers to the names of this machine only."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.client.start()
        yield
        await service.client.stop()

    # FastAPI's documentation pages load scripts from another site; /docs has a page of our own.
    app = FastAPI(
        title="Paceline",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
    )
    for api in (openai, responses, anthropic, vllm):
        api.add_routes(app, service)
    _add_models(app, service)
    _add_status(app, service)
    _add_pages(app)
    for error in (PacelineError, RecursionError, RequestValidationError, Exception):
        app.add_exception_handler(error, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    # The middleware that is added last runs first.
    checks = [check_content_type, *([keys.check_key] if keys else [])]
    app.add_middleware(Gate, checks=checks, limit=service.config.max_request_bytes)
    if local:
        # Prevents DNS rebinding: a page whose own name points at this server's address, so that
        # the browser lets its scripts read answers.
        hosts = ["localhost", "127.0.0.1", "[::1]", service.config.host]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    if service.config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients send many custom headers
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLog)
    return app


def _add_models(app: FastAPI, service: Service) -> None:
    def card(adapter: str | None) -> dict[str, Any]:
        """The entry of an adapter, or of the model (None)."""
        adapter_fields = {"root": service.adapters.get(adapter or ""), "parent": service.model}
        return {
            "id": adapter or service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "paceline",
            "max_model_len": service.max_model_len,
            "drafters": list(service.facts.drafters),
            **(adapter_fields if adapter else {}),
            "has_chat_template": service.tokenizer.chat_template is not None,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (None, *service.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.check_model(name))


def _add_status(app: FastAPI, service: Service) -> None:
    """Health checks, load, metrics and version."""

    def status(healthy: bool, text: str, problem: str) -> Response:
        return JSONResponse({"status": text if healthy else problem}, 200 if healthy else 503)

    @app.get("/health")
    @app.get("/health/live")
    async def live() -> Response:
        return status(service.client.alive, "ok", "the engine has stopped")

    @app.get("/health/ready")
    async def ready() -> Response:
        return status(service.client.ready, "ready", "not ready: starting or shutting down")

    @app.get("/load")
    @app.get("/get_load", include_in_schema=False)  # for SGLang's routers
    async def load() -> dict[str, Any]:
        requests, sequences, capacity = service.client.load
        return {
            "server_load": requests,  # the field's name in vLLM
            "load": requests,  # the field's name in SGLang
            "sequences": sequences,
            "capacity": capacity,
            "ready": service.client.ready,
        }

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        try:
            text = await service.client.scrape()
        except asyncio.TimeoutError:
            raise APIError(
                "the engine did not answer in time", 503, "server_error", code="engine_slow"
            ) from None
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        facts = service.facts
        return {
            "version": __version__,
            "backend": facts.backend,
            "dtype": facts.dtype,
            "drafters": dict(zip(facts.drafters, facts.drafts, strict=True)),
        }


def _add_pages(app: FastAPI) -> None:
    """The chat page at ``/`` and the API reference at ``/docs``; neither loads from elsewhere."""
    chat_page, reference = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("page.html", "reference.html")
    )
    template = Environment(autoescape=True).from_string(reference)

    headers = {
        # The pages' own script and style, and connections to this server only.
        "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "Cache-Control": "no-cache",
    }

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(chat_page, headers=headers)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(template.render(api=app.openapi()), headers=headers)
