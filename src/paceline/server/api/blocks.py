"""Answers as lists of blocks (texts and calls), each started, extended and ended by events: what
OpenAI's responses and Anthropic's messages share. A whole answer is one fed in one piece."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BeforeValidator, ValidationError

from paceline.request.completion import Completion, StreamEvent
from paceline.server.api.chat import Dialogue
from paceline.server.api.choices import token_records
from paceline.server.api.protocol import ChatRequest, Generation
from paceline.server.api.tools import deltas_of
from paceline.server.errors import invalid
from paceline.server.failures import APIError
from paceline.server.requestlog import note
from paceline.server.sse import Answer, Chunk

MessageFields = dict[str, Any]  # those of a ChatMessage


@contextmanager
def reading(where: str) -> Iterator[None]:
    """A KeyError or ValueError in part ``where`` of a conversation becomes an APIError of it."""
    try:
        yield
    except (KeyError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise APIError(f"{where}: {reason}", param=where) from None


class BlocksAnswer(Answer):
    """One choice. ``self._blocks``: those begun so far; the last may still be open."""

    named: ClassVar[bool] = True

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue, self._service = dialogue, dialogue.service
        self._reader = dialogue.reader()
        self._blocks: list[dict[str, Any]] = []
        self._open = self._begun = False
        self._done: Completion | None = None
        self._reason: str | None = None  # of the end
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet

    def feed(self, event: StreamEvent) -> Iterator[Chunk]:
        deltas, self._reason = deltas_of(self._reader, event)
        self._done = event.completion
        if self._dialogue.body.logprobs:
            self._logprobs += token_records(self._service.tokenizer, event)
        for delta in deltas:
            if text := delta.get("content"):
                if not self._text_is_open:
                    yield from self._begin(self._new_text())
                yield from self._add_text(text, self._logprobs)
            self._logprobs = []
            for part in delta.get("tool_calls", ()):
                function = part["function"]
                if "id" in part:
                    yield from self._begin(self._new_call(part["id"], function["name"]))
                if function["arguments"]:
                    yield from self._add_arguments(function["arguments"])
        if self._done is not None:
            if self._logprobs and self._text_is_open:
                yield from self._add_text("", self._logprobs)
            yield from self._begin(None)

    @property
    def _text_is_open(self) -> bool:
        return self._open and self._is_text(self._blocks[-1])

    def _begin(self, block: dict[str, Any] | None) -> Iterator[Chunk]:
        """End the open block and start the next; None ends the answer."""
        if self._open:
            yield from self._ended(self._blocks[-1], cut=self._reason == "length")
        if not self._begun:
            yield from self._opening()
        self._begun, self._open = True, block is not None
        if block is not None:
            self._blocks.append(block)
            yield from self._started(block)

    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        for _ in self.feed(events[0]):
            pass
        return self._result()

    @property
    def receipt(self) -> dict[str, Any]:
        """The answer's ``receipt``, where the request asked for one and it has ended."""
        done = self._done
        return {} if done is None or done.receipt is None else {"receipt": done.receipt}

    # -- the words of an API -------------------------------------------------------------------

    def _is_text(self, block: dict[str, Any]) -> bool:
        return block["type"] in ("text", "message")

    @abstractmethod
    def _opening(self) -> Iterable[Chunk]:
        """The events before the first block."""

    @abstractmethod
    def _new_text(self) -> dict[str, Any]: ...

    @abstractmethod
    def _new_call(self, call: str, name: str) -> dict[str, Any]: ...

    @abstractmethod
    def _started(self, block: dict[str, Any]) -> Iterable[Chunk]: ...

    @abstractmethod
    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterable[Chunk]: ...

    @abstractmethod
    def _add_arguments(self, piece: str) -> Iterable[Chunk]: ...

    @abstractmethod
    def _ended(self, block: dict[str, Any], cut: bool) -> Iterable[Chunk]: ...

    @abstractmethod
    def _result(self) -> Chunk:
        """The whole answer."""


def without_hosted(*hosted: str) -> BeforeValidator:
    """Drops tools that an API's own servers would run (types beginning with ``hosted``) and notes
    them. If there are no others the request is refused: who asks for a search alone wants one."""

    def kept(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kinds = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
        theirs = [kind for kind in kinds if kind.startswith(hosted)]
        if theirs and len(theirs) == len(tools):
            raise ValueError(f"tools of type {theirs[0][:40]!r} are not run here; offer functions")
        for kind in dict.fromkeys(theirs):
            note(f"tools={kind[:40]}")
        return [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in theirs]

    return BeforeValidator(kept)


def function_tool(name: str, description: str | None, parameters: Any, **more: Any) -> Any:
    """A tool as in a chat request."""
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def named_tool(name: str) -> dict[str, Any]:
    """The ``tool_choice`` of one function."""
    return {"type": "function", "function": {"name": name}}


def as_chat(asked: Generation, fields: dict[str, Any], conversation: str) -> ChatRequest:
    """A request of another API as a chat: the common fields of ``asked``, and ``fields``.
    ``conversation`` is the field that became the messages. Raises APIError."""
    common = asked.model_dump(
        include=set(Generation.model_fields), exclude_unset=True, by_alias=True
    )
    named = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate({**common, **named})
    except ValidationError as error:
        raise invalid(error.errors(), renamed={"messages": conversation}) from None
