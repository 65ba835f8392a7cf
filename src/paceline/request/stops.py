"""Stop strings in a text that grows."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
