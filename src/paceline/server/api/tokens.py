"""``/tokenize``, ``/detokenize``, ``/tokenizer_info`` as vLLM has them; filling in the middle."""

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
    # No coroutines, so on worker threads, encoding included: a long text takes seconds.
    tokenizer = service.tokenizer

    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if body.messages is not None:
            opens = body.add_generation_prompt
            ids = render(tokenizer, body.messages, body.tools or (), opens=opens)
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


# Tokens before prefix, suffix and middle, by model family; DeepSeek marks the hole, and ends with
# the suffix.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def infill(tokenizer: Tokenizer, prefix: list[int], suffix: str) -> list[int]:
    """The prompt for the text between ``prefix`` and ``suffix``; a text's first token stays before
    all others. Raises APIError."""
    known = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in known for mark in marks):
            begin, hole, end = (known[mark] for mark in marks)
            after = tokenizer.encode(suffix, add_special_tokens=False)
            first = prefix[:1] if prefix[:1] == [tokenizer.bos_token_id] else []
            return [*first, begin, *prefix[len(first) :], hole, *after, end]
    raise APIError(
        "suffix: this model's tokenizer has no tokens for filling in the middle; leave it out",
        param="suffix",
        code="unsupported_field",
    )
