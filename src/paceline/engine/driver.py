"""Runs an engine over requests given as token ids and records every step. Everything that measures
or compares decoding uses this loop. (``LLM`` and the server let callers share steps, and handle
texts, deadlines and cancelling.)"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.sequence import SEQUENCE_IDS, SequenceState, Sums
from paceline.core.sequence import DraftCounts as DraftCounts
from paceline.engine.clock import PHASES
from paceline.engine.engine import Engine
from paceline.errors import PacelineError


class StandstillError(Exception):
    """The engine has work but commits nothing: a bug in the drafter or the acceptance rule."""


def sequence(
    tokens: Sequence[int],
    params: SamplingParams,
    stop_ids: frozenset[int] = frozenset(),
    prompt_length: int | None = None,
) -> SequenceState:
    """Make a new request. Tokens after ``prompt_length`` (None: all are prompt) count as output."""
    length = len(tokens) if prompt_length is None else prompt_length
    return SequenceState(next(SEQUENCE_IDS), list(tokens), length, params, stop_ids)


@dataclass
class DrivenStep:
    """One recorded step. ``seconds``: by phase."""

    commits: Sequence[Commit]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        """Whether all sequences of the step decode and none is in prefill."""
        return bool(self.commits) and all(c.tokens and c.scheduled == 1 for c in self.commits)


@dataclass(frozen=True)
class StepTotals(Sums):
    """Sums over steps: sequences, tokens gained, drafted and accepted, seconds by phase.
    ``context``: cached tokens of all sequences at the start of each step. ``DraftCounts`` have the
    acceptance by draft position."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    context: int = 0

    @classmethod
    def of(cls, steps: Iterable[DrivenStep]) -> StepTotals:
        listed = list(steps)
        commits = [commit for step in listed for commit in step.commits]
        return cls(
            steps=len(listed),
            sequences=len(commits),
            tokens=sum(len(commit.tokens) for commit in commits),
            drafted=sum(commit.drafted for commit in commits),
            accepted=sum(len(commit.path) for commit in commits),
            seconds={
                phase: sum(step.seconds.get(phase, 0.0) for step in listed) for phase in PHASES
            },
            context=sum(commit.position for commit in commits),
        )

    @property
    def whole(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.whole if self.whole else 0.0

    def mean_seconds(self, *phases: str) -> float:
        """Mean seconds of these phases in a step."""
        return sum(self.seconds[phase] for phase in phases) / self.steps


class Drive:
    """A closed loop of an engine over the requests ``seqs``.

    Each of ``clients`` has one request running and sends its next one when that ends; None sends
    all requests at once. The clock ``seconds`` runs only while the drive works, so that several
    drives may take turns.

    with Drive(engine, seqs, clients=4) as drive:
        for step in drive:
            ...

    At the end of the block unfinished requests are dropped, and the engine can be used again."""

    def __init__(
        self, engine: Engine, seqs: Iterable[SequenceState], clients: int | None = None
    ) -> None:
        self.engine = engine
        self.seqs = list(seqs)
        self.clients = len(self.seqs) if clients is None else clients
        self.running: dict[int, SequenceState] = {}
        self.steps: list[DrivenStep] = []
        self.seconds = 0.0
        self._waiting = deque(self.seqs)

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[DrivenStep]:
        while self.busy:
            yield self.step()

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(seq.generated for seq in self.seqs)

    @property
    def counts(self) -> DraftCounts:
        """Draft counts of all requests together."""
        return sum((seq.counts for seq in self.seqs), DraftCounts())

    def run(self) -> Drive:
        """Run to the end and return the drive; ``seconds`` is then the time of the whole run.
        Raises PacelineError if a request fails."""
        start = time.perf_counter() - self.seconds
        with self:
            for step in self:
                failed = next((c.error for c in step.commits if c.error is not None), None)
                if failed is not None:
                    raise PacelineError(f"nothing can be measured, as a request failed: {failed}")
        self.seconds = time.perf_counter() - start
        return self

    def step(self) -> DrivenStep:
        """Send the requests that are due and run a step. Raises StandstillError, PacelineError."""
        start = time.perf_counter() - self.seconds
        while self._waiting and len(self.running) < self.clients:
            seq = self._waiting.popleft()
            self.running[seq.seq_id] = seq
            self.engine.add(seq)
        before = dict(self.engine.clock.seconds)
        commits = self.engine.step()
        self.seconds = time.perf_counter() - start
        seconds = {name: total - before[name] for name, total in self.engine.clock.seconds.items()}
        if not any(c.tokens or c.scheduled or c.finish_reason for c in commits):
            raise StandstillError(
                "a step committed no token although sequences were waiting for one"
            )
        for commit in commits:
            if commit.finish_reason is not None:
                self.running.pop(commit.seq_id, None)
        self.steps.append(DrivenStep(commits, seconds))
        return self.steps[-1]

    def close(self) -> None:
        """Drop unfinished and unsent requests."""
        self._waiting.clear()
        for seq_id in list(self.running):
            self.drop(seq_id)

    def drop(self, seq_id: int) -> None:
        """End a request early."""
        self.engine.abort(seq_id)
        self.running.pop(seq_id, None)
