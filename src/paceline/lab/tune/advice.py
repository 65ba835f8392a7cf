"""The advice of the field, rule by rule, beside what was measured here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.drafters import DRAFTERS
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.search import MARGIN, PredictedSetting, best_length, pass_ratio

SMALLER = (10.0, 20.0)  # times that a draft model should be smaller than its target
WORTH = 0.4  # acceptance below which drafting is said not to pay
LONGER = 0.8  # acceptance above which to draft longer
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
    gains = _Gains(outcome)
    settings = sorted(outcome.settings, key=lambda setting: -gains.of(setting))
    if not settings:
        return []
    return [
        *_size(outcome, settings, gains),
        _worth(settings, gains),
        *_longer(outcome, settings),
        *_copying(outcome, settings, gains),
        *_trees(settings, gains),
    ]


class _Gains:
    """Speed by plain decoding's; what was confirmed counts more than any prediction."""

    def __init__(self, outcome: TuningOutcome) -> None:
        self.outcome = outcome

    def of(self, setting: PredictedSetting) -> float:
        confirmed = self.outcome.confirmed(setting.method)
        return setting.speedup if confirmed is None else confirmed

    def pays(self, setting: PredictedSetting) -> bool:
        return self.of(setting) >= MARGIN

    def shown(self, *settings: PredictedSetting) -> str:
        """``ngram 1.20x, a/draft 0.95x``."""
        return ", ".join(f"{s.method.label} {self.of(s):.2f}x" for s in settings)


def _size(
    outcome: TuningOutcome, settings: list[PredictedSetting], gains: _Gains
) -> Iterator[Advice]:
    best = next((s for s in settings if s.method.parameters), None)
    if best is None or not outcome.parameters:
        return
    assert outcome.target is not None
    ratio = outcome.parameters / best.method.parameters
    cost = pass_ratio(best.method, outcome.target)
    yield Advice(
        "a draft model should be 10 to 20 times smaller than its target",
        f"{gains.shown(best)}: {ratio:.1f} times smaller; a pass costs {cost:.2f} of a target step",
        (SMALLER[0] <= ratio <= SMALLER[1]) == gains.pays(best),
    )


def _worth(settings: list[PredictedSetting], gains: _Gains) -> Advice:
    rule = "acceptance below 0.4 is not worth drafting for"
    low = [s for s in settings if s.method.mean_acceptance < WORTH]
    if not low:
        least = min(settings, key=lambda s: s.method.mean_acceptance).method
        return Advice(rule, f"the least is {least.mean_acceptance:.2f}, {least.label}", None)
    paying = [setting for setting in low if gains.pays(setting)]
    return Advice(rule, f"less have {gains.shown(*(paying or low))}", not paying)


def _longer(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    assert outcome.target is not None
    best = next((s for s in settings if s.method.longest > _LONG), None)
    if best is None:
        return
    method = best.method
    alone = best_length(method, outcome.target, 1)
    measured = (
        f"{method.label}: acceptance {method.mean_acceptance:.2f}; the best length is "
        f"{alone.length} of {method.longest} for one sequence"
    )
    if best.batch > 1:
        measured += f", {best.length} for {best.batch}"
    if method.lookup:
        measured += "; looking further takes no forward"
    holds = (method.mean_acceptance > LONGER) == (alone.length > _LONG)
    yield Advice("acceptance above 0.8: draft longer", measured, holds)


def _copying(
    outcome: TuningOutcome, settings: list[PredictedSetting], gains: _Gains
) -> Iterator[Advice]:
    kinds = {kind for kind, record in DRAFTERS.items() if record.looks_up}
    lookup = next((s for s in settings if s.method.family in kinds), None)
    model = next((s for s in settings if s.method.family not in kinds), None)
    if lookup is None:
        return
    compared = [lookup] if model is None else [lookup, model]
    measured = (
        f"{outcome.copied:.0%} of the output ends a run of four tokens seen before; "
        f"{gains.shown(*compared)}"
    )
    ahead = gains.pays(lookup) if model is None else gains.of(lookup) >= gains.of(model)
    holds = (outcome.copied >= _COPIES) == ahead
    yield Advice("output that copies its input: prompt lookup first", measured, holds)


def _trees(settings: list[PredictedSetting], gains: _Gains) -> Iterator[Advice]:
    for family in dict.fromkeys(s.method.family for s in settings):
        of_family = [s for s in settings if s.method.family == family]
        chain = next((s for s in of_family if s.method.shape == "chain"), None)
        tree = next((s for s in of_family if s.method.shape not in ("chain", "")), None)
        if chain is not None and tree is not None:
            yield Advice(
                "trees are accepted further than chains",
                f"{gains.shown(tree, chain)}; {tree.tokens_per_step:.2f} and "
                f"{chain.tokens_per_step:.2f} tokens a step",
                gains.of(tree) >= gains.of(chain),
            )
