"""The FastAPI application: routes, error handlers, and the engine's lifespan."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.api import adapters, anthropic, openai, responses, tokens
from paceline.server.config import ServeConfig
from paceline.server.errors import RESPONSES, on_error, on_http_error, on_invalid
from paceline.server.failures import APIError
from paceline.server.requestlog import Exchange, RequestLog
from paceline.server.security import Gate, Keys, wrong_host, wrong_type
from paceline.server.service import Service


def create_app(
    service: Service,
    keys: Keys | None = None,
    ended: Callable[[Exchange], None] | None = None,
    local: bool = False,
) -> FastAPI:
    """The API of a service, whose engine runs while the application does. Without ``keys`` anybody
    may use it; ``local``: see ``wrong_host``. ``ended`` is called after each request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.client.start()
        yield
        await service.client.stop()

    # FastAPI's documentation pages load scripts from elsewhere; ours is at /docs.
    app = FastAPI(
        title="Paceline",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
    )
    for api in (openai, responses, anthropic, tokens, adapters):
        api.add_routes(app, service)
    _add_models(app, service)
    _add_state(app, service)
    _add_page(app)
    for error in (PacelineError, RecursionError, Exception):
        app.add_exception_handler(error, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    _protect(app, service.config, keys, local)
    app.add_middleware(RequestLog, ended=ended)
    return app


def _protect(app: FastAPI, config: ServeConfig, keys: Keys | None, local: bool) -> None:
    """Add the middleware. The last one added runs first."""
    checks = [*([wrong_host] if local else []), wrong_type, *([keys.refusal] if keys else [])]
    app.add_middleware(Gate, checks=checks, limit=config.max_request_bytes)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send many headers of their own
            expose_headers=["x-request-id", "x-paceline-ignored", "retry-after"],
        )


def _add_models(app: FastAPI, service: Service) -> None:
    def card(adapter: str | None) -> dict[str, Any]:
        of_adapter = {"root": service.adapters.get(adapter or ""), "parent": service.model}
        return {
            "id": adapter or service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "paceline",
            "max_model_len": service.max_model_len,
            "drafters": list(service.facts.drafters),
            **(of_adapter if adapter else {}),
            "chats": service.tokenizer.chat_template is not None,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (None, *service.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.check_model(name))


def _add_state(app: FastAPI, service: Service) -> None:
    def status(good: bool, yes: str, no: str) -> Response:
        return JSONResponse({"status": yes if good else no}, 200 if good else 503)

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
        now = service.client.load
        return {
            "server_load": now.requests,  # vLLM's name, and SGLang's
            "load": now.requests,
            "sequences": now.sequences,
            "capacity": now.capacity,
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


def _add_page(app: FastAPI) -> None:
    """The page at ``/`` and the reference at ``/docs``, with policies that let them load nothing
    else."""
    text, reference = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("page.html", "reference.html")
    )
    template = Environment(autoescape=True).from_string(reference)

    def html(text: str) -> HTMLResponse:
        headers = {
            "Content-Security-Policy": policy(text),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return HTMLResponse(text, headers=headers)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return html(text)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return html(template.render(api=app.openapi()))


def policy(page: str) -> str:
    """Allows the page's own script and style, by hash, and connections to this server only."""
    script, style = (
        " ".join(
            f"'sha256-{base64.b64encode(sha256(part.encode()).digest()).decode()}'"
            for part in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)
        )
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
