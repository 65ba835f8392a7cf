"""What all handlers share: the engine's loop, the served model, and what may be asked of it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi import Request as HTTPRequest

from paceline.completion import Completion, StreamEvent
from paceline.server.chat_format import check_text
from paceline.server.errors import APIError
from paceline.server.loop import EngineLoop, Limits, Ticket
from paceline.server.metrics import Metrics
from paceline.server.requestlog import charge
from paceline.server.security import RequestLimits

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.llm import LLM, Prompt

log = logging.getLogger("paceline.server")


class Service:
    """A model under the name by which it is served, its loop and its metrics.

    ``created`` is seconds since the epoch. ``asks`` is what one request may ask for.
    ``log_prompts`` writes the prompts to the log, which otherwise holds no content.
    """

    def __init__(
        self,
        llm: LLM,
        model: str,
        limits: Limits | None = None,
        asks: RequestLimits | None = None,
        log_prompts: bool = False,
    ) -> None:
        self.llm, self.model = llm, model
        self._asks, self._log_prompts = asks or RequestLimits(), log_prompts
        self.created = self.now()
        self.metrics = Metrics()
        self.loop = EngineLoop(llm, limits, self.metrics)
        self.metrics.watch(self.loop)

    def check_model(self, name: str) -> None:
        """Raises APIError 404 for another model."""
        if name != self.model:
            raise APIError(
                f"the model {name!r} does not exist; this server has {self.model!r}",
                404,
                param="model",
                code="model_not_found",
            )

    def room(self, prompt_tokens: int, param: str) -> int:
        """Tokens that may follow a prompt. Raises APIError if there is no room for any."""
        refused = self.llm.room.refusal(prompt_tokens)
        if refused is not None:
            raise APIError(refused, param=param, code="context_length_exceeded")
        return self.llm.max_model_len - prompt_tokens

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; texts are encoded beside the event loop. Raises APIError."""
        if not isinstance(prompt, str):
            return prompt
        check_text(prompt, "prompt")
        ids = await asyncio.to_thread(self.llm.tokenizer.encode, prompt)
        if not ids:
            raise APIError("a prompt is empty; give at least one token of text", param="prompt")
        return list(ids)

    def now(self) -> int:
        """Seconds since the epoch, for ``created``."""
        return int(time.time())

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, deadline: float | None
    ) -> Ticket:
        self._asks.check(len(prompts), params)
        ticket = await self.loop.submit(prompts, params, deadline)
        charge(ticket.requests)
        if self._log_prompts:  # they have been checked: every id is one of the vocabulary
            for prompt in prompts:
                text = prompt if isinstance(prompt, str) else self.llm.tokenizer.decode(prompt)
                log.info("prompt %s", json.dumps(text))
        return ticket


async def gather(ticket: Ticket, http: HTTPRequest) -> list[Completion]:
    """All completions of a ticket, in order; cancels them if the client goes away meanwhile."""

    async def collect() -> None:
        async for _ in ticket:
            pass

    work = asyncio.create_task(collect())
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=0.25)
            if not work.done() and await http.is_disconnected():
                work.cancel()
        await work
    except asyncio.CancelledError:
        raise APIError("the client has gone", 499, "server_error", code="cancelled") from None
    finally:
        ticket.cancel()
        work.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await work
    return [r.completion for r in ticket.requests if r.completion is not None]


async def events_of(ticket: Ticket) -> AsyncIterator[StreamEvent]:
    """Every event of a ticket, as it comes."""
    async for delivery in ticket:
        for event in delivery:
            yield event
