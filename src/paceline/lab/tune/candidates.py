"""Which drafters are tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.drafters import DRAFTERS, DraftSpec, Hybrid, parse_draft
from paceline.errors import ConfigError
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, MADE_FOR, has_assets


@dataclass(frozen=True)
class DrafterCandidate:
    """``requested``: the user named it, so it must load. ``default``: commands take it where no
    draft is named, so it is always confirmed."""

    label: str
    spec: str
    family: str
    requested: bool = False
    default: bool = False


def at_hand(model: str, drafts: Sequence[str], only: bool = False) -> list[DrafterCandidate]:
    """The user's drafts (if none, those built in for the target) with their tree variants, then
    drafters that need no training, the cheapest first, and the default draft. ``only``: nothing but
    the user's. Raises ConfigError on a spec that cannot be read."""
    requested = [variant for text in drafts for variant in variants(text, requested=True)]
    if only:
        if not requested:
            raise ConfigError("--only tries nothing but --draft, which names no drafter; add one")
        return _unique(requested)
    texts: list[str] = []
    if not drafts and model in MADE_FOR:
        # Kinds that share weights are variants of the first of them.
        records = reversed([*DRAFTERS.values()])
        first = {record.weights: record.kind for record in records if record.weights}
        made = [(kind, f"{model}-{weights}") for weights, kind in first.items()]
        texts += [f"{kind}:{name}" for kind, name in made if has_assets(name)]
    unasked = ("always",) if model == EMBEDDED else ("always", "real")
    texts += [kind for kind in DRAFTERS if DRAFTERS[kind].tried in unasked]
    candidates = [*requested, *(variant for text in texts for variant in variants(text))]
    return [*_unique(sorted(candidates, key=_dearness)), default_candidate(DEFAULT_DRAFT)]


def _dearness(candidate: DrafterCandidate) -> tuple[bool, bool]:
    """The user's come first, then those that only look up, then those that run a model."""
    record, unasked = DRAFTERS[candidate.family], not candidate.requested
    return unasked and not record.looks_up, unasked and record.tried != "always"


def default_candidate(text: str) -> DrafterCandidate:
    """What commands take: "auto", and once the target is loaded what that is composed of."""
    spec = parse_draft(text)
    label = " + ".join(map(_label, spec.members())) + " (default)"
    return DrafterCandidate(label, str(spec), spec.kind, default=True)


def variants(text: str, requested: bool = False) -> list[DrafterCandidate]:
    """A draft with the shapes of trees and the precisions that are tried for it. Nobody asked for
    the precisions, so one that cannot be had here is left out."""
    spec = parse_draft(text)
    label = _label(spec)
    tried = [
        (label if variant is spec else f"{label} {shape}", variant, requested)
        for shape, variant in spec.variants().items()
    ]
    for name, one in spec.precisions().items():
        same = one.argument() == spec.argument()
        tried.append((f"{label} {name}" if same else _label(one), one, False))
    return [DrafterCandidate(name, str(v), v.kind, asked) for name, v, asked in tried]


def _label(spec: DraftSpec) -> str:
    """The last part of its path, or its kind and what that is of; with its options."""
    argument = (spec.argument() or "").rstrip("/")
    _, slash, name = argument.rpartition("/")
    if not slash:
        name = f"{spec.kind}:{argument}" if argument else spec.kind
    return " ".join([name, *(f"{key}={value}" for key, value in spec.changed_options().items())])


def hybrid_of(first: DrafterCandidate, second: DrafterCandidate) -> DrafterCandidate:
    """Two drafters that take turns; the one that looks text up comes first."""
    label = f"{first.label} + {second.label}"
    return DrafterCandidate(label, f"{Hybrid.kind}:{first.spec}+{second.spec}", Hybrid.kind)


def _unique(candidates: Iterable[DrafterCandidate]) -> list[DrafterCandidate]:
    return list({candidate.spec: candidate for candidate in candidates}.values())
