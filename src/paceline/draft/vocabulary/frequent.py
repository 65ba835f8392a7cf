"""How much of its head a draft needs: a draft that never says a rare token costs less.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) ranks a vocabulary by frequency. Byte-pair vocabularies
are ranked already: ids are given in the order of merges, so rare tokens come last (of what SmolLM2
says 1.3 % lies in the upper half of its ids). Other texts need other tokens, so each sequence
counts its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.sequence import SequenceView

_PARTS = 4  # of a vocabulary, as many as are told apart
_READ = 256  # tokens of a prompt's end that are counted
_LEAST = 8192  # columns: below, a head is little beside the layers
_REFUSAL = 3.0  # passes that a token costs which the draft cannot say


class FrequentTokens:
    """Which first columns of a head pay for the texts under way.

    ``share``: of what a pass reads, the head's part.
    """

    def __init__(self, vocab: int, share: float) -> None:
        self._vocab, self._share = vocab, share
        self._size = -(-vocab // _PARTS // 32) * 32
        self._counts: dict[int, list[int]] = {}

    def columns(self, seqs: Sequence[SequenceView]) -> int:
        """Columns for a draft of all these sequences, of ``vocab``."""
        if self._size < _LEAST / 2:
            return self._vocab
        counts = [0] * _PARTS
        for seq in seqs:
            counter = self._counts.get(seq.seq_id)
            if counter is None:
                counter = self._counts[seq.seq_id] = [0] * _PARTS
                self._add(counter, seq.tokens[-_READ:])
            counts = [a + b for a, b in zip(counts, counter, strict=True)]
        total = sum(counts)
        costs = {
            parts: self._share * parts / _PARTS + _REFUSAL * sum(counts[parts:]) / total
            for parts in range(1, _PARTS + 1)
        }
        return min(self._vocab, self._size * min(costs, key=lambda parts: costs[parts]))

    def learn(self, seq_id: int, tokens: Iterable[int]) -> None:
        """What a sequence went on with."""
        if seq_id in self._counts:
            self._add(self._counts[seq_id], tokens)

    def forget(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)

    def _add(self, counts: list[int], tokens: Iterable[int]) -> None:
        for token in tokens:
            counts[min(token // self._size, _PARTS - 1)] += 1
