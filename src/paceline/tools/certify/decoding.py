"""Decoding for a test: straight on the engine, from any point of a text, at any draft length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.engine import Engine

# Away from the ids of LLM's own requests.
_FIRST_ID = 1 << 40


@dataclass(frozen=True)
class Start:
    """Where decoding begins: a prompt, and output that is given."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.output


@dataclass(frozen=True)
class DecodedOutput:
    """``tokens`` of the output, the given ones included; what was drafted and accepted of them."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int


class StandstillError(Exception):
    """The engine has work but commits nothing: a bug in the drafter or the rule."""


def decode(
    engine: Engine,
    starts: Sequence[Start],
    params: SamplingParams | Sequence[SamplingParams],
    length: int | None = None,
    enough: int | None = None,
) -> list[DecodedOutput]:
    """Outputs of all starts, decoded in one continuous batch.

    No end token stops them: each has ``max_tokens`` of output, or ``enough`` tokens beyond what
    was given, if that comes first (drafts are then as long at the end as at the beginning).
    ``length`` fixes the draft length; None leaves it to the engine's own controller.
    Raises StandstillError, and whatever the engine raises.
    """
    each_params = [params] * len(starts) if isinstance(params, SamplingParams) else list(params)
    ids = itertools.count(_FIRST_ID)
    seqs = [
        SequenceState(
            next(ids),
            list(start.tokens),
            len(start.prompt),
            replace(own_params, draft_length=length),
        )
        for start, own_params in zip(starts, each_params, strict=True)
    ]
    unfinished = {seq.seq_id: seq for seq in seqs}
    try:
        for seq in seqs:
            engine.add(seq)
        while unfinished:
            _step(engine, unfinished, enough)
    finally:
        for seq_id in unfinished:
            engine.abort(seq_id)
    ends = [None if enough is None else len(start.output) + enough for start in starts]
    return [
        DecodedOutput(
            tuple(seq.tokens[seq.prompt_length :][:end]), seq.counts.drafted, seq.counts.accepted
        )
        for seq, end in zip(seqs, ends, strict=True)
    ]


def _step(engine: Engine, unfinished: dict[int, SequenceState], enough: int | None) -> None:
    commits = engine.step()
    if not any(commit.tokens or commit.scheduled for commit in commits):
        raise StandstillError("a step committed no token although sequences were waiting for one")
    for commit in commits:
        seq = unfinished.get(commit.seq_id)
        if seq is None:
            continue
        if commit.finish_reason is not None:
            del unfinished[commit.seq_id]
        elif enough is not None and sum(count for _, count in seq.arrivals) >= enough:
            engine.abort(commit.seq_id)
            del unfinished[commit.seq_id]
