"""Drafts in another vocabulary, by text: the drafted text is tokenised for the target.

"String-level exact match" of Timor et al. 2025 (arXiv 2502.05202). It works for any two tokenizers
that decode what they encode. The drafts are the draft model's likeliest tokens, for sampled
requests, too: without common ids there is no q, so ``Draw`` is POINT. Texts are on the host, which
takes one more synchronisation per draft.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from paceline.core.batch import Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import PerSequence
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree, children_of, paths_of
from paceline.draft.model_drafter import ModelDrafter
from paceline.draft.trees.levels import GrowthSettings
from paceline.draft.trees.shape import merge
from paceline.draft.vocabulary import Match, SharedVocabulary
from paceline.model.target import CausalModel

# The space between two words: every tokenizer begins a new token there, whatever follows.
_BORDER = re.compile(r"(?<=\w) (?=\w)")
_LEAD = 32  # characters of context encoded with a text, so that its first token has the right space
_TAIL = 256  # longest text without a border that is encoded again whenever it grows


class Retokeniser:
    """A sequence's committed text in the draft's tokens. ``settled`` tokens never change; the
    tokens of the last word change when it grows::

        Once upon a time there was a ho|use
        settled ..................|tail
    """

    def __init__(self, match: Match) -> None:
        self._target, self._draft, self._pairs = match.target, match.draft, match.pairs
        self._back = {theirs: ours for ours, theirs in match.pairs.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.settled: list[int] = []
        self._lead = self._tail = ""
        self._begun = False

    @property
    def waits(self) -> bool:
        """Whether the text so far ends inside a character."""
        return bool(self._decoder.getstate()[0])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the target's next tokens."""
        for token in tokens:
            if not self._begun:
                self._begin(token)
            if token in self._target.special:
                self._tail += self._decoder.decode(b"", final=True)
                self._settle(len(self._tail))
                self.settled += self._special(token)
                self._lead = ""
            else:
                self._tail += self._decoder.decode(self._target.strings.get(token, b""))
        borders = [match.start() for match in _BORDER.finditer(self._tail)]
        self._settle(borders[-1] if borders else max(0, len(self._tail) - _TAIL))

    def _begin(self, first: int) -> None:
        """Start with the draft's beginning-of-text token if it uses one."""
        self._begun = True
        opening: list[int] = self._draft.tokenizer.encode("")
        bos = self._draft.tokenizer.bos_token_id
        if opening[:1] == [bos] and self._pairs.get(first) != bos:
            self.settled.append(bos)

    def _special(self, token: int) -> list[int]:
        shared = self._pairs.get(token)
        if shared is not None:
            return [shared]
        if token == self._target.tokenizer.bos_token_id:
            return []  # a draft without a beginning-of-text token was trained without one
        return self._draft.encode(self._target.special[token])

    def _settle(self, end: int) -> None:
        text, self._tail = self._tail[:end], self._tail[end:]
        if text:
            self.settled += self._encode(text)
            self._lead = (self._lead + text)[-_LEAD:]

    def _encode(self, text: str) -> list[int]:
        ids = self._draft.encode_after(self._lead, text)
        return self._draft.encode(text) if ids is None else ids

    def context(self) -> list[int]:
        """The whole text in the draft's tokens."""
        return self.settled + (self._encode(self._tail) if self._tail else [])

    def proposal(self, drafted: Sequence[int]) -> list[int]:
        """The target's tokens for a drafted continuation, up to its last whole character or first
        special token; [] if one of them would span the border between text and draft."""
        data = bytearray()
        end: list[int] = []
        for token in drafted:
            if token in self._draft.special:
                end = [self._back[token]] if token in self._back else []
                break
            data += self._draft.strings.get(token, b"")
        whole = data.decode("utf-8", "replace").partition("\ufffd")[0]
        ids = self._target.encode_after(self._lead + self._tail, whole)
        if ids is None:
            return []
        return ids + end if len(whole.encode()) == len(data) else ids


class StringDrafter(ModelDrafter):
    """Translates trees by their text: each path is tokenised for the target, and common prefixes
    are merged. The draft's cache keeps the settled tokens; the last word and drafts run again."""

    prefers_seeds = False  # it never samples
    _follows_grammar = False
    _keeps_rows = False  # of tokens that may be written otherwise

    def __init__(
        self, match: Match, model: CausalModel, settings: GrowthSettings, deliver_to: torch.device
    ) -> None:
        ids = SharedVocabulary(model.vocab_size, model.vocab_size)  # trees have the draft's ids
        ids.description = f"string-level match, shared tokens {100 * match.share:.0f} % of text"
        super().__init__(model, settings, ids, deliver_to)
        self.cache.shares = False  # the end of a text may change; shared blocks must not
        self._match = match
        self._texts: PerSequence[Retokeniser] = PerSequence()

    def propose(self, plan: Plan) -> list[TokenTree]:
        for item in plan.slices:
            self._texts.get_or_make(item.seq, lambda _: Retokeniser(self._match))
        drafts = super().propose(Plan(tuple(map(_as_greedy, plan.slices))))
        parts = [draft.tokens for draft in drafts if len(draft)]
        values = iter(torch.cat(parts).tolist() if parts else ())
        pairs = zip(plan.slices, drafts, strict=True)
        return [self._translated(item, d, list(islice(values, len(d)))) for item, d in pairs]

    def _translated(self, item: Slice, draft: TokenTree, tokens: Sequence[int]) -> TokenTree:
        text, length = self._texts[item.seq.seq_id], item.draft_length
        self._calibrations.forget(item.seq.seq_id)  # the verdict is on other nodes
        if not tokens or text.waits:
            return self._empty
        pairs = zip(paths_of(draft.parents), children_of(draft.parents), strict=True)
        leaves = ([tokens[node] for node in path] for path, below in pairs if not below)
        proposals = (text.proposal(leaf)[:length] for leaf in leaves)
        merged, parents = merge(proposals, self.max_nodes(length))
        return TokenTree(to_device(merged, draft.tokens.device), parents)

    def _append(self, seq_id: int, tokens: Sequence[int]) -> None:
        if tokens:
            text, rows = self._texts[seq_id], self._rows[seq_id]
            rows.cached = min(rows.cached, len(text.settled))
            text.extend(tokens)
            rows.keys[:] = text.context()
            rows.translated += len(tokens)

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        super().forget(seq_id)


def _as_greedy(item: Slice) -> Slice:
    """The slice as one of a greedy request without penalties or grammar."""
    seq = replace(item.seq, params=SamplingParams(), constraint=None)
    return replace(item, seq=seq)
