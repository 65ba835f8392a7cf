"""The drafters that ``tune`` tries, their trials in turns with plain decoding, and the choice of
finalists and of a winner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.drafters import DRAFTERS, DraftSpec, parse_draft
from paceline.errors import ConfigError
from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.runner import JobResult, TimedRun, merged
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, MADE_FOR, has_assets

MARGIN = 1.02  # speedup from which a draft is chosen over plain decoding
DEFAULT_MARGIN = 1.03  # another draft must be faster than the default one by this factor
MIN_ROUNDS = 2
_MIN_WINS = 0.75  # share of the rounds in which the faster of two must be faster
ROUND_SIZES = (8, 4, 2, 1)  # prompts per round


@dataclass(frozen=True)
class DrafterCandidate:
    """A draft to try. ``family``: its kind of drafter. ``requested``: the user named it, so it must
    load. ``default``: commands use it if no draft is named, so it is always a finalist."""

    label: str
    spec: str
    family: str
    requested: bool = False
    default: bool = False


PLAIN_CANDIDATE = DrafterCandidate(PLAIN, "none", "none")


def at_hand(model: str, drafts: Sequence[str], only: bool = False) -> list[DrafterCandidate]:
    """The candidates for ``model``: the user's ``drafts`` (if none, the built-in ones for this
    target) with their variants, then drafters that need no training, the cheapest first, and the
    default draft. ``only`` leaves just the user's. Raises ConfigError on an invalid spec."""
    requested = [variant for text in drafts for variant in variants(text, requested=True)]
    if only:
        if not requested:
            raise ConfigError(
                "--draft-only tries only the drafters of --draft, and there is none; add one"
            )
        return _unique(requested)
    texts: list[str] = []
    if not drafts and model in MADE_FOR:
        # Of the kinds that use the same weights, the others are variants of the first.
        records = reversed([*DRAFTERS.values()])
        first = {record.weights: record.kind for record in records if record.weights}
        built_in = [(kind, f"{model}-{weights}") for weights, kind in first.items()]
        texts += [f"{kind}:{name}" for kind, name in built_in if has_assets(name)]
    tried = ("always",) if model == EMBEDDED else ("always", "real")
    texts += [kind for kind in DRAFTERS if DRAFTERS[kind].tune_tries in tried]
    candidates = [*requested, *(variant for text in texts for variant in variants(text))]
    return [*_unique(sorted(candidates, key=_cost_order)), default_candidate(DEFAULT_DRAFT)]


def _cost_order(candidate: DrafterCandidate) -> tuple[bool, bool]:
    """Sort key: the user's drafts, then lookup drafters, then drafters that run a model."""
    record, optional = DRAFTERS[candidate.family], not candidate.requested
    return optional and not record.is_lookup, optional and record.tune_tries != "always"


def default_candidate(text: str) -> DrafterCandidate:
    """The default draft: "auto" or, once the target is loaded, the drafters that it stands for."""
    spec = parse_draft(text)
    label = " + ".join(map(_label, spec.members())) + " (default)"
    return DrafterCandidate(label, str(spec), spec.kind, default=True)


def variants(text: str, requested: bool = False) -> list[DrafterCandidate]:
    """A draft with the tree shapes and weight precisions that are tried for it. Precisions are
    never ``requested``, so one that is not available is left out without an error."""
    spec = parse_draft(text)
    label = _label(spec)
    tried = [
        (label if variant is spec else f"{label} {shape}", variant, requested)
        for shape, variant in spec.variants().items()
    ]
    for name, variant in spec.precisions().items():
        same_weights = variant.argument() == spec.argument()
        tried.append((f"{label} {name}" if same_weights else _label(variant), variant, False))
    return [DrafterCandidate(name, str(v), v.kind, named) for name, v, named in tried]


def _label(spec: DraftSpec) -> str:
    """The last part of the spec's path, or kind and argument; with the changed options."""
    argument = (spec.argument() or "").rstrip("/")
    _, slash, name = argument.rpartition("/")
    if not slash:
        name = f"{spec.kind}:{argument}" if argument else spec.kind
    return " ".join([name, *(f"{key}={value}" for key, value in spec.changed_options().items())])


def _unique(candidates: Iterable[DrafterCandidate]) -> list[DrafterCandidate]:
    return list({candidate.spec: candidate for candidate in candidates}.values())


@dataclass(frozen=True)
class DrafterTrial:
    """A candidate, measured in turns with ``plain`` decoding on the same prompts."""

    candidate: DrafterCandidate
    run: TimedRun
    plain: TimedRun

    @property
    def speedup(self) -> float:
        return self.run.rate / self.plain.rate

    @property
    def gain(self) -> float:
        """The speedup, but at most the tokens per step: a larger one is noise."""
        return min(self.speedup, self.run.tokens_per_step)

    @property
    def step_seconds(self) -> float:
        """Mean time of a step without prefill."""
        return self.run.decoding.whole / max(1, self.run.decoding.steps)

    @property
    def draft_seconds(self) -> float:
        return self.run.decoding.seconds["draft"] / max(1, self.run.decoding.steps)


def choose(
    trials: Sequence[DrafterTrial], default: DrafterCandidate | None = None
) -> list[DrafterCandidate]:
    """The finalists: plain decoding, the ``default`` draft, and the best drafter of each of the
    best two families."""
    best: dict[str, DrafterTrial] = {}
    for trial in sorted(trials, key=lambda trial: (-trial.gain, -trial.speedup)):
        best.setdefault(trial.candidate.family, trial)
    finalists = [PLAIN_CANDIDATE, *([default] if default else [])]
    finalists += [trial.candidate for trial in [*best.values()][:2]]
    return _unique(reversed(finalists))[::-1]


def round_size(finalists: int, request_seconds: float, options: TuneOptions, budget: Budget) -> int:
    """The prompts per round, so that two rounds fit into the budget. ``request_seconds``: wall time
    per plain request."""
    sizes = [max(size, options.concurrency) for size in ROUND_SIZES]
    rounds = min(MIN_ROUNDS, options.rounds)
    seconds = finalists * rounds * request_seconds
    return next((size for size in sizes if size * seconds <= budget.left), sizes[-1])


@dataclass(frozen=True)
class Confirmation:
    """A finalist's tokens per second by round (``rates``), and by plain decoding's (``ratios``)."""

    finalist: DrafterCandidate
    run: TimedRun
    ratios: tuple[float, ...]
    rates: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Tokens per second. A median, like the speedup: one slow round changes it little."""
        return median(self.rates) if self.rates else 0.0

    @property
    def speedup(self) -> float:
        return median(self.ratios) if self.ratios else 0.0


def confirmations(
    finalists: Sequence[DrafterCandidate], record: list[JobResult]
) -> list[Confirmation]:
    """The result of each finalist, in their order: plain decoding is the first."""
    plain, results = [job_result.runs[PLAIN_CANDIDATE.spec].rate for job_result in record], []
    for finalist in finalists:
        runs = [job_result.runs[finalist.spec] for job_result in record]
        rates = tuple(run.rate for run in runs)
        ratios = tuple(a / b for a, b in zip(rates, plain, strict=True))
        results.append(Confirmation(finalist, merged(runs), ratios, rates))
    return results


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest drafter by median speedup, or plain decoding unless a drafter is faster by
    ``MARGIN`` and in most rounds. The default draft, whose several drafters suit other text too,
    is preferred if it is hardly slower, or if the rounds disagree on which of the two is faster;
    over plain decoding, too."""
    plain = results[0]
    drafting = [
        result
        for result in results[1:]
        if result.run.counts.drafted and (result.finalist.default or _mostly_faster(result, plain))
    ]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain
    default = next((result for result in drafting if result.finalist.default), best)
    is_near = default.speedup * DEFAULT_MARGIN >= best.speedup
    return default if is_near or not _mostly_faster(best, default) else best


def _mostly_faster(left: Confirmation, right: Confirmation) -> bool:
    wins = [a > b for a, b in zip(left.ratios, right.ratios, strict=False)]
    return sum(wins) >= _MIN_WINS * len(wins)
