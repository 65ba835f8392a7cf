"""Evaluates the records of drafters.py: ratios to plain decoding, worst sets, tables.

Speeds are tokens per second: all tokens of several waves divided by all their seconds. A ratio is
computed within one record; several records (rounds) of a cell give their median."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from paceline.lab.report.document import Column, Report, Table, Text, table_of

PLAIN = "plain"
PASSES = {"first": "First requests", "later": "Later requests", "again": "The same requests again"}
WANTED = 0.98  # least ratio to plain decoding in every cell
Record = Mapping[str, Any]
Waves = Sequence[Mapping[str, Any]]


def speed(waves: Waves, name: str) -> float:
    runs = [wave["by"][name] for wave in waves]
    return float(sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs))


def figures(waves: Waves, name: str) -> dict[str, Any]:
    """The figures of one engine in one pass: speed relative to plain decoding (over all waves, in
    the median wave, and in the worst set or batch), and its drafts."""
    by_set = {key: speed(part, name) / speed(part, PLAIN) for key, part in _sets(waves).items()}
    worst = min(by_set, key=lambda key: by_set[key])
    total = {
        key: sum(wave["by"][name][key] for wave in waves)
        for key in ("tokens", "steps", "drafted", "accepted", "drafting", "same")
    }
    return {
        "ratio": speed(waves, name) / speed(waves, PLAIN),
        "median": median(speed([wave], name) / speed([wave], PLAIN) for wave in waves),
        "worst": by_set[worst],
        "worst_set": worst,
        "tokens_per_second": speed(waves, name),
        "tokens_a_step": total["tokens"] / total["steps"],
        "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else None,
        "steps_that_drafted": total["drafting"] / total["steps"],
        "same_text": total["same"] / sum(len(wave["sets"]) for wave in waves),
    }


def of_best(waves: Waves, name: str) -> dict[str, Any] | None:
    """A drafter's adaptive length relative to the best of its fixed lengths and plain decoding,
    over the whole pass and within every set; None without fixed lengths.

    The best is a maximum of noisy figures, so these ratios are biased downward."""
    fixed = [PLAIN, *(key for key in waves[0]["by"] if key.startswith(f"{name}@"))]
    if len(fixed) == 1:
        return None

    def by_best(part: Waves) -> dict[str, Any]:
        best = max(fixed, key=lambda key: speed(part, key))
        return {"best": best, "ratio": speed(part, name) / speed(part, best)}

    by_set = {key: by_best(part) for key, part in _sets(waves).items()}
    worst = min(by_set, key=lambda key: float(by_set[key]["ratio"]))
    about = {"worst": by_set[worst]["ratio"], "worst_set": worst, "sets": by_set}
    return by_best(waves) | about


def _sets(waves: Waves) -> dict[str, list[Mapping[str, Any]]]:
    """Group waves of one prompt by its set; a wave of several prompts is a group of its own."""
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for number, wave in enumerate(waves):
        key = wave["sets"][0] if len(wave["sets"]) == 1 else f"batch {number + 1}"
        by_set.setdefault(key, []).append(wave)
    return by_set


def _over(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; other values are those of the round with the least ratio."""
    over = dict(min(rounds, key=lambda figures: float(figures["ratio"])))
    for key, value in over.items():
        if isinstance(value, float) and all(isinstance(one[key], float) for one in rounds):
            over[key] = round(median(one[key] for one in rounds), 3)
    return over | {"rounds": len(rounds)}


def target_of(record: Record) -> str:
    """The target's weights and precision: the cells of one target share a table."""
    settings = record["settings"]
    weights = "" if settings["weights"] == "pulled" else f", {settings['weights']}"
    native = settings["native"]
    pinned = "" if native == "auto" else f", PACELINE_NATIVE={native}"
    return f"{settings['pair']}{weights}, {settings['form']}{pinned}"


def rows_of(records: Iterable[Record]) -> list[Record]:
    """The figures of each ``target``, ``cell``, ``pass`` and ``engine`` over all rounds, with
    ``of_best`` (None without fixed lengths)."""
    by_key: dict[tuple[str, str, str, str], list[Waves]] = {}
    for record in records:
        for name in PASSES:
            waves = [wave for wave in record["waves"] if wave["pass"] == name]
            for engine in waves[0]["by"] if waves else ():
                by_key.setdefault((target_of(record), record["cell"], name, engine), []).append(
                    waves
                )
    rows = []
    for key, rounds in by_key.items():
        engine = key[-1]
        row = dict(zip(("target", "cell", "pass", "engine"), key, strict=True))
        best = [against for waves in rounds if (against := of_best(waves, engine))]
        row |= _over([figures(waves, engine) for waves in rounds])
        rows.append(row | {"of_best": _over(best) if best else None})
    return rows


def is_drafter(row: Record) -> bool:
    """Whether the row is that of a drafter with adaptive length."""
    return "@" not in row["engine"] and row["engine"] != PLAIN


def ratios(records: Iterable[Record]) -> dict[str, Any]:
    """{target: {cell: {pass: {engine: speed relative to plain decoding}}}}."""
    tree: dict[str, Any] = {}
    for row in rows_of(records):
        branch = tree.setdefault(row["target"], {}).setdefault(row["cell"], {})
        branch.setdefault(row["pass"], {})[row["engine"]] = row["ratio"]
    return tree


def brief(record: Record) -> str:
    """One line for a record: the ratio of each drafter in each pass."""
    parts: dict[str, list[str]] = {}
    for row in filter(is_drafter, rows_of([record])):
        parts.setdefault(row["pass"], []).append(f"{row['engine']} {row['ratio']:.2f}")
    return "; ".join(f"{name}: {', '.join(shown)}" for name, shown in parts.items())


def as_report(records: Sequence[Record]) -> Report:
    """For each target: speed relative to plain decoding in every cell and pass, tokens per step,
    the adaptive length relative to the best, and the cells below ``WANTED``."""
    report = Report("Drafters compared with plain decoding")
    by_target: dict[str, list[Record]] = {}
    for row in rows_of(records):
        by_target.setdefault(row["target"], []).append(row)
    for target, rows in by_target.items():
        passes = {name: [row for row in rows if row["pass"] == name] for name in PASSES}
        tables = [_grid(PASSES[name], some, _RATIO, _NOTE) for name, some in passes.items()]
        slow = [
            f"{row['cell']}, {row['pass']}: {row['engine']} {row['ratio']:.3f}"
            for row in filter(is_drafter, rows)
            if row["ratio"] < WANTED
        ]
        if compared := [row for row in rows if row["of_best"]]:
            tables.append(table_of(compared, _OF_BEST, _BEST, "The adaptive length"))
        below = Text(f"Below {WANTED} of plain decoding: {'; '.join(slow) or 'none'}.")
        report.add(target, *tables, below)
        report.add(f"{target}: tokens per step", _grid("First requests", passes["first"], _step))
    tokens = sorted({record["settings"]["tokens"] for record in records})
    about = {_MACHINE.format(**record["machine"]) for record in records}
    how = f"Answers of at most {' or '.join(map(str, tokens))} tokens. {'; '.join(about)}."
    report.add("How", Text(how))
    return report


_RATIO = "{0[ratio]:.2f} ({0[worst]:.2f})".format
_MACHINE = "{processor}, {threads} threads, torch {torch}, transformers {transformers}"
_NOTE = (
    "Speed relative to plain decoding; in brackets: in the worst set or batch. Greedy and seeded "
    "cells compare the same texts, sampled ones different texts of the same distribution."
)
_BEST = "Best: of plain decoding and the fixed lengths, over the pass and within each set."
_OF_BEST = (
    Column("cell", "cell"),
    Column("pass", "pass"),
    Column("engine", "drafter"),
    Column("best", "best", "of_best.best"),
    Column("ratio", "adaptive / best", "of_best.ratio", "{:.3f}".format),
    Column("worst", "worst set", "of_best", "{0[worst]:.3f} {0[worst_set]}".format),
)


def _grid(
    title: str, rows: Sequence[Record], show: Callable[[Record], str], note: str = ""
) -> Table:
    """A row for each engine except plain decoding, and a column for each cell."""
    shown = {(row["engine"], row["cell"]): show(row) for row in rows}
    cells = dict.fromkeys(cell for _, cell in shown)
    engines = dict.fromkeys(engine for engine, _ in shown if engine != PLAIN)
    lines = [[engine, *(shown.get((engine, cell)) for cell in cells)] for engine in engines]
    return Table(["drafter", *cells], lines, title, note)


def _step(row: Record) -> str:
    accepted = "" if row["acceptance"] is None else f" ({row['acceptance']:.0%})"
    return f"{row['tokens_a_step']:.2f}{accepted}"
