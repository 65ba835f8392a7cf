"""The simulation of this machine against this machine: what a few runs show, predicts the others.

Phases of steps are measured in four runs (one and eight requests at a time, without drafts and with
three drafted tokens), reading in some of prompts alone. What the same simulation as of an H100 then
says of other concurrencies, draft lengths, the adaptive length and Poisson arrivals is compared
with doing it, on the real model with its EAGLE-3 head or on the embedded pair. Both are done in
several rounds, in turn, because a machine's speed changes by the minute.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from paceline import LLM
from paceline.control.cost import predicted_by_measured
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.driver import Drive, DrivenStep, sequence
from paceline.lab.report.document import Report, Table, Text
from paceline.lab.report.render import print_report
from scale_costs import Measured
from scale_replica import Arrival, Replica, Settings

# Target and draft. Steps of the embedded pair last about a millisecond: they are mostly Python,
# whose time no roofline knows.
PAIRS = {
    "smollm2": (
        "paceline/smollm2",
        "eagle3:paceline/smollm2-eagle3,branching=1x1x1x1x1x1x1x1",
    ),
    "tiny": ("paceline/tiny", "paceline/tiny-draft"),
}
BATCH = 8
DRAFTED = 3
READ = (32, 96, 256)  # tokens of prompts that are read alone
TEXT = "Once upon a time there was a little girl who lived with her mother near a large forest. "


@dataclass(frozen=True)
class Case:
    """``clients`` in a closed loop, or ``share`` of what eight of them got, as Poisson arrivals."""

    length: int | str
    clients: int | None = None
    share: float = 0.0

    @property
    def name(self) -> str:
        way = {0: "plain", "auto": "auto"}.get(self.length, f"{self.length} tokens")
        return f"{way}, " + (
            f"{self.clients} at a time" if self.clients else f"{self.share:g} load"
        )


CASES = (
    *(Case(0, 2), Case(0, 4), Case(DRAFTED, 4), Case(5, 1), Case("auto", 1), Case("auto", 8)),
    *(Case(0, share=0.6), Case("auto", share=0.6)),
)


@dataclass(frozen=True)
class Outcome:
    """Tokens a second; seconds to the first token and between later ones, means over requests."""

    rate: float
    first_token: float
    token_gap: float


class Machine:
    """A pair, without drafts and with."""

    def __init__(self, pair: str) -> None:
        torch.manual_seed(0)
        target, draft = PAIRS[pair]
        whole = LLM(target, draft="none", prefix_sharing=False, max_batch_size=BATCH)
        common: Any = {"prefix_sharing": False, "max_batch_size": BATCH}
        self.ids = whole.tokenizer.encode(24 * TEXT, add_special_tokens=False)
        self.engines = {0: whole.engine}
        for length in (DRAFTED, 5, "auto"):
            llm = whole.beside(draft, draft_length=length, **common)
            self.engines[length] = llm.engine

    def requests(self, arrivals: Sequence[Arrival]) -> list[SequenceState]:
        """Every one another text: by its seed."""
        return [
            sequence(
                self.ids[: own.prompt],
                SamplingParams(max_tokens=own.output, temperature=0.8, seed=number),
            )
            for number, own in enumerate(arrivals)
        ]

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> tuple[Outcome, list[DrivenStep]]:
        seqs = self.requests(arrivals)
        moments = [own.moment for own in arrivals] if case.clients is None else ()
        drive = Drive(self.engines[case.length], seqs, case.clients, moments).run()
        first = [seq.arrivals[0][0] - seq.queued for seq in seqs]
        gaps = [
            (seq.arrivals[-1][0] - seq.arrivals[0][0]) / max(1, seq.generated - 1) for seq in seqs
        ]
        rate = drive.tokens / (drive.seconds - (moments[0] if moments else 0.0))
        return Outcome(rate, statistics.mean(first), statistics.mean(gaps)), drive.steps


def arrivals(count: int, per_second: float = 1.0, seed: int = 0) -> list[Arrival]:
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += dice.expovariate(per_second)
        found.append(Arrival(now, dice.randint(24, 96), dice.randint(32, 96), 0.0))
    return found


def _median(steps: Sequence[DrivenStep], *phases: str) -> float:
    return statistics.median(sum(step.seconds[phase] for phase in phases) for step in steps)


class Parts:
    """Steps of all rounds, by draft length and clients, and of reading prompts alone."""

    def __init__(self) -> None:
        self.decoding: dict[tuple[int, int], list[DrivenStep]] = {}
        self.reading: dict[tuple[int, int], list[DrivenStep]] = {}

    def look(self, machine: Machine) -> float:
        """One more round; returns tokens a second of eight without drafts."""
        rates = {}
        for length, clients in ((n, c) for n in (0, DRAFTED) for c in (1, BATCH)):
            count = 6 if clients == 1 else 24
            outcome, steps = machine.run(Case(length, clients), arrivals(count))
            rates[length, clients] = outcome.rate
            full = [s for s in steps if s.decodes and len(s.commits) == clients]
            whole = [s for s in full if all(c.drafted == length for c in s.commits)]
            self.decoding.setdefault((length, clients), []).extend(whole)
        for length, count in ((n, c) for n in (0, DRAFTED) for c in READ):
            _, steps = machine.run(Case(length, 1), [Arrival(0.0, count, 8, 0.0)] * 4)
            read = [s for s in steps if s.commits[0].scheduled == count]
            self.reading.setdefault((length, count), []).extend(read)
        return rates[0, BATCH]

    @property
    def accepted(self) -> float:
        """How likely a drafted token is accepted."""
        commits = [
            c for n in (1, BATCH) for step in self.decoding[DRAFTED, n] for c in step.commits
        ]
        return sum(len(c.path) for c in commits) / sum(c.reached for c in commits)

    def costs(self) -> Measured:
        passes = [
            _median(self.decoding[DRAFTED, clients], "draft") / DRAFTED for clients in (1, BATCH)
        ]
        whole = [_median(self.reading[0, n], "draft", "target", "verify", "other") for n in READ]
        # What a drafter adds that reads the prompt, too.
        further = [
            max(0.0, _median(self.reading[DRAFTED, n], "draft") - DRAFTED * passes[0]) for n in READ
        ]
        return Measured(
            self._curves("target"),
            self._curves("verify", "other"),
            CostCurve((1, BATCH), tuple(passes)),
            CostCurve(READ, tuple(whole)),
            CostCurve(READ, tuple(further)),
        )

    def _curves(self, *phases: str) -> TargetCosts:
        def curve(clients: int) -> CostCurve:
            plain, drafted = (_median(self.decoding[n, clients], *phases) for n in (0, DRAFTED))
            return CostCurve((1, 1 + DRAFTED), (plain, drafted))

        return TargetCosts((1, BATCH), (curve(1), curve(BATCH)))


def predicted(case: Case, costs: Measured, accepted: float, asked: Sequence[Arrival]) -> Outcome:
    settings = Settings(case.length, batch=BATCH, cached_tokens=100_000)
    requests = [Arrival(own.moment, own.prompt, own.output, accepted) for own in asked]
    replica = Replica(costs, settings, drafts=case.length != 0)
    figures = replica.run(requests, case.clients)
    # As it is measured: beginning, end and waiting for requests included.
    began = asked[0].moment if case.clients is None else 0.0
    return Outcome(figures.tokens / (replica.now - began), figures.first_token, figures.token_gap)


def asked_of(case: Case, most: float) -> list[Arrival]:
    """The requests of a case, where eight at a time got ``most`` tokens a second."""
    load = case.share * most / 64  # requests have 64 tokens on average
    return arrivals(8 if case.clients == 1 else 24, load or 1.0, seed=2)


def check(console: Console, pair: str, rounds: int) -> dict[str, Any]:
    """All cases, predicted from medians over the rounds and measured in each; prints a table."""
    machine, parts, most = Machine(pair), Parts(), 0.0
    was: dict[Case, list[Outcome]] = {case: [] for case in CASES}
    doing = [case for _ in range(rounds) for case in CASES]
    for case in track(doing, f"{rounds} rounds", console=Console(stderr=True)):
        if case is CASES[0]:
            rate = parts.look(machine)
            most = most or rate  # all rounds have the same arrivals
        was[case].append(machine.run(case, asked_of(case, most))[0])
    costs, accepted = parts.costs(), parts.accepted
    rows, cases = [], []
    for case in CASES:
        said = asdict(predicted(case, costs, accepted, asked_of(case, most)))
        got = {name: statistics.median(getattr(one, name) for one in was[case]) for name in said}
        by = {name: predicted_by_measured(said[name], got[name]) for name in said}
        spread = [one.rate / got["rate"] for one in was[case]]
        cases.append(
            {
                "case": case.name,
                "predicted": said,
                "measured": got,
                "by": by,
                "rounds": [asdict(one) for one in was[case]],
            }
        )
        rows.append([case.name, f"{said['rate']:.0f} / {got['rate']:.0f}", f"{by['rate']:.2f}"])
        rows[-1].append(f"{min(spread):.2f}-{max(spread):.2f}")
        for name in ("token_gap", "first_token"):
            rows[-1] += [f"{1e3 * said[name]:.1f} / {1e3 * got[name]:.1f}", f"{by[name]:.2f}"]
    shown = Report("The simulation of this machine, against this machine")
    columns = ["case", "tokens/s", "by", "rounds", "ms a token", "by", "first token ms", "by"]
    note = (
        "Predicted / measured (median), and the first by the second; rounds: the slowest and the "
        "fastest rate by the median."
    )
    host = [costs.rest(n, 1) for n in (1, BATCH)]
    said_more = (
        f"A step besides its forwards: {1e3 * host[0]:.2f} ms for one sequence, "
        f"{1e3 * host[1]:.2f} for {BATCH}. Accepted of drafted tokens: {accepted:.2f}."
    )
    shown.add(
        "Closed loops, and Poisson arrivals", Table(columns, rows, note=note), Text(said_more)
    )
    print_report(shown, console)
    return {"accepted": accepted, "host_seconds": host, "rounds": rounds, "cases": cases}
