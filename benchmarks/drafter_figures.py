"""What the records of the drafters' benchmark say: ratios to plain decoding, tables, worst sets.

Speeds are tokens a second, all tokens of some waves by all their seconds; a ratio is taken within
one record, and its median over the records (rounds) of a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from paceline.lab.report.columns import Column, table_of
from paceline.lab.report.document import Report, Table, Text

PLAIN = "plain"
PASSES = {"first": "First requests", "later": "Later requests", "again": "The same requests again"}
WANTED = 0.98  # of plain decoding, in every cell
Record = Mapping[str, Any]
Waves = Sequence[Mapping[str, Any]]


def speed(waves: Waves, name: str) -> float:
    own = [wave["by"][name] for wave in waves]
    return float(sum(run["tokens"] for run in own) / sum(run["seconds"] for run in own))


def figures(waves: Waves, name: str) -> dict[str, Any]:
    """Of one engine in one pass: speed by plain decoding's, in all, in the median wave and in
    the worst set (of batches: the worst batch), and what its drafts were."""
    by_set = {key: speed(own, name) / speed(own, PLAIN) for key, own in _sets(waves).items()}
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
    """A drafter's adaptive length by the best of its chosen lengths and plain decoding, over the
    whole pass and within every set; None where no length was chosen.

    The best is a maximum of figures that vary, so these lean downward.
    """
    fixed = [PLAIN, *(key for key in waves[0]["by"] if key.startswith(f"{name}@"))]
    if len(fixed) == 1:
        return None

    def best_of(own: Waves) -> str:
        return str(max(fixed, key=lambda key: speed(own, key)))

    best = best_of(waves)
    by_set: dict[str, dict[str, Any]] = {
        key: {"best": best_of(own), "ratio": speed(own, name) / speed(own, best_of(own))}
        for key, own in _sets(waves).items()
    }
    worst = min(by_set, key=lambda key: by_set[key]["ratio"])
    return {
        "best": best,
        "ratio": speed(waves, name) / speed(waves, best),
        "worst": by_set[worst]["ratio"],
        "worst_set": worst,
        "sets": by_set,
    }


def _sets(waves: Waves) -> dict[str, list[Mapping[str, Any]]]:
    """Waves of one prompt by its set, others one by one."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for number, wave in enumerate(waves):
        key = wave["sets"][0] if len(wave["sets"]) == 1 else f"batch {number + 1}"
        found.setdefault(key, []).append(wave)
    return found


def _passes(record: Record) -> dict[str, Waves]:
    named = {name: [wave for wave in record["waves"] if wave["pass"] == name] for name in PASSES}
    return {name: own for name, own in named.items() if own}


def _over(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of numbers over rounds; of words that of the round with the least ratio."""
    over = dict(min(rounds, key=lambda figures: float(figures["ratio"])))
    for key, value in over.items():
        if isinstance(value, float) and all(isinstance(one[key], float) for one in rounds):
            over[key] = round(median(one[key] for one in rounds), 3)
    return over | {"rounds": len(rounds)}


def target_of(record: Record) -> str:
    """Which weights, held how: cells of one target stand in one table."""
    own = record["settings"]
    name = own["pair"] + ("" if own["weights"] == "pulled" else f", {own['weights']}")
    pinned = "" if own["native"] == "auto" else f", PACELINE_NATIVE={own['native']}"
    return f"{name}, {own['form']}{pinned}"


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """{target: {cell: {pass: {engine: figures}}}}; a drafter has ``of_best`` where its lengths
    were chosen, too."""
    by_key: dict[tuple[str, str, str, str], list[Waves]] = {}
    for record in records:
        for name, waves in _passes(record).items():
            for engine in waves[0]["by"]:
                key = (target_of(record), record["cell"], name, engine)
                by_key.setdefault(key, []).append(waves)
    tree: dict[str, Any] = {}
    for key, rounds in by_key.items():
        engine, branch = key[-1], tree
        for part in key[:-1]:
            branch = branch.setdefault(part, {})
        branch[engine] = _over([figures(waves, engine) for waves in rounds])
        if "@" not in engine and engine != PLAIN:
            best = [against for waves in rounds if (against := of_best(waves, engine))]
            branch[engine] |= {"of_best": _over(best)} if best else {}
    return tree


def ratios(records: Iterable[Record]) -> dict[str, Any]:
    """{target: {cell: {pass: {engine: speed by plain decoding's}}}}."""
    return {
        target: {
            cell: {name: {one: own["ratio"] for one, own in by.items()} for name, by in own.items()}
            for cell, own in cells.items()
        }
        for target, cells in summary(records).items()
    }


def brief(record: Record) -> str:
    """One line for a record: every drafter's ratio in every pass."""
    parts = []
    for name, waves in _passes(record).items():
        own = [one for one in waves[0]["by"] if "@" not in one and one != PLAIN]
        found = [f"{one} {figures(waves, one)['ratio']:.2f}" for one in own]
        parts.append(f"{name}: {', '.join(found)}")
    return "; ".join(parts)


# -- tables ---------------------------------------------------------------------------------------


def as_report(records: Sequence[Record]) -> Report:
    """Per target: speed by plain decoding's in every cell and pass, tokens a step, the adaptive
    length by the best, and where anything is slower than plain decoding."""
    report = Report("Drafters beside plain decoding")
    for target, cells in summary(records).items():
        tables = [
            _grid(
                title, {cell: by[name] for cell, by in cells.items() if name in by}, _ratio, _NOTE
            )
            for name, title in PASSES.items()
        ]
        flat = [
            {"cell": cell, "pass": name, "drafter": one, **own}
            for cell, passes in cells.items()
            for name, by in passes.items()
            for one, own in by.items()
        ]
        slow = [
            f"{row['cell']}, {row['pass']}: {row['drafter']} {row['ratio']:.3f}"
            for row in flat
            if "@" not in row["drafter"] and row["ratio"] < WANTED
        ]
        chosen = [row for row in flat if "of_best" in row]
        if chosen:
            tables.append(table_of(chosen, _OF_BEST, _BEST, "The adaptive length"))
        below = Text(f"Below {WANTED} of plain decoding: {'; '.join(slow) or 'nothing'}.")
        report.add(target, *(table for table in tables if table.rows), below)
        steps = {cell: by["first"] for cell, by in cells.items() if "first" in by}
        report.add(f"{target}: tokens a step", _grid("First requests", steps, _step))
    tokens = sorted({record["settings"]["tokens"] for record in records})
    about = {_MACHINE.format(**record["machine"]) for record in records}
    how = f"Answers of {' or '.join(map(str, tokens))} tokens at most. {'; '.join(about)}."
    report.add("How", Text(how))
    return report


_MACHINE = "{cpu}, {threads} threads, torch {torch}, transformers {transformers}"
_NOTE = "By plain decoding; in brackets the worst set, or batch."
_BEST = "The best of plain decoding and the chosen lengths, in all and within each set."
_OF_BEST = (
    Column("cell", "cell"),
    Column("pass", "pass"),
    Column("drafter", "drafter"),
    Column("best", "best", "of_best.best"),
    Column("ratio", "adaptive / best", "of_best.ratio", "{:.3f}".format),
    Column("worst", "worst set", "of_best", "{0[worst]:.3f} {0[worst_set]}".format),
)


def _grid(
    title: str,
    cells: Mapping[str, Mapping[str, Any]],
    show: Callable[[Mapping[str, Any]], str],
    note: str = "",
) -> Table:
    names = dict.fromkeys(one for own in cells.values() for one in own if one != PLAIN)
    rows = [
        [name, *(show(own[name]) if name in own else None for own in cells.values())]
        for name in names
    ]
    return Table(["drafter", *cells], rows, title, note)


def _ratio(own: Mapping[str, Any]) -> str:
    return f"{own['ratio']:.2f} ({own['worst']:.2f})"


def _step(own: Mapping[str, Any]) -> str:
    accepted = "" if own["acceptance"] is None else f" ({own['acceptance']:.0%})"
    return f"{own['tokens_a_step']:.2f}{accepted}"
