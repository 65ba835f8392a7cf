"""The drafters that ``tune`` tries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.drafters import DRAFTERS, DraftSpec, Hybrid, parse_draft
from paceline.errors import ConfigError
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, MADE_FOR, has_assets


@dataclass(frozen=True)
class DrafterCandidate:
    """A draft to try. ``family``: its kind of drafter. ``requested``: the user named it, so it must
    load. ``default``: commands use it if no draft is named, so it is always a finalist."""

    label: str
    spec: str
    family: str
    requested: bool = False
    default: bool = False


def at_hand(model: str, drafts: Sequence[str], only: bool = False) -> list[DrafterCandidate]:
    """The candidates for ``model``: the user's ``drafts`` (if none, the built-in ones for this
    target) with their variants, then drafters that need no training, the cheapest first, and the
    default draft. ``only`` leaves just the user's. Raises ConfigError on an invalid spec."""
    requested = [variant for text in drafts for variant in variants(text, requested=True)]
    if only:
        if not requested:
            raise ConfigError(
                "--draft-only tries only the drafters of --draft, and there is none; add one"
            )
        return _unique(requested)
    texts: list[str] = []
    if not drafts and model in MADE_FOR:
        # Of the kinds that use the same weights, the others are variants of the first.
        records = reversed([*DRAFTERS.values()])
        first = {record.weights: record.kind for record in records if record.weights}
        built_in = [(kind, f"{model}-{weights}") for weights, kind in first.items()]
        texts += [f"{kind}:{name}" for kind, name in built_in if has_assets(name)]
    tried = ("always",) if model == EMBEDDED else ("always", "real")
    texts += [kind for kind in DRAFTERS if DRAFTERS[kind].tune_tries in tried]
    candidates = [*requested, *(variant for text in texts for variant in variants(text))]
    return [*_unique(sorted(candidates, key=_cost_order)), default_candidate(DEFAULT_DRAFT)]


def _cost_order(candidate: DrafterCandidate) -> tuple[bool, bool]:
    """Sort key: the user's drafts, then lookup drafters, then drafters that run a model."""
    record, optional = DRAFTERS[candidate.family], not candidate.requested
    return optional and not record.is_lookup, optional and record.tune_tries != "always"


def default_candidate(text: str) -> DrafterCandidate:
    """The default draft: "auto" or, once the target is loaded, the drafters that it stands for."""
    spec = parse_draft(text)
    label = " + ".join(map(_label, spec.members())) + " (default)"
    return DrafterCandidate(label, str(spec), spec.kind, default=True)


def variants(text: str, requested: bool = False) -> list[DrafterCandidate]:
    """A draft with the tree shapes and weight precisions that are tried for it. Precisions are
    never ``requested``, so one that is not available is left out without an error."""
    spec = parse_draft(text)
    label = _label(spec)
    tried = [
        (label if variant is spec else f"{label} {shape}", variant, requested)
        for shape, variant in spec.variants().items()
    ]
    for name, variant in spec.precisions().items():
        same_weights = variant.argument() == spec.argument()
        tried.append((f"{label} {name}" if same_weights else _label(variant), variant, False))
    return [DrafterCandidate(name, str(v), v.kind, named) for name, v, named in tried]


def _label(spec: DraftSpec) -> str:
    """The last part of the spec's path, or kind and argument; with the changed options."""
    argument = (spec.argument() or "").rstrip("/")
    _, slash, name = argument.rpartition("/")
    if not slash:
        name = f"{spec.kind}:{argument}" if argument else spec.kind
    return " ".join([name, *(f"{key}={value}" for key, value in spec.changed_options().items())])


def hybrid_of(first: DrafterCandidate, second: DrafterCandidate) -> DrafterCandidate:
    """A hybrid of a lookup drafter and a second one."""
    label = f"{first.label} + {second.label}"
    return DrafterCandidate(label, f"{Hybrid.kind}:{first.spec}+{second.spec}", Hybrid.kind)


def _unique(candidates: Iterable[DrafterCandidate]) -> list[DrafterCandidate]:
    return list({candidate.spec: candidate for candidate in candidates}.values())
