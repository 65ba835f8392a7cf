"""What was measured of drafters beside plain decoding, who of them is a finalist, and who wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from paceline.drafters import parse_draft
from paceline.engine.driver import StepSums
from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.runner import Heat, Length, TimedRun, merged
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import DrafterCandidate, hybrid_of
from paceline.settings.tuned import PassCosts

MARGIN = 1.02  # what must be gained before anything but plain decoding is taken
AUTO_MARGIN = 1.03  # by which a fixed length must beat the adaptive one, which follows the load
FEW = 3  # finalists at least: plain decoding, and the best drafter at both lengths
LEAST_ROUNDS = 2
_MOST_OF = 0.75  # of the rounds in which the faster of two must be so
CALM = 1.5  # slow by fast beyond which figures are worth little
SIZES = (8, 4, 2, 1)  # prompts of a round


@dataclass(frozen=True)
class DrafterTrial:
    """A candidate beside ``plain`` decoding, on the same prompts in turns, at an adaptive length.
    ``passes``: what passes of its drafters take, of those that run a model."""

    candidate: DrafterCandidate
    run: TimedRun
    plain: TimedRun
    passes: dict[str, PassCosts]

    @property
    def speedup(self) -> float:
        return self.run.rate / self.plain.rate

    @property
    def gain(self) -> float:
        """The speedup, as far as tokens a step explain it: one without accepted drafts is noise."""
        return min(self.speedup, self.run.tokens_per_step)

    @property
    def length(self) -> int:
        """Levels of a mean draft."""
        counts = self.run.counts
        return max(1, round(counts.levels / counts.reached_at[0])) if counts.drafted else 1

    @property
    def step_seconds(self) -> float:
        """Of a mean step in which nobody read a prompt."""
        return self.run.decoding.whole / max(1, self.run.decoding.steps)

    @property
    def draft_seconds(self) -> float:
        return self.run.decoding.seconds["draft"] / max(1, self.run.decoding.steps)


@dataclass(frozen=True)
class Finalist:
    """A drafter at a ``length``, fixed or "auto". ``trials``: of it, or of its members.
    ``default``: what commands take unasked."""

    label: str
    spec: str
    length: Length
    trials: tuple[DrafterTrial, ...] = ()
    default: bool = False

    @property
    def name(self) -> str:
        return PLAIN if self.spec == "none" else f"{self.label}, length {self.length}"

    @property
    def key(self) -> str:
        """In the record of heats: labels may be the same."""
        return PLAIN if self.spec == "none" else f"{self.spec}, length {self.length}"


def choose(
    trials: Sequence[DrafterTrial], default: DrafterCandidate | None = None
) -> list[Finalist]:
    """Plain decoding; the ``default`` draft, adapting; the best two families, at their mean length
    and adapting, first those that gain and look text up; a hybrid of the best drafter that looks
    text up and the best that runs a model, if both gain anything."""
    best: dict[str, DrafterTrial] = {}
    for trial in sorted(trials, key=lambda trial: (-trial.gain, -trial.speedup)):
        best.setdefault(trial.candidate.family, trial)

    def adapting(one: DrafterCandidate, *members: DrafterTrial) -> Finalist:
        return Finalist(one.label, one.spec, "auto", members, one.default)

    finalists = [Finalist(PLAIN, "none", 0)]
    if default is not None:
        kinds = [member.kind for member in parse_draft(default.spec).members()]
        finalists.append(adapting(default, *(best[kind] for kind in kinds if kind in best)))
    first_two = list(best.values())[:2]
    for trial in sorted(first_two, key=lambda t: (t.gain <= 1, bool(t.passes))):
        one = trial.candidate
        finalists += [Finalist(one.label, one.spec, trial.length, (trial,)), adapting(one, trial)]
    gaining = [trial for trial in best.values() if trial.gain > 1]
    lookup = next((trial for trial in gaining if not trial.passes), None)
    model = next((trial for trial in gaining if trial.passes), None)
    if lookup and model:
        finalists.append(adapting(hybrid_of(lookup.candidate, model.candidate), lookup, model))
    first = {finalist.key: finalist for finalist in finalists[::-1]}
    return [finalist for finalist in finalists if first[finalist.key] is finalist]


def affordable(
    finalists: list[Finalist], request_seconds: float, options: TuneOptions, budget: Budget
) -> tuple[list[Finalist], int]:
    """The finalists confirmed, the first few at least, and prompts a round: two rounds must fit.
    ``request_seconds``: a plain request's part of the time."""
    few = min(len(finalists), FEW + any(finalist.default for finalist in finalists))
    concurrency, rounds = options.concurrency, min(LEAST_ROUNDS, options.rounds)
    sizes = [max(SIZES[0], concurrency), *(size for size in SIZES[1:] if size >= concurrency)]
    for many, size in product(dict.fromkeys((len(finalists), few)), sizes):
        if many * size * rounds * request_seconds <= budget.left:
            return finalists[:many], size
    return finalists[:few], sizes[-1]


@dataclass(frozen=True)
class Confirmation:
    """What a finalist took in all rounds: tokens a second by round (``rates``), and these by
    plain decoding's in the same round (``ratios``)."""

    finalist: Finalist
    run: TimedRun
    ratios: tuple[float, ...]
    rates: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Median, as the speedups are: one slow round moves none of them."""
        return median(self.rates) if self.rates else 0.0

    @property
    def speedup(self) -> float:
        return median(self.ratios) if self.ratios else 0.0


def confirmations(finalists: Sequence[Finalist], record: list[Heat]) -> list[Confirmation]:
    """Of each finalist, plain decoding being the first of them."""
    plain, results = [heat.outcomes[PLAIN].rate for heat in record], []
    for finalist in finalists:
        runs = [heat.outcomes[finalist.key] for heat in record]
        rates = tuple(run.rate for run in runs)
        ratios = tuple(a / b for a, b in zip(rates, plain, strict=True))
        results.append(Confirmation(finalist, merged(runs), ratios, rates))
    return results


def unrest_between(plain: Sequence[StepSums]) -> float:
    """Plain decoding's steps in the slowest run, by those in the fastest."""
    rates = [steps.rate for steps in plain if steps.rate]
    return max(rates) / min(rates) if rates else 1.0


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest by median that drafted; plain decoding unless it is beaten clearly and in most
    rounds. Preferred if hardly slower: the default draft, which has what other text may need, also
    where rounds disagree on which of both is faster; then that drafter's adaptive length."""
    plain = results[0]
    drafted = [result for result in results[1:] if result.run.counts.drafted]
    drafting = [result for result in drafted if _mostly_faster(result, plain)]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain

    def is_near(result: Confirmation) -> bool:
        unsure = result.finalist.default and not _mostly_faster(best, result)
        return unsure or result.speedup * AUTO_MARGIN >= best.speedup

    def preference(result: Confirmation) -> tuple[bool, bool, float]:
        finalist = result.finalist
        adapts = (finalist.spec, finalist.length) == (best.finalist.spec, "auto")
        return finalist.default, adapts, result.speedup

    return max(filter(is_near, drafting), key=preference)


def _mostly_faster(one: Confirmation, other: Confirmation) -> bool:
    wins = [a > b for a, b in zip(one.ratios, other.ratios, strict=False)]
    return sum(wins) >= _MOST_OF * len(wins)
