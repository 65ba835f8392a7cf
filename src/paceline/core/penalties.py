"""Repetition, presence and frequency penalties, at the tokens that occurred and nowhere else.

A text has a thousand different tokens, a vocabulary fifty or two hundred thousand: what did not
occur keeps its score, so only the others are gathered, changed and put back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.sequence import SequenceView, TokenView
from paceline.core.transfer import to_device, upload
from paceline.core.truncation import column


def _viewed(seq: SequenceView) -> TokenView:
    """Its tokens as they are now."""
    tokens = seq.tokens
    return tokens if isinstance(tokens, TokenView) else TokenView(list(tokens), len(tokens))


class Occurrences:
    """How often each token stands in one sequence's output, and which stand in it at all.

    Parallel lists: ``ids`` are distinct, ``counts`` are of the output, where 0 is a token of the
    prompt alone.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.counts: list[int] = []
        self._place: dict[int, int] = {}
        self._seen = TokenView([], 0)  # the tokens counted so far
        self._prompt = 0

    def continues(self, seq: SequenceView) -> bool:
        """Whether the sequence begins with what was counted: tokens may be taken back."""
        return self._prompt == seq.prompt_length and _viewed(seq).begins(self._seen)

    def update(self, seq: SequenceView) -> None:
        """Count what was committed since."""
        self._prompt = seq.prompt_length
        known = len(self._seen)
        new = seq.tokens[known:]
        for at, token in enumerate(new, known):
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += at >= seq.prompt_length
        self._seen = _viewed(seq)

    def within(self, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids below ``width`` and their counts."""
        ids = np.array(self.ids, dtype=np.int64)
        counts = np.array(self.counts, dtype=np.float32)
        fitting = ids < width
        return (ids, counts) if fitting.all() else (ids[fitting], counts[fitting])


_KEPT = 256  # sequences; the one longest not asked for is counted anew if it comes back


class _Kept(threading.local):
    """By sequence. Of each thread its own: engines of two threads may change theirs at once."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[int, Occurrences] = OrderedDict()


_kept = _Kept()


def forget(seq_id: int) -> None:
    """Drop what was counted of a sequence on this thread: it has ended."""
    _kept.by_id.pop(seq_id, None)


def _occurrences(seq: SequenceView) -> Occurrences:
    kept = _kept.by_id
    found = kept.get(seq.seq_id)
    if found is None or not found.continues(seq):
        found = kept[seq.seq_id] = Occurrences()
        if len(kept) > _KEPT:
            kept.popitem(last=False)
    kept.move_to_end(seq.seq_id)
    found.update(seq)
    return found


def penalised(
    scores: torch.Tensor,
    seqs: Sequence[SequenceView],
    depths: Sequence[int],
    paths: torch.Tensor | None,
) -> torch.Tensor:
    """float32 ``[R, V]``: repetition over prompt and output, presence and frequency over output.

    Drafted tokens before a row, ``paths[r, :depths[r]]``, count as output: they are, if the row is
    reached.
    """
    distinct = list({id(seq): seq for seq in seqs}.values())
    ids, counts = _tables(distinct, scores)
    place = {id(seq): i for i, seq in enumerate(distinct)}
    of_row = to_device([place[id(seq)] for seq in seqs], scores.device)
    ids, counts = ids[of_row], counts[of_row]
    if paths is not None and paths.shape[1]:
        ids, counts = _with_paths(ids, counts, paths, depths)
    params = [seq.params for seq in seqs]
    repetition = column(params, lambda p: p.repetition_penalty, scores.device)
    frequency = column(params, lambda p: p.frequency_penalty, scores.device)
    presence = column(params, lambda p: p.presence_penalty, scores.device)
    own = scores.gather(1, ids)
    discouraged = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where(counts >= 0, discouraged, own)
    counts = counts.clamp(min=0)
    # An id that stands here several times has the same value every time.
    return scores.scatter(1, ids, own - frequency * counts - presence * (counts > 0))


def _tables(
    distinct: list[SequenceView], scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and counts float32, both [S, U]; -1 counts a token that did not occur."""
    found = [_occurrences(seq).within(scores.shape[1]) for seq in distinct]
    longest = max(1, *(len(ids) for ids, _ in found))
    ids = np.zeros((len(found), longest), dtype=np.int64)
    counts = np.full((len(found), longest), -1, dtype=np.float32)
    for row, (own, times) in enumerate(found):
        if len(own):  # what lies beyond repeats the first
            ids[row], counts[row] = own[0], times[0]
            ids[row, : len(own)], counts[row, : len(own)] = own, times
    device = scores.device
    return upload(torch.from_numpy(ids), device), upload(torch.from_numpy(counts), device)


def _with_paths(
    ids: torch.Tensor, counts: torch.Tensor, paths: torch.Tensor, depths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables [R, U] with the tokens of each row's path: [R, U + D]."""
    limit = to_device(list(depths), paths.device).unsqueeze(1)
    on_path = torch.arange(paths.shape[1], device=paths.device) < limit
    # A void entry stands for the row's first id.
    tokens = torch.where(on_path, paths, ids[:, :1])
    same = ids.unsqueeze(1) == tokens.unsqueeze(2)  # [R, D, U]
    known = torch.where(same, counts.unsqueeze(1), -1.0).amax(-1)
    ids, counts = torch.cat((ids, tokens), 1), torch.cat((counts, known), 1)
    times = ((ids.unsqueeze(1) == paths.unsqueeze(2)) & on_path.unsqueeze(2)).sum(1)
    return ids, torch.where(times > 0, counts.clamp(min=0) + times, counts)
