"""The controller protocol: which drafter drafts for a sequence in a step, and how many levels."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState

_log = logging.getLogger("paceline.decisions")

# Reasons why a sequence had no draft in a step.
NOTHING_FOUND = "no lookup found anything"
NOT_WORTH_IT = "no draft was expected to pay"
MEASURING = "a plain step was measured"
NO_DRAFT = "the drafter proposed nothing"
NOT_ASKED = "none is asked for"


class Decision(NamedTuple):
    """What a sequence gets in a step.

    ``length``: draft depth in levels; 0 is a plain step. ``drafter``: the member of a hybrid that
    drafts (None: the first that proposes anything). ``reason``: why nothing is drafted, or
    "exploration". ``speedup``: the step's expected tokens a second relative to a plain step; 1 if
    that is not known.
    """

    length: int
    drafter: Hashable = None
    reason: str = ""
    speedup: float = 1.0


PLAIN = Decision(0)
METHODS = ("lengths", "observe", "forget")  # that a controller must have


class Controller:
    """Chooses draft lengths and drafters. It sees only committed tokens, never the tokens being
    drafted, so no choice can bias the output. ``LLM(controller=...)`` takes one of your own
    (docs/concepts/control.md)."""

    def lengths(self, seqs: Sequence[SequenceState]) -> Sequence[Decision | int]:
        """The next step's draft for each running sequence; a number stands for
        ``Decision(number)``. The scheduler may shorten it: by the request's ``draft_length`` and by
        the room that is left.
        """
        raise NotImplementedError

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        """A step has ended. ``seconds``: its wall time. ``drafting``: the part of it that drafting
        took; None if it was not measured."""

    def forget(self, seq_id: int) -> None:
        """A sequence has ended, or starts anew after a preemption."""


class FixedLength(Controller):
    """The same draft length for all sequences, always."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._choice = Decision(length, reason="" if length else NOT_ASKED)

    def lengths(self, seqs: Sequence[SequenceState]) -> list[Decision]:
        return [self._choice] * len(seqs)


def log_decisions(
    step: int,
    seqs: Sequence[SequenceState],
    decisions: Sequence[Decision],
    last: Mapping[int, Decision],
) -> None:
    """Log the decisions of a step to "paceline.decisions": a line of JSON for each one that differs
    from the sequence's ``last``."""
    for seq, decision in zip(seqs, decisions, strict=True):
        if decision[:3] != last.get(seq.seq_id, ())[:3]:
            record = {"step": step, "request": seq.seq_id, "generated": seq.generated}
            _log.info(json.dumps({**record, **decision._asdict()}, default=str))
