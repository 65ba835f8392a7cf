"""A tensor-parallel target: ``SharedForward`` in rank 0, the process that decodes with it, gives
orders to the ``Follower`` of every other rank.

The process of another rank runs ``main``. Its argument, a JSON object, says what to load; the
process ends when standard input is closed. A rank that fails writes the reason in one line to
standard output."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NoReturn

import torch
from torch import nn

from paceline.core.adapter import Adapter
from paceline.core.batch import Batch, ModelOutput
from paceline.core.children import exit_now, ignore_signals
from paceline.errors import ConfigError, debugging
from paceline.model.backends.base import REFERENCE, Backend
from paceline.model.loading import resolve_device
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from paceline.parallel.group import BatchOrder, RankGroup, rank_environment, whole_parameters
from paceline.parallel.processes import READY, RankProcesses, check_shareable, load_part


def load_shared(
    name: str,
    size: int,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    backend: str = "auto",
) -> CausalModel:
    """Load a target into ``size`` processes, of which this is rank 0, on the reference backend. Its
    ``cache_shapes`` are rank 0's. Raises ConfigError, ModelLoadError, UnsupportedModelError."""
    if backend == "native" or quantize not in (None, "none"):
        what = "backend='native'" if backend == "native" else f"quantize={quantize!r}"
        raise ConfigError(
            f"{what} keeps a model in one process; leave it out, or tensor_parallel={size}"
        )
    check_shareable(name, size)
    target_device = resolve_device(device)
    ranks = RankProcesses(size, target_device, {"model": name, "dtype": dtype})
    try:
        with ranks.loading():
            rank_device = torch.device("cuda", 0) if target_device.type == "cuda" else target_device
            model = load_part(name, dtype, rank_device, size)
    except BaseException:
        ranks.close()
        raise
    shared = SharedForward(model, ranks)
    model.backend = model.ranks = shared
    model.backend_refusal = f"on {size} ranks"
    return model


class SharedForward(Backend):
    """A backend that runs the reference forward on all ranks. Each cache of rank 0 has a
    counterpart on the other ranks, known by a number."""

    name = REFERENCE

    def __init__(self, model: CausalModel, ranks: RankProcesses) -> None:
        self.ranks, self.size = ranks, ranks.size
        self._model = copy.copy(model)  # runs rank 0's part
        self._model.ranks = self
        self._numbers: weakref.WeakKeyDictionary[PagedCache, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._dropped: list[int] = []
        self._whole: dict[str, nn.Module] = {}
        self.on_failure = ranks.on_failure
        self.close: Callable[[], None] = weakref.finalize(self, ranks.close)

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        with self.ranks.together():
            order, numbers = BatchOrder.of(batch)
            self.ranks.group.broadcast("forward", self._number(cache), order)
            if numbers is not None:
                self.ranks.group.share(numbers)
            return self._model(batch, cache)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.reference.head(hidden, self.embedding("output"))

    def without_layers(self, skipped: frozenset[int]) -> NoReturn:
        raise ConfigError(
            f"a target on {self.size} ranks cannot draft with a part of its own layers; "
            "use another drafter"
        )

    def check_adapter(self, adapter: Adapter) -> NoReturn:
        raise ConfigError(
            f"the adapter {adapter.name}: a target on {self.size} ranks runs no adapters; leave "
            "tensor_parallel out, or merge the adapter into the model (peft's merge_and_unload)"
        )

    def embedding(self, side: Literal["input", "output"]) -> nn.Module:
        """The input or output embeddings, gathered once on rank 0, which alone runs drafters."""
        if side not in self._whole:
            module = getattr(self._model.hf, f"get_{side}_embeddings")()
            with self.ranks.together():
                self.ranks.group.broadcast("gather", side)
                whole = whole_parameters(module)
            copied = copy.copy(module)
            copied.__dict__.pop("forward", None)  # the forward that sums over ranks
            copied._parameters = {
                key: nn.Parameter(value, requires_grad=False) for key, value in whole.items()
            }
            self._whole[side] = copied
        return self._whole[side]

    def free_memory(self) -> int:
        with self.ranks.together():
            self.ranks.group.broadcast("free_memory")
            return self.ranks.group.least_memory()

    def _number(self, cache: PagedCache) -> int:
        """The number of a cache's counterparts, made once; drops those of deleted caches."""
        while self._dropped:
            self.ranks.group.broadcast("drop", self._dropped.pop())
        if cache not in self._numbers:
            number = self._numbers[cache] = next(self._count)
            cache.on_move = partial(self._move, number)
            weakref.finalize(cache, self._dropped.append, number).atexit = False
            how = cache.num_blocks, cache.block_size, cache.dtype
            self.ranks.group.broadcast("make", number, *how)
        return self._numbers[cache]

    def _move(self, number: int, slots: Sequence[tuple[int, int]]) -> None:
        with self.ranks.together():
            self.ranks.group.broadcast("move", number, tuple(slots))


# -- the other ranks -------------------------------------------------------------------------------


def main() -> None:
    ignore_signals()
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not reach rank 0
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        job = json.loads(sys.argv[1])
        rank, size, kind = job["rank"], job["size"], job["device"]
        device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        torch.set_num_threads(job["threads"])
        print(READY, file=replies, flush=True)
        with rank_environment(rank):
            group = RankGroup(rank, size, job["store"], device)
            model = load_part(job["model"], job["dtype"], device, size)
        Follower(model, group).run()
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        print(f"failed: {type(error).__name__}: {words}", file=replies, flush=True)
        if debugging():
            logging.getLogger("paceline").exception("a rank failed", exc_info=error)
        exit_now(1)
    exit_now(0)


def _end_with_rank_0() -> None:
    sys.stdin.read()
    exit_now(0)


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
