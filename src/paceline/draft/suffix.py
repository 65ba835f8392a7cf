"""Suffix decoding: draft what most often followed the text's last tokens in it or earlier outputs.

Oliaro, Jia, Campos and Qiao 2024 (SuffixDecoding, arXiv 2411.04975); Snowflake's Arctic Inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.adapter import Adapter, PerAdapter
from paceline.core.batch import Commit, ModelOutput, Slice
from paceline.core.sequence import SequenceView
from paceline.draft.spec import DraftSpec, LoadContext, PreparedDraft, option
from paceline.draft.text_index import IndexedDrafter, TextIndex, open_index
from paceline.kernels.lookup import Draft, Ids, Lookup

_SPARE = 2  # default nodes of a tree beyond one per level: alternatives are rarely worth more
_LENGTHS = (1, 2, 4, 8, 16, 32)  # n-grams in the index, from which longer matches are found
_CONTEXT = 16  # prompt tokens stored in front of an output, so that its first token can match


@dataclass(frozen=True, kw_only=True)
class Suffix(DraftSpec):
    """Options of suffix decoding. ``max_depth``: longest match, in tokens. A match of m tokens
    allows ``factor * m + offset`` nodes, at most ``nodes`` (None: draft length + 2), none less
    likely than ``min_prob``. ``max_tokens``: size of the global tree of outputs; ``shared`` False
    (in specs ``global=off``) or 0 switches it off."""

    kind = "suffix"
    default_draft_length = 8
    learns_across_requests = True
    is_lookup = True
    tune_tries = "always"
    examples = ("suffix",)

    max_depth: int = option(64, least=1)
    factor: float = option(1.0, least=0, below=1e6)
    offset: float = option(4.0, least=0, below=1e6)
    min_prob: float = option(0.1, above=0, most=1)
    nodes: int | None = option(None, least=1)
    max_tokens: int = option(500_000, least=0)  # about 45 MB
    shared: bool = option(True, key="global")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor + self.offset < 1:
            raise self.refuse("factor + offset is below 1; it would hardly ever draft")

    @property
    def capacity(self) -> int:
        """The most tokens that the global tree holds."""
        return self.max_tokens if self.shared else 0

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        drafter = SuffixDrafter(loading.target.device, self)
        return PreparedDraft(lambda context: drafter)


class SuffixDrafter(IndexedDrafter):
    """Looks up the last tokens of each text in the text itself and in a memory of earlier outputs,
    and proposes the draft with more expected accepted tokens.

    Every LoRA adapter has its own memory. The output of a finished request enters the memory with
    the last tokens of its prompt, the output of a cancelled request does not. Beyond ``max_tokens``
    the oldest outputs are dropped.
    """

    name = "suffix"

    def __init__(self, device: torch.device | str, spec: Suffix | None = None) -> None:
        super().__init__(device)
        self.options = spec or Suffix()
        # Of each sequence: the end of its prompt and its output, and the memory they will enter.
        self._texts: dict[int, tuple[list[int], TextIndex]] = {}
        self.clear()

    def memory(self, adapter: Adapter | None = None) -> TextIndex:
        """The earlier outputs of an adapter's requests."""
        return self._memories.get(adapter, self._open)

    def remember(self, text: Sequence[int], memory: TextIndex | None = None) -> None:
        """Add an output to a memory, by default that of requests without adapter; the oldest
        outputs are dropped until it fits."""
        memory = self.memory() if memory is None else memory
        if len(text) <= self.options.capacity:
            while len(memory) + len(text) > self.options.capacity:
                memory.drop_oldest()
            memory.extend(text)
            memory.finish()

    def clear(self) -> None:
        """Forget all earlier outputs."""
        self._memories: PerAdapter[TextIndex] = PerAdapter()

    def max_nodes(self, length: int) -> int:
        if self.options.nodes is None:
            return length + _SPARE if length else 0
        # Siblings' probabilities sum to one: a level has at most 1 / min_prob nodes.
        return min(self.options.nodes, length * int(1 / self.options.min_prob + 1e-9))

    def begin_step(self, slices: Sequence[Slice]) -> None:
        for item in slices:
            self.states.get_or_make(item.seq, self.new_state)
        super().begin_step(slices)

    def _open(self) -> TextIndex:
        rule = self.options
        lengths = tuple(length for length in _LENGTHS if length <= rule.max_depth)
        bounds = 0, 2**31 - 1, rule.factor, rule.offset, rule.min_prob
        return open_index(Lookup(lengths, rule.max_depth, *bounds))

    def new_state(self, seq: SequenceView) -> TextIndex:
        text = list(seq.tokens[max(0, seq.prompt_length - _CONTEXT) :])
        self._texts[seq.seq_id] = text, self.memory(seq.adapter)
        return self._open()

    def continuation(
        self, seq: SequenceView, index: TextIndex, new: Ids, tail: Ids, length: int
    ) -> Draft:
        """The better of the drafts from the text itself and from the memory."""
        memory, nodes = self.memory(seq.adapter), self.max_nodes(length)
        return index.suffixes(new, tail, length, nodes, memory)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Extend the outputs by the committed tokens; finished outputs enter the memory."""
        for commit in commits:
            if commit.seq_id in self._texts:
                text, memory = self._texts[commit.seq_id]
                text += commit.tokens
                if commit.finish_reason is not None:
                    self.remember(text, memory)

    def forget(self, seq_id: int) -> None:
        super().forget(seq_id)
        self._texts.pop(seq_id, None)
