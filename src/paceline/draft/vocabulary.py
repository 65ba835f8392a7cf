"""Drafts in another vocabulary than the target's: which tokens both have, and how ids translate.

Timor et al. 2025 (arXiv 2502.05202). Tokens are the same if they stand for the same bytes. If the
common tokens cover most text, the draft proposes only these ("token-level intersection"). Its
logits are mapped to the target's ids before anything is sampled, so q is exact: it is renormalised
over the intersection.

Otherwise the draft model writes in its vocabulary, and the target tokenises the text ("string-level
exact match"). It works for any two tokenizers that decode what they encode.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.core.transfer import to_device
from paceline.errors import VocabularyMismatchError
from paceline.model.tokenizer import Tokenizer, TokenSpeller, differences

# Share of a text's tokens that must be common for the intersection; measured, see
# docs/contributing/decisions.md.
ENOUGH_SHARED = 0.5

# Texts like those of users: a story, a question with an answer, numbers, code, other languages.
SAMPLE = Path(__file__).parents[1] / "assets" / "vocabulary_sample.txt"
# The space between two words: every tokenizer begins a new token there, whatever follows.
_BORDER = re.compile(r"(?<=\w) (?=\w)")
_LEAD = 32  # characters of context encoded with a text, so that its first token has the right space
_TAIL = 256  # longest text without a border that is encoded again whenever it grows


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
    """The bytes of each token of a tokenizer, and encoding in the middle of a text.
    ``strings[id]``: bytes of an ordinary token; ``special[id]``: name of a special token."""

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

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens around it."""
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes of some ids; a special token stands for its name."""
        return b"".join(
            self.strings[i] if i in self.strings else self.special.get(i, "").encode() for i in ids
        )

    def encode_after(self, lead: str, text: str) -> list[int] | None:
        """Ids of ``text`` where it follows ``lead``; None if a token spans the border."""
        ids = self.encode(lead + text)
        # Some tokenizers put a space before the first word.
        surplus = len(self.bytes_of(ids)) - len((lead + text).encode())
        border = len(lead.encode()) + max(0, surplus) if lead else 0
        position = 0
        for column, index in enumerate(ids):
            if position == border:
                return ids[column:]
            position += len(self.bytes_of((index,)))
        return [] if position == border else None

    def round_trips(self, text: str) -> bool:
        """Whether encoding and decoding a text returns it."""
        return self.bytes_of(self.encode(text)).removeprefix(b" ") == text.encode()

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


def shared_token_share(
    target: TokenTexts, draft: TokenTexts, pairs: Mapping[int, int], sample: str
) -> float:
    """Share of a text's tokens that both vocabularies have (the lower of the two shares)."""

    def share(ids: Sequence[int], common: set[int]) -> float:
        return sum(index in common for index in ids) / max(1, len(ids))

    theirs = share(draft.encode(sample), set(pairs.values()))
    return min(share(target.encode(sample), set(pairs)), theirs)


@dataclass(frozen=True)
class Match:
    """What two vocabularies have in common, and the method to use. ``pairs``: target id -> draft id
    of common tokens; ``share``: how much of a text these cover."""

    method: Literal["intersection", "string"]
    target: TokenTexts
    draft: TokenTexts
    pairs: dict[int, int]
    share: float


def match_vocabularies(
    target: Any,
    draft: Any,
    tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer,
    method: str = "auto",
) -> Match | None:
    """How to translate between two vocabularies; None if the ids agree and ``method`` is "auto".
    ``target``, ``draft``: models or their descriptions, with ``name`` and ``vocab_size``. Raises
    VocabularyMismatchError if no method, or not this one, is lossless and useful."""
    differing = differences(tokenizer, draft_tokenizer)
    if not differing and method == "auto":
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
    sample = SAMPLE.read_text(encoding="utf-8")
    share = shared_token_share(ours, theirs, pairs, sample)
    unreadable = [
        f"the tokenizer of {model.name} does not give text back as it was"
        for model, texts in ((target, ours), (draft, theirs))
        if not texts.round_trips(sample)
    ]
    tokenwise = method == "intersection" or (method == "auto" and share >= ENOUGH_SHARED)
    if (tokenwise and share == 0) or (not tokenwise and unreadable):
        reasons = [f"shared tokens cover {100 * share:.0f} % of text", *unreadable]
        raise VocabularyMismatchError(
            f"draft {draft.name} and target {target.name} differ in {differing or 'nothing'}; "
            f"{', and '.join(reasons)}; use a draft of the same family"
        )
    return Match("intersection" if tokenwise else "string", ours, theirs, pairs, share)


class Intersection(SharedVocabulary):
    """Token-level intersection: the draft proposes only tokens that both vocabularies have. Other
    committed tokens are spelt in the draft's one by one, so what its cache holds never changes."""

    def __init__(self, match: Match, widths: tuple[int, int], device: torch.device) -> None:
        """``widths``: of the logits of target and draft."""
        self.description = f"token-level intersection, {100 * match.share:.0f} % of text"
        width, self._draft_width = widths
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
