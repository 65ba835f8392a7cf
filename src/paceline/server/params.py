"""From a request's fields to ``SamplingParams``."""

from __future__ import annotations

import json

from paceline.core.params import Grammar, SamplingParams, shown
from paceline.errors import ConfigError
from paceline.server.errors import APIError
from paceline.server.protocol import Generation, ResponseFormat, Speculation

_MOST_DIGITS = 12  # of a token id


def sampling_params(
    request: Generation,
    max_tokens: int,
    logprobs: int | None,
    drafters: tuple[str, ...],
    grammar: Grammar | None = None,
    visible: bool = False,
) -> SamplingParams:
    """``drafters`` are the loaded ones; ``grammar`` that of a tool call, else the request's own.

    ``visible``: special tokens are part of the text, as calls are marked by them.

    Raises APIError.
    """
    stop = request.stop if request.stop is not None else ()
    speculation = request.speculation or Speculation()
    try:
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=_biases(request.logit_bias or {}),
            seed=request.seed,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            n=request.n,
            drafter=_drafter(speculation.method, drafters),
            draft_length=speculation.draft_length,
            skip_special_tokens=not visible,
            grammar=grammar or _grammar(request.response_format),
        )
    except ConfigError as error:
        raise APIError(str(error)) from None


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not token.isdecimal() or len(token) > _MOST_DIGITS:
            raise APIError(f"logit_bias: {shown(token)} is not a token id", param="logit_bias")
        if not -100 <= bias <= 100:
            raise APIError(
                f"logit_bias: {bias} for token {token} is not from -100 to 100", param="logit_bias"
            )
        biases[int(token)] = bias
    return biases


def _drafter(method: str, drafters: tuple[str, ...]) -> str | None:
    if method == "auto":
        return None
    if method == "off":
        return "none"
    if method not in drafters:
        offered = ", ".join(dict.fromkeys(("auto", "off", *drafters)))
        raise APIError(
            f"speculation.method {method!r} is not loaded; use one of {offered}",
            param="speculation.method",
        )
    return method


def _grammar(response_format: ResponseFormat | None) -> Grammar | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return Grammar.json()
    return Grammar("json", json.dumps(response_format.json_schema.schema_))
