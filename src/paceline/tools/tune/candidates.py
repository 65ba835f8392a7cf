"""Which drafters are tried: those that the user names, and what is at hand anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import DraftSpec
from paceline.defaults import EMBEDDED
from paceline.defaults import candidates as built_in
from paceline.drafters import DRAFTERS, POLICY_OPTIONS
from paceline.tools.tune.search import MeasuredMethod

_LOOKUPS = ("ngram", "suffix", "recycling")
_TRAINED_ON_NOTHING = ("lookahead", "layer_skip")
_TREE_KINDS = {"model", "tree", "eagle", "eagle2", "eagle3"}
# A static tree may be cut at any level, so one deep one stands for the shallower ones.
_BRANCHING, _NODES = "2x2x1x1x1", 8
CHAIN, TREE, BEST_FIRST = "chain", "2x2 tree", f"{_NODES} nodes"


@dataclass(frozen=True)
class DrafterCandidate:
    """``shape``: how its trees grow. ``given``: the user asked for it, so it must load."""

    label: str
    spec: str
    family: str
    shape: str
    given: bool = False


def at_hand(model: str, drafts: Sequence[str], only: bool = False) -> list[DrafterCandidate]:
    """The user's drafts with their tree variants, and drafters that need no training.

    Without any of the user's, those built in for the target are taken. ``only``: nothing but the
    user's. Raises ConfigError on a spec that cannot be read.
    """
    given = [found for text in drafts for found in variants(text, given=True)]
    if only and given:
        return _unique(given)
    own: list[DrafterCandidate] = []
    if not drafts:
        own = [found for text in built_in(model) for found in variants(text)]
    untrained = _LOOKUPS if model == EMBEDDED else _LOOKUPS + _TRAINED_ON_NOTHING
    return _unique([*given, *own, *(found for text in untrained for found in variants(text))])


def variants(text: str, given: bool = False) -> list[DrafterCandidate]:
    """A draft as a chain, a static tree and a best-first tree, unless its spec already says."""
    spec = DraftSpec.parse(text, tuple(DRAFTERS))
    if spec.kind == "none":
        return []  # plain decoding is always measured
    fixed = set(spec.options) & set(POLICY_OPTIONS) or spec.kind in ("tree", "eagle2")
    if spec.kind not in _TREE_KINDS or fixed:
        full = text if text.partition(":")[0] in DRAFTERS else f"model:{text}"
        return [DrafterCandidate(_label(spec), full, spec.kind, _shape_of(spec), given)]
    base = f"{spec.kind}:{spec.argument or ''}"
    rest = "".join(f",{key}={value}" for key, value in spec.options.items())
    shapes = {
        CHAIN: f"{base}{rest},nodes=0",
        TREE: f"{base}{rest},branching={_BRANCHING}",
        BEST_FIRST: f"{base}{rest},nodes={_NODES}",
    }
    label = _label(spec)
    return [
        DrafterCandidate(f"{label} {s}", full, spec.kind, s, given) for s, full in shapes.items()
    ]


def _label(spec: DraftSpec) -> str:
    """The last part of its path, or its kind; with its options."""
    name = (spec.argument or spec.kind).rstrip("/").rpartition("/")[2]
    return " ".join([name, *(f"{key}={value}" for key, value in spec.options.items())])


def _shape_of(spec: DraftSpec) -> str:
    if "branching" in spec.options:
        return spec.options["branching"]
    if spec.options.get("nodes", "0") != "0":
        return f"{spec.options['nodes']} nodes"
    return "tree" if spec.kind in ("tree", "eagle2") else CHAIN


def hybrid_of(first: MeasuredMethod, second: MeasuredMethod) -> DrafterCandidate:
    """Two drafters that take turns; the one that looks text up comes first."""
    label = f"{first.label} + {second.label}"
    return DrafterCandidate(label, f"hybrid:{first.spec}+{second.spec}", "hybrid", "")


def _unique(candidates: Sequence[DrafterCandidate]) -> list[DrafterCandidate]:
    return list({candidate.spec: candidate for candidate in candidates}.values())
