"""What the engine does about a failed step, which has been undone. In this order::

    once more              a failure that does not come back is only logged
    without drafts         if that works, these sequences are decoded plainly from now on
    each sequence alone    those that fail end with an error, the others go on
    a made-up token        if all failed: does the target still run? If not, EngineLostError

A strict engine raises the first failure instead. Errors are not stored: their tracebacks would keep
the failed step's tensors.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from paceline.control.controller import PLAIN, Decision
from paceline.core.batch import Commit, Plan, Span
from paceline.core.sequence import SequenceState
from paceline.engine.clock import PhaseClock
from paceline.engine.scheduler import Scheduler
from paceline.errors import EngineLostError, PacelineError
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

log = logging.getLogger("paceline.engine")

_LONGEST = 300  # characters of a message


class Failure(NamedTuple):
    """An error in one line, and where in the code it was raised."""

    message: str
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = " ".join(str(error).split())[:_LONGEST]
        kind = type(error).__name__
        if not isinstance(error, PacelineError):
            text = f"{kind}: {text}" if text else kind
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return cls(text or kind, location)

    def __str__(self) -> str:
        return f"{self.message} ({self.where})"


def failed(seq: SequenceState, failure: Failure | str) -> Commit:
    """The commit that ends a sequence with an error; also logged."""
    log.error("request %d ends with an error: %s", seq.seq_id, failure)
    message = failure.message if isinstance(failure, Failure) else failure
    return Commit(seq.seq_id, (), position=seq.cached, finish_reason="error", error=message)


Planner = Callable[[], Plan]
Step = Callable[[Planner], None]


class Stepping(Protocol):
    """What recovery needs of an engine."""

    target: CausalModel
    cache: PagedCache
    scheduler: Scheduler
    clock: PhaseClock
    ready: list[Commit]
    strict: bool

    def choices(self, seqs: Sequence[SequenceState]) -> Sequence[Decision | int]: ...
    def max_nodes(self, length: int) -> int: ...
    def account(self, commits: Sequence[Commit], start: float) -> None: ...
    def forget(self, seq_id: int) -> None: ...
    def abort(self, seq_id: int) -> None: ...


Trial = Callable[[Planner], Failure | None]  # undone if it fails, and the failure returned


def recovered(engine: Stepping, step: Step) -> list[Commit]:
    """The commits of a step, undone and tried again if it fails."""
    trial = partial(_attempt, engine, step)
    failure = trial(_planner(engine, engine.choices))
    if failure is not None:
        _recover(engine, trial, failure)
    return engine.ready


def _planner(
    engine: Stepping, choices: Callable[[Sequence[SequenceState]], Sequence[Decision | int]]
) -> Planner:
    """A plan of the whole batch, with these drafts."""
    return partial(engine.scheduler.plan, choices, engine.max_nodes)


def _attempt(engine: Stepping, step: Step, planned: Planner) -> Failure | None:
    """Take a step; its commits are then ``ready``. If it fails it is undone and the failure
    returned."""
    before, start = len(engine.ready), time.perf_counter()
    engine.clock.start()
    try:
        try:
            step(planned)
        finally:
            if commits := engine.ready[before:]:
                engine.account(commits, start)
    except BaseException as error:
        _undo(engine)
        if engine.strict or not isinstance(error, Exception):
            raise
        failure = Failure.of(error)
        if len(engine.ready) == before:
            return failure
        _undraft(engine.scheduler.running, failure)  # only drafters fail after commits
    return None


def _undo(engine: Stepping) -> None:
    """Restore all sequences to before the step; the drafter starts over with them."""
    for seq in engine.scheduler.waiting:
        engine.cache.free(seq.seq_id)  # it may have been admitted in part
    for seq in engine.scheduler.running:
        engine.cache.commit(seq.seq_id, seq.tokens, seq.cached)
    for seq in engine.scheduler.running:
        engine.forget(seq.seq_id)


def _undraft(seqs: Sequence[SequenceState], failure: Failure) -> None:
    """Drafting failed for these: they go on without."""
    log.error("drafting failed: %s; %d requests go on without drafts", failure, len(seqs))
    for seq in seqs:
        seq.drafts = False


def _recover(
    engine: Stepping, trial: Callable[[Planner], Failure | None], failure: Failure
) -> None:
    """After a failed step: everything that can be committed is ``engine.ready``. Raises
    EngineLostError after dropping all sequences."""
    log.warning("a step failed and was undone: %s; it is tried again", failure)
    if engine.target.device.type == "cuda":
        with suppress(Exception):  # the device may be lost
            torch.cuda.empty_cache()  # fragmentation may be the cause
    again = trial(_planner(engine, engine.choices))
    if again is None:
        return
    drafted = [seq for seq in engine.scheduler.running if seq.drafts]
    for seq in drafted:
        seq.drafts = False
    plain = trial(_planner(engine, lambda seqs: [PLAIN] * len(seqs)))
    if plain is None:
        _undraft(drafted, again)
        return
    _one_by_one(engine, trial, plain)
    for seq in drafted:
        seq.drafts = True


def _one_by_one(engine: Stepping, trial: Trial, failure: Failure) -> None:
    """Step each sequence alone and end those that fail."""
    scheduler = engine.scheduler
    culprits: list[tuple[SequenceState, Failure]] = []
    went_on = False
    for seq in list(scheduler.running):
        if seq not in scheduler.running:
            continue  # preempted by an older one
        culprit = trial(partial(scheduler.alone, seq))
        if culprit is None:
            went_on = True
        else:
            culprits.append((seq, culprit))
    if not culprits and not went_on and scheduler.waiting:
        culprits.append((scheduler.waiting[0], failure))  # it fails when admitted
    if not went_on and not _runs(engine):
        log.critical("every forward fails, the engine is lost: %s", failure)
        for seq in [*scheduler.running, *scheduler.waiting]:
            engine.abort(seq.seq_id)
        raise EngineLostError(f"every forward fails ({failure.message})")
    engine.ready += [failed(seq, culprit) for seq, culprit in culprits]


def _runs(engine: Stepping) -> bool:
    """Whether the target still yields logits for a token, in a cache of its own."""
    target = engine.target
    try:
        cache = target.new_cache(1, 1)
        cache.admit(0, (0,))
        cache.reserve(0, 1)
        # The transfer waits for the device, so its errors are raised here.
        target(cache.batch_of([Span.of(0, 0, (0,))]), cache).logits.argmax(-1).tolist()
    except Exception:
        return False
    return True
