"""Real decoding of the best settings beside plain decoding, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.control.cost import predicted_by_measured
from paceline.core.params import SamplingParams
from paceline.lab.budget import Budget
from paceline.lab.tune.decode import Run, decode
from paceline.lab.tune.search import MARGIN, MeasuredMethod
from paceline.llm import LLM

AUTO_MARGIN = 1.03  # by which a fixed length must beat the adaptive one, which follows the load
PLAIN = "none"


@dataclass(frozen=True)
class Finalist:
    """A drafter at a ``length``, fixed or "auto", which is then at most ``max_length``.

    ``predicted``: speed by plain decoding's; of the adaptive length and of a hybrid that of the
    best fixed length and member, which they should reach; None where none was measured.
    ``methods``: the measured drafters.
    """

    label: str
    spec: str
    family: str
    length: int | str
    max_length: int
    batch: int
    predicted: float | None = 1.0
    methods: tuple[MeasuredMethod, ...] = ()
    default: bool = False  # what commands take unasked

    @property
    def name(self) -> str:
        if self.spec == PLAIN:
            return "plain"
        return f"{self.label}, length {self.length}"


@dataclass
class Confirmation:
    """What a finalist took in every round; a ratio is its rate by plain's in that round."""

    finalist: Finalist
    tokens: int = 0
    seconds: float = 0.0
    target_steps: int = 0
    drafted: int = 0
    ratios: list[float] = field(default_factory=list)
    decoded: int = 0  # tokens of steps that read no prompt, and their seconds
    decoding_seconds: float = 0.0

    def add(self, run: Run, ratio: float) -> None:
        """A round that all have run in."""
        self.tokens += run.tokens
        self.seconds += run.seconds
        self.target_steps += run.target_steps
        self.drafted += run.drafted
        self.decoded += sum(step.tokens for step in run.steps)
        self.decoding_seconds += sum(step.seconds for step in run.steps)
        self.ratios.append(ratio)

    @property
    def rate(self) -> float:
        """Tokens per second over all rounds."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decoding_rate(self) -> float:
        """Tokens per second once the prompts are read, which is what the model predicts."""
        return self.decoded / self.decoding_seconds if self.decoding_seconds else 0.0

    def predicted_by_measured(self, plain_rate: float) -> float | None:
        """Once the prompts are read; ``plain_rate`` is plain decoding's then."""
        if self.finalist.predicted is None:
            return None
        measured = self.decoding_rate / plain_rate if plain_rate else 0.0
        return predicted_by_measured(self.finalist.predicted, measured)

    @property
    def speedup(self) -> float:
        return median(self.ratios) if self.ratios else 0.0

    @property
    def ran(self) -> bool:
        """Whether it was what its name says: not plain decoding for want of drafts."""
        return self.finalist.spec == PLAIN or self.drafted > 0 or not self.ratios

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.target_steps if self.target_steps else 0.0


@dataclass(frozen=True)
class Rounds:
    """``prompts`` of every round. Where rounds ``repeat`` prompts, everyone begins anew in each:
    some drafters remember what they have seen."""

    prompts: list[list[list[int]]]
    repeat: bool
    params: SamplingParams
    concurrency: int

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        count: int,
        params: SamplingParams,
        concurrency: int,
        size: int = 8,
    ) -> Rounds:
        """``count`` rounds of as many prompts as are decoded at once, but of ``size`` at least."""
        size = min(max(size, concurrency), max(concurrency, len(prompts)))
        places = range(count * size)
        chosen = [prompts[number % len(prompts)] for number in places]
        slices = [chosen[n * size : (n + 1) * size] for n in range(count)]
        return cls(slices, len(prompts) < count * size, params, concurrency)


def confirm(
    llm: LLM,
    finalists: Sequence[Finalist],
    rounds: Rounds,
    results: list[Confirmation],
    advance: Callable[[str], None],
    budget: Budget | None = None,
) -> None:
    """Fill ``results``, one for each finalist, plain decoding being the first of them.

    They take turns, in an order that rotates. A round counts once all have run in it; what was
    measured until an interruption, or until no further round fits, stays. Rounds that the results
    have already are not run again.
    """
    assert finalists[0].spec == PLAIN
    budget = budget or Budget()
    if not results:
        results.extend(Confirmation(finalist) for finalist in finalists)
    engines: dict[int, LLM] = {}
    for number in range(len(results[0].ratios), len(rounds.prompts)):
        if not budget.fits("round"):
            break
        prompts = rounds.prompts[number]
        runs: dict[int, Run] = {}
        with budget.piece("round"):
            for turn in range(len(finalists)):
                index = (number + turn) % len(finalists)
                advance(f"confirming: {finalists[index].name}")
                if index not in engines or rounds.repeat:
                    engines[index] = _engine(llm, finalists[index])
                    warm = [ids[: max(1, len(ids) // 2)] for ids in prompts[:1]]
                    decode(engines[index], warm, 1, SamplingParams(max_tokens=8))
                runs[index] = decode(engines[index], prompts, rounds.concurrency, rounds.params)
        for index, run in runs.items():
            results[index].add(run, run.rate / runs[0].rate)
    for engine in engines.values():
        engine.close()


def _engine(llm: LLM, finalist: Finalist) -> LLM:
    return llm.beside(
        finalist.spec,
        max_batch_size=finalist.batch,
        draft_length=finalist.length,
        max_draft_length=finalist.max_length,
        prefix_sharing=False,  # every round pays for its prompts
        seed=0,
    )


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest by median; plain decoding unless it is beaten clearly.

    The adaptive length is preferred where a fixed one of the same drafter is hardly faster, and the
    default draft where another is: it has what other text may need. A finalist that never drafted
    was plain decoding under another name, and cannot win.
    """
    plain = results[0]
    drafting = [result for result in results[1:] if result.drafted]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain
    for other in drafting:
        if other.finalist.default and other.speedup * AUTO_MARGIN >= best.speedup:
            return other
    for other in drafting:
        same = other.finalist.spec == best.finalist.spec
        if same and other.finalist.length == "auto":
            return other if other.speedup * AUTO_MARGIN >= best.speedup else best
    return best
