"""Endpoints of vLLM: ``/tokenize``, ``/detokenize``, ``/tokenizer_info``, and
``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from paceline.server.api.chat import render
from paceline.server.api.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from paceline.server.failures import APIError, check_text
from paceline.server.fields import Body
from paceline.server.service import Service

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_INFO_FIELDS = (*_SPECIAL, "chat_template", "model_max_length")


class UnloadAdapter(Body):
    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None  # an identifier of vLLM's, ignored here


class LoadAdapter(UnloadAdapter):
    """``load_inplace``: replace a loaded adapter of the same name."""

    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


def add_routes(app: FastAPI, service: Service) -> None:
    # These handlers are not coroutines, so they run on worker threads: encoding a long text as
    # tokens or as JSON takes seconds.
    tokenizer = service.tokenizer

    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if body.messages is not None:
            chat = ChatRequest(messages=body.messages, tools=body.tools)
            chat.add_generation_prompt = body.add_generation_prompt
            ids = render(tokenizer, chat)
        else:
            check_text(body.prompt or "", "prompt")
            ids = list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens))
        answer = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
        return _json(answer)

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        count = len(tokenizer)
        for token in body.tokens:
            if not 0 <= token < count:
                problem = f"token {token} is not in the vocabulary (0 to {count - 1})"
                raise APIError(problem, param="tokens")
        return _json({"prompt": str(tokenizer.decode(body.tokens))})

    @app.get("/tokenizer_info")
    def tokenizer_info() -> Response:
        special = {name: getattr(tokenizer, name, None) for name in _INFO_FIELDS}
        return _json({"tokenizer_class": type(tokenizer).__name__, **special})

    _add_adapter_routes(app, service)


def _add_adapter_routes(app: FastAPI, service: Service) -> None:
    # Changes run one after the other, so that ``service.adapters`` matches the engine's adapters.
    changing = asyncio.Lock()

    def check(name: str, allowed: bool, problem: str, status: int = 400) -> None:
        """Raise APIError if adapters may not be changed at all, or not ``allowed`` is given."""
        if not service.config.lora_updates:
            raise APIError(
                "this server's adapters are fixed; start it with --lora-updates to change them", 403
            )
        if not allowed:
            raise APIError(f"the adapter {name!r} {problem}", status, param="lora_name")

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(body: LoadAdapter) -> str:
        name = body.lora_name
        async with changing:
            free = name != service.model and (body.load_inplace or name not in service.adapters)
            check(name, free, "is loaded already, or has the same name as the model")
            await service.client.set_adapter(name, body.lora_path)
            service.adapters[name] = body.lora_path
        return f"Success: LoRA adapter '{name}' added successfully."

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(body: UnloadAdapter) -> str:
        name = body.lora_name
        async with changing:
            check(name, name in service.adapters, "is not loaded", 404)
            del service.adapters[name]  # first, so that no new request uses it
            await service.client.set_adapter(name, None)
        return f"Success: LoRA adapter '{name}' removed successfully."


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
