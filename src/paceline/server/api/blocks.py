"""What OpenAI's responses and Anthropic's messages share: answers that are lists of blocks (texts
and tool calls), which events start, extend and end. A complete answer is fed as one event."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BeforeValidator, ValidationError

from paceline.request.completion import Completion, StreamEvent
from paceline.server.api.chat import SubmittedChat
from paceline.server.api.choices import token_records
from paceline.server.api.protocol import ChatRequest, Generation, Speculation
from paceline.server.api.tools import parse_event
from paceline.server.errors import validation_error
from paceline.server.failures import APIError
from paceline.server.requestlog import report_ignored
from paceline.server.sse import Answer, Chunk

MessageFields = dict[str, Any]  # fields of a ChatMessage


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Turn a KeyError or ValueError into an APIError about part ``where`` of a conversation."""
    try:
        yield
    except (KeyError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise APIError(f"{where}: {reason}", param=where) from None


class BlocksAnswer(Answer):
    """An answer with one completion. ``_blocks`` were started; the last one may still be open."""

    named_events: ClassVar[bool] = True

    def __init__(self, chat: SubmittedChat) -> None:
        self._chat, self._service = chat, chat.service
        self._parser = chat.new_parser()
        self._blocks: list[dict[str, Any]] = []
        self._open = self._started = False
        self._completion: Completion | None = None  # set by the last event
        self._reason: str | None = None  # the finish reason
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not known yet

    def feed(self, event: StreamEvent) -> Iterator[Chunk]:
        deltas, self._reason = parse_event(self._parser, event)
        self._completion = event.completion
        if self._chat.body.logprobs:
            self._logprobs += token_records(self._service.tokenizer, event)
        for delta in deltas:
            if text := delta.get("content"):
                if not self._text_is_open:
                    yield from self._next_block(self._new_text())
                yield from self._add_text(text, self._logprobs)
            self._logprobs = []
            for part in delta.get("tool_calls", ()):
                function = part["function"]
                if "id" in part:
                    yield from self._next_block(self._new_call(part["id"], function["name"]))
                if function["arguments"]:
                    yield from self._add_arguments(function["arguments"])
        if self._completion is not None:
            if self._logprobs and self._text_is_open:
                yield from self._add_text("", self._logprobs)
            yield from self._next_block(None)

    @property
    def _text_is_open(self) -> bool:
        return self._open and self._is_text(self._blocks[-1])

    def _next_block(self, block: dict[str, Any] | None) -> Iterator[Chunk]:
        """End the open block and start the next one; None ends the answer."""
        if self._open:
            yield from self._end_block(self._blocks[-1], truncated=self._reason == "length")
        if not self._started:
            yield from self._first_events()
        self._started, self._open = True, block is not None
        if block is not None:
            self._blocks.append(block)
            yield from self._start_block(block)

    def complete(self, events: Sequence[StreamEvent]) -> Chunk:
        for _ in self.feed(events[0]):
            pass
        return self._result()

    @property
    def receipt(self) -> dict[str, Any]:
        """The field ``receipt`` of the answer, if the request asked for it and has ended."""
        completion = self._completion
        if completion is None or completion.receipt is None:
            return {}
        return {"receipt": completion.receipt}

    # -- the format of an API ------------------------------------------------------------------

    def _is_text(self, block: dict[str, Any]) -> bool:
        return block["type"] in ("text", "message")

    @abstractmethod
    def _first_events(self) -> Iterable[Chunk]:
        """The events before the first block."""

    @abstractmethod
    def _new_text(self) -> dict[str, Any]: ...

    @abstractmethod
    def _new_call(self, call_id: str, name: str) -> dict[str, Any]: ...

    @abstractmethod
    def _start_block(self, block: dict[str, Any]) -> Iterable[Chunk]: ...

    @abstractmethod
    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterable[Chunk]: ...

    @abstractmethod
    def _add_arguments(self, piece: str) -> Iterable[Chunk]: ...

    @abstractmethod
    def _end_block(self, block: dict[str, Any], truncated: bool) -> Iterable[Chunk]: ...

    @abstractmethod
    def _result(self) -> Chunk:
        """The complete answer."""


def drop_hosted_tools(*hosted: str) -> BeforeValidator:
    """A validator that drops the tools that the API's own servers would run, whose types begin with
    ``hosted``, and reports them as ignored. A request that offers no other tools is refused: a
    client that asks only for a web search, say, cannot do without it."""

    def drop(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kinds = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
        dropped = [kind for kind in kinds if kind.startswith(hosted)]
        if dropped and len(dropped) == len(tools):
            raise ValueError(f"tools of type {dropped[0][:40]!r} are not run here; offer functions")
        for kind in dict.fromkeys(dropped):
            report_ignored(f"tools={kind[:40]}")
        return [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in dropped]

    return BeforeValidator(drop)


def function_tool(name: str, description: str | None, parameters: Any, **more: Any) -> Any:
    """A function as a tool of a chat request."""
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def named_tool(name: str) -> dict[str, Any]:
    """The ``tool_choice`` of a chat request that must call one function."""
    return {"type": "function", "function": {"name": name}}


def to_chat_request(
    request: Generation, fields: dict[str, Any], conversation_field: str
) -> ChatRequest:
    """Convert a request of another API: the fields that it shares with chat requests, and
    ``fields``. Errors about messages name ``conversation_field``. Raises APIError."""
    if request.n != 1:
        problem = "n must be 1 here; /v1/chat/completions supports several answers"
        raise APIError(problem, param="n", code="invalid_value")
    speculation = request.speculation or Speculation()
    additions = {
        "return_token_ids": request.return_token_ids,
        "speculation.stats": speculation.stats,
        "speculation.tokens": speculation.tokens,
    }
    for name in (name for name, wanted in additions.items() if wanted):
        report_ignored(name)
    common = request.model_dump(
        include=set(Generation.model_fields), exclude_unset=True, by_alias=True
    )
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate({**common, **given})
    except ValidationError as error:
        raise validation_error(error.errors(), renamed={"messages": conversation_field}) from None
