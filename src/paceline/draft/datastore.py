"""Retrieval: draft what most often followed the text's last tokens in the texts of a datastore.

He et al. 2023 (REST, arXiv 2311.08252). As in SAM decoding (Hu et al. 2024, 2411.10666) only long
matches count; as in CREST (Ho et al. 2024, 2408.04678) only frequent n-grams are stored.

A datastore is a safetensors file, which is mapped into memory. It is a suffix
array over reversed texts::

    about   uint8: JSON with format, version, vocab_size and tokenizer (a digest)
    tokens  uint8 [n * width]: all texts in reverse order, as big-endian ids of ``width`` 2 or 4
            bytes; the largest number stands before, between and after texts
    order   int32 [m]: positions of contexts, sorted by the bytes of their ``DEPTH`` tokens

A context begins at its position with its last token; its continuation is in front of the position,
backwards. Contexts with the same end are neighbours: one binary search finds the longest match.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.batch import Slice
from paceline.draft.base import (
    ANY_FORCED,
    LookupDrafter,
    Proposal,
    forced_tokens,
    with_forced_prefix,
)
from paceline.draft.spec import DraftInfo, DraftSpec, LoadContext, PreparedDraft, Target, option
from paceline.errors import DataError, ModelLoadError, VocabularyMismatchError
from paceline.files import user_path, write_files
from paceline.model.tensorfile import as_bytes, load_tensors
from paceline.model.tokenizer import Tokenizer

MATCH = 5  # tokens of the shortest match
DEPTH = 16  # tokens of the longest match
_FORMAT, _VERSION = "paceline-datastore", 1
_ENTRIES = ("about", "tokens", "order")
_COMPARED = 32  # occurrences of a match that count, on either side of the text's rank
# Confidence by the least share of a match's occurrences (plus one) that continue with the first
# draft token. It is the length of a match within the text itself that is right as often
# (control/acceptance.py). Measured on 118 answers of SmolLM2 with a datastore of 2,240 others.
_CONFIDENCES = ((0.93, 5), (0.6, 3), (0.45, 2), (0.0, 1))
_AGAIN = "build it with `paceline datastore build`"


@dataclass(frozen=True)
class Datastore(DraftSpec):
    """Continuations from the datastore ``file``. ``min``: tokens of the shortest match.
    ``min_prob``: least estimated probability of a drafted token, given the text."""

    kind = "datastore"
    default_draft_length = 8
    is_lookup = True
    weights = "datastore"
    examples = ("datastore:{datastore}",)

    file: str = option(needs="a file of `paceline datastore build`")
    _: KW_ONLY
    min: int = option(MATCH, least=MATCH, most=DEPTH)
    min_prob: float = option(0.2, above=0, most=1)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        store = Store(user_path(self.file), loading.target.vocab_size)
        store.check_tokenizer(loading.tokenizer)
        device = loading.target.device
        return PreparedDraft(lambda context: DatastoreDrafter(device, self, store))

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        store = Store(user_path(self.file), target.vocab_size)
        size = f"{len(store.ids):,} tokens, {len(store.order):,} contexts"
        return self.report("draft-free", f"a datastore ({size}) needs no weights and no cache")


class Store:
    """A datastore's file in mapped memory."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Raises DataError for a damaged or another file, VocabularyMismatchError for more tokens
        than the target's ``vocab_size`` logits."""
        self.path = path
        try:
            tensors = load_tensors(path)
        except ModelLoadError as error:
            raise DataError(f"cannot read the datastore {path}: {error}") from None
        if not set(_ENTRIES) <= tensors.keys():
            raise DataError(f"{path} is not a datastore; {_AGAIN} or name another file")
        parts = (tensors[name].flatten().view(torch.uint8).numpy() for name in _ENTRIES)
        about, tokens, order = parts
        try:
            self.about = json.loads(bytes(about))
            sound = (self.about["format"], self.about["version"]) == (_FORMAT, _VERSION)
            self.width = 2 if self.about["vocab_size"] < 1 << 16 else 4
            self.ids = np.frombuffer(tokens, f">u{self.width}")
            self.order = np.frombuffer(order, "<i4")
            sound &= self.order.min(initial=1) > 0 and self.order.max(initial=0) < len(self.ids)
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise DataError(f"{path} is no datastore of version {_VERSION}; {_AGAIN}")
        if self.about["vocab_size"] > vocab_size:
            raise VocabularyMismatchError(
                f"{path} is a datastore of a tokenizer with {self.about['vocab_size']} tokens, but "
                f"the target knows {vocab_size}; use one file per tokenizer"
            )
        every_token = np.arange(self.about["vocab_size"] + 1)
        # Where in ``order`` the contexts that end with each token begin: saves half of a search.
        self._first_entries = np.searchsorted(self.ids[self.order], every_token).tolist()
        self._tokens, self._order = tokens.data, self.order.data

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises VocabularyMismatchError if the datastore's ids stand for other tokens."""
        if self.about.get("tokenizer") != vocabulary_digest(tokenizer):
            raise VocabularyMismatchError(
                f"the datastore {self.path} was built with another tokenizer than the target's; "
                f"{_AGAIN} for this model"
            )

    def find(self, text: Sequence[int], least: int) -> tuple[list[int], int]:
        """Positions of the contexts that share the longest end with ``text``, and the length of
        that match; none if it is shorter than ``least``. Takes 7 to 8 microseconds."""
        recent, vocab = text[-DEPTH:][::-1], len(self._first_entries) - 1
        if len(recent) < least or recent[0] >= vocab:
            return [], 0
        low, high = self._first_entries[recent[0]], self._first_entries[recent[0] + 1]
        if low == high:
            return [], 0
        # The target may have more tokens than the datastore.
        known = array(
            "H" if self.width == 2 else "I", takewhile(lambda token: token < vocab, recent)
        )
        if sys.byteorder == "little":
            known.byteswap()
        wanted, width, content = known.tobytes(), self.width, self._tokens
        size = len(wanted)

        def context(position: int) -> bytes:
            first = position * width
            return bytes(content[first : first + size])

        order = self._order
        middle = bisect_left(order, wanted, low, high, key=context)
        near = range(max(low, middle - 1), min(high, middle + 1))
        match = max(_common(context(order[entry]), wanted) for entry in near) // width
        if match < least:
            return [], 0
        size = match * width
        bounds = max(low, middle - _COMPARED), middle, min(high, middle + _COMPARED)
        first = bisect_left(order, wanted[:size], *bounds[:2], key=context)
        end = bisect_right(order, wanted[:size], *bounds[1:], key=context)
        return order[first:end].tolist(), match

    def continuations(self, positions: Sequence[int], levels: int) -> list[list[int]]:
        """The ``levels`` tokens that follow each context; after a text's end the largest number."""
        steps = np.array(positions)[:, None] - np.arange(1, levels + 1)
        following: list[list[int]] = self.ids[np.maximum(steps, 0)].tolist()
        return following


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix of two byte strings of one length."""
    differing = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return len(other) - (differing.bit_length() + 7) // 8


class DatastoreDrafter(LookupDrafter):
    """Drafts the likeliest continuation in a datastore, a chain."""

    name = "datastore"
    max_forced_tokens = ANY_FORCED

    def __init__(self, device: torch.device | str, spec: Datastore, store: Store) -> None:
        super().__init__(device)
        self._spec, self._store = spec, store
        self._vocab_size = store.about["vocab_size"]  # larger numbers mark the end of a text

    def propose_one(self, item: Slice) -> Proposal:
        forced = forced_tokens(item)
        text, levels = item.seq.tokens, item.draft_length - len(forced)
        if forced:
            text = [*text[-DEPTH:], *forced]
        positions, match = self._store.find(text, self._spec.min)
        if not match or not levels:
            return [], ()
        rows = self._store.continuations(positions, levels)
        chain, chance, confidence = list[int](), 1.0, 0
        for level in range(levels):
            token, count = Counter(row[level] for row in rows).most_common(1)[0]
            chance *= count / len(rows)
            if token >= self._vocab_size or chance < self._spec.min_prob:
                break
            share = count / (len(rows) + 1)
            values = (value for least, value in _CONFIDENCES if share >= least)
            confidence = confidence or next(values)
            chain.append(token)
            rows = [row for row in rows if row[level] == token]
        return with_forced_prefix(forced, chain, range(-1, len(chain) - 1), confidence)


# -- building --------------------------------------------------------------------------------------


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of all tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def write_datastore(
    path: Path, texts: Sequence[np.ndarray], tokenizer: Tokenizer, min_count: int = 2
) -> tuple[int, int]:
    """Write the datastore of some texts, token ids ``[n]`` each; returns its numbers of tokens and
    contexts. A context is stored if its last ``MATCH`` tokens and the next one occur ``min_count``
    times together. Raises DataError if there is none, WriteError."""
    width = 2 if len(tokenizer) < 1 << 16 else 4
    end = np.array([(1 << 8 * width) - 1])
    parts = [end] + [part for text in texts for part in (text[::-1], end)]
    tokens = np.concatenate([*parts[::-1], *[end] * DEPTH]).astype(np.int64)
    order = _sorted_contexts(tokens, int(end[0]), min_count)
    if not len(order):
        raise DataError(
            f"no run of {MATCH + 1} tokens occurs {min_count} times; give more text or a lower "
            "--min-count"
        )
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "vocab_size": len(tokenizer),
        "tokenizer": vocabulary_digest(tokenizer),
    }
    values = {
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8).copy(),
        "tokens": tokens.astype(f">u{width}").view(np.uint8),
        "order": order.astype(np.int32),
    }
    content = as_bytes({key: torch.from_numpy(value) for key, value in values.items()})
    write_files({path: content}, "the datastore")
    return len(tokens), len(order)


def _sorted_contexts(tokens: np.ndarray, end: int, least: int) -> np.ndarray:
    """The positions of the contexts to store, sorted by ``DEPTH`` tokens (prefix doubling)."""
    one = np.unique(tokens, return_inverse=True)[1]
    two = _ranks(one, one, 1)
    three = _ranks(two, one, 2)
    six = _ranks(three, three, 3)  # the next token and MATCH tokens of a context
    ends = np.cumsum(tokens == end)
    stored = np.bincount(six)[six[:-DEPTH]] >= least
    stored &= ends[MATCH : MATCH - DEPTH] == ends[:-DEPTH] - (tokens[:-DEPTH] == end)
    positions = np.flatnonzero(stored) + 1
    ranks, length = two, 2
    while length < DEPTH:
        ranks, length = _ranks(ranks, ranks, length), 2 * length
    return positions[np.argsort(ranks[positions], kind="stable")]


def _ranks(first: np.ndarray, second: np.ndarray, length: int) -> np.ndarray:
    """The rank of the string at each position, from the rank ``first`` of its first ``length``
    tokens there and the rank ``second`` of its other tokens ``length`` positions later."""
    rest = np.zeros_like(first)
    rest[:-length] = second[length:] + 1
    ranks: np.ndarray = np.unique(first * (rest.max() + 1) + rest, return_inverse=True)[1]
    return ranks
