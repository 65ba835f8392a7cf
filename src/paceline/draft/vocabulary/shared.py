"""Drafts with a vocabulary of their own: which tokens the two share, and how ids are translated.

Timor et al. 2025 (arXiv 2502.05202). Two tokens are the same if they stand for the same bytes.
Where that covers nearly all text, the draft proposes from the intersection alone (their algorithm
"token-level intersection"): its logits are brought into the target's ids before anything is drawn,
so q is exact and renormalised over the intersection, and everything after it works as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from paceline.core.transfer import to_device
from paceline.errors import ConfigError, VocabularyMismatchError
from paceline.model.tokenizer import Named, TokenSpeller, check_embeddings, differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

METHODS = ("auto", "intersection", "string")
ENOUGH = 0.5  # from here on token by token: measured, see docs/decisions.md

# What users ask of models: a story, a question with an answer, numbers, code, other languages.
SAMPLE = Path(__file__).parents[2] / "assets" / "vocabulary_sample.txt"


class SharedVocabulary:
    """How a draft model reads the target's tokens, and how its logits become the target's: here
    ids are the same; either side may have more rows of logits than tokens (padding).
    ``description`` tells people how two vocabularies were brought together."""

    description: str | None = None

    def __init__(self, target_vocab: int, draft_vocab: int) -> None:
        self._width = min(target_vocab, draft_vocab)
        self._last = draft_vocab - 1

    def context(self, tokens: Sequence[int]) -> list[int]:
        """Committed target tokens as draft tokens, at least one each, whatever comes before."""
        return [min(token, self._last) for token in tokens]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """``[R, draft vocabulary]`` to ``[R, ids of the target]``, -inf where it has no opinion."""
        return logits[:, : self._width]

    def nodes(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drafted target ids, int64, as the draft ids to feed; ``context`` of each, one to one."""
        return tokens


class TokenTexts:
    """The bytes behind every id of a tokenizer, and encoding in the middle of a text.
    ``strings[id]``: bytes of an ordinary token; ``special[id]``: the name of a special one."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        speller = TokenSpeller(tokenizer.backend_tokenizer.decoder)
        added = tokenizer.added_tokens_decoder
        self.strings: dict[int, bytes] = {}
        self.special: dict[int, str] = {}
        self._spare: set[int] = set()  # single bytes, kept for characters that have no token
        for token, index in tokenizer.get_vocab().items():
            if index not in added:
                self.strings[index] = speller.spell(token)
                if speller.byte(token) is not None:
                    self._spare.add(index)
            elif added[index].special:
                self.special[index] = token
            else:
                self.strings[index] = token.encode()

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """One id for each string: the lowest, but one that is spare only for want of another."""
        order = sorted(self.strings, key=lambda index: (index not in self._spare, -index))
        return {self.strings[index]: index for index in order if self.strings[index]}

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.ids), default=0)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without the special tokens around it."""
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spelt(self, ids: Sequence[int]) -> bytes:
        """What ids stand for, special tokens by their names."""
        return b"".join(
            self.strings[i] if i in self.strings else self.special.get(i, "").encode() for i in ids
        )

    def after(self, lead: str, text: str) -> list[int] | None:
        """Ids of ``text`` where it follows ``lead``; None if a token spans the border."""
        ids = self.encode(lead + text)
        # Some tokenizers put a space before the first word.
        surplus = len(self.spelt(ids)) - len((lead + text).encode())
        border = len(lead.encode()) + max(0, surplus) if lead else 0
        position = 0
        for column, index in enumerate(ids):
            if position == border:
                return ids[column:]
            position += len(self.spelt((index,)))
        return [] if position == border else None

    def reads_back(self, text: str) -> bool:
        """Whether an encoded text can be had back: nothing unknown, lower-cased or rewritten."""
        return self.spelt(self.encode(text)).removeprefix(b" ") == text.encode()

    def spell(self, string: bytes) -> list[int]:
        """``string`` in the longest tokens there are, from its beginning; skips unknown bytes."""
        result: list[int] = []
        start = 0
        while start < len(string):
            for end in range(min(len(string), start + self.longest), start, -1):
                index = self.ids.get(string[start:end])
                if index is not None:
                    result.append(index)
                    break
            else:
                end = start + 1
            start = end
        return result


def shared_ids(target: TokenTexts, draft: TokenTexts) -> dict[int, int]:
    """Target id -> draft id of every token that both have: ordinary tokens by their bytes, special
    ones by their names, begin and end of text by their role."""
    pairs = {target.ids[s]: index for s, index in draft.ids.items() if s in target.ids}
    names = {name: index for index, name in draft.special.items()}
    pairs.update({i: names[name] for i, name in target.special.items() if name in names})
    for role in ("bos_token_id", "eos_token_id"):
        ours, theirs = getattr(target.tokenizer, role), getattr(draft.tokenizer, role)
        if isinstance(ours, int) and isinstance(theirs, int) and theirs not in pairs.values():
            pairs.setdefault(ours, theirs)
    return pairs


def overlap(target: TokenTexts, draft: TokenTexts, pairs: Mapping[int, int], sample: str) -> float:
    """Share of the tokens of a text that both vocabularies have, as the target writes it or as the
    draft does, whichever is less."""

    def share(ids: Sequence[int], common: set[int]) -> float:
        return sum(index in common for index in ids) / max(1, len(ids))

    theirs = share(draft.encode(sample), set(pairs.values()))
    return min(share(target.encode(sample), set(pairs)), theirs)


@dataclass(frozen=True)
class Match:
    """What a draft's vocabulary has in common with the target's, and what is made of it. ``pairs``:
    target id -> draft id of the shared tokens; ``share``: how much of text they cover."""

    method: Literal["intersection", "string"]
    target: TokenTexts
    draft: TokenTexts
    pairs: dict[int, int]
    share: float


def match_vocabularies(
    target: Named,
    draft: Named,
    tokenizer: PreTrainedTokenizerFast,
    draft_tokenizer: PreTrainedTokenizerFast,
    method: str = "auto",
) -> Match | None:
    """None if the ids agree and nothing else is asked for; otherwise how to translate. Raises
    ConfigError on an unknown method, VocabularyMismatchError if no way, or not the one asked for,
    is lossless and sensible."""
    if method not in METHODS:
        raise ConfigError(f"vocab is {method!r}; use one of {', '.join(METHODS)}")
    differing = differences(tokenizer, draft_tokenizer)
    if not differing and method == "auto":
        check_embeddings(draft, len(tokenizer.get_vocab()))
        return None
    ours, theirs = TokenTexts(tokenizer), TokenTexts(draft_tokenizer)
    pairs = {
        a: b
        for a, b in shared_ids(ours, theirs).items()
        if a < target.vocab_size and b < draft.vocab_size
    }
    sample = SAMPLE.read_text(encoding="utf-8")
    share = overlap(ours, theirs, pairs, sample)
    unreadable = [
        f"the tokenizer of {model.name} does not give text back as it was"
        for model, texts in ((target, ours), (draft, theirs))
        if not texts.reads_back(sample)
    ]
    tokenwise = method == "intersection" or (method == "auto" and share >= ENOUGH)
    if (tokenwise and share == 0) or (not tokenwise and unreadable):
        reasons = [f"shared tokens cover {100 * share:.0f} % of text", *unreadable]
        raise VocabularyMismatchError(
            f"draft {draft.name} and target {target.name} differ in {differing or 'nothing'}; "
            f"{', and '.join(reasons)}; use a draft of the same family"
        )
    logging.getLogger("paceline.draft.vocabulary").info(
        "draft %s and target %s differ in %s; shared tokens cover %.0f %% of text",
        draft.name,
        target.name,
        differing,
        100 * share,
    )
    return Match("intersection" if tokenwise else "string", ours, theirs, pairs, share)


class Intersection(SharedVocabulary):
    """Token-level intersection: the draft speaks only of tokens that both vocabularies have.
    Committed tokens outside of it are spelt in the draft's tokens, each by itself: what the draft
    has read never changes."""

    def __init__(self, match: Match, widths: tuple[int, int], device: torch.device) -> None:
        """``widths``: rows of logits of target and draft."""
        self.description = f"token-level intersection, {100 * match.share:.0f} % of text"
        rows, self._draft_width = widths
        self._pairs = {a: b for a, b in match.pairs.items() if a < rows and b < self._draft_width}
        self._target, self._draft = match.target, match.draft
        source = [self._pairs.get(token, 0) for token in range(rows)]
        outside = [token not in self._pairs for token in range(rows)]
        self._source = to_device(source, device)
        self._outside = to_device(outside, device, torch.bool)
        self._spellings: dict[int, list[int]] = {}  # of tokens outside that were read

    def context(self, tokens: Sequence[int]) -> list[int]:
        return [index for token in tokens for index in self._spelt(token)]

    def _spelt(self, token: int) -> list[int]:
        if token in self._pairs:
            return [self._pairs[token]]
        if token not in self._spellings:
            spelling = self._draft.spell(self._target.spelt((token,)))
            known = [index for index in spelling if index < self._draft_width]
            self._spellings[token] = known or [0]
        return self._spellings[token]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_select(1, self._source).masked_fill_(self._outside, -torch.inf)

    def nodes(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._source[tokens]
