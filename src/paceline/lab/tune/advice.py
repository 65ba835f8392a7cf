"""The advice of the field, rule by rule, beside what was measured here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.drafters import DRAFTERS
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.search import MARGIN, PredictedSetting

_LONG = 4  # levels beyond which a draft is long
_COPIES = 0.3  # share of copied tokens from which output "copies its input"


@dataclass(frozen=True)
class Advice:
    """``holds``: whether the measured optimum agrees with the rule; None where it has no say."""

    rule: str
    measured: str
    holds: bool | None


def advise(outcome: TuningOutcome) -> list[Advice]:
    """All rules to which the outcome has something to say; none before anything was measured."""
    settings = sorted(outcome.settings, key=outcome.speedup_of, reverse=True)
    rules = (_size, _low, _high, _lookups, _trees) if settings else ()
    return [advice for rule in rules for advice in rule(outcome, settings)]


def _shown(outcome: TuningOutcome, *settings: PredictedSetting) -> str:
    """``ngram 1.20x, a/draft 0.95x``."""
    return ", ".join(f"{s.method.label} {outcome.speedup_of(s):.2f}x" for s in settings)


def _size(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    sized = next((s for s in settings if s.method.parameters), None)
    if sized is not None and outcome.parameters and outcome.target is not None:
        ratio = outcome.parameters / sized.method.parameters
        cost = sized.method.pass_ratio(outcome.target)
        yield Advice(
            "a draft model should be 10 to 20 times smaller than its target",
            f"{_shown(outcome, sized)}: {ratio:.1f} times smaller; a pass costs {cost:.2f} of a "
            "target step",
            (10 <= ratio <= 20) == (outcome.speedup_of(sized) >= MARGIN),
        )


def _low(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    rule = "acceptance below 0.4 is not worth drafting for"
    low = [s for s in settings if s.method.levels.acceptance < 0.4]
    paying = [setting for setting in low if outcome.speedup_of(setting) >= MARGIN]
    if low:
        yield Advice(rule, f"less have {_shown(outcome, *(paying or low))}", not paying)
    else:
        least = min((s.method for s in settings), key=lambda method: method.levels.acceptance)
        yield Advice(rule, f"the least is {least.levels.acceptance:.2f}, {least.label}", None)


def _high(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    method = next((s.method for s in settings if s.method.costs.longest > _LONG), None)
    if method is not None and outcome.target is not None:
        length, acceptance = method.best_length(outcome.target, 1).length, method.levels.acceptance
        yield Advice(
            "acceptance above 0.8: draft longer",
            f"{method.label}: acceptance {acceptance:.2f}; the best length is {length} of "
            f"{method.costs.longest} for one sequence",
            (acceptance > 0.8) == (length > _LONG),
        )


def _lookups(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    kinds = {kind for kind, record in DRAFTERS.items() if record.looks_up}
    lookup = next((s for s in settings if s.method.family in kinds), None)
    model = next((s for s in settings if s.method.family not in kinds), None)
    if lookup is not None:
        least = MARGIN if model is None else outcome.speedup_of(model)
        compared = _shown(outcome, *(s for s in (lookup, model) if s is not None))
        yield Advice(
            "output that copies its input: prompt lookup first",
            f"{outcome.copied:.0%} of the output ends a run of four tokens seen before; {compared}",
            (outcome.copied >= _COPIES) == (outcome.speedup_of(lookup) >= least),
        )


def _trees(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    for family in dict.fromkeys(s.method.family for s in settings):
        of_family = [s for s in settings if s.method.family == family]
        chain = next((s for s in of_family if s.method.shape == "chain"), None)
        tree = next((s for s in of_family if s.method.shape not in ("chain", "")), None)
        if chain is not None and tree is not None:
            yield Advice(
                "trees are accepted further than chains",
                f"{_shown(outcome, tree, chain)}; {tree.tokens_per_step:.2f} and "
                f"{chain.tokens_per_step:.2f} tokens a step",
                outcome.speedup_of(tree) >= outcome.speedup_of(chain),
            )
