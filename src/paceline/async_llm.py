"""``AsyncLLM``: the interface of ``LLM`` for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Concatenate, ParamSpec

from paceline.core.params import SamplingParams
from paceline.llm import LLM, Prompt
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

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """Make an AsyncLLM that uses an existing LLM."""
        async_llm = cls.__new__(cls)
        async_llm.llm = llm
        return async_llm

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None
    ) -> list[Completion]:
        """As ``LLM.generate``."""
        async with self._running(prompts, params, False) as requests:
            await self._until(lambda: all(request.completion for request in requests))
        return completions_of(requests)

    async def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None
    ) -> AsyncIterator[StreamEvent]:
        """As ``LLM.stream``, for ``async for``. The first event raises errors of the arguments."""
        async with self._running(prompts, params, True) as requests:
            while any(request.completion is None or request.events for request in requests):
                await self._until(partial(any_events, requests))
                for request in requests:
                    while request.events:
                        yield request.events.popleft()

    async def chat(
        self, messages: Conversations, params: SamplingParams | None = None
    ) -> list[Completion]:
        """As ``LLM.chat``."""
        prompts: list[Prompt] = [
            await asyncio.to_thread(self.llm.render_chat, item)
            for item in as_conversations(messages)
        ]
        return await self.generate(prompts, params)

    async def close(self) -> None:
        """As ``LLM.close``; running calls raise PacelineError."""
        await asyncio.to_thread(self.llm.close)

    @asynccontextmanager
    async def _running(
        self, prompts: Prompt | Sequence[Prompt], params: Params, streams: bool
    ) -> AsyncIterator[list[Request]]:
        owner = self.llm.owner
        # On a thread, because long prompts and grammars would block the event loop.
        requests = await asyncio.to_thread(self.llm.prepare_all, prompts, params, streams)
        try:
            owner.enqueue(requests)
            yield requests
        finally:
            owner.release(requests)

    async def _until(self, done: Callable[[], bool]) -> None:
        """Have steps run until ``done()`` is true. Raises EngineLostError, PacelineError."""
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        with self.llm.owner.waiting(done, partial(loop.call_soon_threadsafe, ready.set)):
            await ready.wait()
