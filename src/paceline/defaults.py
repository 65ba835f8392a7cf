"""Which model a command takes where nobody names one, and the drafts that go with it.

The real model where it has been pulled, else the small one that is part of the package; the
variable PACELINE_MODEL names another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.model.names import EMBEDDED as EMBEDDED
from paceline.model.names import has_assets
from paceline.model.store import SMOLLM2, megabytes, pulled

REAL = SMOLLM2.full_name
VARIABLE = "PACELINE_MODEL"
IN_WORDS = f"{REAL} where pulled, else {EMBEDDED}; ${VARIABLE} names another"

# A model -> the drafts that go with it. The first that this installation has is the default; a
# server loads all of them, and requests choose.
DRAFTS = {
    EMBEDDED: ("paceline/tiny-draft", "ngram", "eagle3:paceline/tiny-eagle3"),
    # Look-ups beside the head: on every public set faster than the head alone.
    REAL: (
        "hybrid:suffix+ngram+eagle3:paceline/smollm2-eagle3",
        "hybrid:suffix+ngram",
        "ngram",
        "eagle3:paceline/smollm2-eagle3",
    ),
}


@dataclass(frozen=True)
class Choice:
    """``note`` says why it was taken; None where the user decided."""

    model: str
    note: str | None


def default_model() -> Choice:
    """The model of a command that was given none."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Choice(chosen, None)
    if pulled(SMOLLM2) is not None:
        return Choice(REAL, f"model: {REAL}, because it has been pulled (--model names another)")
    return Choice(
        EMBEDDED,
        f"model: {EMBEDDED}, a toy, because {REAL} has not been pulled "
        f"(`paceline pull {SMOLLM2.name}`, {megabytes(SMOLLM2.download)})",
    )


def default_draft(model: str) -> str | None:
    """The draft that a model is decoded with where none is named; None: plainly."""
    return next(iter(default_drafts(model)), None)


def default_drafts(model: str) -> tuple[str, ...]:
    """All drafts that go with a model and are part of this installation, the first of each kind."""
    found: dict[str, str] = {}
    for spec in at_hand(DRAFTS.get(model, ())):
        found.setdefault(spec.partition(":")[0], spec)
    return tuple(found.values())


def at_hand(specs: tuple[str, ...]) -> tuple[str, ...]:
    """Those whose weights, if they need any, are installed."""
    return tuple(spec for spec in specs if _installed(spec))


def _installed(spec: str) -> bool:
    name = spec.rpartition(":")[2]
    return not name.startswith("paceline/") or has_assets(name)
