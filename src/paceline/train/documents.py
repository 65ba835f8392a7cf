"""Documents as heads are trained on them: from their first token, in batches of like length.

In a window from the middle of a text the target has not read what stands before: its features are
none that decoding meets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from paceline.errors import DataError
from paceline.train.data import Stream

SHORTEST = 4  # tokens: with fewer there is nowhere to draft from


@dataclass(frozen=True)
class Windows:
    """Pieces of text side by side: ``ids`` int64 ``[B, W]``, shorter ones padded at the end, and
    ``learn`` bool ``[B, W]``, the tokens that a head shall learn to draft."""

    ids: torch.Tensor
    learn: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def drafts(self) -> int:
        """Positions that drafts start from: the token after the next one is to be learnt."""
        return int(self.learn[:, 2:].sum())


class Documents:
    """Pieces of documents of several files, each a document's next ``longest`` tokens.

    Files are drawn by weight, the pieces of a file in a new order every time through. Batch n
    depends only on the seed and n. Raises DataError if a file has no piece to learn from.
    """

    def __init__(
        self, streams: Sequence[Stream], weights: Sequence[float], seed: int, longest: int
    ) -> None:
        self.streams = list(streams)
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self.longest = longest
        self.pieces: list[tuple[np.ndarray, np.ndarray]] = []  # ids, and which are to be learnt
        self._of: list[range] = []  # numbers of the pieces of each file
        for stream in self.streams:
            first = len(self.pieces)
            self.pieces.extend(self._cut(stream))
            if len(self.pieces) == first:
                raise DataError(
                    f"{stream.name} has no document of {SHORTEST} tokens or more to learn from"
                )
            self._of.append(range(first, len(self.pieces)))
        self._drawn = self._draws(seed)
        self._batches: list[list[int]] = []

    def _cut(self, stream: Stream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for begin, end in pairwise([*stream.starts.tolist(), len(stream.ids)]):
            for start in range(begin, end, self.longest):
                part = slice(start, min(end, start + self.longest))
                ids, learn = stream.ids[part], stream.learn[part]
                if len(ids) >= SHORTEST and learn[2:].any():
                    yield ids, learn

    def _draws(self, seed: int) -> Iterator[int]:
        """Numbers of pieces without end."""
        rng = np.random.default_rng(seed)
        left: list[list[int]] = [[] for _ in self._of]
        while True:
            index = int(rng.choice(len(self._of), p=self.weights))
            if not left[index]:
                left[index] = rng.permutation(self._of[index]).tolist()
            yield left[index].pop()

    def tokens(self, number: int) -> int:
        return len(self.pieces[number][0])

    def batch(self, step: int, tokens: int) -> list[int]:
        """Numbers of the pieces of batch ``step``: as many as reach ``tokens``, one at least. All
        batches are asked for with the same ``tokens``."""
        while len(self._batches) <= step:
            numbers, size = [], 0
            while size < tokens:
                numbers.append(next(self._drawn))
                size += self.tokens(numbers[-1])
            self._batches.append(numbers)
        return self._batches[step]

    def windows(self, numbers: Sequence[int], tokens: int) -> list[Windows]:
        """The pieces side by side, those of like length together, in parts of at most ``tokens``
        with their padding (a single piece may be longer)."""
        parts: list[list[int]] = []
        for number in sorted(numbers, key=lambda n: (self.tokens(n), n)):
            if parts and self.tokens(number) * (len(parts[-1]) + 1) <= tokens:
                parts[-1].append(number)
            else:
                parts.append([number])
        return [self._side_by_side([[n] for n in part]) for part in parts]

    def joined(self, numbers: Sequence[int], length: int) -> list[Windows]:
        """The pieces one behind the other, in windows of at most ``length``: for the positions
        that no single one reaches."""
        runs: list[list[int]] = []
        size = 0
        for number in numbers:
            if not runs or size + self.tokens(number) > length:
                runs.append([])
                size = 0
            runs[-1].append(number)
            size += self.tokens(number)
        return [self._side_by_side([run]) for run in runs]

    def _side_by_side(self, runs: list[list[int]]) -> Windows:
        """A window of each run of pieces."""
        ids = [np.concatenate([self.pieces[n][0] for n in run]).astype(np.int64) for run in runs]
        learn = [np.concatenate([self.pieces[n][1] for n in run]) for run in runs]
        padded, to_learn = (
            pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
            for rows in (ids, learn)
        )
        return Windows(padded, to_learn, tuple(map(len, ids)))
