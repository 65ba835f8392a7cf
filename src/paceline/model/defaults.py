"""Which model a command takes where nobody names one, and the drafts that go with it.

The real model where it has been pulled, else the small one that is part of the package; the
variable PACELINE_MODEL names another. Torch is not needed here, so that ``--help`` is fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.model.names import EMBEDDED as EMBEDDED
from paceline.model.names import MADE_FOR, has_assets
from paceline.model.store import SMOLLM2, megabytes, pulled

REAL = SMOLLM2.full_name
VARIABLE = "PACELINE_MODEL"
IN_WORDS = f"{REAL} where pulled, else {EMBEDDED}; ${VARIABLE} names another"
# What commands, ``LLM`` and servers draft with where no draft is named (draft/auto.py).
DEFAULT_DRAFT = "auto"


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


def default_drafts(model: str) -> tuple[str, ...]:
    """What a server loads for its requests to choose from: the default, then what else is part of
    this installation for the model."""
    made = [f"{kind}:{name}" for kind, name in MADE_FOR.get(model, ()) if has_assets(name)]
    return (DEFAULT_DRAFT, *(["ngram", *made] if model in MADE_FOR else []))
