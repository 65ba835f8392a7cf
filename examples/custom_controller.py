"""A controller of one's own: two tokens more after a draft that held, one less after another.

So does transformers' assisted generation (the schedule "heuristic").
"""

from collections.abc import Sequence

from paceline import LLM, SamplingParams
from paceline.control.controller import Controller
from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState


class Heuristic(Controller):
    """Draft lengths from 1 to ``longest``, one for each sequence; each begins at ``first``."""

    def __init__(self, first: int = 5, longest: int = 16) -> None:
        self.first, self.longest = first, longest
        self._lengths: dict[int, int] = {}

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        return [self._lengths.get(seq.seq_id, self.first) for seq in seqs]

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        for commit in commits:
            if commit.drafted:
                length = self._lengths.get(commit.seq_id, self.first)
                length += 2 if len(commit.path) == commit.levels else -1
                self._lengths[commit.seq_id] = max(1, min(self.longest, length))

    def forget(self, seq_id: int) -> None:
        self._lengths.pop(seq_id, None)


if __name__ == "__main__":
    llm = LLM("paceline/tiny", draft="paceline/tiny-draft", controller=Heuristic())
    (story,) = llm.generate("Once upon a time", SamplingParams(max_tokens=60))
    print(story.text)
    stats = story.stats
    print(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens were accepted")
