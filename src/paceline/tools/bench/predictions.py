"""Predicted against measured speedup, for the methods of a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.tools.bench.contestants import Paceline
from paceline.tools.bench.figures import complete, merged
from paceline.tools.bench.methods import PLAIN, Method
from paceline.tools.bench.outcome import Contestant
from paceline.tools.bench.predict import Prediction, compare
from paceline.tools.bench.runner import Heat, HeatRecord


@dataclass(frozen=True)
class Predicted:
    """What was expected of a method at a concurrency, and what came of it."""

    method: str
    concurrency: int
    prediction: Prediction


def predictions(
    record: HeatRecord,
    methods: Sequence[Method],
    contestants: Sequence[Contestant],
    concurrency: int,
    temperature: float,
) -> list[Predicted]:
    """For our speculative methods, from the heats at one concurrency and temperature.

    ``contestants`` must still be those that ran: what their forwards take alone is measured now.
    A method whose every step also read prompts has none.
    """
    heats = [
        heat
        for heat in record.heats
        if (heat.job.concurrency, heat.job.temperature) == (concurrency, temperature)
    ]
    if not heats:
        return []
    turns = complete(heats)
    plain = [merged([heat.outcomes[PLAIN] for heat in turn]) for turn in turns]
    context = _context(turns[0])
    asked = {method.name: method for method in methods if method.speculates}
    found = []
    for contestant in contestants:
        method = asked.get(contestant.name)
        if method is None or not isinstance(contestant, Paceline):
            continue
        rounds = [merged([heat.outcomes[contestant.name] for heat in turn]) for turn in turns]
        ratios = [own.rate / other.rate for own, other in zip(rounds, plain, strict=True)]
        prediction = compare(
            contestant.llm.engine,
            plain,
            rounds,
            context=context,
            measured=statistics.median(ratios),
        )
        if prediction is not None:
            found.append(Predicted(contestant.name, concurrency, prediction))
    return found


def _context(heats: Sequence[Heat]) -> int:
    """Mean tokens of a request while it decodes: its prompt and half of its answer."""
    asks = [ask for heat in heats for ask in heat.job.asks]
    return round(statistics.mean(len(ask.prompt) + ask.params.max_tokens / 2 for ask in asks))
