"""Tokens to text, incrementally: no cut characters, no leaked stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may yet become a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class TextStream:
    """The text of one sequence. ``push`` tokens, ``take`` what may be shown."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: frozenset[int] | None = None,
    ) -> None:
        """``hidden`` are the special tokens without text; None is all of them."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = DecodeStream(skip_special_tokens=hidden is None)
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Take one token; true once a stop string is complete (``text`` then ends before it)."""
        if self._hidden is not None and token in self._hidden:
            return False
        self._tokens.append(token)
        piece = self._decoder.step(self._tokenizer.backend_tokenizer, token)
        if not piece:
            return False
        start = len(self.text)
        self.text += piece
        if len(self._tokens) < self._min_tokens:
            return False
        for stop in self._stops:
            # A match that ends in this piece may have begun before it.
            found = self.text.find(stop, max(self._shown, start - len(stop) + 1))
            if found >= 0:
                self.text = self.text[:found]
                self.stopped = True
        return self.stopped

    def take(self) -> str:
        """New text that no later token can turn into a stop string."""
        safe = len(self.text)
        if not self.stopped:
            safe -= held_back(self.text, self._stops)
        piece = self.text[self._shown : safe]
        self._shown = max(self._shown, safe)
        return piece

    def finish(self) -> str:
        """The rest, once no token will follow; bytes of an unfinished character become U+FFFD."""
        if not self.stopped:
            skip = self._hidden is None
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=skip)
            if whole.startswith(self.text):
                self.text = whole
        piece = self.text[self._shown :]
        self._shown = len(self.text)
        return piece
