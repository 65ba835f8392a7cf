"""The text of a completion while it grows: no cut characters, no leaked stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.model.tokenizer import Tokenizer
from paceline.request.detokenise import Detokeniser


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
