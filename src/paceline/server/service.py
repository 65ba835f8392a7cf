"""What all handlers share: the engine, the served model's name, and what may be asked of it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.server.failures import APIError, check_text
from paceline.server.requestlog import attach
from paceline.server.security import RequestLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.core.params import SamplingParams
    from paceline.server.client import EngineClient, Ticket

log = logging.getLogger("paceline.server")


class Service:
    """An engine under the name by which its model is served, and the tokenizer of that model.

    ``created`` is seconds since the epoch. ``asks`` is what one request may ask for.
    ``log_prompts`` writes the prompts to the log, which otherwise holds no content.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerFast,
        model: str,
        asks: RequestLimits | None = None,
        log_prompts: bool = False,
    ) -> None:
        self.client, self.tokenizer, self.model = client, tokenizer, model
        self._asks, self._log_prompts = asks or RequestLimits(), log_prompts
        self.facts = client.facts
        self.max_model_len = client.facts.context_budget.limit  # tokens of prompt and answer
        self.created = self.now()

    def check_model(self, name: str | None) -> None:
        """Raises APIError 404 for another model; who names none means this one."""
        if name not in (None, self.model):
            raise APIError(
                f"the model {name!r} does not exist; this server has {self.model!r}",
                404,
                param="model",
                code="model_not_found",
            )

    def remaining(self, prompt_tokens: int, param: str) -> int:
        """Tokens that may follow a prompt.

        Raises APIError if there is no room for any, in the sentence that clients know.
        """
        refused = self.facts.context_budget.refusal(prompt_tokens)
        if refused is None:
            return self.max_model_len - prompt_tokens
        raise APIError(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your "
            f"{param} resulted in {prompt_tokens} tokens. Please reduce the length of the {param}. "
            f"({refused[:1].upper()}{refused[1:]}.)",
            param=param,
            code="context_length_exceeded",
        )

    async def encode(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text, found beside the event loop; ``special``: with those that a
        tokenizer adds to a text. Raises APIError."""
        check_text(text, param)
        encode = self.tokenizer.encode
        return list(await asyncio.to_thread(encode, text, add_special_tokens=special))

    def now(self) -> int:
        """Seconds since the epoch, for ``created``: never before the request came."""
        return math.ceil(time.time())

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        deadline: float | None,
        streams: bool,
    ) -> Ticket:
        self._asks.check(len(prompts), params)
        ticket = await self.client.submit(prompts, params, deadline, streams)
        attach(ticket)
        if self._log_prompts:  # they have been checked: every id is one of the vocabulary
            for prompt in prompts:
                log.info("prompt %s", json.dumps(self.tokenizer.decode(prompt)))
        return ticket
