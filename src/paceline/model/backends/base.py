"""Backends, which run all forwards: protocol (whose defaults use torch's modules) and names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from paceline.core.adapter import Adapter
from paceline.core.batch import Batch, ModelOutput, Span
from paceline.core.params import SamplingParams
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError, PacelineError
from paceline.files import FileStamp
from paceline.model.backends.reference.attention import paged_attention
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.paged.segments import FULL, AttentionStep, Pattern

NATIVE, REFERENCE = "native", "reference"


class Adapted(Protocol):
    """A model as ``CausalModel`` adapts it: what backends read of it. ``hf`` is the module of
    transformers, whose attention goes through our paged cache; ``cache_shapes`` and ``patterns``
    (windows, chunks) are by layer; ``checkpoint``: the files that it was loaded from."""

    hf: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_layers: int
    max_positions: int
    cache_shapes: list[LayerShape]
    patterns: tuple[Pattern, ...]
    checkpoint: tuple[FileStamp, ...]

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput: ...

    def embedding(self, side: Literal["input", "output"]) -> Any: ...


# -- growing whole drafts in one call ----------------------------------------------------------


class Ending(NamedTuple):
    """Where a tree ends. A path of probability p counts for a chance of p ** ``power``; behind a
    level whose expanded nodes have less than ``stop`` together there is no other, and nodes less
    probable than ``least`` are left out of a dynamic tree (but for one)."""

    power: float = 1.0
    stop: float = 0.0
    least: float = 0.0


WHOLE = Ending()  # it ends with its depth


@dataclass(frozen=True)
class WantedTree:
    """A tree below a committed token; the cache has ``base`` rows before its nodes. ``width``:
    candidates after an expanded node, and expanded nodes of a level; the ``nodes`` likeliest stay.
    A width of 1 is a chain: what was drawn may say where a chain ends, but not drop what it ends
    with.
    ``position``: index of its first token, on which seeded noise depends. ``drawn``: the seed of a
    chain's draws, where the request has none (Draw.IID)."""

    depth: int
    width: int
    nodes: int
    base: int
    table: Sequence[int]  # the sequence's blocks, with room for what is expanded
    params: SamplingParams
    position: int
    ending: Ending = WHOLE
    adapter: Adapter | None = None
    drawn: int | None = None


@dataclass(frozen=True)
class GrownTree:
    """A tree, and by node its index among the expanded ones (-1: not expanded) and the
    log-probability of its path (0 in chains that do not end early; () if not known)."""

    tree: TokenTree
    slots: tuple[int, ...]
    scores: tuple[float, ...] = ()


class Growth(Protocol):
    """Grows drafts with a model or a head, as draft/trees/grow.py does by levels."""

    def __call__(
        self,
        cache: PagedCache,
        wanted: Sequence[WantedTree],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """From ``logits [trees, columns]`` after the committed tokens, and an EAGLE head's
        ``outputs [trees, hidden]`` there, both of the model's dtype. ``ids`` int64 ``[columns]``,
        ascending: the columns' tokens, if not their numbers. ``first``: a forward that writes the
        logits in the same call. Raises IndexError if a table has no room for a tree, or a token or
        a position of ``first`` is out of range."""


# -- heads on a target's features --------------------------------------------------------------

# Logits ``[B, count, vocab]`` of the first ``count`` Medusa heads, from features ``[B, width]``.
DraftingHeads = Callable[[torch.Tensor, int], torch.Tensor]
# ``attend(query [1, heads, T, d], key and value [1, kv_heads, T, d], layer=, scaling=)`` of a
# head's layers stores keys and values after rotary embedding; ``[1, T, heads, d]``.
Attend = Callable[..., torch.Tensor]


class EagleStep:
    """Runs the EAGLE head ``head`` by its modules; ``embed`` maps the target's token ids to ``[T,
    H]``. ``growth`` grows whole trees with it; None: drafters do by levels."""

    growth: Growth | None = None

    def __init__(self, head: Any, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.head, self._embed = head, embed

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs ``[R, H]`` and logits ``[R, draft_vocab]`` of ``batch.logit_rows``, from features
        ``[T, layers * target_hidden]`` or, if ``fused``, earlier outputs ``[T, H]``."""
        head, layers = self.head, (FULL,) * self.head.config.layers
        step = AttentionStep.of(batch, cache, layers, device=cache.device)
        attend, rows = partial(paged_attention, step=step), step.batch
        inputs = hidden if fused else head.fuse(hidden)
        outputs: torch.Tensor = head(self._embed(rows.input_ids), inputs, rows.positions, attend)
        if rows.logit_rows is not None:
            outputs = outputs.index_select(0, rows.logit_rows)
        return outputs, head.logits(outputs) if len(outputs) else outputs


class BlockStep:
    """Runs a block drafter's ``head`` by its modules; ``embed`` maps the target's token ids to
    ``[T, H]``, ``lm_head`` outputs to logits."""

    def __init__(
        self,
        head: Any,
        embed: Callable[[torch.Tensor], torch.Tensor],
        lm_head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.head, self._embed, self.logits = head, embed, lm_head

    def read(self, batch: Batch, cache: PagedCache, features: torch.Tensor) -> None:
        """Store the keys and values of ``features [T, layers * H]`` at the batch's rows."""
        positions, slots = to_device((batch.positions, batch.slots), cache.device)
        for layer, new in enumerate(self.head.context(features, positions)):
            for stored, part in zip(cache.kv(layer), new, strict=True):
                stored.index_copy_(0, slots, part[0].transpose(0, 1))

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Outputs ``[T, H]`` of the rows of blocks, whose keys and values the cache gets, too."""
        layers = (FULL,) * self.head.config.layers
        step = AttentionStep.of(batch, cache, layers, device=cache.device)
        attend, rows = partial(paged_attention, step=step), step.batch
        outputs: torch.Tensor = self.head(self._embed(rows.input_ids), rows.positions, attend)
        return outputs


class Backend(ABC):
    """Runs a model's forward over a packed batch."""

    name: str
    runs_torch = True  # forwards run operators of torch
    same_bits = False  # a row's results do not depend on the other rows of a batch
    runs_quantised = False  # weights in 8 and 4 bits are multiplied without unpacking
    head_share = 0.0  # of the bytes of all matrices, the language-model head's

    @property
    def description(self) -> str:
        """The name, and what it computes with."""
        return self.name

    @abstractmethod
    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        """One forward: ``logits [R, vocab]`` of ``batch.logit_rows``, keys and values of all rows
        into ``batch.slots`` of the cache, and ``batch.features``, which are known to exist."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab]`` of final-norm outputs ``[..., hidden]``."""

    @abstractmethod
    def without(self, skipped: frozenset[int]) -> Backend:
        """The same without some layers; the others keep their numbers, and so their cache. Raises
        ConfigError or UnsupportedModelError."""

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises ConfigError if rows of a batch with this adapter would not get what it adds."""
        raise ConfigError(
            f"the adapter {adapter.name}: the backend {self.description} runs no adapters; use "
            "--backend reference"
        )

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of a forward over so many rows beside weights, cache and torch's memory."""
        return 0

    @property
    def growth(self) -> Growth | None:
        """Grows whole drafts with this model; None: drafters do by levels."""
        return None

    def eagle(self, head: Any, model: Adapted) -> EagleStep:
        """A step of an EAGLE ``head`` on features of ``model``; may change its weights' layout."""
        return EagleStep(head, head.embed_tokens or model.embedding("input"))

    def block(self, head: Any, model: Adapted) -> BlockStep:
        """A step of a block drafter's ``head`` on features of ``model``."""
        embed = head.embed_tokens or model.embedding("input")
        return BlockStep(head, embed, head.lm_head or self.head)

    def medusa(self, heads: Any) -> DraftingHeads:
        """All Medusa ``heads`` in one call; may change their weights' layout."""

        def run(features: torch.Tensor, count: int) -> torch.Tensor:
            logits = [heads.logits(head, features, self.head) for head in range(count)]
            return torch.stack(logits, 1)

        return run

    def quantised(self, model: Adapted, precision: str) -> tuple[Any, Backend] | None:
        """Modules like ``model``'s with matrices in ``precision``, sharing all else, and their
        backend. None: the library's modules are rounded and given to this backend."""
        return None


class Ranks(Protocol):
    """The processes that share a model's weights, seen from the one that decodes."""

    size: int

    def whole(self, side: Literal["input", "output"]) -> nn.Module:
        """The embedding or the language-model head, gathered on this process's device."""

    def free_memory(self) -> int:
        """Bytes that every rank has free."""

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Call once, on any thread, with the reason why the model cannot run any more."""

    def close(self) -> None:
        """End the other processes."""


# -- the batch on which a backend is compared with the reference before it is used --------------

_ROWS = 8  # of each sequence, a block
# Positions of the trial, as rows read all keys before them.
_LONGEST = 4096


def trial_logits(model: Adapted, backend: Backend | None = None) -> tuple[torch.Tensor, ...]:
    """Logits ``[8, vocab]`` of ``backend`` (or the model's) for three sequences at the beginning,
    middle and end of the context, of at most 4,096 positions, over the same keys."""
    blocks = max(1, min(model.max_positions, _LONGEST) // _ROWS)
    before = [0, (blocks - 1) // 2, blocks - 1]  # blocks of each sequence
    rows = range(3 * _ROWS)
    batch = Batch(
        [(row * 7919 + 1) % model.vocab_size for row in rows],
        [before[row // _ROWS] * _ROWS + row % _ROWS for row in rows],
        rows,
        tuple(Span(n, n * _ROWS, count * _ROWS, _ROWS) for n, count in enumerate(before)),
        tuple((*[0] * count, n) for n, count in enumerate(before)),
    )
    cache = PagedCache(model.cache_shapes, 3, _ROWS, model.dtype, model.device)
    return torch.split((backend or model)(batch, cache).logits, _ROWS)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``wanted``, whose rows are centred first."""
    got, wanted = got.float(), wanted.float()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
    return float((got - wanted).norm() / spread.clamp_min(1e-12))


# -- by name -----------------------------------------------------------------------------------
# Functions ``make(model) -> Backend | str``, the string why it cannot run a model. Packages offer
# more by entry points of the group ``paceline.backends``, programs by ``register_backend``.

AUTO = "auto"
MakeBackend = Callable[[Adapted], Backend | str]

_registered: dict[str, MakeBackend] = {}


def register_backend(name: str, make: MakeBackend) -> None:
    """Let ``backend=name`` run models by ``make``. Raises ConfigError for names of our own."""
    if name in (AUTO, NATIVE, REFERENCE):
        raise ConfigError(f"there is a backend {name!r} already; use another name")
    _registered[name] = make


def backend_names() -> tuple[str, ...]:
    """What ``backend=`` may be."""
    offered = {point.name for point in entry_points(group="paceline.backends")}
    more = sorted({*_registered, *offered} - {AUTO, NATIVE, REFERENCE})
    return (AUTO, NATIVE, REFERENCE, *more)


def make_backend(name: str, model: Adapted) -> Backend | str:
    """The backend of a model, or why it cannot run it. Raises ConfigError for an unknown name, one
    that cannot be imported, and whatever a backend of others raises."""
    if name == NATIVE:
        native: MakeBackend = import_module("paceline.model.backends.native.model").native_backend
        return native(model)
    check_backend(name)
    try:
        make = _registered.get(name) or _imported(name)
        return make(model)
    except PacelineError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"backend {name!r} fails with this model ({what}); use another backend, or report it "
            "to the backend's authors"
        ) from error


def _imported(name: str) -> MakeBackend:
    point = next(iter(entry_points(group="paceline.backends", name=name)), None)
    if point is None:
        raise ConfigError(
            f"backend {name!r} is not made for a model; use native or one of a package"
        )
    try:
        loaded: MakeBackend = point.load()
    except Exception as error:
        raise ConfigError(f"backend {name!r} cannot be imported ({error})") from None
    return loaded


def check_backend(name: str) -> None:
    """Raises ConfigError for a name that is not known."""
    if name not in backend_names():
        known = ", ".join(backend_names())
        raise ConfigError(f"backend {name!r} is not known; use one of {known}")
