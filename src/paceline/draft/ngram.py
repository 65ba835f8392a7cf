"""Prompt lookup: draft what followed earlier occurrences of the text's last tokens.

Saxena 2023 (prompt lookup decoding); LLMA, Yang et al. 2023 (arXiv 2304.04487).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.core.sequence import SequenceView
from paceline.draft.spec import DraftSpec, LoadContext, PreparedDraft, option
from paceline.draft.text_index import MAX_BRANCH_NODES, IndexedDrafter, TextIndex, open_index
from paceline.kernels.lookup import Draft, Ids, Lookup


@dataclass(frozen=True, kw_only=True)
class NGram(DraftSpec):
    """Matches the last ``max`` down to ``min`` tokens in prompt and output. The first candidate is
    a chain: the ``length`` tokens after the latest occurrence of the longest match. The other
    ``candidates`` come from earlier occurrences and shorter matches; they branch off where they
    differ and add at most two nodes each. ``source``: where a continuation may begin."""

    kind = "ngram"
    default_draft_length = 8
    is_lookup = True
    tune_tries = "always"
    examples = ("ngram:max=3,length=6,candidates=1", "ngram:candidates=4")

    min: int = 1
    max: int = option(4, most=256)  # each length has an index of its own
    length: int = option(8, least=1)
    candidates: int = option(3, least=1)
    source: str = option("both", choices=("prompt", "output", "both"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min <= self.max:
            raise self.refuse(f"min is {self.min} and max is {self.max}; use 1 <= min <= max")

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        return PreparedDraft(lambda context: NGramDrafter(context.target.device, self))


class NGramDrafter(IndexedDrafter):
    """Drafts from an index of each sequence, with the options of ``spec``."""

    name = "ngram"

    def __init__(self, device: torch.device | str, spec: NGram | None = None) -> None:
        super().__init__(device)
        self._spec = spec or NGram()
        self._lengths = tuple(range(self._spec.min, self._spec.max + 1))

    def max_nodes(self, length: int) -> int:
        levels = min(length, self._spec.length)
        return levels + (self._spec.candidates - 1) * min(levels, MAX_BRANCH_NODES)

    def continuation(
        self, seq: SequenceView, index: TextIndex, new: Ids, tail: Ids, length: int
    ) -> Draft:
        levels = min(length, self._spec.length)
        return index.ngrams(new, tail, levels, self.max_nodes(levels))

    def new_state(self, seq: SequenceView) -> TextIndex:
        bounds = {}
        if self._spec.source != "both":
            bounds["first" if self._spec.source == "output" else "stop"] = seq.prompt_length
        return open_index(Lookup(self._lengths, self._spec.max, **bounds))
