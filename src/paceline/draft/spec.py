"""Records of drafter kinds: a dataclass beside each drafter, whose fields are its options.

Users write the record in Python (``NGram(min=2)``) or as text, a spec (``ngram:min=2``). A
positional field, mostly a path, comes first in a spec. To be built, a record first loads weights
(``prepare``), from which the cache is sized, and then makes the drafter (``PreparedDraft.build``).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import lru_cache
from inspect import get_annotations
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch

from paceline.core.costs import TargetCosts
from paceline.core.keywords import announce, our_name
from paceline.core.params import is_finite, is_whole
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.trees.levels import GrowthSettings
from paceline.draft.trees.policy import Policy, break_even_chance
from paceline.draft.trees.shape import Shape
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.names import model_path
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.target import CausalModel
from paceline.model.tokenizer import Tokenizer

# A static tree can be cut at any level: a deep one serves for all lengths.
_BRANCHING, NODES = (2, 2, 1, 1, 1), 16
# In a card's table of acceptance: the first position, over all tasks.
_STATED = re.compile(r"^\| all \| [\d.]+ \| ([\d.]+)", re.M)
_LEAST = 0.02  # default chance of acceptance from which verifying a node pays


@dataclass(frozen=True)
class LoadContext:
    """What a drafter is prepared from: target, tokenizer, and how to load draft models
    (``quantize``: "int8", "int4" or None; ``offload``: "cpu", "disk" or None)."""

    target: CausalModel
    tokenizer: Tokenizer
    dtype: str
    quantize: str | None = None
    offload: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class DraftContext:
    """What a prepared drafter is built from. ``cache``: the target's. ``generator``: random numbers
    for requests without a seed. ``costs`` measures target forwards on first use; None if draft
    lengths are fixed, so that the same seed gives the same drafts."""

    target: CausalModel
    cache: PagedCache
    generator: torch.Generator
    costs: Callable[[], TargetCosts] | None = None

    def min_acceptance(self) -> float:
        """The chance of acceptance from which verifying one more node pays."""
        return _LEAST if self.costs is None else break_even_chance(self.costs().curves[0])

    def new_cache(
        self,
        shapes: list[LayerShape],
        dtype: torch.dtype,
        device: torch.device | None = None,
        rope_switch: int | None = None,
    ) -> PagedCache:
        """A cache for a drafter's layers, by default on the target's device, of the same size."""
        pool, device = self.cache, device or self.cache.device
        size = pool.num_blocks, pool.block_size
        return PagedCache(shapes, *size, dtype, device, pool.shares, rope_switch)


@dataclass(frozen=True)
class PreparedDraft:
    """A drafter whose weights are loaded; ``build`` makes it. ``cache_bytes`` per cached token,
    ``feature_bytes`` per token whose features may be kept, ``state_bytes`` per recurrent state.
    ``names``: by which requests choose drafters, the default first; ``drafts``: their specs.
    ``notes``: messages for the user."""

    build: Callable[[DraftContext], Drafter]
    cache_bytes: int = 0
    names: tuple[str, ...] = ()
    feature_bytes: int = 0
    drafts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    state_bytes: int = 0


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target that is not loaded. ``vocab_size``: width of its logits."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_positions: int = 0


Target = CausalModel | TargetShape  # the target that a draft must fit

# A finding of ``paceline doctor``: code, text, and the cure if it is not the code's usual one.
Note = tuple[str, str, str | None]


@dataclass(frozen=True)
class DraftInfo:
    """A record's report to ``paceline doctor``: notes, and memory in numbers of values, of which
    ``cache_values`` and ``feature_values`` are per token. ``copy_precision``: of the copy of the
    target, if it makes one."""

    notes: tuple[Note, ...]
    parameters: int = 0
    cache_values: int = 0
    feature_values: int = 0
    copy_precision: str | None = None


def reduced(size: int, target: Target) -> list[Note]:
    """Doctor's note on a head that can draft only ``size`` of the target's tokens."""
    if size >= target.vocab_size:
        return []
    text = f"drafts {size:,} of the target's {target.vocab_size:,} tokens"
    return [("head-vocabulary-reduced", text, None)]


_BOUNDS = {"least": (ge, "at least"), "above": (gt, "above"), "most": (le, "at most")}
_BOUNDS |= {"below": (lt, "below")}
# By the type of an option: a check of its values, and what a wrong value is said to be.
_ANY: tuple[Callable[[Any], bool], str] = (lambda value: True, "")
_TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "neither on nor off"),
    int: (is_whole, "not a whole number"),
    float: (is_finite, "not a number"),
    tuple: (lambda v: isinstance(v, (tuple, list)) and all(map(is_whole, v)), "not like {like}"),
}


def option(default: Any = MISSING, **metadata: Any) -> Any:
    """A field of a record. ``key``: its name in specs if Python cannot have that name; ``like``:
    an example of a tuple; ``needs``: what a positional field without default must name;
    ``choices``: the allowed values; ``least``, ``above``, ``most``, ``below``: bounds."""
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class DraftSpec(ABC):
    """The record of a drafter kind: made in Python, or read from the spec
    ``KIND[:ARGUMENT][,KEY=VALUE...]``, which ``str`` returns. Invalid options raise ConfigError.
    Subclasses are frozen dataclasses with ``kind``, ``examples`` and ``prepare``."""

    kind: ClassVar[str]
    page: ClassVar[str] = ""  # its documentation: an address, or a file of docs/drafters (KIND.md)
    default_draft_length: ClassVar[int] = 4  # levels
    max_useful_length: ClassVar[int] = 0  # levels worth trying, if more than for other kinds
    # Prior acceptance rate by level, if all before are accepted; the last: of all deeper levels.
    acceptance: ClassVar[tuple[float, ...]] = ()
    learns_across_requests: ClassVar[bool] = False  # from one request for the next
    is_lookup: ClassVar[bool] = False  # whether it looks up text and drafts where that repeats
    tune_tries: ClassVar[Literal["always", "real", "never"]] = "never"  # if it is not asked to
    argument_kind: ClassVar[Literal["nothing", "model", "head"]] = "nothing"
    weight_files: ClassVar[tuple[str, ...]] = ()  # a head's weights: the first file that exists
    weights: ClassVar[str] = ""  # suffix of weights made for a target: paceline/tiny-draft
    # Specs that the tests run; {target} is the target's folder, {draft} (the suffix ``weights``)
    # that of weights made for it.
    examples: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        for item in fields(self):
            value, metadata = getattr(self, item.name), item.metadata
            if value is None:
                continue
            fits, wrong = _TYPES.get(self._kind(item) if item.kw_only else None, _ANY)
            if not fits(value):
                raise self.refuse(f"{_key(item)}={value!r} is {wrong.format(**metadata)}")
            bounds = [(*_BOUNDS[key], metadata[key]) for key in _BOUNDS if key in metadata]
            problem = f"use one of {', '.join(metadata.get('choices', ()))}"
            if not all(keeps(value, bound) for keeps, _, bound in bounds):
                problem = f"it must be {' and '.join(f'{w} {bound}' for _, w, bound in bounds)}"
            elif value in metadata.get("choices", (value,)):
                continue
            raise self.refuse(f"{item.name} is {value!r}; {problem}")

    @abstractmethod
    def prepare(self, loading: LoadContext) -> PreparedDraft:
        """Load what the drafter needs, before the cache is sized. Raises PacelineErrors."""

    def members(self) -> tuple[DraftSpec, ...]:
        """The records that it combines; itself unless it is a hybrid."""
        return (self,)

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        """The report to doctor, without loading weights. ``read``: a head's checkpoint with its
        tensors on the meta device. Raises ConfigError and ModelLoadError."""
        return self.report("draft-free", f"{self.kind} needs no weights and no cache of its own")

    def report(self, code: str, text: str) -> DraftInfo:
        """A report of one note."""
        return DraftInfo(((code, text, None),))

    def variants(self) -> dict[str, DraftSpec]:
        """The records that ``tune`` tries in its place, by the shape of their trees; "": itself."""
        return {"": self}

    def precisions(self) -> dict[str, DraftSpec]:
        """The same draft in fewer bits, by precision, for ``tune`` to try."""
        return {}

    def prior(self) -> tuple[float, ...]:
        """The kind's ``acceptance``, else what the card of its weights states (train/card.md)."""
        if self.acceptance or self.argument_kind == "nothing":
            return self.acceptance
        try:
            card = Path(model_path(self.argument() or ""), "README.md").read_text("utf-8")
        except (OSError, ValueError, ModelLoadError):
            return ()
        row = _STATED.search(card)
        return () if row is None else (float(row[1]),)

    def refuse(self, problem: str) -> ConfigError:
        """The error for wrong options."""
        return ConfigError(f"draft {self.kind!r}: {problem}")

    # -- specs ---------------------------------------------------------------------------------

    @classmethod
    def read(cls, rest: str, kinds: Mapping[str, type[DraftSpec]]) -> DraftSpec:
        """The record of a spec without its ``KIND:``; ``kinds``: all kinds. Raises ConfigError."""
        known = {_key(item): item for item in fields(cls) if item.kw_only}
        argument = next((item for item in fields(cls) if not item.kw_only), None)
        values: dict[str, Any] = {}
        for position, part in enumerate(part for part in rest.split(",") if part):
            key, equals, value = (text.strip() for text in part.partition("="))
            if key not in known and (ours := our_name(f"spec.{key}", known)) in known:
                announce(f"draft {cls.kind!r}", key, ours, known[ours].name in values)
                key = ours
            if position == 0 and argument is not None and (not equals or "/" in key):
                values[argument.name] = part  # a path may have a =
            elif not equals:
                raise ConfigError(f"draft {f'{cls.kind}:{rest}'!r}: {part!r} is not KEY=VALUE")
            elif key not in known:
                knows = ", ".join(known) or "none"
                raise ConfigError(f"draft {cls.kind!r} has no option {key}; it knows: {knows}")
            elif known[key].name in values:
                raise ConfigError(f"draft {cls.kind!r} has {key} twice; give it once")
            else:
                values[known[key].name] = cls._value(known[key], value)
        if argument and argument.name not in values and argument.default is MISSING:
            needs = argument.metadata["needs"]
            raise ConfigError(f"draft {cls.kind!r} needs {needs}: {cls.kind}:PATH")
        return cls(**values)

    @classmethod
    def _value(cls, of: Field[Any], text: str) -> Any:
        """Parses an option's value. Raises ConfigError."""
        kind = cls._kind(of)
        try:
            if kind is bool:
                return {"on": True, "off": False}[text]
            return tuple(map(int, text.split("x"))) if kind is tuple else kind(text)
        except (ValueError, KeyError):
            what = f"{_key(of)}={text!r} is {_TYPES[kind][1].format(**of.metadata)}"
            raise ConfigError(f"draft {cls.kind!r}: {what}") from None

    @classmethod
    @lru_cache
    def _kind(cls, of: Field[Any]) -> Any:
        """The type of an option: bool, int, float, str, or tuple of whole numbers."""
        # typing.get_type_hints of Python 3.10 does not accept KW_ONLY.
        annotations = (get_annotations(home, eval_str=True) for home in cls.__mro__)
        hint = next(hints[of.name] for hints in annotations if of.name in hints)
        if NoneType in get_args(hint):
            (hint,) = set(get_args(hint)) - {NoneType}
        return get_origin(hint) or hint

    def changed_options(self) -> dict[str, str]:
        """The options that differ from their defaults, with values as text."""
        values = {item: getattr(self, item.name) for item in fields(self) if item.kw_only}
        return {_key(e): _text(v) for e, v in values.items() if v != e.default}

    def argument(self) -> str | None:
        """The positional field, as text."""
        values = [getattr(self, item.name) for item in fields(self) if not item.kw_only]
        return None if not values or values[0] is None else str(values[0])

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.changed_options().items()]
        argument = self.argument()
        text = ",".join(options if argument is None else [argument, *options])
        return f"{self.kind}:{text}" if text else self.kind


def _key(of: Field[Any]) -> str:
    return str(of.metadata.get("key", of.name))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class TreeSpec(DraftSpec):
    """A kind whose drafts are trees, by default chains. ``branching``: a static tree with so many
    children per node of each level. ``nodes``, ``width``: dynamic trees of ``nodes`` nodes, of
    which ``width`` are expanded per level."""

    branching: tuple[int, ...] | None = option(None, like="2x2x1 (children per level)")
    nodes: int | None = option(None, least=0)
    width: int = option(4, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branching is not None and min(self.branching, default=0) < 1:
            stated = f"branching={_text(self.branching)!r}"
            raise self.refuse(f"{stated} is not like 2x2x1 (children per level)")
        if self.branching and self.nodes is not None:
            raise self.refuse("give either branching or nodes, not both")

    def policy(self, nodes: int = 0) -> Policy:
        """The trees that the options ask for. ``nodes``: the default if they do not say; then all
        sequences of a step share them."""
        if self.branching:
            return Policy(Shape.branching(self.branching))
        if self.nodes is None:
            return Policy(nodes=nodes, width=self.width, shared=nodes > 0)
        return Policy(nodes=self.nodes, width=self.width)

    def growth_settings(
        self, context: DraftContext, cache: PagedCache, min_level_prob: float = 0.0, nodes: int = 0
    ) -> GrowthSettings:
        """``min_level_prob`` as in ``GrowthSettings``, ``nodes`` as in ``policy``."""
        generator, policy = context.generator, self.policy(nodes)
        if cache.device != generator.device:
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            generator = torch.Generator(cache.device).manual_seed(int(seed))
        node = context.min_acceptance() if policy.nodes else 0.0
        limits = min_level_prob, node
        return GrowthSettings(self.kind, cache, policy, generator, *limits, self.prior())

    def is_shaped(self) -> bool:
        """Whether the options say the shape of its trees."""
        return bool(self.branching) or self.nodes is not None

    def variants(self) -> dict[str, DraftSpec]:
        """A chain, a static and a dynamic tree, unless the options say which."""
        if self.is_shaped() or self.argument_kind == "nothing":
            return super().variants()
        return {
            "chain": replace(self, nodes=0),
            "2x2 tree": replace(self, branching=_BRANCHING),
            f"{NODES} nodes": replace(self, nodes=NODES),
        }


@dataclass(frozen=True)
class NoDraft(DraftSpec):
    """Plain decoding."""

    kind = "none"
    page = "README.md"
    default_draft_length = 0
    examples = ("none",)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        return PreparedDraft(lambda context: NoDrafter(context.target.device))

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        return self.report("draft-none", "no draft is given")

    def variants(self) -> dict[str, DraftSpec]:
        return {}  # plain decoding is always measured
