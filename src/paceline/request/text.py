"""The text of a completion while it grows: no cut characters, no leaked stop strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.request.detokenise import Detokeniser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextStream:
    """The text of one sequence. ``push`` tokens, ``take`` what may be shown, ``finish``.

    All that was taken and what ``finish`` gives are together ``text``, and that is what a decode
    of prompt and tokens has beyond a decode of the prompt, up to the first stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
        include_stop: bool = False,
    ) -> None:
        """``hidden`` are the special tokens without text; None is all of them. ``include_stop``:
        the text ends behind the stop string, not before it.

        ``prompt`` stands before the text: whether its first word begins with a space, for
        example, depends on there being something.
        """
        self._hidden = hidden
        self._detokeniser = Detokeniser(tokenizer, prompt, skip_special=hidden is None)
        self._stops = bool(stops)
        self._scan = StopScan(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._done: list[str] = []  # taken
        self._fresh: list[str] = []  # certain, not yet taken
        self._early = 0  # characters that wait in which a stop string came too early
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
        """A stop string in a run of bytes ends the sequence where it is, though the text would be
        another one if bytes followed that are no characters."""
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
        safe = len(fresh) if self.stopped else len(fresh) - self._scan.held
        self._fresh = [fresh[safe:]]
        self._done.append(fresh[:safe])
        return fresh[:safe]

    def finish(self, whole: bool = False) -> str:
        """The rest, once no token will follow; bytes of an unfinished character become U+FFFD or,
        if only ``whole`` characters are wanted, nothing.

        A stop string that is complete only now counts, too: see ``stopped``.
        """
        if not self.stopped:
            self._add(self._detokeniser.flush(whole))
        self._scan = StopScan(())
        return self.take()


class StopScan:
    """Finds where a stop string is first complete; Knuth, Morris, Pratt for each of them.

    Time is linear in the text, whatever the strings. A result depends on the text alone, not on
    the pieces it came in: the first character that completes a string decides, and of several that
    it completes the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        # Most characters begin nothing: those are skipped by the regular expression.
        beginnings = "".join(sorted({stop[0] for stop in self._stops}))
        self._beginning = re.compile(f"[{re.escape(beginnings)}]") if beginnings else None
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        self.length = 0  # of the string that was found
        self.held = 0  # characters at the text's end that may yet become a stop string

    def fork(self) -> StopScan:
        """A scan of another text that has been the same so far."""
        other = StopScan.__new__(StopScan)
        other.__dict__.update(self.__dict__)
        other._matched = list(self._matched)
        return other

    def feed(self, piece: str, count_from: int = 0) -> int | None:
        """Where a stop string begins, counted from the beginning of ``piece``; None if none ends.

        Strings that end within the first ``count_from`` characters do not count. After a result
        the scan is over.
        """
        if self._beginning is None:
            return None
        position = 0
        while position < len(piece):
            if not self.held:
                ahead = self._beginning.search(piece, position)
                if ahead is None:
                    return None
                position = ahead.start()
            longest = self._advance(piece[position])
            position += 1
            if longest and position > count_from:
                self.length = longest
                return position - longest
        return None

    def _advance(self, character: str) -> int:
        """The length of the longest string that this character completes."""
        longest = held = 0
        for index, stop in enumerate(self._stops):
            matched, borders = self._matched[index], self._borders[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                longest = max(longest, matched)
                matched = borders[-1]
            held = max(held, matched)
            self._matched[index] = matched
        self.held = held
        return longest


def _borders(text: str) -> list[int]:
    """Of every beginning, the length of the longest proper beginning that it ends with."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        length += text[end] == text[length]
        borders[end] = length
    return borders
