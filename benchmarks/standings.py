"""What the drafters' benchmark has measured so far: figures, tables, what was expected."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from entrants import PLAIN, REPEATED, Run

TITLES = {
    "stories": "stories",
    "arith": "arithmetic",
    "chat": "chat",
    "stdlib": "code",
    "summ": "summarisation",
    "mt_bench": "MT-Bench",
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "summarization": "summarization",
    "math_reasoning": "mathematics",
}
Case = tuple[float, str]  # temperature, suite


@dataclass
class Standings:
    """Figures of one target.

    ``fixed``: runs at a fixed draft length. ``adaptive``: the timed runs. ``rounds``: seconds a
    token of every entrant that decoded a prompt, one entry a prompt. ``nodes``: chains and trees
    of equal size at temperature 0.
    """

    fixed: dict[Case, dict[str, Run]] = field(default_factory=lambda: defaultdict(dict))
    adaptive: dict[Case, dict[str, Run]] = field(default_factory=lambda: defaultdict(dict))
    rounds: dict[Case, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    nodes: dict[str, dict[str, Run]] = field(default_factory=lambda: defaultdict(dict))
    skipped: dict[str, str] = field(default_factory=dict)

    def timed(self, case: Case, name: str, run: Run, number: int) -> None:
        """Take one timed run of a case's prompt ``number``."""
        while len(self.rounds[case]) <= number:
            self.rounds[case].append({})
        self.rounds[case][number][name] = run.seconds / run.tokens
        self.adaptive[case].setdefault(name, Run()).merge(run)

    def ratio(self, case: Case, name: str) -> float | None:
        """Speed by plain decoding's in the same round, median over the rounds."""
        both = [r for r in self.rounds.get(case, []) if name in r and PLAIN in r]
        return statistics.median(r[PLAIN] / r[name] for r in both) if both else None

    def speed(self, case: Case, name: str) -> float | None:
        run = self.adaptive.get(case, {}).get(name)
        return run.tokens / run.seconds if run and run.seconds else None

    def shown(self, case: Case, name: str) -> Run | None:
        """The run that tells acceptance: at a fixed length, else the timed one."""
        return self.fixed.get(case, {}).get(name) or self.adaptive.get(case, {}).get(name)

    def temperatures(self) -> list[float]:
        return sorted({t for t, _ in (*self.fixed, *self.adaptive)})

    def suites(self) -> list[str]:
        return list(dict.fromkeys(s for _, s in (*self.fixed, *self.adaptive)))

    def names(self) -> list[str]:
        """Rows: plain decoding first, the repeated ones last."""
        cases = (*self.fixed.values(), *self.adaptive.values())
        found = list(dict.fromkeys(name for case in cases for name in case))
        return sorted(found, key=lambda name: (name != PLAIN, name.endswith(REPEATED)))

    def length(self, case: Case, name: str) -> float | None:
        run = self.shown(case, name)
        return run.length if run else None

    def figures(self, temperature: float) -> dict[str, dict[str, dict[str, Any]]]:
        """name -> suite -> figures at one temperature."""
        result: dict[str, dict[str, dict[str, Any]]] = {}
        for name in self.names():
            for suite in self.suites():
                case = (temperature, suite)
                run = self.shown(case, name)
                if run is None:
                    continue
                timed = self.adaptive.get(case, {}).get(name)
                result.setdefault(name, {})[suite] = {
                    "mean_accepted_length": rounded(run.length),
                    "vs_plain": rounded(self.ratio(case, name)),
                    "acceptance_per_position": [rounded(share) for share in run.by_position],
                    "adaptive_mean_accepted_length": rounded(timed.length if timed else None),
                    "tokens_per_second": rounded(self.speed(case, name), 1),
                }
        return result

    def node_figures(self) -> dict[str, dict[str, float | None]]:
        """name -> suite -> tokens a step, at an equal number of nodes."""
        return {
            name: {suite: rounded(run.length) for suite, run in runs.items()}
            for name, runs in self.nodes.items()
        }


def rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def merged(models: dict[str, Standings]) -> dict[str, Any]:
    """The JSON object: name -> suite -> figures of the first model at its lowest temperature,
    under ``temperature_1`` those at temperature 1, under ``inflated`` those of another model."""
    trees = []
    for standings in models.values():
        by_temperature = [(t, standings.figures(t)) for t in standings.temperatures()]
        tree = by_temperature[0][1] if by_temperature else {}
        for temperature, figures in by_temperature[1:]:
            _attach(tree, f"temperature_{temperature:g}", figures)
        trees.append(tree)
    result = trees[0] if trees else {}
    for name, tree in list(zip(models, trees, strict=True))[1:]:
        _attach(result, name, tree)
    return result


def _attach(tree: dict[str, Any], key: str, figures: dict[str, Any]) -> None:
    for name, suites in figures.items():
        for suite, values in suites.items():
            tree.setdefault(name, {}).setdefault(suite, {})[key] = values


# -- tables ----------------------------------------------------------------------------------

Rows = list[list[str]]


def main_rows(standings: Standings, temperature: float) -> Rows:
    """Header and rows: tokens a step and speed by plain decoding's, by suite."""
    suites = standings.suites()
    rows = [["drafter", *(TITLES.get(suite, suite) for suite in suites), "mean"]]
    for name in standings.names():
        lengths = [standings.length((temperature, suite), name) for suite in suites]
        ratios = [standings.ratio((temperature, suite), name) for suite in suites]
        if any(value is not None for value in (*lengths, *ratios)):
            pairs = [*zip(lengths, ratios, strict=True), (mean(lengths), mean(ratios))]
            rows.append([name, *(_cell(*pair) for pair in pairs)])
    return rows


def _cell(length: float | None, ratio: float | None) -> str:
    parts = ["" if length is None else f"{length:.2f}", "" if ratio is None else f"{ratio:.2f}x"]
    return " ".join(part for part in parts if part)


def position_rows(standings: Standings, temperature: float) -> Rows:
    """Header and rows: acceptance by position, all suites together."""
    shares: dict[str, list[float]] = {}
    for name in standings.names():
        pooled = Run()
        for suite in standings.suites():
            run = standings.shown((temperature, suite), name)
            if run is not None:
                pooled.merge(run)
        if pooled.by_position:
            shares[name] = pooled.by_position
    width = max(map(len, shares.values()), default=0)
    rows = [["drafter", *(str(number + 1) for number in range(width))]]
    for name, values in shares.items():
        cells = [f"{value:.2f}" for value in values]
        rows.append([name, *cells, *[""] * (width - len(cells))])
    return rows


def node_rows(standings: Standings) -> Rows:
    suites = standings.suites()
    rows = [["", *(TITLES.get(suite, suite) for suite in suites), "mean"]]
    for name, runs in standings.nodes.items():
        lengths = [runs[suite].length if suite in runs else None for suite in suites]
        rows.append([name, *(_cell(value, None) for value in [*lengths, mean(lengths)])])
    return rows


def table(title: str, rows: Rows) -> Table:
    grid = Table(title=title, title_justify="left")
    for index, head in enumerate(rows[0]):
        grid.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in rows[1:]:
        grid.add_row(*row)
    return grid


def markdown(rows: Rows) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- what was expected -----------------------------------------------------------------------


def expectations(standings: Standings) -> list[str]:
    """Each expectation at temperature 0, with its figures, met or missed."""
    suites = standings.suites()
    trees = {
        name: mean([run.length for run in runs.values()]) for name, runs in standings.nodes.items()
    }
    lines = []
    for better, worse in (
        ("eagle3 tree", "draft tree"),
        ("eagle3 chain", "draft chain"),
        ("draft tree", "draft chain"),
        ("eagle2 tree", "eagle chain"),
        ("eagle3 tree", "eagle3 chain"),
    ):
        lines += _compare(f"{better} above {worse}", trees.get(better), trees.get(worse), "tokens")
    for suite in ("arith", "summ"):
        found = standings.length((0.0, suite), "ngram")
        lines += _compare(f"ngram on {TITLES[suite]} at least 1.5", found, 1.5, "tokens")
    again = {
        name: mean([standings.length((0.0, suite), name + REPEATED) for suite in suites])
        for name in ("suffix", "ngram")
    }
    what = "suffix above ngram on repeated requests"
    lines += _compare(what, again["suffix"], again["ngram"], "tokens")
    for suite in suites:
        ratios = {n: standings.ratio((0.0, suite), n) for n in ("suffix", "ngram", "eagle3")}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        if known:
            best = max(known, key=lambda name: known[name])
            own = standings.ratio((0.0, suite), "hybrid")
            what = f"hybrid at least as fast as {best} on {TITLES.get(suite, suite)}"
            lines += _compare(what, own, known[best], "x")
    means = {
        name: ratio
        for name in standings.names()
        if (ratio := mean([standings.ratio((0.0, suite), name) for suite in suites])) is not None
    }
    if means:
        name = min(means, key=lambda name: means[name])
        lines += _compare(f"nothing below 0.95x plain (least: {name})", means[name], 0.95, "x")
    return lines


def real_expectations(standings: Standings) -> list[str]:
    """What was asked of the real model's drafters, each with its figures, met or missed."""
    suites, lines = standings.suites(), []
    for temperature, goal in ((0.0, 1.7), (1.0, 1.3)):
        ratios = {s: standings.ratio((temperature, s), "eagle3") for s in suites}
        known = {suite: ratio for suite, ratio in ratios.items() if ratio is not None}
        if not known:
            continue
        at = f"temperature {temperature:g}, eagle3"
        lines += _compare(f"{at}: mean of {len(known)} sets", mean([*known.values()]), goal, "x")
        if temperature == 0:
            least = min(known, key=lambda suite: known[suite])
            lines += _compare(f"{at}: least, {TITLES.get(least, least)}", known[least], 1.2, "x")
    for suite in suites:
        members = {n: standings.ratio((0.0, suite), n) for n in ("suffix", "ngram", "eagle3")}
        found = {name: ratio for name, ratio in members.items() if ratio is not None}
        if found:
            best = max(found, key=lambda name: found[name])
            what = f"hybrid within 3 % of {best} on {TITLES.get(suite, suite)}"
            own = standings.ratio((0.0, suite), "hybrid")
            lines += _compare(what, own, 0.97 * found[best], "x")
    return lines


def _compare(what: str, found: float | None, wanted: float | None, unit: str) -> list[str]:
    if found is None or wanted is None:
        return []
    verdict = "met" if found >= wanted else "MISSED"
    return [f"{verdict}: {what}: {found:.2f} against {wanted:.2f} {unit}"]
