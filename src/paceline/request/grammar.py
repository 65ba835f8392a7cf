"""Constrained decoding by llguidance: JSON schemas, regular expressions and Lark grammars."""

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


# JSON is written on one line: with free white space a model may write blanks until max_tokens.
_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

# Keywords of a JSON schema: those whose values are data, those whose values are schemas by name,
# and those that combine the properties of several schemas.
_DATA = {"const", "default", "enum", "examples", "required"}
_NAMED = {"$defs", "definitions", "patternProperties", "properties"}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "properties"}


class GrammarCompiler:
    """Makes matchers for one tokenizer and caches compiled grammars. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        """``end_tokens`` are allowed only where the text is complete."""
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
            if grammar.kind == "json":
                schema: dict[str, Any] = json.loads(grammar.text)
                _forbid_unlisted_properties(schema)
                layout = cast(Any, _LAYOUT)
                text = str(LLMatcher.grammar_from_json_schema(schema, overrides=layout))
            elif grammar.kind == "regex":
                text = str(LLMatcher.grammar_from_regex(grammar.text))
            else:
                text = str(LLMatcher.grammar_from_lark(grammar.text))
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


def _forbid_unlisted_properties(schema: Any) -> None:
    """Set ``additionalProperties`` to False, unless it is given, in objects that list
    ``properties``, as xgrammar (vLLM) and llama.cpp read schemas: a small model may otherwise add
    fields until its context is full. Schemas that combine the properties of several parts are left
    as they are, because each part would forbid the properties of the others."""
    nodes = list(_schemas(schema))
    if any(map(_combines_properties, nodes)):
        return
    for node in nodes:
        listed, required = node.get("properties"), node.get("required", [])
        names = required if isinstance(required, list) else [None]
        if isinstance(listed, dict) and all(str(name) in listed for name in names):
            node.setdefault("additionalProperties", False)


def _combines_properties(node: dict[str, Any]) -> bool:
    """Whether a schema combines several. ``allOf`` of one is how Pydantic writes references."""
    parts = node.get("allOf", [])
    return not isinstance(parts, list) or len(parts) > 1 or len(_COMBINING & node.keys()) > 1


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas within it."""
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
    """The state of a sequence in its grammar; implements ``core.sequence.Constraint``."""

    def __init__(self, matcher: LLMatcher, width: int) -> None:
        self._matcher, self._width = matcher, width
        # Results by path since the last commit: drafters and the verifier ask for the same paths.
        self._masks: dict[tuple[int, ...], torch.Tensor | None] = {}
        self._forced_runs: dict[tuple[int, ...], Sequence[int] | None] = {}

    def consume(self, tokens: Sequence[int]) -> int | None:
        self._masks.clear()
        self._forced_runs.clear()
        for count, token in enumerate(tokens, 1):
            accepted = self._matcher.consume_token(token)
            assert accepted, f"token {token} was committed against its grammar"
            if self._matcher.is_stopped():
                return count
        return None

    def allowed_tokens(self, path: tuple[int, ...]) -> torch.Tensor | None:
        if path not in self._masks:
            with self._after(path) as matcher:
                bits = None if matcher is None else matcher.compute_bitmask()
            self._masks[path] = None if bits is None else _unpack_bits(bits, self._width)
        return self._masks[path]

    def is_allowed(self, path: tuple[int, ...], token: int) -> bool:
        with self._after(path) as matcher:
            if matcher is None:
                return True
            forced = matcher.compute_ff_tokens()
            if forced:  # forced text has one tokenisation only
                return token == forced[0]
            return 0 <= token < self._width and matcher.validate_tokens([token]) == 1

    def forced_tokens(self, path: tuple[int, ...] = ()) -> Sequence[int] | None:
        if path not in self._forced_runs:
            with self._after(path) as matcher:
                tokens = None if matcher is None else matcher.compute_ff_tokens()
            # A tokenizer may have more tokens than the target has logits.
            run = tokens and list(takewhile(lambda token: token < self._width, tokens))
            self._forced_runs[path] = run
        return self._forced_runs[path]

    @contextmanager
    def _after(self, path: tuple[int, ...]) -> Iterator[LLMatcher | None]:
        """The matcher advanced by ``path``; None if that is forbidden or the text complete."""
        matcher = self._matcher
        if matcher.is_stopped() or matcher.validate_tokens(list(path)) < len(path):
            yield None
            return
        if path:
            matcher.consume_tokens(list(path))
        try:
            yield None if matcher.is_stopped() else matcher
        finally:
            if path:  # after an error as well
                matcher.rollback(len(path))


def _unpack_bits(bits: bytes, width: int) -> torch.Tensor:
    """bool [width] from a bit mask with the lowest bit first."""
    # For 150,000 tokens numpy takes 10 microseconds, shifts in torch take 800.
    packed = np.frombuffer(bits, dtype=np.uint8)
    single = np.unpackbits(packed, bitorder="little", count=width)
    return torch.from_numpy(single.view(np.bool_))
