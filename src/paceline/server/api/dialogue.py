"""A conversation that is being answered, whichever API has asked.

a dialect's body --> ChatRequest --> Dialogue.begin --> ticket --> events
                                     reader() turns the text of events into deltas --> the dialect
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.server.api.chat_format import render_request
from paceline.server.api.params import PREDICTED_LENGTH, sampling_params
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.tool_calls import forced_grammar
from paceline.server.api.tool_stream import AnswerStream, ForcedCall, PossibleCall, TextAnswer

if TYPE_CHECKING:
    from paceline.server.client import Ticket
    from paceline.server.service import Service


@dataclass(frozen=True)
class Dialogue:
    """``prompt`` is the conversation in token ids."""

    service: Service
    body: ChatRequest
    prompt: list[int]
    ticket: Ticket

    @classmethod
    async def begin(cls, service: Service, body: ChatRequest) -> Dialogue:
        """Submit it. Raises APIError and what ``Service.submit`` does."""
        service.check_model(body.model)
        prompt = await asyncio.to_thread(render_request, service.tokenizer, body)
        remaining = service.remaining(len(prompt), "messages")
        limit = body.max_completion_tokens or body.max_tokens or remaining
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar, visible = forced_grammar(body), bool(body.shown_tools)
        params = sampling_params(body, service.facts, limit, logprobs, grammar, visible)
        if body.prediction is not None and params.drafter != "none":
            expected = await service.encode(body.prediction.content, False, "prediction")
            length = PREDICTED_LENGTH if params.draft_length is None else params.draft_length
            params = replace(params, prediction=tuple(expected), draft_length=length)
        ticket = await service.submit([prompt], params, body.deadline, body.stream)
        return cls(service, body, prompt, ticket)

    def reader(self) -> AnswerStream:
        """What reads one choice's text, whole or in pieces."""
        tools, choice = self.body.shown_tools, self.body.choice
        if not tools:
            return TextAnswer()
        if choice in (None, "auto"):
            parallel = self.body.parallel_tool_calls is not False and not self.body.functions
            return PossibleCall(tools, parallel)
        return ForcedCall(self.body.callable_names)
