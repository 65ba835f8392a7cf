"""What answers the requests: our engine with any drafter, and other engines (served.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.engine.driver import Drive, StepSums, sequence
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runs import Ask, BenchEngine, TimedAnswer, TimedRun
from paceline.lab.bench.served import open_served
from paceline.llm import LLM


class Paceline(BenchEngine):
    """Our engine, driven by ``clients`` that each send their next request when one is answered.
    ``build`` gives the LLM, anew at every ``refresh`` if its drafter learns from requests."""

    def __init__(self, method: Method, build: Callable[[], LLM], clients: int) -> None:
        self.name, self.method = method.name, method
        self.llm = build()
        self._build = build if method.remembers else None
        self._clients = clients

    def refresh(self) -> None:
        if self._build is not None:
            self.llm = self._build()

    def close(self) -> None:
        self.llm.close()

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Raises PacelineError if a request fails or does not fit into the cache."""
        seqs = []
        for ask in asks:
            ends = frozenset[int]() if ask.params.ignore_eos else self.llm.end_tokens
            seqs.append(sequence(ask.prompt, ask.params, ends | {*ask.params.stop_token_ids}))
        drive = Drive(self.llm.engine, seqs, self._clients).run()
        answers = [
            TimedAnswer(
                tuple(seq.tokens[seq.prompt_length :]),
                tuple((moment - seq.queued, count) for moment, count in seq.arrivals),
            )
            for seq in drive.seqs
        ]
        decoding = StepSums.of(step for step in drive.steps if step.decodes)
        return TimedRun(answers, drive.seconds, drive.counts, decoding)


class Starter:
    """Makes engines around one loaded target. ``options`` go to ``LLM.beside``; without a prefix
    cache, so prompts are computed anew in every round."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self._llm = llm
        self._options = {"seed": 0, "prefix_sharing": False, **options}
        self.unequal: dict[str, dict[str, str]] = {}  # of other engines, see served.py

    def open(self, method: Method, clients: int) -> BenchEngine:
        """Raises what loading a drafter or asking another engine raises."""
        if method.url is not None:
            served = open_served(method.name, method.url, clients, self._llm)
            # What was seen of it at other numbers of clients still counts.
            served.different = self.unequal.setdefault(method.name, served.different)
            return served
        length = method.length if method.draft is not None else 0

        def build() -> LLM:
            return self._llm.beside(
                method.draft, draft_length=length, max_batch_size=clients, **self._options
            )

        return Paceline(method, build, clients)
