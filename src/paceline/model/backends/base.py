"""The backend interface. A backend runs all forwards of a model and of its draft heads; the default
methods use torch modules. Backends are looked up by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
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
from paceline.model.paged.segments import FULL, AttentionStep, DeviceBatch, Pattern

NATIVE, REFERENCE = "native", "reference"


class BackendModel(Protocol):
    """What a backend may read of the model that it runs; ``CausalModel`` fulfils it. ``hf``: the
    module of transformers, whose attention goes through our paged cache. ``cache_shapes`` and
    ``patterns`` (what a row attends to) are by layer. ``checkpoint``: the files it was loaded from,
    none for a module of the caller's. ``packed``: a backend sets this before it changes modules;
    if it refuses the model then, the checkpoint is loaded again."""

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
    packed: bool

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput: ...

    def embedding(self, side: Literal["input", "output"]) -> Any: ...


# -- growing whole drafts in one call ----------------------------------------------------------


class EarlyStop(NamedTuple):
    """When a tree stops growing. A path of draft probability p counts as accepted with probability
    p ** ``power``. Growth stops after a level whose expanded nodes have less than ``level_prob`` in
    total. A dynamic tree drops nodes below ``node_prob``, but keeps at least one."""

    power: float = 1.0
    level_prob: float = 0.0
    node_prob: float = 0.0


NO_EARLY_STOP = EarlyStop()  # the tree always grows to its depth


@dataclass(frozen=True)
class TreeRequest:
    """A tree to be grown below a committed token. ``width``: candidates after each expanded node,
    and expanded nodes in each level; the ``nodes`` most probable nodes stay. ``base``: cache rows
    in front of the tree's nodes. A width of 1 is a chain; ``early_stop`` may end it, but never
    drops its last token, as pruning a sampled token by its own probability biases the output.
    ``position``: index of its first token in the text, on which seeded noise depends.
    ``draw_seed``: the seed with which a chain is sampled (Draw.IID) if the request has none."""

    depth: int
    width: int
    nodes: int
    base: int
    table: Sequence[int]  # the sequence's block table, with room for the expanded nodes
    params: SamplingParams
    position: int
    early_stop: EarlyStop = NO_EARLY_STOP
    adapter: Adapter | None = None
    draw_seed: int | None = None


@dataclass(frozen=True)
class GrownTree:
    """A grown tree. ``slots``: each node's index among the expanded nodes, -1 if not expanded.
    ``scores``: the log-probability of each node's path; 0 in chains without an early end, () if
    unknown."""

    tree: TokenTree
    slots: tuple[int, ...]
    scores: tuple[float, ...] = ()


class TreeGrower(Protocol):
    """Grows whole draft trees with a model or head, as draft/trees/grow.py does level by level."""

    def __call__(
        self,
        cache: PagedCache,
        wanted: Sequence[TreeRequest],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """Grow a tree for each of ``wanted``. ``logits [trees, columns]`` in the model's dtype: the
        logits after the committed tokens; ``outputs [trees, hidden]``: an EAGLE head's outputs
        there. ``ids`` int64 ``[columns]``, ascending: the columns' token ids; None: column n is
        token n. ``first``: a forward that the same call runs before, and that writes ``logits``.
        Raises IndexError if a block table has no room for its tree, or a token or position of
        ``first`` is out of range."""


# -- heads on a target's features --------------------------------------------------------------

# (features ``[B, width]``, count) to the logits ``[B, count, vocab]`` of the first Medusa heads.
DraftingHeads = Callable[[torch.Tensor, int], torch.Tensor]
# Attention of a head's layer: ``attend(query [1, heads, T, d], key, value, layer=, scaling=)``
# stores key and value, ``[1, kv_heads, T, d]`` after rotary embedding, and returns ``[1, T, heads,
# d]``.
Attend = Callable[..., torch.Tensor]


def _rows_and_attention(head: Any, batch: Batch, cache: PagedCache) -> tuple[DeviceBatch, Attend]:
    step = AttentionStep.of(batch, cache, (FULL,) * head.config.layers, device=cache.device)
    return step.batch, partial(paged_attention, step=step)


class EagleStep:
    """Runs the modules of the EAGLE head ``head``; ``embed`` maps the target's token ids to ``[T,
    H]``. ``tree_grower`` grows whole trees with the head; None: drafters grow level by level."""

    tree_grower: TreeGrower | None = None

    def __init__(self, head: Any, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.head, self._embed = head, embed

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs ``[R, H]`` and logits ``[R, draft_vocab]`` of ``batch.logit_rows``, from the
        target's features ``[T, layers * target_hidden]`` or, if ``fused``, the head's own earlier
        outputs ``[T, H]``."""
        head, (rows, attend) = self.head, _rows_and_attention(self.head, batch, cache)
        inputs = hidden if fused else head.fuse(hidden)
        outputs: torch.Tensor = head(self._embed(rows.input_ids), inputs, rows.positions, attend)
        if rows.logit_rows is not None:
            outputs = outputs.index_select(0, rows.logit_rows)
        return outputs, head.logits(outputs) if len(outputs) else outputs


class BlockStep:
    """Runs the modules of a block drafter's ``head``; ``embed`` maps the target's token ids to
    ``[T, H]``, ``lm_head`` maps outputs to logits."""

    def __init__(
        self,
        head: Any,
        embed: Callable[[torch.Tensor], torch.Tensor],
        lm_head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.head, self._embed, self.logits = head, embed, lm_head

    def write_context(self, batch: Batch, cache: PagedCache, features: torch.Tensor) -> None:
        """Write the keys and values of ``features [T, layers * H]`` into the batch's slots."""
        positions, slots = to_device((batch.positions, batch.slots), cache.device)
        for layer, new in enumerate(self.head.context(features, positions)):
            for cached, part in zip(cache.kv(layer), new, strict=True):
                cached.index_copy_(0, slots, part[0].transpose(0, 1))

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Outputs ``[T, H]`` of the rows of the blocks; their keys and values go into the cache."""
        rows, attend = _rows_and_attention(self.head, batch, cache)
        outputs: torch.Tensor = self.head(self._embed(rows.input_ids), rows.positions, attend)
        return outputs


class Backend(ABC):
    """Runs a model's forward over a packed batch."""

    name: str
    runs_torch = True  # whether forwards run torch operators
    batch_invariant = False  # whether a row has the same bits whatever other rows are in the batch
    runs_quantised = False  # whether 8- and 4-bit weights are multiplied without dequantising them
    head_share = 0.0  # the language-model head's share of the bytes of all matrices

    @property
    def description(self) -> str:
        """The name, with the instruction set or library that it computes with."""
        return self.name

    @abstractmethod
    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        """One forward. Returns ``logits [R, vocab]`` of ``batch.logit_rows`` and features of the
        layers ``batch.features``, which all exist; writes the keys and values of all rows into the
        cache at ``batch.slots``."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[..., vocab]`` for final-norm outputs ``[..., hidden]``."""

    @abstractmethod
    def without_layers(self, skipped: frozenset[int]) -> Backend:
        """A backend that shares the weights but skips these layers; the others keep their indices,
        and so their part of the cache. Raises ConfigError or UnsupportedModelError."""

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises ConfigError if this backend cannot apply the adapter to rows of a batch."""
        raise ConfigError(
            f"the adapter {adapter.name}: the backend {self.description} runs no adapters; use "
            "--backend reference"
        )

    def scratch_bytes(self, rows: int) -> int:
        """Bytes that a forward over ``rows`` rows allocates outside torch, weights and cache."""
        return 0

    @property
    def tree_grower(self) -> TreeGrower | None:
        """Grows whole draft trees with this model; None: drafters grow level by level."""
        return None

    def eagle(self, head: Any, model: BackendModel) -> EagleStep:
        """Runs an EAGLE ``head`` on features of ``model``; may change the layout of its weights."""
        return EagleStep(head, head.embed_tokens or model.embedding("input"))

    def block(self, head: Any, model: BackendModel) -> BlockStep:
        """Runs a block drafter's ``head`` on features of ``model``."""
        embed = head.embed_tokens or model.embedding("input")
        return BlockStep(head, embed, head.lm_head or self.head)

    def packed(self, head: Any) -> Any:
        """``head``, which torch runs, with linear layers that kernels multiply, where there are
        some; may change it in place."""
        return head

    def medusa(self, heads: Any) -> DraftingHeads:
        """Runs Medusa ``heads`` in one call; may change the layout of their weights."""

        def run(features: torch.Tensor, count: int) -> torch.Tensor:
            logits = [heads.logits(head, features, self.head) for head in range(count)]
            return torch.stack(logits, 1)

        return run

    def quantised(self, model: BackendModel, precision: str) -> tuple[Any, Backend] | None:
        """Modules like ``model``'s with matrices in ``precision`` that share all else, and their
        backend. None: the caller quantises modules of transformers for this backend."""
        return None


class Ranks(Protocol):
    """The tensor-parallel processes of a model, as seen from the process that decodes."""

    size: int

    def embedding(self, side: Literal["input", "output"]) -> nn.Module:
        """The embedding or the language-model head, gathered on this process's device."""

    def free_memory(self) -> int:
        """Free bytes of the rank that has the fewest."""

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` once, on any thread, with the reason if the model can no longer run."""

    def close(self) -> None:
        """End the other processes."""


# -- the batch on which a backend is compared with the reference before it is used --------------

_ROWS = 8  # rows of each sequence, and tokens of a block
_LONGEST = 4096  # longest context of the trial: a row attends to all keys before it


def trial_logits(model: BackendModel, backend: Backend | None = None) -> tuple[torch.Tensor, ...]:
    """Logits ``[8, vocab]`` of three sequences, computed by ``backend`` (None: the model's own).
    They have rows at the beginning, in the middle and at the end of the model's context (of at most
    4,096 positions); their contexts repeat the block that the first sequence writes."""
    blocks = max(1, min(model.max_positions, _LONGEST) // _ROWS)
    before = [0, (blocks - 1) // 2, blocks - 1]  # blocks in front of each sequence's rows
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


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected`` with each row's mean subtracted."""
    actual, expected = actual.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((actual - expected).norm() / spread.clamp_min(1e-12))


# -- by name -----------------------------------------------------------------------------------

AUTO = "auto"
MakeBackend = Callable[[BackendModel], Backend | str]  # the string says why it cannot run the model

_registered: dict[str, MakeBackend] = {}


def register_backend(name: str, make: MakeBackend) -> None:
    """Make ``backend=name`` known; ``make`` creates it. Raises ConfigError for built-in names."""
    if name in (AUTO, NATIVE, REFERENCE):
        raise ConfigError(f"there is a backend {name!r} already; use another name")
    _registered[name] = make


def backend_names() -> tuple[str, ...]:
    """The values that ``backend=`` may have."""
    return (AUTO, NATIVE, REFERENCE, *sorted(_registered))


def make_backend(name: str, model: BackendModel) -> Backend | str:
    """Create the backend ``name`` for a model, or say why it cannot run the model. Raises
    ConfigError if the name is unknown or the backend fails."""
    if name == NATIVE:
        native: MakeBackend = import_module("paceline.model.backends.native.model").native_backend
        return native(model)
    check_backend(name)
    try:
        return _registered[name](model)
    except PacelineError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"backend {name!r} fails with this model ({what}); use another backend, or report it "
            "to the backend's authors"
        ) from error


def check_backend(name: str) -> None:
    """Raises ConfigError if no backend has this name."""
    if name not in backend_names():
        known = ", ".join(backend_names())
        raise ConfigError(f"backend {name!r} is not known; use one of {known}")
