"""What all request handlers share: the engine, the tokenizer, and the names of the models."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.core.libraries import quiet_libraries
from paceline.core.params import SamplingParams
from paceline.model.gguf import gguf_file
from paceline.model.names import resolve
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.server.api.protocol import Generation
from paceline.server.client import EngineClient, EngineEndpoint, Ticket
from paceline.server.config import ServeConfig
from paceline.server.failures import INVALID_GRAMMAR, APIError, check_text
from paceline.server.requestlog import current_exchange

log = logging.getLogger("paceline.server")


class Service:
    """An engine with its tokenizer and settings; ``created`` is in seconds since the epoch."""

    def __init__(self, engine: EngineEndpoint, tokenizer: Tokenizer, config: ServeConfig) -> None:
        self.client = EngineClient(engine, config)
        self.tokenizer, self.config, self.model = tokenizer, config, config.name
        self.facts = engine.facts
        self.max_model_len = self.facts.context_budget.limit  # tokens of prompt and completion
        self.adapters = dict(self.facts.adapters)  # the folders of loaded adapters, by name
        self.created = self.now()

    def check_model(self, name: str | None) -> str | None:
        """The name if it is an adapter's, None if it is the model's. Raises APIError 404."""
        if name in self.adapters:
            return name
        if name not in (None, self.model):
            names = " and ".join(map(repr, (self.model, *self.adapters)))
            raise APIError(
                f"the model {name!r} does not exist; this server serves {names}",
                404,
                param="model",
                code="model_not_found",
            )
        return None

    def remaining(self, prompt_tokens: int, param: str) -> int:
        """How many tokens may follow; if none, raises OpenAI's text, which clients look for."""
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
        """Tokenise a text on a worker thread, with ``special`` including the special tokens that
        the tokenizer adds. Raises APIError if the text is not valid Unicode."""
        check_text(text, param)
        encode = self.tokenizer.encode
        return list(await asyncio.to_thread(encode, text, add_special_tokens=special))

    def now(self) -> int:
        """Seconds since the epoch, rounded up so that it is never before the request's arrival."""
        return math.ceil(time.time())

    async def submit(
        self, body: Generation, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Ticket:
        """``EngineClient.submit`` for the model or adapter named; the ticket goes to the log."""
        params = replace(params, lora=self.check_model(body.model))
        try:
            ticket = await self.client.submit(prompts, params, body.deadline, body.stream)
        except APIError as error:
            if error.code != INVALID_GRAMMAR:
                raise
            field = body.grammar_field
            raise APIError(f"{field}: {error}", param=field, code=error.code) from None
        current_exchange().ticket = ticket
        if self.config.log_prompts:  # the engine has checked all ids, so they can be decoded
            for prompt in prompts:
                log.info("prompt %s", json.dumps(self.tokenizer.decode(prompt)))
        return ticket


def load_tokenizer_alone(config: ServeConfig) -> Tokenizer:
    """Load the tokenizer without torch, in a tenth of the memory. Raises ModelLoadError."""
    # transformers imports torch wherever it is installed, but its tokenizers need it only to read
    # a GGUF file.
    if "torch" not in sys.modules and gguf_file(resolve(config.model)) is None:
        sys.modules["torch"] = None  # type: ignore[assignment]
    quiet_libraries()
    return load_tokenizer(config.model)
