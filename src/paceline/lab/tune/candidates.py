"""The drafters that ``tune`` tries, their trials in turns with plain decoding, and the choice of
finalists and of a winner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from paceline.drafters import DRAFTERS, DraftSpec, Hybrid, parse_draft
from paceline.errors import ConfigError
from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.runner import JobResult, Length, TimedRun, merged
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, MADE_FOR, has_assets
from paceline.settings.tuned import PassCosts

MARGIN = 1.02  # speedup from which a draft is chosen over plain decoding
# A fixed length must be faster than the adaptive one, which follows the load, by this factor.
AUTO_MARGIN = 1.03
MIN_FINALISTS = 3  # plain decoding, and the best drafter at a fixed and at the adaptive length
MIN_ROUNDS = 2
_MIN_WINS = 0.75  # share of the rounds in which the faster of two must be faster
MAX_TIMING_SPREAD = 1.5  # slowest by fastest plain step: beyond it the figures are not reliable
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
    """A candidate with adaptive draft length, measured in turns with ``plain`` decoding on the same
    prompts. ``passes``: costs of a forward pass of each member drafter that runs a model."""

    candidate: DrafterCandidate
    run: TimedRun
    plain: TimedRun
    passes: dict[str, PassCosts]

    @property
    def speedup(self) -> float:
        return self.run.rate / self.plain.rate

    @property
    def gain(self) -> float:
        """The speedup, but at most the tokens per step: a larger one is noise."""
        return min(self.speedup, self.run.tokens_per_step)

    @property
    def length(self) -> int:
        """Mean draft depth, rounded."""
        counts = self.run.counts
        return max(1, round(counts.levels / counts.reached_at[0])) if counts.drafted else 1

    @property
    def step_seconds(self) -> float:
        """Mean time of a step without prefill."""
        return self.run.decoding.whole / max(1, self.run.decoding.steps)

    @property
    def draft_seconds(self) -> float:
        return self.run.decoding.seconds["draft"] / max(1, self.run.decoding.steps)


@dataclass(frozen=True)
class Finalist:
    """A drafter with a draft ``length``, fixed or "auto". ``trials``: its own, or those of its
    members. ``default``: commands use it if no draft is named."""

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
        """The engine's name in job results. Unlike ``name`` it is unique: labels may be equal."""
        return PLAIN if self.spec == "none" else f"{self.spec}, length {self.length}"


def choose(
    trials: Sequence[DrafterTrial], default: DrafterCandidate | None = None
) -> list[Finalist]:
    """The finalists, in this order and without duplicates:

    1. plain decoding;
    2. the ``default`` draft with adaptive length;
    3. the best drafter of each of the best two families, with its mean length and with adaptive
       length. Families that gain come first, and among them lookup drafters;
    4. a hybrid of the best lookup drafter and the best drafter that runs a model, if both gain."""
    best: dict[str, DrafterTrial] = {}
    for trial in sorted(trials, key=lambda trial: (-trial.gain, -trial.speedup)):
        best.setdefault(trial.candidate.family, trial)

    def adaptive(candidate: DrafterCandidate, *members: DrafterTrial) -> Finalist:
        return Finalist(candidate.label, candidate.spec, "auto", members, candidate.default)

    finalists = [Finalist(PLAIN, "none", 0)]
    if default is not None:
        kinds = [member.kind for member in parse_draft(default.spec).members()]
        finalists.append(adaptive(default, *(best[kind] for kind in kinds if kind in best)))
    first_two = list(best.values())[:2]
    for trial in sorted(first_two, key=lambda t: (t.gain <= 1, bool(t.passes))):
        label, spec = trial.candidate.label, trial.candidate.spec
        finalists.append(Finalist(label, spec, trial.length, (trial,)))
        finalists.append(adaptive(trial.candidate, trial))
    gaining = [trial for trial in best.values() if trial.gain > 1]
    lookup = next((trial for trial in gaining if not trial.passes), None)
    model = next((trial for trial in gaining if trial.passes), None)
    if lookup and model:
        one, other = lookup.candidate, model.candidate
        label, spec = f"{one.label} + {other.label}", f"{Hybrid.kind}:{one.spec}+{other.spec}"
        finalists.append(Finalist(label, spec, "auto", (lookup, model)))
    first = {finalist.key: finalist for finalist in finalists[::-1]}
    return [finalist for finalist in finalists if first[finalist.key] is finalist]


def affordable(
    finalists: list[Finalist], request_seconds: float, options: TuneOptions, budget: Budget
) -> tuple[list[Finalist], int]:
    """The finalists that can be confirmed (at least the first few), and the prompts per round, so
    that two rounds fit into the budget. ``request_seconds``: wall time per plain request."""
    few = min(len(finalists), MIN_FINALISTS + any(finalist.default for finalist in finalists))
    concurrency, rounds = options.concurrency, min(MIN_ROUNDS, options.rounds)
    sizes = [max(ROUND_SIZES[0], concurrency)]
    sizes += [size for size in ROUND_SIZES[1:] if size >= concurrency]
    for count, size in product(dict.fromkeys((len(finalists), few)), sizes):
        if count * size * rounds * request_seconds <= budget.left:
            return finalists[:count], size
    return finalists[:few], sizes[-1]


@dataclass(frozen=True)
class Confirmation:
    """A finalist's tokens per second by round (``rates``), and by plain decoding's (``ratios``)."""

    finalist: Finalist
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


def confirmations(finalists: Sequence[Finalist], record: list[JobResult]) -> list[Confirmation]:
    """The result of each finalist, in their order: plain decoding is the first."""
    plain, results = [job_result.runs[PLAIN].rate for job_result in record], []
    for finalist in finalists:
        runs = [job_result.runs[finalist.key] for job_result in record]
        rates = tuple(run.rate for run in runs)
        ratios = tuple(a / b for a, b in zip(rates, plain, strict=True))
        results.append(Confirmation(finalist, merged(runs), ratios, rates))
    return results


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest drafter by median speedup, or plain decoding unless a drafter is faster by
    ``MARGIN`` and in most rounds. If they are hardly slower than the fastest, these are preferred:
    the default draft, whose several drafters suit other text too (also if the rounds disagree on
    which of the two is faster), then the fastest drafter with adaptive length."""
    plain = results[0]
    drafted = [result for result in results[1:] if result.run.counts.drafted]
    drafting = [result for result in drafted if _mostly_faster(result, plain)]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain

    def is_near(result: Confirmation) -> bool:
        undecided = result.finalist.default and not _mostly_faster(best, result)
        return undecided or result.speedup * AUTO_MARGIN >= best.speedup

    def preference(result: Confirmation) -> tuple[bool, bool, float]:
        finalist = result.finalist
        adaptive = (finalist.spec, finalist.length) == (best.finalist.spec, "auto")
        return finalist.default, adaptive, result.speedup

    return max(filter(is_near, drafting), key=preference)


def _mostly_faster(left: Confirmation, right: Confirmation) -> bool:
    wins = [a > b for a, b in zip(left.ratios, right.ratios, strict=False)]
    return sum(wins) >= _MIN_WINS * len(wins)
