"""Repetition, presence and frequency penalties, applied to occurring tokens only: a text has a
thousand different tokens, a vocabulary 50,000 to 200,000, so scores are gathered, changed and
scattered back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device, upload
from paceline.core.truncation import column


def penalised(
    scores: torch.Tensor,
    seqs: Sequence[SequenceView],
    depths: Sequence[int],
    paths: torch.Tensor | None,
) -> torch.Tensor:
    """float32 ``[R, V]``: repetition over prompt and output, presence and frequency over output.
    Drafted tokens before a row, ``paths[r, :depths[r]]``, count as output."""
    distinct = list({id(seq): seq for seq in seqs}.values())
    ids, counts = _tables(distinct, scores)
    index = {id(seq): i for i, seq in enumerate(distinct)}
    of_row = to_device([index[id(seq)] for seq in seqs], scores.device)
    ids, counts = ids[of_row], counts[of_row]
    if paths is not None and paths.shape[1]:
        ids, counts = _with_paths(ids, counts, paths, depths)
    params = [seq.params for seq in seqs]
    repetition = column(params, lambda p: p.repetition_penalty, scores.device)
    frequency = column(params, lambda p: p.frequency_penalty, scores.device)
    presence = column(params, lambda p: p.presence_penalty, scores.device)
    penalized = scores.gather(1, ids)
    discouraged = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
    penalized = torch.where(counts >= 0, discouraged, penalized)
    counts = counts.clamp(min=0)
    # Repeated ids have equal values.
    return scores.scatter(1, ids, penalized - frequency * counts - presence * (counts > 0))


def _tables(
    distinct: list[SequenceView], scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and counts float32, both [S, U]; count -1: the token did not occur."""
    of_seqs = [seq.occurrences.of(seq).within(scores.shape[1]) for seq in distinct]
    longest = max(1, *(len(ids) for ids, _ in of_seqs))
    ids = np.zeros((len(of_seqs), longest), dtype=np.int64)
    counts = np.full((len(of_seqs), longest), -1, dtype=np.float32)
    for row, (token_ids, times) in enumerate(of_seqs):
        if len(token_ids):  # padded with the first
            ids[row], counts[row] = token_ids[0], times[0]
            ids[row, : len(token_ids)], counts[row, : len(token_ids)] = token_ids, times
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
