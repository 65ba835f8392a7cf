"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.request.completion import StreamEvent
from paceline.server.api.answers import OpenAIAnswer
from paceline.server.api.choices import token_records
from paceline.server.api.dialogue import Dialogue
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.tool_stream import AnswerStream, Delta, deltas_of, message_of
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with


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
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        prompts, names = [dialogue.prompt], ("chatcmpl", kind)
        super().__init__(dialogue.service, body, dialogue.ticket, prompts, visible, names)
        self._dialogue, self._body = dialogue, body
        self._streams: dict[int, AnswerStream] = {}

    def _choices(self, events: Sequence[StreamEvent]) -> Chunk:
        choices = []
        for event in events:
            index = self._index(event)
            deltas, ended = deltas_of(self._dialogue.reader(), event)
            message, reason = self._as_asked(message_of(deltas), ended or "")
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "refusal": None, **message},
                    "logprobs": self._logprobs(event),
                    "finish_reason": reason,
                    **self._of_tokens(index, event),
                }
            )
        answer = {"choices": choices, **self._prompt_scores(events[0].prompt_logprobs)}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._dialogue.prompt
        return answer

    def _as_asked(self, said: Delta, reason: str) -> tuple[Delta, str]:
        """Who has offered functions hears of a function call, not of tools."""
        if not self._body.functions:
            return said, reason
        calls = said.get("tool_calls")
        if calls:
            said = {name: value for name, value in said.items() if name != "tool_calls"}
            said["function_call"] = calls[0]["function"]
        return said, "function_call" if reason == "tool_calls" else reason

    def _logprobs(self, event: StreamEvent) -> dict[str, Any] | None:
        if not self._body.logprobs or event.logprobs is None:
            return None
        return {"content": token_records(self._tokenizer, event), "refusal": None}

    # -- streaming -----------------------------------------------------------------------------

    def feed(self, event: StreamEvent) -> list[Chunk]:
        index = self._index(event)
        stream = self._streams.setdefault(index, self._dialogue.reader())
        deltas, ended = deltas_of(stream, event)
        logprobs, more = self._logprobs(event), self._of_tokens(index, event)
        choices = [self._choice(index, self._as_asked(delta, "")[0]) for delta in deltas]
        if not choices and (more or (logprobs and logprobs["content"])):
            choices.append(self._choice(index, {}))
        if choices:
            choices[-1] |= {"logprobs": logprobs, **more}
        if ended is not None:
            choices.append(self._choice(index, {}, self._as_asked({}, ended)[1]))
        if choices and index not in self._begun:
            self._begun.add(index)
            choices.insert(0, self._choice(index, {"role": "assistant", "content": ""}))
        chunks = [self._chunk(choice) for choice in choices]
        if event.prompt_logprobs is not None and chunks and index == 0:
            chunks[0] |= self._prompt_scores(event.prompt_logprobs)
        return chunks

    def _choice(self, index: int, delta: Delta, reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
