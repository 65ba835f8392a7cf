"""Drafts in another vocabulary than the target's: which tokens both have, and how ids translate.

Timor et al. 2025 (arXiv 2502.05202). Tokens are the same if they stand for the same bytes. The
draft proposes only these ("token-level intersection"). Its logits are mapped to the target's ids
before anything is sampled, so q is exact: it is renormalised over the intersection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from paceline.core.transfer import to_device
from paceline.errors import VocabularyMismatchError
from paceline.model.tokenizer import Tokenizer, TokenSpeller, differences


class SharedVocabulary:
    """Translates between the target's tokens and the draft model's. In this class both have the
    same ids, but their logits may be padded to different widths. ``description``: how two
    vocabularies are matched, for users."""

    description: str | None = None

    def __init__(self, target_vocab: int, draft_vocab: int) -> None:
        self._width = min(target_vocab, draft_vocab)
        self._last = draft_vocab - 1

    def context(self, tokens: Sequence[int]) -> list[int]:
        """Committed target tokens as draft tokens: at least one for each, whatever the context."""
        return [min(token, self._last) for token in tokens]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, draft vocab]`` of the target's ids; -inf where the draft has no token."""
        return logits[:, : self._width]

    def nodes(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drafted target ids, int64, as draft ids, one for each."""
        return tokens


class TokenTexts:
    """The bytes of each token of a tokenizer. ``strings[id]``: those of an ordinary token;
    ``special[id]``: name of a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        speller = TokenSpeller(tokenizer.backend_tokenizer.decoder)
        added = tokenizer.added_tokens_decoder
        self.strings: dict[int, bytes] = {}
        self.special: dict[int, str] = {}
        self._byte_ids: set[int] = set()  # byte-fallback tokens, for characters without a token
        for token, index in tokenizer.get_vocab().items():
            if index not in added:
                self.strings[index] = speller.spell(token)
                if speller.byte(token) is not None:
                    self._byte_ids.add(index)
            elif added[index].special:
                self.special[index] = token
            else:
                self.strings[index] = token.encode()

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """One id for each string: the lowest, a byte-fallback token only if there is no other."""
        order = sorted(self.strings, key=lambda index: (index not in self._byte_ids, -index))
        return {self.strings[index]: index for index in order if self.strings[index]}

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.ids), default=0)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes of some ids; a special token stands for its name."""
        return b"".join(
            self.strings[i] if i in self.strings else self.special.get(i, "").encode() for i in ids
        )

    def encode_longest(self, string: bytes) -> list[int]:
        """Ids for ``string``, greedily the longest token from the left; skips unknown bytes."""
        result: list[int] = []
        start = 0
        while start < len(string):
            ends = range(min(len(string), start + self.longest), start, -1)
            end = next((end for end in ends if string[start:end] in self.ids), None)
            if end is not None:
                result.append(self.ids[string[start:end]])
            start = end or start + 1
        return result


def shared_ids(target: TokenTexts, draft: TokenTexts) -> dict[int, int]:
    """Target id -> draft id of the common tokens: ordinary tokens match by their bytes, special
    tokens by name, beginning and end of text by role."""
    pairs = {target.ids[s]: index for s, index in draft.ids.items() if s in target.ids}
    names = {name: index for index, name in draft.special.items()}
    pairs.update({i: names[name] for i, name in target.special.items() if name in names})
    for role in ("bos_token_id", "eos_token_id"):
        ours, theirs = getattr(target.tokenizer, role), getattr(draft.tokenizer, role)
        if isinstance(ours, int) and isinstance(theirs, int) and theirs not in pairs.values():
            pairs.setdefault(ours, theirs)
    return pairs


@dataclass(frozen=True)
class Match:
    """What two vocabularies have in common. ``pairs``: target id -> draft id of common tokens."""

    target: TokenTexts
    draft: TokenTexts
    pairs: dict[int, int]


def match_vocabularies(
    target: Any, draft: Any, tokenizer: Tokenizer, draft_tokenizer: Tokenizer
) -> Match | None:
    """What two vocabularies have in common; None if the ids agree. ``target``, ``draft``: models or
    their descriptions, with ``name`` and ``vocab_size``. Raises VocabularyMismatchError if they
    share nothing."""
    differing = differences(tokenizer, draft_tokenizer)
    if not differing:
        if draft.vocab_size < (count := len(tokenizer.get_vocab())):
            raise VocabularyMismatchError(
                f"draft {draft.name} has only {draft.vocab_size} embeddings for {count} tokens; "
                "use a draft of the same family"
            )
        return None
    ours, theirs = TokenTexts(tokenizer), TokenTexts(draft_tokenizer)
    pairs = {
        a: b
        for a, b in shared_ids(ours, theirs).items()
        if a < target.vocab_size and b < draft.vocab_size
    }
    if not pairs:
        raise VocabularyMismatchError(
            f"draft {draft.name} and target {target.name} have no token in common; use a draft of "
            "the same family"
        )
    return Match(ours, theirs, pairs)


class Intersection(SharedVocabulary):
    """Token-level intersection: the draft proposes only tokens that both vocabularies have. Other
    committed tokens are spelt in the draft's one by one, so what its cache holds never changes."""

    def __init__(self, match: Match, widths: tuple[int, int], device: torch.device) -> None:
        """``widths``: of the logits of target and draft."""
        width, self._draft_width = widths
        count = len(match.target.tokenizer)
        self.description = f"token-level intersection, {len(match.pairs):,} of {count:,} tokens"
        self._pairs = {a: b for a, b in match.pairs.items() if a < width and b < self._draft_width}
        self._target, self._draft = match.target, match.draft
        source = [self._pairs.get(token, 0) for token in range(width)]
        outside = [token not in self._pairs for token in range(width)]
        self._source = to_device(source, device)
        self._outside = to_device(outside, device, torch.bool)
        self._spellings: dict[int, list[int]] = {}  # draft ids of committed tokens outside

    def context(self, tokens: Sequence[int]) -> list[int]:
        return [index for token in tokens for index in self._draft_ids(token)]

    def _draft_ids(self, token: int) -> list[int]:
        if token in self._pairs:
            return [self._pairs[token]]
        if token not in self._spellings:
            spelling = self._draft.encode_longest(self._target.bytes_of((token,)))
            known = [index for index in spelling if index < self._draft_width]
            self._spellings[token] = known or [0]
        return self._spellings[token]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_select(1, self._source).masked_fill_(self._outside, -torch.inf)

    def nodes(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._source[tokens]
