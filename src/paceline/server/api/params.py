"""From a request's fields to ``SamplingParams``."""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.core.params import Grammar, SamplingParams, shown
from paceline.request.defaults import SamplingDefaults
from paceline.server.api.protocol import Generation, Speculation, StructuredOutputs
from paceline.server.failures import APIError
from paceline.server.wire import Facts

PREDICTED_LENGTH = 16  # tokens drafted a step for a request that predicts its answer
_MOST_DIGITS = 12  # of a token id


def sampling_params(
    request: Generation,
    facts: Facts,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    visible: bool = False,
) -> SamplingParams:
    """``facts`` names the loaded drafters and the sampling defaults; ``grammar`` is that of a
    forced tool call. ``visible``: special tokens are part of the text, as they mark calls. As in
    OpenAI and vLLM, seed -1 is no seed and top_p 0 is greedy. Raises APIError and ConfigError."""
    speculation = request.speculation or Speculation()
    return SamplingParams(
        **sampling_of(request, facts.sampling),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_biases(request.logit_bias or {}),
        seed=None if request.seed in (None, -1) else request.seed % 2**63,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=0 if logprobs is None and speculation.tokens else logprobs,
        prompt_logprobs=request.prompt_logprobs,
        priority=request.priority,
        include_stop=request.include_stop_str_in_output,
        n=request.n,
        drafter=_drafter(speculation.drafter, facts.drafters),
        draft_length=speculation.draft_length,
        skip_special_tokens=request.skip_special_tokens and not visible,
        skip_end_tokens=request.skip_special_tokens,
        grammar=grammar or _grammar(request),
        receipt=request.receipt,
    )


def sampling_of(request: Generation, defaults: SamplingDefaults) -> dict[str, Any]:
    """Temperature, truncation and repetition penalty of a request. Raises ConfigError."""
    asked = SamplingDefaults(
        request.temperature,
        request.top_p or (None if request.top_p is None else 1.0),
        1 if request.top_p == 0 else request.top_k,
        request.min_p,
        request.repetition_penalty,
    )
    return asked.over(defaults).filled()


def _biases(logit_bias: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in logit_bias.items():
        if not token.isdecimal() or len(token) > _MOST_DIGITS:
            raise APIError(f"logit_bias: {shown(token)} is not a token id", param="logit_bias")
        if not -100 <= bias <= 100:
            raise APIError(
                f"logit_bias: {bias} for token {token} is not from -100 to 100", param="logit_bias"
            )
        biases[int(token)] = bias
    return biases


def _drafter(name: str, drafters: tuple[str, ...]) -> str | None:
    if name == "auto":
        return None
    if name in ("off", "none"):
        return "none"
    if name not in drafters:
        offered = ", ".join(dict.fromkeys(("auto", "off", *drafters)))
        raise APIError(
            f"speculation.drafter {name!r} is not loaded; use one of {offered}",
            param="speculation.drafter",
        )
    return name


def _grammar(request: Generation) -> Grammar | None:
    """The grammar that one of several fields asks for. Raises APIError if two do."""
    asked, form = request.structured_outputs or StructuredOutputs(), request.response_format
    schema = None if form is None or form.json_schema is None else form.json_schema.schema_
    choices = [choice for choice in (asked.choice, request.guided_choice) if choice is not None]
    regexes = [asked.regex, request.guided_regex]
    regexes += ["|".join(map(re.escape, choice)) for choice in choices]
    objects = [asked.json_object, form is not None and form.type == "json_object"]
    grammars = [
        *(Grammar.json() for wanted in objects if wanted),
        *(_json(s) for s in (asked.json_, request.guided_json, schema) if s is not None),
        *(Grammar("regex", regex) for regex in regexes if regex is not None),
        *(Grammar("lark", g) for g in (asked.grammar, request.guided_grammar) if g is not None),
    ]
    if len(grammars) > 1:
        raise APIError(
            "the text is given several forms; give one of response_format and structured_outputs",
            param="structured_outputs",
        )
    return grammars[0] if grammars else None


def _json(schema: dict[str, Any] | str) -> Grammar:
    return Grammar("json", schema if isinstance(schema, str) else json.dumps(schema))
