"""Records of drafter kinds: one dataclass beside each drafter.

Its fields are the options, in Python (``NGram(min=2)``) and in a spec (``ngram:min=2``). A
positional field, mostly a path, stands first in a spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import lru_cache
from inspect import get_annotations
from operator import ge, gt, le, lt
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import torch

from paceline.core.costs import TargetCosts
from paceline.core.keywords import announce, our_name
from paceline.core.params import is_finite, is_whole
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.trees.levels import Levels
from paceline.draft.trees.policy import Policy, paying_chance
from paceline.draft.trees.shape import Shape
from paceline.errors import ConfigError
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.target import CausalModel
from paceline.model.tokenizer import Tokenizer

# A static tree can be cut at any level: a deep one serves for all lengths.
_BRANCHING, _NODES, _GPU_NODES = (2, 2, 1, 1, 1), 16, 32
_LEAST = 0.02  # the least chance of a node that is worth verifying, where that was not measured
_Spec = TypeVar("_Spec", bound="DraftSpec")


@dataclass(frozen=True)
class Loading:
    """What a drafter is prepared from: target, tokenizer, and how draft models are loaded:
    ``dtype``, ``quantize`` ("int8", "int4" or None), ``offload`` ("cpu", "disk" or None),
    ``device`` (None: the target's)."""

    target: CausalModel
    tokenizer: Tokenizer
    dtype: str
    quantize: str | None = None
    offload: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class DraftContext:
    """What a prepared drafter is built from. ``cache``: the target's. ``generator``: randomness of
    requests without a seed. ``costs`` measures target forwards on first use; None where draft
    lengths are fixed: the same seed then gives the same drafts."""

    target: CausalModel
    cache: PagedCache
    generator: torch.Generator
    costs: Callable[[], TargetCosts] | None = None

    def tree_nodes(self) -> int:
        """Default for the most nodes of a dynamic tree."""
        return _GPU_NODES if self.cache.device.type == "cuda" else _NODES

    def least_chance(self) -> float:
        """The chance of acceptance from which verifying a node more pays."""
        return _LEAST if self.costs is None else paying_chance(self.costs().curves[0])

    def new_cache(
        self,
        shapes: list[LayerShape],
        dtype: torch.dtype,
        device: torch.device | None = None,
        rope_switch: int | None = None,
    ) -> PagedCache:
        """A cache for a drafter's layers, of as many tokens as the target's. ``device``: None for
        the target's."""
        pool, device = self.cache, device or self.cache.device
        size = pool.num_blocks, pool.block_size
        return PagedCache(shapes, *size, dtype, device, pool.shares, rope_switch)

    def generator_on(self, device: torch.device) -> torch.Generator:
        """Randomness of requests without a seed, on any device."""
        if device == self.generator.device:
            return self.generator
        other = torch.Generator(device)
        drawn = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
        return other.manual_seed(int(drawn))


@dataclass(frozen=True)
class Prepared:
    """A drafter whose weights are loaded. ``cache_bytes`` per cached token; ``feature_bytes`` per
    token whose features may have to be kept; ``state_bytes`` of a state of its recurrent layers.
    ``names``: those by which requests choose it, the first is the default; ``drafts`` their specs;
    ``notes`` for the user."""

    build: Callable[[DraftContext], Drafter]
    cache_bytes: int = 0
    names: tuple[str, ...] = ()
    feature_bytes: int = 0
    drafts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    state_bytes: int = 0


@dataclass(frozen=True)
class TargetShape:
    """A target that is not loaded. ``vocab_size`` counts logits."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_positions: int = 0


Target = CausalModel | TargetShape  # what drafts are checked against

# One of doctor's findings: code, text, and the cure if it is not the usual one.
Note = tuple[str, str, str | None]


@dataclass(frozen=True)
class Examined:
    """What a kind tells ``paceline doctor``: notes, and counts of values kept beside the target:
    weights, and per token in a cache and in features. ``target_in``: precision of a copy of the
    target."""

    notes: tuple[Note, ...]
    parameters: int = 0
    cache_values: int = 0
    feature_values: int = 0
    target_in: str | None = None


def reduced(size: int, target: Target) -> list[Note]:
    """Doctor's note on heads that know ``size`` of the target's tokens."""
    if size >= target.vocab_size:
        return []
    text = f"drafts {size:,} of the target's {target.vocab_size:,} tokens"
    return [("head-vocabulary-reduced", text, None)]


_BOUNDS = {"least": (ge, "at least"), "above": (gt, "above"), "most": (le, "at most")}
_BOUNDS |= {"below": (lt, "below")}
# What a value of an option's type is, and what another one is.
_ANY: tuple[Callable[[Any], bool], str] = (lambda value: True, "")
_TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "neither on nor off"),
    int: (is_whole, "not a whole number"),
    float: (is_finite, "not a number"),
    tuple: (lambda v: isinstance(v, (tuple, list)) and all(map(is_whole, v)), "not like {like}"),
}


def option(default: Any = MISSING, **metadata: Any) -> Any:
    """A field of a spec. ``key``: its name in a spec string if Python cannot have it; ``like``:
    an example of a tuple; ``needs``: what the argument without a default is; ``choices``: its
    values; ``least``, ``above``, ``most``, ``below``: its bounds."""
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class DraftSpec(ABC):
    """A drafter as its user asks for it, made in Python or read from
    ``KIND[:ARGUMENT][,KEY=VALUE...]``; ``str`` gives that. ConfigError for invalid options."""

    kind: ClassVar[str]
    page: ClassVar[str]  # of its documentation: a file of docs/drafters, or an address
    default_draft_length: ClassVar[int] = 4  # levels
    deepest: ClassVar[int] = 0  # most levels worth trying, if more than for other kinds
    # Prior acceptance by level, all levels before accepted; the last is of all deeper ones.
    acceptance: ClassVar[tuple[float, ...]] = ()
    remembers: ClassVar[bool] = False  # learns from one request for the next
    looks_up: ClassVar[bool] = False  # in text; drafts where it repeats itself
    tried: ClassVar[Literal["always", "real", "never"]] = "never"  # by `tune`, unasked
    holds: ClassVar[Literal["nothing", "model", "head"]] = "nothing"  # weights in the argument
    weight_files: ClassVar[tuple[str, ...]] = ()  # names of a head's file; the first that exists
    weights: ClassVar[str] = ""  # suffix of weights made for a target: paceline/tiny-draft
    # Specs that tests decode with; {target} is the target's folder, {draft} (``weights``) the
    # weights made for it.
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
    def prepare(self, loading: Loading) -> Prepared:
        """Load what it needs. Raises PacelineErrors."""

    def members(self) -> tuple[DraftSpec, ...]:
        """The specs it joins; itself unless it joins several."""
        return (self,)

    def examine(self, target: Target, read: Any = None) -> Examined:
        """What doctor says before loading; ``read``: a head's checkpoint with tensors on the meta
        device. Raises ConfigError and ModelLoadError."""
        return self.noted("draft-free", f"{self.kind} needs no weights and no cache of its own")

    def noted(self, code: str, text: str) -> Examined:
        return Examined(((code, text, None),))

    def variants(self: _Spec) -> dict[str, _Spec]:
        """What ``tune`` tries in its place, by the shape of the trees."""
        return {"chain": self}

    def precisions(self: _Spec) -> dict[str, _Spec]:
        """The same in fewer bits, which ``tune`` tries as well."""
        return {}

    def refuse(self, problem: str) -> ConfigError:
        return ConfigError(f"draft {self.kind!r}: {problem}")

    # -- as text -------------------------------------------------------------------------------

    @classmethod
    def read(cls: type[_Spec], rest: str, kinds: Mapping[str, type[DraftSpec]]) -> _Spec:
        """A spec from the text after kind and colon; ``kinds``: all kinds by name, for those that
        join others. Raises ConfigError."""
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
        """An option's value. Raises ConfigError."""
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
        # Not get_type_hints: that of Python 3.10 refuses the mark KW_ONLY.
        annotations = (get_annotations(home, eval_str=True) for home in cls.__mro__)
        hint = next(hints[of.name] for hints in annotations if of.name in hints)
        if NoneType in get_args(hint):
            (hint,) = set(get_args(hint)) - {NoneType}
        return get_origin(hint) or hint

    def changed_options(self) -> dict[str, str]:
        """The options that differ from their defaults, as text."""
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
    """A kind that grows trees level by level; by default chains. ``branching``: children per level
    of a static tree. ``nodes``, ``width``: dynamic trees of ``nodes`` nodes, expanding ``width`` a
    level."""

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
        """``nodes``: the default where neither shape nor number is given."""
        if self.branching:
            return Policy(Shape.branching(self.branching))
        if self.nodes is None:
            return Policy(nodes=nodes, width=self.width, shared=nodes > 0)
        return Policy(nodes=self.nodes, width=self.width)

    def levels(
        self, context: DraftContext, cache: PagedCache, stop: float = 0.0, nodes: int = 0
    ) -> Levels:
        """How its trees grow over ``cache``; ``stop`` as of Levels, ``nodes`` as in ``policy``."""
        generator, policy = context.generator_on(cache.device), self.policy(nodes)
        least = context.least_chance() if policy.nodes else 0.0
        return Levels(self.kind, cache, policy, generator, stop, least)

    def shape(self) -> str | None:
        """Its trees in words, as far as the options say."""
        if self.branching:
            return _text(self.branching)
        return f"{self.nodes} nodes" if self.nodes else None if self.nodes is None else "chain"

    def variants(self: _Tree) -> dict[str, _Tree]:
        """A chain, a static and a dynamic tree, unless the options already say."""
        shape = self.shape()
        if shape is not None or self.holds == "nothing":
            return {shape or "chain": self}
        return {
            "chain": replace(self, nodes=0),
            "2x2 tree": replace(self, branching=_BRANCHING),
            f"{_NODES} nodes": replace(self, nodes=_NODES),
        }


_Tree = TypeVar("_Tree", bound=TreeSpec)


@dataclass(frozen=True)
class NoDraft(DraftSpec):
    """Plain decoding."""

    kind = "none"
    page = "README.md"
    default_draft_length = 0
    examples = ("none",)

    def prepare(self, loading: Loading) -> Prepared:
        return Prepared(lambda context: NoDrafter(context.target.device))

    def examine(self, target: Target, read: Any = None) -> Examined:
        return self.noted("draft-none", "no draft is given")

    def variants(self) -> dict[str, NoDraft]:
        return {}  # plain decoding is always measured
