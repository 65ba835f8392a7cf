"""The advice of the field, rule by rule, beside what was measured here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from paceline.drafters import DRAFTERS
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.search import (
    MARGIN,
    PredictedSetting,
    batch_sizes,
    best_length,
    pass_ratio,
    predict,
)

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
    verdict: str
    holds: bool | None


def advise(outcome: TuningOutcome) -> list[Advice]:
    """All rules to which the outcome has something to say; none before anything was measured."""
    settings = sorted(outcome.settings, key=lambda s: -_gain(outcome, s))
    if not settings:
        return []
    return [
        *_size(outcome, settings),
        _worth(outcome, settings),
        *_longer(outcome, settings),
        *_copying(outcome, settings),
        _break_even(outcome, settings[0]),
        *_trees(outcome, settings),
        *_temperature(outcome, settings[0]),
        _batch(outcome, settings[0]),
    ]


def _gain(outcome: TuningOutcome, setting: PredictedSetting) -> float:
    """By plain decoding; what was confirmed, where it was, counts more than any prediction."""
    confirmed = outcome.confirmed(setting.method)
    return setting.rate / outcome.plain_rate if confirmed is None else confirmed


def _source(outcome: TuningOutcome, setting: PredictedSetting) -> str:
    return "predicted" if outcome.confirmed(setting.method) is None else "confirmed"


def _size(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    best = next((s for s in settings if s.method.parameters), None)
    if best is None or not outcome.parameters:
        return
    method, gain = best.method, _gain(outcome, best)
    ratio = outcome.parameters / method.parameters
    inside, pays = SMALLER[0] <= ratio <= SMALLER[1], gain >= MARGIN
    assert outcome.target is not None
    cost = pass_ratio(method, outcome.target)
    verdict = f"it {'pays' if pays else 'does not pay'}, {gain:.2f}x {_source(outcome, best)}"
    if not inside:
        verdict += "; what counts is the cost of a pass, not the size"
    yield Advice(
        "a draft model should be 10 to 20 times smaller than its target",
        f"{method.label}: {ratio:.1f} times smaller; a pass costs {cost:.2f} of a target step",
        verdict,
        inside == pays,
    )


def _worth(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Advice:
    low = [s for s in settings if s.method.mean_acceptance < WORTH]
    paying = [s for s in low if _gain(outcome, s) >= MARGIN]
    shown = [
        f"{s.method.label} {s.method.mean_acceptance:.2f} ({_gain(outcome, s):.2f}x)"
        for s in paying or low
    ]
    if not low:
        least = min(settings, key=lambda s: s.method.mean_acceptance)
        measured = f"the least is {least.method.mean_acceptance:.2f}, {least.method.label}"
        verdict = "acceptance rules nothing out here; cost decides"
    elif paying:
        measured = ", ".join(shown)
        verdict = "cheap enough to pay all the same"
    else:
        measured = ", ".join(shown)
        verdict = "not worth it, as the rule says"
    holds = None if not low else not paying
    return Advice("acceptance below 0.4 is not worth drafting for", measured, verdict, holds)


def _longer(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    assert outcome.target is not None
    best = next((s for s in settings if s.method.longest > _LONG), None)
    if best is None:
        return
    method = best.method
    alone = best_length(method, outcome.target, 1)
    high, long = method.mean_acceptance > LONGER, alone.length > _LONG
    measured = (
        f"{method.label}: acceptance {method.mean_acceptance:.2f}; the best length is "
        f"{alone.length} of {method.longest} for one sequence"
    )
    if best.batch > 1:
        measured += f", {best.length} for {best.batch}"
    if high:
        verdict = "draft long" if long else "short drafts win: every level costs a pass"
    elif method.lookup and long:
        verdict = "long all the same: looking further takes no forward"
    else:
        verdict = "no reason for longer drafts" if not long else "long drafts win all the same"
    yield Advice("acceptance above 0.8: draft longer", measured, verdict, high == long)


def _copying(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    kinds = {kind for kind, record in DRAFTERS.items() if record.looks_up}
    lookup = next((s for s in settings if s.method.family in kinds), None)
    model = next((s for s in settings if s.method.family not in kinds), None)
    if lookup is None:
        return
    copies, gain = outcome.copied >= _COPIES, _gain(outcome, lookup)
    measured = (
        f"{outcome.copied:.0%} of the output ends a run of four tokens seen before; "
        f"{lookup.method.label} {gain:.2f}x"
    )
    if model is None:
        ahead = gain >= MARGIN
        verdict = "it pays" if ahead else "it does not pay"
    else:
        ahead = gain >= _gain(outcome, model)
        measured += f", {model.method.label} {_gain(outcome, model):.2f}x"
        verdict = f"{(lookup if ahead else model).method.label} comes first"
    if copies != ahead:
        verdict += ", copied text or not"
    yield Advice(
        "output that copies its input: prompt lookup first", measured, verdict, copies == ahead
    )


def _break_even(outcome: TuningOutcome, best: PredictedSetting) -> Advice:
    last, largest = outcome.break_even_of(best.method), outcome.largest_batch
    confirmed = outcome.confirmed(best.method)
    if confirmed is not None and confirmed < 1:
        at = outcome.options.concurrency
        measured = f"{best.method.label} is confirmed at {confirmed:.2f}x for {at} at once"
        verdict = "decode plainly"
    elif last >= largest:
        measured = f"{best.method.label} still gains at {largest} sequences"
        verdict = "no break-even was reached; the adaptive length watches for it"
    elif last == 0:
        measured = f"{best.method.label} gains at no batch size"
        verdict = "decode plainly"
    else:
        measured = f"{best.method.label} gains up to {last} sequences at once"
        verdict = f"from {last + 1} on plain decoding is faster; the adaptive length stops there"
    return Advice("no speculation past the break-even batch size", measured, verdict, None)


def _trees(outcome: TuningOutcome, settings: list[PredictedSetting]) -> Iterator[Advice]:
    for family in dict.fromkeys(s.method.family for s in settings):
        of_family = [s for s in settings if s.method.family == family]
        chain = next((s for s in of_family if s.method.shape == "chain"), None)
        tree = next((s for s in of_family if s.method.shape not in ("chain", "")), None)
        if chain is None or tree is None:
            continue
        ahead = _gain(outcome, tree) >= _gain(outcome, chain)
        yield Advice(
            "trees are accepted further than chains",
            f"{family}: {tree.method.shape} {tree.tokens_per_step:.2f} tokens a step, "
            f"{_gain(outcome, tree):.2f}x; chain {chain.tokens_per_step:.2f}, "
            f"{_gain(outcome, chain):.2f}x",
            "the tree pays for its nodes" if ahead else "the chain is faster: nodes cost time",
            ahead,
        )


def _temperature(outcome: TuningOutcome, best: PredictedSetting) -> Iterator[Advice]:
    if outcome.at_other is None:
        return
    other, rate = outcome.at_other
    here = best.method.mean_acceptance
    cold, hot = (rate, here) if outcome.options.temperature else (here, rate)
    yield Advice(
        "a higher temperature lowers acceptance",
        f"{best.method.label}: acceptance {here:.2f} at temperature "
        f"{outcome.options.temperature:g}, {rate:.2f} at {other:g}",
        "tune again if you sample otherwise" if cold > hot else "not here",
        cold > hot,
    )


def _batch(outcome: TuningOutcome, best: PredictedSetting) -> Advice:
    assert outcome.target is not None and outcome.plain is not None
    sizes = batch_sizes(outcome.options.concurrency, outcome.largest_batch)
    plain = {b: predict(outcome.plain, outcome.target, 0, b).rate for b in sizes}
    fast = {b: max(plain[b], best_length(best.method, outcome.target, b).rate) for b in sizes}
    shown = ", ".join(f"{b}: {fast[b]:.0f}" for b in sizes)
    grows = all(fast[b] >= fast[a] for a, b in pairwise(sizes))
    return Advice(
        "larger batches yield more tokens a second",
        f"predicted tokens/s by sequences at once: {shown}",
        "so let requests run together" if grows else "not beyond the largest figure",
        grows,
    )
