"""The simulation of this machine against this machine: what a few runs show, predicts the others.

Phases of steps are measured in four runs (one and eight requests at a time, without drafts and with
three drafted tokens), reading in some of prompts alone. What the same simulation as of an H100 then
says of other concurrencies, draft lengths, the adaptive length and Poisson arrivals is compared
with doing it, on the real model with its EAGLE-3 head or on the embedded pair.
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
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.driver import Drive, DrivenStep, sequence
from paceline.pace.cost import predicted_by_measured
from paceline.tools.report.document import Report, Table, Text
from paceline.tools.report.terminal import print_report
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
        whole = LLM(target, prefix_sharing=False, max_batch_size=BATCH)
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


def calibrate(machine: Machine, console: Console) -> tuple[Measured, float, float]:
    """Costs, how many drafted tokens are accepted, and tokens a second of eight without drafts."""
    seen: dict[tuple[int, int], list[DrivenStep]] = {}
    rates: dict[tuple[int, int], float] = {}
    ways = [(length, clients) for length in (0, DRAFTED) for clients in (1, BATCH)]
    for length, clients in track(ways, "measuring parts of steps", console=console):
        count = 6 if clients == 1 else 24
        outcome, steps = machine.run(Case(length, clients), arrivals(count))
        rates[length, clients] = outcome.rate
        full = [s for s in steps if s.decodes and len(s.commits) == clients]
        seen[length, clients] = [
            step for step in full if all(commit.drafted == length for commit in step.commits)
        ]

    def costs(*phases: str) -> TargetCosts:
        def curve(clients: int) -> CostCurve:
            plain, drafted = (_median(seen[n, clients], *phases) for n in (0, DRAFTED))
            return CostCurve((1, 1 + DRAFTED), (plain, drafted))

        return TargetCosts((1, BATCH), (curve(1), curve(BATCH)))

    passes = [_median(seen[DRAFTED, clients], "draft") / DRAFTED for clients in (1, BATCH)]
    commits = [c for n in (1, BATCH) for step in seen[DRAFTED, n] for c in step.commits]
    accepted = sum(len(c.path) for c in commits) / sum(c.reached for c in commits)
    prompt, read = _reading(machine, passes[0])
    found = Measured(
        costs("target"),
        costs("verify", "other"),
        CostCurve((1, BATCH), tuple(passes)),
        prompt,
        read,
    )
    return found, accepted, rates[0, BATCH]


def _reading(machine: Machine, a_pass: float) -> tuple[CostCurve, CostCurve]:
    """Steps that read so many tokens: all of one, and what a drafter adds that reads them, too."""
    whole, drafter = [], []
    for count in READ:
        asked = [Arrival(0.0, count, 8, 0.0)] * 4
        _, plain = machine.run(Case(0, 1), asked)
        _, drafted = machine.run(Case(DRAFTED, 1), asked)
        read = [[s for s in steps if s.commits[0].scheduled == count] for steps in (plain, drafted)]
        whole.append(_median(read[0], "draft", "target", "verify", "other"))
        drafter.append(max(0.0, _median(read[1], "draft") - DRAFTED * a_pass))
    return CostCurve(READ, tuple(whole)), CostCurve(READ, tuple(drafter))


def predicted(case: Case, costs: Measured, accepted: float, asked: Sequence[Arrival]) -> Outcome:
    settings = Settings(case.length, batch=BATCH, cached_tokens=100_000)
    requests = [Arrival(own.moment, own.prompt, own.output, accepted) for own in asked]
    replica = Replica(costs, settings, drafts=case.length != 0)
    figures = replica.run(requests, case.clients)
    return Outcome(figures.rate, figures.first_token, figures.token_gap)


def check(console: Console, pair: str) -> dict[str, Any]:
    """All cases, predicted and measured; prints a table."""
    machine = Machine(pair)
    errors = Console(stderr=True)
    costs, accepted, most = calibrate(machine, errors)
    rows, cases = [], []
    for case in track(CASES, "comparing", console=errors):
        count = 8 if case.clients == 1 else 24
        load = case.share * most / 64  # requests have 64 tokens on average
        asked = arrivals(count, load or 1.0, seed=2)
        said = predicted(case, costs, accepted, asked)
        was = machine.run(case, asked)[0]
        by = {
            name: predicted_by_measured(getattr(said, name), getattr(was, name))
            for name in ("rate", "first_token", "token_gap")
        }
        cases.append(
            {"case": case.name, "predicted": asdict(said), "measured": asdict(was), "by": by}
        )
        rows.append(
            [
                case.name,
                *(f"{said.rate:.0f} / {was.rate:.0f}", f"{by['rate']:.2f}"),
                *(
                    f"{1e3 * said.token_gap:.1f} / {1e3 * was.token_gap:.1f}",
                    f"{by['token_gap']:.2f}",
                ),
                *(f"{1e3 * said.first_token:.0f} / {1e3 * was.first_token:.0f}",),
                f"{by['first_token']:.2f}",
            ]
        )
    shown = Report("The simulation of this machine, against this machine")
    columns = ["case", "tokens/s", "by", "ms a token", "by", "first token ms", "by"]
    note = "Predicted / measured, and the first by the second."
    host = [costs.rest(n, 1) for n in (1, BATCH)]
    said = (
        f"A step besides its forwards: {1e3 * host[0]:.2f} ms for one sequence, "
        f"{1e3 * host[1]:.2f} for {BATCH}. Accepted of drafted tokens: {accepted:.2f}."
    )
    shown.add("Closed loops, and Poisson arrivals", Table(columns, rows, note=note), Text(said))
    print_report(shown, console)
    return {"accepted": accepted, "host_seconds": host, "cases": cases}
