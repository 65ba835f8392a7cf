"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, compatible with vLLM."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field

from paceline.server.failures import APIError
from paceline.server.fields import Body
from paceline.server.service import Service


class UnloadAdapter(Body):
    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None  # an identifier of vLLM's, ignored here


class LoadAdapter(UnloadAdapter):
    """``load_inplace``: replace a loaded adapter of the same name."""

    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


def add_routes(app: FastAPI, service: Service) -> None:
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
