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
        self._stops = bool(stops)
        self._scan = StopScan(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._done: list[str] = []  # taken
        self._fresh: list[str] = []  # certain, not yet taken
        self._early = 0  # characters of the guess in which stop strings came too early
        self.stopped = False

    @property
    def text(self) -> str:
        """What is certain so far; all of it after ``finish``."""
        return "".join(self._done) + "".join(self._fresh)

    def push(self, token: int) -> bool:
        """Take one token; true once a stop string is complete (``text`` then ends before it)."""
        if self.stopped:
            return True
        self._tokens += 1
        if self._hidden is not None and token in self._hidden:
            return False
        certain = self._detokeniser.feed(token)
        if certain:
            self._add(certain)
        elif self._stops:
            self._add_guess(self._detokeniser.guess())
        return self.stopped

    def read(self, tokens: Sequence[int]) -> int | None:
        """Take tokens up to the one that completes a stop string; how many, None if none does."""
        return next((n for n, token in enumerate(tokens, 1) if self.push(token)), None)

    def _counts(self) -> bool:
        """Whether a stop string may end the text yet."""
        return self._tokens >= self._min_tokens

    def _add(self, piece: str) -> None:
        """Certain text; it begins with what was guessed before, if that was right."""
        early = self._early if self._counts() else len(piece)
        self._early = 0
        stop = self._scan.feed(piece, early)
        self._fresh.append(piece)
        if stop is not None:
            self._stop(len(piece) - stop, self._scan)

    def _add_guess(self, guess: str) -> None:
        """A stop string in a run of bytes ends the sequence there, though bytes that are no
        characters could still change the text."""
        if not self._counts():
            self._early = len(guess)
            return
        scan = self._scan.fork()
        stop = scan.feed(guess, self._early)
        if stop is not None:
            self._fresh.append(guess)
            self._stop(len(guess) - stop, scan)

    def _stop(self, surplus: int, scan: StopScan) -> None:
        """A stop string begins ``surplus`` characters before the end of what is certain."""
        if self._include_stop:
            surplus -= scan.length
        fresh = "".join(self._fresh)
        self._fresh = [fresh[: len(fresh) - surplus]]
        self.stopped = True

    def take(self) -> str:
        """New text that no later token can change, or turn into a stop string."""
        fresh = "".join(self._fresh)
        safe = len(fresh) if self.stopped else len(fresh) - len(self._scan.partial)
        self._fresh = [fresh[safe:]]
        self._done.append(fresh[:safe])
        return fresh[:safe]

    def finish(self, whole: bool = False) -> str:
        """The rest, once no token will follow. Bytes of an unfinished character become U+FFFD, or
        nothing if only ``whole`` characters are wanted. It may set ``stopped``."""
        if not self.stopped:
            self._add(self._detokeniser.flush(whole))
        self._scan = StopScan(())
        return self.take()


class StopScan:
    """Finds where a stop string is first complete: the earliest end, of several there the longest.
    The result depends on the text alone, not on the pieces it came in."""

    def __init__(self, stops: Sequence[str], partial: str = "") -> None:
        self._stops = tuple(stops)
        self.partial = partial  # the text's end that may yet become a stop string
        self.length = 0  # of the string that was complete

    def fork(self) -> StopScan:
        """A scan of another text that has been the same so far."""
        return StopScan(self._stops, self.partial)

    def feed(self, piece: str, count_from: int = 0) -> int | None:
        """Where a stop string begins, counted from the beginning of ``piece``; None if none ends.
        Strings that end within the first ``count_from`` characters do not count. After a result the
        scan is over."""
        text, before = self.partial + piece, len(self.partial)
        ends: list[tuple[int, int]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, before + count_from + 1 - len(stop)))
            if start >= 0:
                ends.append((start + len(stop), -len(stop)))
        if ends:
            end, negative = min(ends)
            self.length = -negative
            return end - self.length - before
        partials = [_overlap(text, stop) for stop in self._stops]
        self.partial = max(partials, key=len, default="")
        return None


def _overlap(text: str, stop: str) -> str:
    """The longest end of ``text`` that ``stop`` begins with and goes on from."""
    start = max(0, len(text) + 1 - len(stop))
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return text[start:]
        start += 1
    return ""
