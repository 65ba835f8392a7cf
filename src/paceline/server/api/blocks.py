"""What OpenAI's responses and Anthropic's messages share: answers that are lists of blocks (texts,
thoughts, tool calls), which events start, extend and end. A complete answer is fed as one event."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from pydantic import BeforeValidator, ValidationError

from paceline.request.completion import Completion, StreamEvent
from paceline.server.api.chat import SubmittedChat
from paceline.server.api.choices import token_records
from paceline.server.api.protocol import ChatRequest, Generation
from paceline.server.api.tools import THOUGHT, parse_event
from paceline.server.errors import validation_error
from paceline.server.failures import APIError
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


@dataclass
class AnswerBlock:
    """A part of an answer: a text, a thought or, with a ``call_id``, a tool call, whose ``text`` is
    JSON."""

    index: int
    is_thought: bool = False
    call_id: str = ""
    name: str = ""  # of the called function
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: str = "in_progress"  # then "completed", or "incomplete" if it was cut off


class BlocksAnswer(Answer):
    """An answer with one completion. ``_blocks`` were started; the last one may still be open."""

    named_events: ClassVar[bool] = True

    def __init__(self, chat: SubmittedChat) -> None:
        self._chat, self._service = chat, chat.service
        self._parser = chat.new_parser()
        self._blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._completion: Completion | None = None  # set by the last event
        self._reason: str | None = None  # the finish reason
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not known yet

    def feed(self, event: StreamEvent) -> Iterator[Chunk]:
        deltas, self._reason = parse_event(self._parser, event)
        self._completion = event.completion
        if self._chat.body.logprobs:
            params = self._chat.ticket.params
            self._logprobs += token_records(self._service.tokenizer, event, params)
        for delta in deltas:
            is_thought = THOUGHT in delta
            if text := delta.get(THOUGHT if is_thought else "content"):
                last = self._open
                if last is None or last.call_id or last.is_thought != is_thought:
                    yield from self._next_block(AnswerBlock(len(self._blocks), is_thought))
                    if not is_thought:
                        self._drop_thought(text)
                yield self._extend(text)
            if not is_thought:
                self._logprobs = []
            for part in delta.get("tool_calls", ()):
                function = part["function"]
                if "id" in part:
                    block = AnswerBlock(len(self._blocks), False, part["id"], function["name"])
                    yield from self._next_block(block)
                if function["arguments"]:
                    yield self._extend(function["arguments"])
        if self._completion is not None:
            last = self._open
            if self._logprobs and last is not None and not last.call_id and not last.is_thought:
                yield self._extend("")
            yield from self._next_block(None)

    def _drop_thought(self, text: str) -> None:
        """Drop the log-probabilities of the thought before a block that begins with ``text``."""
        if self._chat.marks is None:
            return
        mark = self._chat.marks.end.encode()
        spelled = b"".join(bytes(record["bytes"]) for record in self._logprobs)
        thought = spelled.find(mark)
        start = spelled.find(text.encode(), thought + len(mark))
        if min(thought, start) >= 0:
            ends = accumulate(len(record["bytes"]) for record in self._logprobs)
            pairs = zip(self._logprobs, ends, strict=True)
            self._logprobs = [record for record, end in pairs if end > start]

    def _extend(self, piece: str) -> Chunk:
        """Add to the open block a piece of its text, with the log-probabilities of its tokens."""
        block = self._blocks[-1]
        block.text += piece
        logprobs = [] if block.is_thought else self._logprobs
        block.logprobs = [*block.logprobs, *logprobs]
        return self._delta_event(block, piece, logprobs)

    def _next_block(self, block: AnswerBlock | None) -> Iterator[Chunk]:
        """End the open block and start the next one; None ends the answer."""
        if self._open is not None:
            cut = block is None and self._reason == "length"
            self._open.status = "incomplete" if cut else "completed"
            yield from self._end_events(self._open)
        if not self._blocks:
            yield from self._first_events()
        self._open = block
        if block is not None:
            self._blocks.append(block)
            yield from self._start_events(block)

    def complete(self, events: Sequence[StreamEvent]) -> Chunk:
        for _ in self.feed(events[0]):
            pass
        return self._result()

    @property
    def receipt(self) -> dict[str, Any]:
        """The field ``receipt`` of the answer, if the request asked for it and has ended."""
        receipt = self._completion and self._completion.receipt
        return {} if receipt is None else {"receipt": receipt}

    # -- the format of an API ------------------------------------------------------------------

    @abstractmethod
    def _first_events(self) -> Iterable[Chunk]:
        """The events before the first block."""

    @abstractmethod
    def _start_events(self, block: AnswerBlock) -> Iterable[Chunk]: ...

    @abstractmethod
    def _delta_event(
        self, block: AnswerBlock, piece: str, logprobs: list[dict[str, Any]]
    ) -> Chunk: ...

    @abstractmethod
    def _end_events(self, block: AnswerBlock) -> Iterable[Chunk]: ...

    @abstractmethod
    def _result(self) -> Chunk:
        """The complete answer."""


def drop_hosted_tools(*hosted: str) -> BeforeValidator:
    """A validator that drops the tools that the API's own servers would run, whose types begin with
    ``hosted``. A request that offers no other tools is refused: a client that asks only for a web
    search, say, cannot do without it."""

    def drop(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kinds = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
        dropped = [kind for kind in kinds if kind.startswith(hosted)]
        if dropped and len(dropped) == len(tools):
            raise ValueError(f"tools of type {dropped[0][:40]!r} are not run here; offer functions")
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
    common = request.model_dump(
        include=set(Generation.model_fields), exclude_unset=True, by_alias=True
    )
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate({**common, **given})
    except ValidationError as error:
        raise validation_error(error.errors(), renamed={"messages": conversation_field}) from None
