"""The process of a tensor-parallel rank other than 0: runs rank 0's orders on its part of the
target. A line of JSON on standard input says what to load; the process ends when standard input is
closed. A rank that fails writes the reason in one line to standard output."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from typing import TextIO

import torch

from paceline.core.children import exit_now, ignore_signals
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from paceline.parallel.group import BatchOrder, RankGroup, rank_environment, whole_parameters
from paceline.parallel.processes import READY, load_part


def _end_with_rank_0() -> None:
    sys.stdin.read()
    exit_now(0)


def main() -> None:
    ignore_signals()
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not reach rank 0
    line = sys.stdin.readline()
    if not line:
        return
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        _run_rank(json.loads(line), replies)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        print(f"failed: {type(error).__name__}: {words}", file=replies, flush=True)
        if os.environ.get("PACELINE_DEBUG", "0") != "0":
            logging.getLogger("paceline").exception("a rank failed", exc_info=error)
        exit_now(1)
    exit_now(0)


def _run_rank(job: dict[str, str | int], replies: TextIO) -> None:
    rank, size, kind = int(job["rank"]), int(job["size"]), str(job["device"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(int(job["threads"]))
    print(READY, file=replies, flush=True)
    group = RankGroup(rank, size, str(job["store"]), device)
    with rank_environment(rank):
        model = load_part(str(job["model"]), str(job["dtype"]), device, size)
    Follower(model, group).run()


class Follower:
    """Runs rank 0's orders (the methods after ``run``) on this rank's weights and caches."""

    def __init__(self, model: CausalModel, group: RankGroup) -> None:
        self._model, self._group = model, group
        self._caches: dict[int, PagedCache] = {}

    @torch.inference_mode()
    def run(self) -> None:
        while (order := self._group.receive())[0] != "stop":
            getattr(self, order[0])(*order[1])
        self._group.leave()

    def make(self, cache: int, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Make this rank's part of the cache with the number ``cache``."""
        shapes, device = self._model.cache_shapes, self._model.device
        self._caches[cache] = PagedCache(shapes, blocks, block_size, dtype, device)

    def drop(self, cache: int) -> None:
        del self._caches[cache]

    def forward(self, cache: int, order: BatchOrder) -> None:
        batch, count = order.batch, sum(order.sizes)
        if count:
            numbers = torch.empty(count, dtype=torch.int64, device=self._model.device)
            batch = order.whole(self._group.share(numbers))
        self._model(batch, self._caches[cache])

    def move(self, cache: int, slots: tuple[tuple[int, int], ...]) -> None:
        """Copy rows of a cache between slots: (from, to) pairs."""
        self._caches[cache].copy(slots)

    def gather(self, side: str) -> None:
        whole_parameters(getattr(self._model.hf, f"get_{side}_embeddings")())

    def free_memory(self) -> None:
        self._group.least_memory()
