"""The text of a growing completion: token by token, no cut characters, no leaked stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

from paceline.model.tokenizer import Tokenizer, TokenSpeller

REPLACEMENT = "\ufffd"
# Only this end of a prompt is decoded: longer than a character (four tokens at most) and than what
# decoders strip from the beginning of a text.
_WINDOW = 16
_MOST_UNFINISHED = 3  # bytes, and so tokens, of a character that is not whole
_LONGEST_GUESS = 1024  # tokens; each guess decodes the run again


class Spelling:
    """What texts of one tokenizer share: the names of tokens, and what they stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._names: dict[int, str | None] = {}
        self._speller = TokenSpeller(self._backend.decoder)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Spelling:
        spelling = _spellings.get(tokenizer)
        if spelling is None:
            spelling = _spellings[tokenizer] = cls(tokenizer)
        return spelling

    def name(self, token: int, skip_special: bool) -> str | None:
        """How the vocabulary writes a token; None if it is not part of the text."""
        try:
            name = self._names[token]
        except KeyError:
            name = self._names[token] = self._backend.id_to_token(token)
        return None if skip_special and name in self._special else name

    def byte(self, token: int) -> int | None:
        """The byte that a token of byte fallback is; None for any other token."""
        return self._speller.byte(self.name(token, skip_special=False) or "")

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for in the middle of a text; none if it has no name."""
        name = self.name(token, skip_special=False)
        return b"" if name is None else self._speller.spell(name)


_spellings: WeakKeyDictionary[Tokenizer, Spelling] = WeakKeyDictionary()


class Detokeniser:
    """The text that follows a prompt, given token by token as it becomes certain.

    All pieces and ``flush`` together are a decode of prompt and tokens without a decode of the
    prompt. ``DecodeStream`` waits while a text ends inside a character, but is wrong with byte
    fallback (``<0xE4>``): a run of bytes is text as a whole, or every byte of it is U+FFFD. So the
    stream gets a run once it has ended."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._spelling, self._skip = Spelling.of(tokenizer), skip_special
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._unread: list[int] = []  # a run of bytes, not yet given to the stream
        self._shown: list[int] = []  # the tokens of the last piece
        self._waiting: list[int] = []  # tokens after it, whose text is not certain yet
        self._prompt_ending = ""
        for token in self._end_of(prompt):
            self.feed(token)
        # The end of the prompt's text, which later tokens may still change.
        self._prompt_ending = self._text_of(self._waiting)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, of which the first is not part of a run of bytes."""
        end: list[int] = []
        for token in reversed(prompt):
            if self._spelling.name(token, self._skip) is None:
                continue
            end.append(token)
            if len(end) >= _WINDOW and self._spelling.byte(token) is None:
                break
        return end[::-1]

    def feed(self, token: int) -> str:
        """What is certain now and was not before this token."""
        if self._spelling.name(token, self._skip) is None:
            return ""
        self._waiting.append(token)
        self._unread.append(token)
        if self._spelling.byte(token) is not None:
            return ""
        piece = self._stream.step(self._backend, self._unread)
        self._unread = []
        return self._show(piece) if piece else ""

    def guess(self) -> str:
        """The waiting tokens' text if no byte follows; "" if they end inside a character."""
        if not 0 < len(self._waiting) <= _LONGEST_GUESS:
            return ""
        text = self._text_of(self._waiting)
        return "" if text.endswith(REPLACEMENT) else text

    def flush(self, whole: bool = False) -> str:
        """The rest. Bytes of an unfinished character become U+FFFD, if ``whole`` nothing."""
        text = self._text_of(self._waiting)
        if not whole or not text.endswith(REPLACEMENT):
            return text
        if self._spelling.byte(self._waiting[-1]) is None:
            return text[:-1]
        # Of a run of bytes that is cut every byte is U+FFFD.
        shorter = (self._text_of(self._waiting[:-cut]) for cut in range(1, _MOST_UNFINISHED + 1))
        return next((cut for cut in shorter if not cut.endswith(REPLACEMENT)), text)

    def _text_of(self, waiting: list[int]) -> str:
        shown, whole = (
            self._backend.decode(tokens, skip_special_tokens=self._skip)
            for tokens in (self._shown, self._shown + waiting)
        )
        return self._behind_prompt(whole[len(shown) :])

    def _show(self, piece: str) -> str:
        text, self._prompt_ending = self._behind_prompt(piece), ""
        self._shown, self._waiting = self._waiting, []
        return text

    def _behind_prompt(self, text: str) -> str:
        """Without what the prompt's own text ended with."""
        ending = self._prompt_ending
        same = (left == right for left, right in zip(text, ending, strict=False))
        return text[sum(1 for _ in takewhile(bool, same)) :] if ending else text


class TextStream:
    """The text of one sequence. ``push`` tokens, ``take`` what may be shown, ``finish``. ``text``
    is all that was taken and what ``finish`` gives: what a decode of prompt and tokens has beyond a
    decode of the prompt, up to the first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
        include_stop: bool = False,
    ) -> None:
        """``hidden``: special tokens without text; None is all of them. ``include_stop``: the text
        ends behind the stop string. ``prompt``: whether the first word begins with a space depends
        on it."""
        self._hidden = hidden
        self._detokeniser = Detokeniser(tokenizer, prompt, skip_special=hidden is None)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._settled: list[str] = []  # no later token can change it, or turn it into a stop string
        self._taken = 0  # so many of these
        self._open = ""  # certain, but perhaps the beginning of a stop string
        self._early = 0  # characters of it, and of the guess, in which stop strings do not count
        self.stopped = False

    @property
    def text(self) -> str:
        """What is certain so far; all of it after ``finish``."""
        return "".join(self._settled) + self._open

    def push(self, token: int) -> bool:
        """Take one token; true once a stop string is complete (``text`` then ends before it)."""
        if self.stopped:
            return True
        self._tokens += 1
        if self._hidden is not None and token in self._hidden:
            return False
        certain = self._detokeniser.feed(token)
        if certain or self._stops:
            # A stop string in a run of bytes ends the sequence there, though bytes that are no
            # characters could still change the text.
            self._add(certain, "" if certain else self._detokeniser.guess())
        return self.stopped

    def consume(self, tokens: Sequence[int]) -> int | None:
        """Take tokens up to the one that completes a stop string; how many, None if none does."""
        return next((n for n, token in enumerate(tokens, 1) if self.push(token)), None)

    def _add(self, certain: str, guess: str = "") -> None:
        """The text goes on with what is ``certain``, and perhaps with the ``guess``."""
        self._open += certain
        text = self._open + guess
        if self._tokens < self._min_tokens:
            self._early = len(text)
        elif (stop := first_stop(text, self._stops, self._early)) is not None:
            self._open = text[: stop[1] if self._include_stop else stop[0]]
            self.stopped = True
        self._settle(0 if self.stopped else longest_overlap(self._open, self._stops))

    def _settle(self, left: int) -> None:
        """All that is certain but for the last ``left`` characters."""
        settled = len(self._open) - left
        self._settled.append(self._open[:settled])
        self._open = self._open[settled:]
        self._early = max(0, self._early - settled)

    def take(self) -> str:
        """New text that no later token can change, or turn into a stop string."""
        fresh = "".join(self._settled[self._taken :])
        self._taken = len(self._settled)
        return fresh

    def finish(self, whole: bool = False) -> str:
        """The rest, once no token will follow. Bytes of an unfinished character become U+FFFD, or
        nothing if only ``whole`` characters are wanted. It may set ``stopped``."""
        if not self.stopped:
            self._add(self._detokeniser.flush(whole))
        self._settle(0)
        return self.take()


def first_stop(text: str, stops: Sequence[str], early: int = 0) -> tuple[int, int] | None:
    """Beginning and end of the stop string that is first complete in ``text``, of several there the
    longest; None if none is. Those that end within the first ``early`` characters do not count."""
    ends = []
    for stop in stops:
        start = text.find(stop, max(0, early + 1 - len(stop)))
        if start >= 0:
            ends.append((start + len(stop), start))
    if not ends:
        return None
    end, start = min(ends)
    return start, end


def longest_overlap(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that a stop string begins with and goes on from."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    start = max(0, len(text) + 1 - len(stop))
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
