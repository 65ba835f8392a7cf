"""Decoding for a test: straight on the engine, from any point of a text, at any draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.engine.driver import Drive, sequence
from paceline.engine.engine import Engine

String = tuple[int, ...]  # of token ids


@dataclass(frozen=True)
class Start:
    """Where decoding begins: a prompt, its ``name`` for people, and ``output`` that is given."""

    prompt: String
    params: SamplingParams
    output: String = ()
    name: str = ""

    @property
    def tokens(self) -> String:
        return self.prompt + self.output


def decode(
    engine: Engine, starts: Sequence[Start], length: int | None = None, enough: int | None = None
) -> list[tuple[String, DraftCounts]]:
    """Outputs of all starts, with the given tokens, and what was drafted: in one continuous batch.

    No end token stops them: each has ``max_tokens`` of output, or ``enough`` tokens beyond what
    was given, if that comes first (drafts are then as long at the end as at the beginning).
    ``length`` fixes the draft length; None leaves it to the engine's own controller.
    Raises StandstillError, and whatever the engine raises.
    """
    seqs = [
        sequence(s.tokens, replace(s.params, draft_length=length), prompt_length=len(s.prompt))
        for s in starts
    ]
    with Drive(engine, seqs) as drive:
        for _ in drive:
            for seq in list(drive.running.values()):
                if enough is not None and sum(count for _, count in seq.arrivals) >= enough:
                    drive.drop(seq.seq_id)
    ends = [None if enough is None else len(start.output) + enough for start in starts]
    outputs = (tuple(seq.tokens[seq.prompt_length :]) for seq in seqs)
    return [(out[:end], seq.counts) for out, end, seq in zip(outputs, ends, seqs, strict=True)]
