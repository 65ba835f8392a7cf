"""Our lookup drafters inside vLLM, as proposers of its ``method: "custom_class"``.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "paceline.integrations.vllm.HybridProposer", "num_speculative_tokens": 8}'

vLLM (0.32) makes one object of the class with its configuration and calls ``propose`` once a step
with the texts of all rows; it has no trees, so drafts are chains. It names no requests: rows are
told apart by their texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.core.batch import Commit, ModelOutput, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.ngram import NGram, NGramDrafter
from paceline.draft.suffix import Suffix, SuffixDrafter

_MEMORY = 0.9  # of what a member's drafts were worth, a step later
_NO_OUTPUT = ModelOutput(torch.empty(0, 0))
_BITS = 6  # matches of 32 tokens and more are one class


@dataclass
class _Row:
    """A text that is being written, how it began, and the draft that it was last given."""

    seq: SequenceState
    member: int = 0
    level: int = 0
    drafted: tuple[int, ...] = ()


class LookupProposer:
    """The members propose, and the one whose drafts of such matches were worth most is taken.

    ``config`` is vLLM's VllmConfig; of it the model's length and vocabulary and the number of
    speculative tokens are read.
    """

    kinds: tuple[type[NGram] | type[Suffix], ...] = (NGram, Suffix)

    def __init__(self, config: Any) -> None:
        self.length = int(config.speculative_config.num_speculative_tokens)
        self.limit = int(config.model_config.max_model_len)
        vocab = int(config.model_config.get_vocab_size())
        self._members: list[NGramDrafter | SuffixDrafter] = [
            NGramDrafter("cpu", NGram(length=self.length, candidates=1))
            if kind is NGram
            else SuffixDrafter("cpu", vocab, Suffix())
            for kind in self.kinds
        ]
        self._memories = [m for m in self._members if isinstance(m, SuffixDrafter)]
        # Accepted tokens of a member's drafts, by the bits of the match that they came from.
        self._worth = [[0.5 * bits for bits in range(_BITS + 1)] for _ in self._members]
        self._rows: dict[int, _Row] = {}  # by the position in vLLM's batch
        self._ids = itertools.count(1)

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM asks every proposer; there is nothing to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """At most ``length`` tokens for each row; none for one that is still reading its prompt.

        ``token_ids_cpu[row, :num_tokens_no_spec[row]]`` is the text with the tokens of this step.
        """
        before, self._rows = self._rows, {}
        drafts: list[list[int]] = []
        for position, sampled in enumerate(sampled_token_ids):
            count = int(num_tokens_no_spec[position])
            if not sampled or count >= self.limit:
                drafts.append([])
                continue
            text: list[int] = token_ids_cpu[position, :count].tolist()
            row = _continued(before, position, text) or self._begun(text[: -len(sampled)])
            self._advance(row, text)
            self._rows[position] = row
            drafts.append(self._draft(row, min(self.length, self.limit - count - 1)))
        for row in before.values():  # it has ended, or waits
            ended = Commit(row.seq.seq_id, (), finish_reason="stop")
            for memory in self._memories:
                memory.observe([ended], _NO_OUTPUT)
            for member in self._members:
                member.forget(row.seq.seq_id)
        return drafts

    def _begun(self, prompt: list[int]) -> _Row:
        params = SamplingParams(max_tokens=self.limit)
        row = _Row(SequenceState(next(self._ids), prompt, len(prompt), params))
        for memory in self._memories:
            memory.states.of(row.seq.view(), memory.begin)
        return row

    def _advance(self, row: _Row, text: list[int]) -> None:
        """What came since, as a commit; and how much of the last draft it holds."""
        new = text[len(row.seq.tokens) :]
        if row.drafted:
            right = (ours == theirs for ours, theirs in zip(row.drafted, new, strict=False))
            accepted = sum(itertools.takewhile(bool, right))
            means = self._worth[row.member]
            means[row.level] = _MEMORY * means[row.level] + (1 - _MEMORY) * accepted
        row.seq.tokens += new
        for memory in self._memories:
            memory.observe([Commit(row.seq.seq_id, tuple(new))], _NO_OUTPUT)

    def _draft(self, row: _Row, length: int) -> list[int]:
        row.drafted = ()
        if length < 1:
            return []
        best = 0.0
        item = Slice(row.seq.view(), row.seq.num_pending, length)
        for number, member in enumerate(self._members):
            member.take_in([item])
            tokens, parents, match = member.guess(item)  # of suffixes in bits already
            chain = chain_of(tokens, parents)[:length]
            level = min(_BITS, match if isinstance(member, SuffixDrafter) else match.bit_length())
            worth = min(self._worth[number][level], float(len(chain)))
            if chain and worth > best:
                best, row.member, row.level, row.drafted = worth, number, level, tuple(chain)
        return list(row.drafted)


def _continued(rows: dict[int, _Row], position: int, text: list[int]) -> _Row | None:
    """The row that this text goes on from, mostly the one in its position; taken out."""
    for other in (position, *rows):
        tokens = rows[other].seq.tokens if other in rows else text
        if len(tokens) < len(text) and text[: len(tokens)] == tokens:
            return rows.pop(other)
    return None


class NGramProposer(LookupProposer):
    """The latest occurrence of the longest match, as ``--draft ngram`` with one candidate."""

    kinds = (NGram,)


class SuffixProposer(LookupProposer):
    """Suffix decoding over the request and earlier answers, as ``--draft suffix``."""

    kinds = (Suffix,)


class HybridProposer(LookupProposer):
    """Both, as ``--draft hybrid:suffix+ngram``."""

    kinds = (Suffix, NGram)


def chain_of(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Of a drafted tree the path of first children: the likeliest, as they are made in order."""
    chain: list[int] = []
    node = -1
    while node in parents:
        node = parents.index(node)
        chain.append(tokens[node])
    return chain
