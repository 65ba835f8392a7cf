"""Sampling parameters of a request, checked on construction."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from paceline.core.keywords import forgiving
from paceline.errors import ConfigError

MAX_SAMPLES = 16_384  # n: a typo must not fill the memory
# Within these bounds no adjusted score can overflow float32.
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
MAX_LOGIT_BIAS = 100.0
# Every new piece of text is searched for every stop string.
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters
EMPTY_PROMPT = "a prompt is empty; give at least one token of text"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # too large for a float
        return False


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """Format a value for an error message, with at most 80 characters."""
    try:
        text = ascii(value)
    except Exception:  # too many digits, or a failing __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _items(name: str, value: object, *rules: tuple[Callable[[Any], bool], str]) -> tuple[Any, ...]:
    """The items of a list parameter, checked by rules: (condition, end of the error message)."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ConfigError(f"{name} is {shown(value)}; give a list")
    for allowed, rule in rules:
        for item in value:
            if not allowed(item):
                raise ConfigError(f"{name} has {shown(item)}{rule}")
    return tuple(value)


@dataclass(frozen=True)
class Grammar:
    """A grammar that the output must match. ``kind``: "json" (``text`` is a JSON schema; ``{}`` is
    any JSON, ``{"type": "object"}`` any object), "regex" or "lark". Raises ConfigError for another
    kind. The text is checked when a request is made."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "lark")
        _require(self.kind in kinds, f"grammar kind is {shown(self.kind)}; use {', '.join(kinds)}")
        _require(isinstance(self.text, str), "the text of a grammar must be a string")

    @classmethod
    def json(cls, schema: Mapping[str, object] | None = None) -> Grammar:
        """The grammar of a JSON schema, or of any JSON object. Raises ConfigError if not JSON."""
        try:
            text = json.dumps({"type": "object"} if schema is None else schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the schema is not JSON: {shown(str(error))}") from None
        return cls("json", text)


def _rules() -> Iterator[tuple[str, Callable[[Any], bool], str]]:
    """Field, condition and message of each check, in order; types are checked here as well."""
    least, most = REPETITION_PENALTIES
    penalties = "presence_penalty", "frequency_penalty"
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", *penalties):
        yield name, is_finite, "it must be a finite number"
    for name in ("top_k", "max_tokens", "min_tokens", "n", "priority"):
        yield name, is_whole, "it must be a whole number"
        yield name, lambda v: abs(v) < 2**63, "it must be smaller than 2**63"
    texts = "skip_special_tokens", "skip_end_tokens", "include_stop_str_in_output"
    for name in ("ignore_eos", *texts, "receipt"):
        yield name, lambda v: isinstance(v, bool), "it must be True or False"
    warm = f"it must be from 0 (greedy) to {MAX_TEMPERATURE:g}"
    yield "temperature", lambda v: 0 <= v <= MAX_TEMPERATURE, warm
    yield "top_k", lambda v: v >= -1, "use 1 or more, or 0 for no limit"
    yield "top_p", lambda v: 0 < v <= 1, "it must be above 0 and at most 1"
    yield "min_p", lambda v: 0 <= v <= 1, "it must be from 0 to 1"
    repeated = f"it must be from {least:g} to {most:g} (1 is off)"
    yield "repetition_penalty", lambda v: least <= v <= most, repeated
    for name in penalties:
        yield name, lambda v: -2 <= v <= 2, "it must be from -2 to 2"
    yield "max_tokens", lambda v: v >= 1, "it must be at least 1"
    yield "n", lambda v: 1 <= v <= MAX_SAMPLES, f"it must be from 1 to {MAX_SAMPLES}"
    for name in ("logprobs", "prompt_logprobs"):
        yield name, _whole_below(21), "it must be a whole number from 0 to 20, or None"
    yield "seed", _whole_below(2**63), "it must be a whole number from 0 to 2**63 - 1"
    named = 'give the name of a loaded one, or "none"'
    yield "drafter", lambda v: v is None or isinstance(v, str), named
    yield "lora", lambda v: v is None or isinstance(v, str), "give the name of a loaded adapter"
    yield "draft_length", _whole_below(65), "it must be from 0 to 64, or left out"


def _whole_below(end: int) -> Callable[[Any], bool]:
    return lambda value: value is None or (is_whole(value) and 0 <= value < end)


_RULES = tuple(_rules())
_LISTS = ("stop", "stop_token_ids", "logits_processors", "prediction")


@forgiving("SamplingParams")
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings follow vLLM and the OpenAI API.

    ``temperature``: 0 (greedy) to 100. ``top_k`` 0 or -1 and ``top_p`` 1 switch truncation off.
    ``repetition_penalty``, 0.01 to 100, counts tokens of prompt and output, presence and frequency
    penalties, -2 to 2, tokens of the output. ``logit_bias``: a number from -100 to 100 to add, by
    token id. ``seed``: the sampled text then does not depend on drafter, batch or load (coupled
    rule). ``logprobs``, ``prompt_logprobs``: number of alternatives beside each token; a prompt
    with log-probabilities does not use the prefix cache. ``drafter``: the name of a loaded drafter,
    or "none"; by default the first. ``draft_length`` fixes the draft length. ``grammar``: the
    output must match it, and ends when it is complete. ``stop``: up to 16 stop strings of up to
    1,000 characters; ``include_stop_str_in_output`` keeps the string or token that ended the text.
    ``logits_processors``: functions f(output_ids, logits) or f(prompt_ids, output_ids, logits) that
    return logits, float32 [vocab]. They are applied before everything else, and also called for
    every drafted token, so they must not keep state. ``skip_special_tokens`` leaves special tokens
    out of the text. ``skip_end_tokens`` leaves end tokens out, also where special ones are kept or
    ``ignore_eos`` continues after one. ``prediction``: token ids of the expected
    output, used as drafts. ``lora``: the name of a loaded adapter. ``priority``: requests with
    lower numbers start first. ``receipt``: the completion gets a record from which ``paceline
    replay`` decodes it again; a request that samples without a seed gets a seed.

    Raises ConfigError, a ValueError, for a value out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    drafter: str | None = None
    draft_length: int | None = None
    grammar: Grammar | None = None
    logits_processors: tuple[Any, ...] = ()
    skip_special_tokens: bool = True
    skip_end_tokens: bool = False
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    priority: int = 0
    lora: str | None = None
    receipt: bool = False

    def __post_init__(self) -> None:
        for name in _LISTS:
            if getattr(self, name) is None:  # as in vLLM and the OpenAI API
                object.__setattr__(self, name, ())
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        for name, allowed, rule in _RULES:
            value = getattr(self, name)
            if not allowed(value):
                raise ConfigError(f"{name} is {shown(value)}; {rule}")
        function = callable, "; give functions of (output_ids, logits)"
        processors = _items("logits_processors", self.logits_processors, function)
        object.__setattr__(self, "logits_processors", processors)
        most = self.max_tokens
        _require(
            0 <= self.min_tokens <= most,
            f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens ({most})",
        )
        self._check_stops()
        self._check_biases()
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            "grammar must be a paceline.Grammar, as in Grammar.json(schema)",
        )
        _require(
            self.grammar is None or not self.min_tokens,
            "min_tokens and grammar contradict each other: the grammar says where a text ends",
        )
        _require(
            not self.receipt or not (self.lora or self.logits_processors),
            "receipt: it cannot record a LoRA adapter or logits_processors; leave one of them out",
        )

    def _check_stops(self) -> None:
        text = lambda stop: isinstance(stop, str), "; stop strings are texts"
        whole = is_unicode, ": half a surrogate pair is no character"
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        stops = _items("stop", stops, text, whole)
        longest = max(map(len, stops), default=0)
        _require(all(stops), "a stop string is empty; leave it out")
        _require(
            len(stops) <= MAX_STOPS, f"stop has {len(stops)} strings; give at most {MAX_STOPS}"
        )
        _require(
            longest <= MAX_STOP_LENGTH,
            f"a stop string has {longest} characters; {MAX_STOP_LENGTH} are the most",
        )
        object.__setattr__(self, "stop", stops)
        number = is_whole, "; they are whole numbers"
        ids = dict.fromkeys(_items("stop_token_ids", self.stop_token_ids, number))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "prediction", _items("prediction", self.prediction, number))

    def _check_biases(self) -> None:
        biases = self.logit_bias
        if not isinstance(biases, Mapping):
            raise ConfigError(f"logit_bias is {shown(biases)}; map token ids to numbers")
        for token, bias in biases.items():
            if not is_whole(token):
                raise ConfigError(f"logit_bias has {shown(token)}, which is no token id")
            if not is_finite(bias) or abs(bias) > MAX_LOGIT_BIAS:
                raise ConfigError(
                    f"logit_bias of token {shown(token)} is {shown(bias)}; it must be a number "
                    f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                )
        # A copy, because the caller may change the mapping while the request runs.
        object.__setattr__(self, "logit_bias", dict(biases))

    @property
    def may_draft(self) -> bool:
        """Whether the request allows drafts."""
        return self.drafter != "none" and self.draft_length != 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p removes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Whether penalties make a distribution depend on which tokens occurred before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token; ``top``: (id, logprob) of the likeliest tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
