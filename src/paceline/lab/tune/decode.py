"""What tuning reads from decoding prompts: each step's seconds, and how its drafts fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.driver import Drive, DrivenStep, StepSums, sequence
from paceline.errors import PacelineError
from paceline.lab.budget import Budget
from paceline.llm import LLM


class ShareSpentError(PacelineError):
    """Decoding was stopped, for it had used up its share of the time."""


@dataclass(frozen=True)
class MeasuredStep:
    """One engine step that decoded only: ``nodes`` verified over ``batch`` sequences gained so
    many ``tokens``; the rest are seconds."""

    batch: int
    nodes: int
    tokens: int
    draft: float
    target: float
    other: float
    full: bool  # every sequence had room for the longest draft

    @property
    def seconds(self) -> float:
        return self.draft + self.target + self.other


@dataclass
class Run:
    """What a run took and yielded. ``seconds`` is wall time, prompts included. ``levels``: how the
    drafts of those fared that had room for the longest."""

    concurrency: int = 1
    steps: list[MeasuredStep] = field(default_factory=list)
    levels: StepSums = field(default_factory=StepSums)
    outputs: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    target_steps: int = 0  # summed over sequences
    drafted: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def decode(
    llm: LLM,
    prompts: Sequence[list[int]],
    concurrency: int,
    params: SamplingParams,
    longest: int = 0,
    budget: Budget | None = None,
) -> Run:
    """Decode all prompts, ``concurrency`` at a time, each up to its end or ``max_tokens``.

    ``longest``: levels of the drafts, of which acceptance is counted. Raises PacelineError if a
    request fails, ShareSpentError when the ``budget`` is spent before the end.
    """
    stops = frozenset[int]() if params.ignore_eos else llm.end_tokens
    drive = Drive(llm.engine, [sequence(ids, params, stops) for ids in prompts], concurrency)
    drive.run(partial(_in_time, budget or Budget()))
    seqs = {seq.seq_id: seq for seq in drive.seqs}
    steps, whole = [], []
    for step in drive.steps:
        free = [c for c in step.commits if _remaining(seqs[c.seq_id], c) > longest]
        going = [commit for commit in free if commit.tokens and commit.finish_reason is None]
        whole.append(DrivenStep(going, step.ended))
        if step.decodes:
            steps.append(_measured(step, len(free) == len(step.commits)))
    return Run(
        concurrency,
        steps,
        StepSums.of(whole),
        [seq.tokens[seq.prompt_length :] for seq in drive.seqs],
        drive.seconds,
        drive.counts.target_steps,
        drive.counts.drafted,
    )


def _in_time(budget: Budget) -> None:
    if budget.left <= 0:
        raise ShareSpentError("its share of the time is spent")


def _remaining(seq: SequenceState, commit: Commit) -> int:
    """Tokens that the request might still get when the step began."""
    generated = max(0, commit.position + commit.scheduled - seq.prompt_length)
    return seq.params.max_tokens - generated


def _measured(step: DrivenStep, full: bool) -> MeasuredStep:
    return MeasuredStep(
        batch=len(step.commits),
        nodes=sum(commit.drafted for commit in step.commits),
        tokens=sum(len(commit.tokens) for commit in step.commits),
        draft=step.seconds["draft"],
        target=step.seconds["target"],
        other=step.seconds["verify"] + step.seconds["other"],
        full=full,
    )
