"""Incremental detokenisation: streams text without cut characters and without stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

from paceline.model.tokenizer import Tokenizer, TokenSpeller

REPLACEMENT = "\ufffd"
# How many tokens at the end of the prompt are decoded: more than a character has (at most four) and
# more than decoders strip from the beginning of a text.
_WINDOW = 16
_MAX_UNFINISHED = 3  # bytes, and so tokens, of an unfinished character
_MAX_GUESS = 1024  # tokens; each guess decodes the run of bytes again


class Spelling:
    """The strings and bytes that the tokens of one tokenizer stand for, cached for all texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._name = cache(self._backend.id_to_token)
        self._speller = TokenSpeller(self._backend.decoder)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Spelling:
        """The spelling of a tokenizer, made once."""
        spelling = _spellings.get(tokenizer)
        if spelling is None:
            spelling = _spellings[tokenizer] = cls(tokenizer)
        return spelling

    def name(self, token: int, skip_special: bool) -> str | None:
        """The token's string in the vocabulary; None if the token is not part of the text."""
        name: str | None = self._name(token)
        return None if skip_special and name in self._special else name

    def byte(self, token: int) -> int | None:
        """The byte of a byte-fallback token such as ``<0xE4>``; None for any other token."""
        return self._speller.byte(self.name(token, skip_special=False) or "")

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds in the middle of a text; empty if it has no name."""
        name = self.name(token, skip_special=False)
        return b"" if name is None else self._speller.spell(name)


_spellings: WeakKeyDictionary[Tokenizer, Spelling] = WeakKeyDictionary()


class Detokeniser:
    """Incremental detokeniser of the text after a prompt: returns text only once no later token can
    change it.

    All pieces and ``flush`` together equal the decoded prompt and output without the decoded
    prompt. ``DecodeStream`` holds text back while it ends inside a character, but is wrong with
    byte fallback (``<0xE4>``): a run of such bytes decodes as a whole, or each of its bytes becomes
    U+FFFD. So the stream gets a run of bytes only once the run has ended."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._spelling, self._skip = Spelling.of(tokenizer), skip_special
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._unread: list[int] = []  # a run of bytes that the stream has not got yet
        self._shown: list[int] = []  # the tokens of the last piece
        self._waiting: list[int] = []  # tokens after those, whose text may still change
        self._prompt_ending = ""
        for token in self._last_tokens(prompt):
            self.feed(token)
        # The end of the prompt's text that output tokens may still change.
        self._prompt_ending = self._text_of(self._waiting)

    def _last_tokens(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, beginning with one that is no byte-fallback token."""
        end: list[int] = []
        for token in reversed(prompt):
            if self._spelling.name(token, self._skip) is None:
                continue
            end.append(token)
            if len(end) >= _WINDOW and self._spelling.byte(token) is None:
                break
        return end[::-1]

    def feed(self, token: int) -> str:
        """Add a token; returns the text that has become certain by it."""
        if self._spelling.name(token, self._skip) is None:
            return ""
        self._waiting.append(token)
        self._unread.append(token)
        if self._spelling.byte(token) is not None:
            return ""
        piece = self._stream.step(self._backend, self._unread)
        self._unread = []
        if not piece:
            return ""
        text, self._prompt_ending = self._without_prompt_ending(piece), ""
        self._shown, self._waiting = self._waiting, []
        return text

    def guess(self) -> str:
        """The waiting tokens' text if no byte follows; "" if they end inside a character."""
        if not 0 < len(self._waiting) <= _MAX_GUESS:
            return ""
        text = self._text_of(self._waiting)
        return "" if text.endswith(REPLACEMENT) else text

    def flush(self, whole: bool = False) -> str:
        """The rest of the text; an unfinished character is U+FFFD, or left out if ``whole``."""
        text = self._text_of(self._waiting)
        if not whole or not text.endswith(REPLACEMENT):
            return text
        if self._spelling.byte(self._waiting[-1]) is None:
            return text[:-1]
        # Every byte of a cut run would be U+FFFD, so the last bytes are dropped until it decodes.
        shorter = (self._text_of(self._waiting[:-cut]) for cut in range(1, _MAX_UNFINISHED + 1))
        return next((text for text in shorter if not text.endswith(REPLACEMENT)), text)

    def _text_of(self, waiting: list[int]) -> str:
        shown, whole = (
            self._backend.decode(tokens, skip_special_tokens=self._skip)
            for tokens in (self._shown, self._shown + waiting)
        )
        return self._without_prompt_ending(whole[len(shown) :])

    def _without_prompt_ending(self, text: str) -> str:
        """``text`` without the end of the prompt's text that it begins with."""
        ending = self._prompt_ending
        same = (left == right for left, right in zip(text, ending, strict=False))
        return text[sum(1 for _ in takewhile(bool, same)) :] if ending else text


class TextStream:
    """The text of one sequence, up to its first stop string; what may be the beginning of one is
    held back. ``push`` (or ``consume``) its tokens, ``take`` the text that may be shown, and
    ``finish``. All text together is the decoded prompt and output without the decoded prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """``hidden``: tokens that have no text, nor have special ones if ``skip_special``.
        ``include_stop``: the text includes the stop string that ends it. ``prompt``: the tokens
        before; whether the first word begins with a space depends on them. Stop strings count from
        ``min_tokens`` tokens on."""
        self._hidden = hidden
        self._detokeniser = Detokeniser(tokenizer, prompt, skip_special)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._released: list[str] = []  # text that can be shown, in pieces
        self._num_taken = 0  # how many of the pieces ``take`` has returned
        self._held = ""  # certain text that may be the beginning of a stop string
        self._ignored = 0  # characters of it and of the guess that come before min_tokens
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """The text that is certain so far; all of it after ``finish``."""
        return "".join(self._released) + self._held

    def push(self, token: int) -> bool:
        """Add one token; returns True once a stop string is complete. ``text`` then ends there."""
        if self.stop is not None:
            return True
        self._num_tokens += 1
        if token in self._hidden:
            return False
        certain = self._detokeniser.feed(token)
        if certain or self._stops:
            # A stop string within a run of byte-fallback tokens ends the sequence there, although
            # later bytes could still turn the run into U+FFFD.
            self._add(certain, "" if certain else self._detokeniser.guess())
        return self.stop is not None

    def consume(self, tokens: Sequence[int]) -> int | None:
        """Add tokens until a stop string is complete; returns how many, None if none is."""
        return next((n for n, token in enumerate(tokens, 1) if self.push(token)), None)

    def _add(self, certain: str, guess: str = "") -> None:
        """Append ``certain`` text, and look for stop strings in it and in the ``guess`` after."""
        self._held += certain
        text = self._held + guess
        if self._num_tokens < self._min_tokens:
            self._ignored = len(text)
        elif (bounds := first_stop(text, self._stops, self._ignored)) is not None:
            start, end = bounds
            self.stop = text[start:end]
            self._held = text[: end if self._include_stop else start]
        self._release(0 if self.stop else longest_overlap(self._held, self._stops))

    def _release(self, held: int) -> None:
        """Release all held text but the last ``held`` characters."""
        released = len(self._held) - held
        self._released.append(self._held[:released])
        self._held = self._held[released:]
        self._ignored = max(0, self._ignored - released)

    def take(self) -> str:
        """New text that no later token can change or make part of a stop string."""
        fresh = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return fresh

    def finish(self, whole: bool = False) -> str:
        """The rest of the text, once no token will follow. Bytes of an unfinished character become
        U+FFFD, or are left out if ``whole``. May set ``stop``."""
        if self.stop is None:
            self._add(self._detokeniser.flush(whole))
        self._release(0)
        return self.take()


def first_stop(text: str, stops: Sequence[str], ignored: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first in ``text`` (the longest of those),
    or None. Stop strings that end within the first ``ignored`` characters do not count."""
    ends = []
    for stop in stops:
        start = text.find(stop, max(0, ignored + 1 - len(stop)))
        if start >= 0:
            ends.append((start + len(stop), start))
    if not ends:
        return None
    end, start = min(ends)
    return start, end


def longest_overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a stop string."""
    longest = 0
    for stop in stops:
        start = max(0, len(text) + 1 - len(stop))
        while (start := text.find(stop[0], start)) >= 0:
            if stop.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start += 1
    return longest
