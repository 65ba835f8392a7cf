"""Which drafters are tried: those that the user names, and what is at hand anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.drafters import DRAFTERS, DraftSpec, Hybrid, parse_draft
from paceline.lab.tune.search import MeasuredMethod
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, MADE_FOR, has_assets


@dataclass(frozen=True)
class DrafterCandidate:
    """``shape``: how its trees grow. ``requested``: the user named it, so it must load.
    ``default``: commands take it where no draft is named, so it is confirmed, not predicted."""

    label: str
    spec: str
    family: str
    shape: str
    requested: bool = False
    default: bool = False


def at_hand(model: str, drafts: Sequence[str], only: bool = False) -> list[DrafterCandidate]:
    """The user's drafts with their tree variants, then drafters that need no training, the
    cheapest first, and the default draft.

    Without any of the user's, those built in for the target are taken. ``only``: nothing but the
    user's. Raises ConfigError on a spec that cannot be read.
    """
    requested = [variant for text in drafts for variant in variants(text, requested=True)]
    if only and requested:
        return _unique(requested)
    trained: list[DrafterCandidate] = []
    if not drafts:
        # Kinds that share weights are variants of the first of them.
        records = [*DRAFTERS.values()] if model in MADE_FOR else []
        first = {record.weights: record.kind for record in records[::-1] if record.weights}
        made = [(kind, f"{model}-{weights}") for weights, kind in first.items()]
        here = [f"{kind}:{name}" for kind, name in made if has_assets(name)]
        trained = [variant for text in here for variant in variants(text)]
    unasked = ("always",) if model == EMBEDDED else ("always", "real")
    untrained = [kind for kind in DRAFTERS if DRAFTERS[kind].tried in unasked]
    candidates = [
        *requested,
        *trained,
        *(variant for text in untrained for variant in variants(text)),
    ]
    return [*_unique(sorted(candidates, key=_dearness)), default_candidate(DEFAULT_DRAFT)]


def _dearness(candidate: DrafterCandidate) -> int:
    """The user's come first, then those that only look up, then those that run a model."""
    record = DRAFTERS[candidate.family]
    if candidate.requested:
        return 0
    if record.looks_up:
        return 1
    return 2 if record.tried == "always" else 3


def default_candidate(text: str) -> DrafterCandidate:
    """What commands take: "auto", and once the target is loaded what that is composed of."""
    spec = parse_draft(text)
    label = " + ".join(map(_label, spec.members())) + " (default)"
    return DrafterCandidate(label, str(spec), spec.kind, "", default=True)


def variants(text: str, requested: bool = False) -> list[DrafterCandidate]:
    """A draft with the shapes of trees and the precisions that are tried for it."""
    spec = parse_draft(text)
    shaped = [
        DrafterCandidate(
            _label(spec) + (f" {shape}" if spec_variant is not spec else ""),
            str(spec_variant),
            spec_variant.kind,
            shape,
            requested,
        )
        for shape, spec_variant in spec.variants().items()
    ]
    # Nobody asked for these, so one that cannot be had here is left out.
    return shaped + [
        DrafterCandidate(f"{_label(spec)} {name}", str(precise), precise.kind, "")
        for name, precise in spec.precisions().items()
    ]


def _label(spec: DraftSpec) -> str:
    """The last part of its path, or its kind; with its options."""
    name = (spec.argument() or spec.kind).rstrip("/").rpartition("/")[2]
    return " ".join([name, *(f"{key}={value}" for key, value in spec.changed_options().items())])


def hybrid_of(first: MeasuredMethod, second: MeasuredMethod) -> DrafterCandidate:
    """Two drafters that take turns; the one that looks text up comes first."""
    label = f"{first.label} + {second.label}"
    return DrafterCandidate(label, f"{Hybrid.kind}:{first.spec}+{second.spec}", Hybrid.kind, "")


def _unique(candidates: Sequence[DrafterCandidate]) -> list[DrafterCandidate]:
    return list({candidate.spec: candidate for candidate in candidates}.values())
