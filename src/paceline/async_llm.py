"""``AsyncLLM``: the interface of ``LLM`` for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Concatenate, ParamSpec

from paceline.core.params import SamplingParams, shown
from paceline.errors import ConfigError
from paceline.llm import LLM, Lora, Prompt
from paceline.request.completion import Completion, StreamEvent
from paceline.request.request import Request, any_events, completions_of
from paceline.request.validation import Conversations, Params, as_conversations

_P = ParamSpec("_P")


def _as_llm(
    _: Callable[Concatenate[LLM, _P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[AsyncLLM, _P], None]]:
    """Decorator: give ``AsyncLLM`` the parameters of ``LLM`` for type checkers and ``help``."""
    return wraps(LLM.__init__, ("__annotations__",))


class AsyncLLM:
    """``LLM`` with ``await``: the requests of all coroutines share the engine's steps.

    Takes the arguments of ``LLM`` and raises the same errors. Loading the model blocks. ``llm`` is
    the LLM underneath, which threads may call at the same time. Steps run on the engine's thread.
    Cancelling a coroutine, or closing a stream early, cancels its requests. ``async with`` closes
    the LLM at the end.
    """

    @_as_llm(LLM.__init__)
    def __init__(self, *args: object, **settings: object) -> None:
        self.llm = LLM(*args, **settings)  # type: ignore[arg-type]
        self._calls: dict[object, list[Request]] = {}  # by request_id

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """Make an AsyncLLM that uses an existing LLM."""
        async_llm = cls.__new__(cls)
        async_llm.llm, async_llm._calls = llm, {}
        return async_llm

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        lora: Lora = None,
        request_id: str | None = None,
    ) -> list[Completion]:
        """As ``LLM.generate``. ``request_id`` names the call for ``abort``; raises ConfigError if
        another call has that name."""
        async with self._running(prompts, params, request_id, False, lora) as requests:
            await self._until(lambda: all(request.completion for request in requests))
        return completions_of(requests)

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        lora: Lora = None,
        request_id: str | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """As ``LLM.stream``, for ``async for``. The first event raises errors of the arguments."""
        async with self._running(prompts, params, request_id, True, lora) as requests:
            while any(request.completion is None or request.events for request in requests):
                await self._until(partial(any_events, requests))
                for request in requests:
                    while request.events:
                        yield request.events.popleft()

    async def chat(
        self,
        messages: Conversations,
        params: SamplingParams | None = None,
        *,
        lora: Lora = None,
        request_id: str | None = None,
    ) -> list[Completion]:
        """As ``LLM.chat``."""
        prompts: list[Prompt] = [
            await asyncio.to_thread(self.llm.render_chat, item)
            for item in as_conversations(messages)
        ]
        return await self.generate(prompts, params, lora=lora, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """End a call by its ``request_id``: it returns what has been decoded, with
        ``finish_reason`` "abort". Unknown names are ignored."""
        self.llm.owner.abort(self._calls.pop(request_id, ()))

    async def close(self) -> None:
        """As ``LLM.close``; running calls raise PacelineError."""
        await asyncio.to_thread(self.llm.close)

    @asynccontextmanager
    async def _running(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        request_id: str | None,
        streams: bool,
        lora: Lora,
    ) -> AsyncIterator[list[Request]]:
        owner, requests = self.llm.owner, list[Request]()
        name = object() if request_id is None else request_id
        if self._calls.setdefault(name, requests) is not requests:
            raise ConfigError(f"request_id {shown(request_id)} is in use; give each call its own")
        try:
            # On a thread, because long prompts and grammars would block the event loop.
            prepared = await asyncio.to_thread(self.llm.prepare_all, prompts, params, streams, lora)
            owner.enqueue(prepared)
            requests += prepared
            if self._calls.get(name) is not requests:  # aborted in the meantime
                owner.abort(requests)
            yield requests
        finally:
            if self._calls.get(name) is requests:
                del self._calls[name]
            owner.release(requests)

    async def _until(self, done: Callable[[], bool]) -> None:
        """Have steps run until ``done()`` is true. Raises EngineLostError, PacelineError."""
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        with self.llm.owner.waiting(done, partial(loop.call_soon_threadsafe, ready.set)):
            await ready.wait()
