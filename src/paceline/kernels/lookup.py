"""Indexes of texts in the kernels' library (csrc/lookup.cpp), on the CPU whatever runs the model.
They find what draft/text_index.py finds by searching."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.kernels.compile import NativeUnavailableError, is_off
from paceline.kernels.library import CLookup, check, declare, library

_WORK = "an index of texts"  # in errors
Ids = Sequence[int]  # of tokens
Draft = tuple[list[int], tuple[int, ...], int]  # tokens, parents, tokens of the match


@dataclass(frozen=True)
class Lookup:
    """``lengths`` of an index's strings, ascending. ``first``, ``stop``: positions of a text where
    a continuation may begin. ``depth``: tokens of a text's end that are compared. The others are
    options of suffixes (draft/suffix.py)."""

    lengths: tuple[int, ...]
    depth: int
    first: int = 0
    stop: int = 2**31 - 1
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1


def functions() -> Any | None:
    """The library's, which is built first where needed; None without kernels."""
    return None if is_off() else _functions()


@lru_cache(maxsize=1)
def _functions() -> Any | None:
    try:
        # Calls of microseconds keep the GIL: to get it back may take milliseconds.
        loaded = ctypes.PyDLL("paceline", handle=library()._handle)
    except NativeUnavailableError:
        return None
    declare(loaded)
    return loaded


class NativeTextIndex:
    """As ``draft.text_index.TextIndex``, which documents the methods."""

    def __init__(self, native: Any, rule: Lookup) -> None:
        """``native``: what ``functions`` returned."""
        self._native, self.rule = native, rule
        lengths = array("i", rule.lengths)
        self._handle = native.pl_index_open(
            CLookup(
                *(lengths.buffer_info()[0], len(lengths), rule.first, rule.stop, rule.depth),
                *(rule.factor, rule.offset, rule.min_prob),
            )
        )
        check(not self._handle, _WORK)
        self.open_tokens = 0
        self._finished = 0
        self._out = array("i", bytes(4 * 64))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._native.pl_index_close(self._handle)

    def __len__(self) -> int:
        return self._finished + self.open_tokens

    @property
    def held_bytes(self) -> int:
        return int(self._native.pl_index_bytes(self._handle))

    def extend(self, tokens: Sequence[int]) -> None:
        new = array("i", tokens)
        check(self._native.pl_index_extend(self._handle, new.buffer_info()[0], len(new)), _WORK)
        self.open_tokens += len(new)

    def finish(self) -> None:
        check(self._native.pl_index_end_text(self._handle), _WORK)
        self._finished += self.open_tokens
        self.open_tokens = 0

    def drop_oldest(self) -> None:
        self._finished -= self._native.pl_index_drop_oldest(self._handle)

    def texts(self) -> Iterator[Sequence[int]]:
        stream = array("i", bytes(4 * self._native.pl_index_copy_texts(self._handle, None)))
        self._native.pl_index_copy_texts(self._handle, stream.buffer_info()[0])
        start = 0
        while start < len(stream) - self.open_tokens:
            end = stream.index(-1, start)
            yield stream[start:end]
            start = end + 1

    def ngrams(self, new: Ids, tail: Ids, levels: int, nodes: int) -> Draft:
        return self._drafted(
            self._native.pl_draft_ngrams, (self._handle,), new, tail, levels, nodes
        )

    def suffixes(
        self, new: Ids, tail: Ids, levels: int, nodes: int, memory: NativeTextIndex | None = None
    ) -> Draft:
        handles = self._handle, None if memory is None else memory._handle
        return self._drafted(self._native.pl_draft_suffixes, handles, new, tail, levels, nodes)

    def _drafted(
        self, find: Any, handles: tuple[Any, ...], new: Ids, tail: Ids, levels: int, nodes: int
    ) -> Draft:
        if len(self._out) < 2 + 2 * nodes:
            self._out = array("i", bytes(4 * (2 + 2 * nodes)))
        out = self._out
        question = array("i", (levels, nodes, len(new), len(tail), *new, *tail))
        check(find(*handles, question.buffer_info()[0], out.buffer_info()[0]), _WORK)
        self.open_tokens += len(new)
        middle = 2 + out[0]
        return out[2:middle].tolist(), tuple(out[middle : 2 * middle - 2]), out[1]
