"""vLLM's ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``; fill-in-the-middle prompts."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from paceline.model.tokenizer import Tokenizer
from paceline.server.api.chat import render
from paceline.server.api.protocol import DetokenizeRequest, TokenizeRequest
from paceline.server.failures import APIError, check_text
from paceline.server.service import Service

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_INFO_FIELDS = (*_SPECIAL, "chat_template", "model_max_length")


def add_routes(app: FastAPI, service: Service) -> None:
    # These handlers are not coroutines, so they run on worker threads: encoding a long text as
    # tokens or as JSON takes seconds.
    tokenizer = service.tokenizer

    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if body.messages is not None:
            generation = body.add_generation_prompt
            ids = render(tokenizer, body.messages, body.tools or (), None, generation)
        else:
            check_text(body.prompt or "", "prompt")
            ids = list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens))
        answer = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
        return _json(answer)

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        count = len(tokenizer)
        for token in body.tokens:
            if not 0 <= token < count:
                problem = f"token {token} is not in the vocabulary (0 to {count - 1})"
                raise APIError(problem, param="tokens")
        return _json({"prompt": str(tokenizer.decode(body.tokens))})

    @app.get("/tokenizer_info")
    def tokenizer_info() -> Response:
        special = {name: getattr(tokenizer, name, None) for name in _INFO_FIELDS}
        return _json({"tokenizer_class": type(tokenizer).__name__, **special})


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


# The special tokens before the prefix, before the suffix and at the end of the prompt, by model
# family. (DeepSeek's second token marks the hole between prefix and suffix.)
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def fill_in_middle_prompt(tokenizer: Tokenizer, prefix: list[int], suffix: str) -> list[int]:
    """The prompt for the text between ``prefix`` and ``suffix``. A beginning-of-text token of the
    prefix stays in front. Raises APIError if the tokenizer has no tokens for it."""
    vocabulary = tokenizer.get_vocab()
    for tokens in _FIM_TOKENS:
        if all(token in vocabulary for token in tokens):
            begin, hole, end = (vocabulary[token] for token in tokens)
            suffix_ids = tokenizer.encode(suffix, add_special_tokens=False)
            bos = prefix[:1] if prefix[:1] == [tokenizer.bos_token_id] else []
            return [*bos, begin, *prefix[len(bos) :], hole, *suffix_ids, end]
    raise APIError(
        "suffix: this model's tokenizer has no tokens for filling in the middle; leave suffix out",
        param="suffix",
        code="unsupported_field",
    )
