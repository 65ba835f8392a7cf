"""Decoding for a test: straight on the engine, from any point of a text, at any draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, sequence
from paceline.engine.engine import Engine


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
    seqs = [
        sequence(
            start.tokens, replace(seq_params, draft_length=length), prompt_length=len(start.prompt)
        )
        for start, seq_params in zip(starts, each_params, strict=True)
    ]
    with Drive(engine, seqs) as drive:
        for _ in drive:
            for seq in list(drive.running.values()):
                if enough is not None and sum(count for _, count in seq.arrivals) >= enough:
                    drive.drop(seq.seq_id)
    ends = [None if enough is None else len(start.output) + enough for start in starts]
    return [
        DecodedOutput(
            tuple(seq.tokens[seq.prompt_length :][:end]), seq.counts.drafted, seq.counts.accepted
        )
        for seq, end in zip(seqs, ends, strict=True)
    ]
