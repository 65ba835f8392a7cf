"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.server.answers import OpenAIAnswer
from paceline.server.choices import seen, token_record
from paceline.server.dialogue import Dialogue
from paceline.server.protocol import ChatRequest
from paceline.server.records import CompletionRecord, Event, LogprobRecord
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with
from paceline.server.tool_stream import AnswerStream, Delta, message_of


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def answer(body: ChatRequest, http: HTTPRequest) -> Response:
        dialogue = await Dialogue.begin(service, body)
        return await respond_with(ChatAnswer(dialogue), dialogue.ticket, http, body.stream)

    return routes


class ChatAnswer(OpenAIAnswer):
    """With messages as choices, or in a stream with what is added to them."""

    def __init__(self, dialogue: Dialogue) -> None:
        body = dialogue.body
        visible = bool(body.shown_tools) or not body.skip_special_tokens
        super().__init__(
            dialogue.service, body, dialogue.ticket, [dialogue.prompt], visible=visible
        )
        self._dialogue, self._body = dialogue, body
        self._streams: dict[int, AnswerStream] = {}

    def whole(self, completions: Sequence[CompletionRecord]) -> Chunk:
        choices = []
        for index, done in enumerate(completions):
            message, reason = message_of(self._dialogue.reader(), done.text, done.finish_reason)
            message, reason = self._as_asked(message, reason)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "refusal": None, **message},
                    "logprobs": self._logprobs(done.logprobs, done.finish_reason),
                    "finish_reason": reason,
                    **self._more_of(index, done),
                }
            )
        answer = {**self._frame("chatcmpl", "chat.completion"), "choices": choices}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._dialogue.prompt
        return {**answer, **self._totals(completions)}

    def _as_asked(self, said: Delta, reason: str) -> tuple[Delta, str]:
        """Who has offered functions hears of a function call, not of tools."""
        if not self._body.functions:
            return said, reason
        calls = said.get("tool_calls")
        if calls:
            said = {name: value for name, value in said.items() if name != "tool_calls"}
            said["function_call"] = calls[0]["function"]
        return said, "function_call" if reason == "tool_calls" else reason

    def _logprobs(
        self, entries: Sequence[LogprobRecord] | None, reason: str | None
    ) -> dict[str, Any] | None:
        if not self._body.logprobs or entries is None:
            return None
        shown = seen(self._tokenizer, entries, reason)
        return {"content": [token_record(self._tokenizer, e) for e in shown], "refusal": None}

    # -- streaming -----------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Chunk]:
        place, ended = self._place(event), None
        stream = self._streams.setdefault(place, self._dialogue.reader())
        deltas = stream.feed(event.text)
        done = event.completion
        if done is not None:
            rest, ended = stream.finish(done.finish_reason)
            deltas = [*deltas, *rest]
        reason = None if done is None else done.finish_reason
        logprobs, more = self._logprobs(event.logprobs, reason), self._more_of_event(place, event)
        shown = [self._as_asked(delta, "")[0] for delta in deltas]
        choices = [self._choice(place, delta) for delta in shown]
        if not choices and (more or (logprobs and logprobs["content"])):
            choices.append(self._choice(place, {}))
        if choices:
            choices[-1] |= {"logprobs": logprobs, **more}
        if ended is not None:
            choices.append(self._choice(place, {}, self._as_asked({}, ended)[1]))
        if choices and place not in self._begun:
            self._begun.add(place)
            choices.insert(0, self._choice(place, {"role": "assistant", "content": ""}))
        frame = self._frame("chatcmpl", "chat.completion.chunk")
        return [self._chunk(frame, choice) for choice in choices]

    def _choice(self, place: int, delta: Delta, reason: str | None = None) -> dict[str, Any]:
        return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}

    def closing(self) -> list[Chunk]:
        return self._tails(self._frame("chatcmpl", "chat.completion.chunk"))
