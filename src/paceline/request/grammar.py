"""Grammars for constrained decoding: JSON schemas, regular expressions, Lark, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from paceline.core.params import Grammar
from paceline.errors import GrammarError
from paceline.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# JSON on one line: with free white space a model may write blanks until its tokens run out.
_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

# Keywords of a JSON schema whose values are data, those with schemas by name, and those that
# combine the properties of several schemas.
_DATA = {"const", "default", "enum", "examples", "required"}
_NAMED = {"$defs", "definitions", "patternProperties", "properties"}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "properties"}


class GrammarCompiler:
    """Makes matchers for one tokenizer, on any thread; caches compiled grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        """``end_tokens`` are allowed only where a text is complete."""
        self._tokenizer, self._width = tokenizer, vocab_size
        self._ends = sorted(end_tokens)
        self._compiled = lru_cache(maxsize=64)(self._compile)
        self._compiling = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new matcher. Raises GrammarError if the grammar is malformed or not supported."""
        with self._compiling:
            return Matcher(self._compiled(grammar).deep_copy(), self._width)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            text = _compiled_text(grammar)
            trouble = LLMatcher.validate_grammar(text, self._tokens)
        except (ValueError, RecursionError) as error:
            trouble = str(error)
        if trouble:
            line = " ".join(trouble.split())
            raise GrammarError(f"grammar ({grammar.kind}): {line[:300]}; mend it or leave it out")
        return LLMatcher(self._tokens, text, log_level=0)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        # Logits may be wider than the tokenizer (padding) or, rarely, narrower.
        width = max(self._width, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=width, eos_token=self._ends or None)


def _compiled_text(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.text))
    schema: dict[str, Any] = json.loads(grammar.text)
    _close(schema)
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=cast(Any, _LAYOUT)))


def _close(schema: Any) -> None:
    """Objects that list ``properties`` get no others unless ``additionalProperties`` is given, as
    xgrammar (vLLM) and llama.cpp read schemas: a small model may add fields until its context is
    full. A schema that combines properties stays open, for each part would forbid the others'."""
    nodes = list(_schemas(schema))
    if any(map(_combines, nodes)):
        return
    for node in nodes:
        listed, required = node.get("properties"), node.get("required", [])
        asked = required if isinstance(required, list) else [None]
        if isinstance(listed, dict) and all(str(name) in listed for name in asked):
            node.setdefault("additionalProperties", False)


def _combines(node: dict[str, Any]) -> bool:
    """One schema alone in ``allOf`` is combined with nothing: Pydantic writes references so."""
    parts = node.get("allOf", [])
    return not isinstance(parts, list) or len(parts) > 1 or len(_COMBINING & node.keys()) > 1


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """The schema and all within it."""
    if isinstance(node, list):
        for item in node:
            yield from _schemas(item)
    elif isinstance(node, dict):
        yield node
        for key in node.keys() - _DATA:
            inner = node[key]
            named = key in _NAMED and isinstance(inner, dict)
            yield from _schemas(list(inner.values()) if named else inner)


class Matcher:
    """A sequence's state in its grammar: a ``core.sequence.Constraint``."""

    def __init__(self, matcher: LLMatcher, width: int) -> None:
        self._matcher, self._width = matcher, width
        # Since the last token, by path: drafters and the verifier ask for the same.
        self._known: dict[tuple[int, ...], torch.Tensor | None] = {}
        self._runs: dict[tuple[int, ...], Sequence[int] | None] = {}

    def consume(self, tokens: Sequence[int]) -> int | None:
        self._known.clear()
        self._runs.clear()
        for count, token in enumerate(tokens, 1):
            taken = self._matcher.consume_token(token)
            assert taken, f"token {token} was committed against its grammar"
            if self._matcher.is_stopped():
                return count
        return None

    def allowed_tokens(self, path: tuple[int, ...]) -> torch.Tensor | None:
        if path not in self._known:
            with self._after(path) as matcher:
                bits = None if matcher is None else matcher.compute_bitmask()
            self._known[path] = None if bits is None else _unpacked(bits, self._width)
        return self._known[path]

    def is_allowed(self, path: tuple[int, ...], token: int) -> bool:
        with self._after(path) as matcher:
            if matcher is None:
                return True
            forced = matcher.compute_ff_tokens()
            if forced:  # text that is forced may be written in one way only
                return token == forced[0]
            return 0 <= token < self._width and matcher.validate_tokens([token]) == 1

    def forced_tokens(self, path: tuple[int, ...] = ()) -> Sequence[int] | None:
        if path not in self._runs:
            with self._after(path) as matcher:
                tokens = None if matcher is None else matcher.compute_ff_tokens()
            # A tokenizer may have more tokens than the target has logits.
            run = tokens and list(takewhile(lambda token: token < self._width, tokens))
            self._runs[path] = run
        return self._runs[path]

    @contextmanager
    def _after(self, path: tuple[int, ...]) -> Iterator[LLMatcher | None]:
        """The matcher behind ``path``; None if that is forbidden or final."""
        matcher = self._matcher
        if matcher.is_stopped() or matcher.validate_tokens(list(path)) < len(path):
            yield None
            return
        if path:
            matcher.consume_tokens(list(path))
        try:
            yield None if matcher.is_stopped() else matcher
        finally:
            if path:  # also after an error
                matcher.rollback(len(path))


def _unpacked(bits: bytes, width: int) -> torch.Tensor:
    """bool [width] from one bit a token, lowest first."""
    # numpy takes 10 microseconds for 150,000 tokens, torch's shifts 800.
    packed = np.frombuffer(bits, dtype=np.uint8)
    single = np.unpackbits(packed, bitorder="little", count=width)
    return torch.from_numpy(single.view(np.bool_))
