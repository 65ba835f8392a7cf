"""Figures, tables and the missed cells of the never-slower matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from paceline.tools.report.document import Report, Table, Text

PLAIN, AUTO = "plain", "auto"
WANTED = 0.97  # of plain decoding, from the first request on
WANTED_OF_BEST = 0.98  # of the best of plain decoding and all fixed lengths, later on
Rounds = Sequence[Mapping[str, Any]]  # by contestant, what it did

_NOTES = ("others", "same_text")  # of a round, beside its contestants


def summary(rounds: Mapping[str, Rounds], fixed: bool) -> dict[str, dict[str, Any]]:
    """The figures of every cell, by its key."""
    return {key: (against_best if fixed else against_plain)(own) for key, own in rounds.items()}


def against_plain(rounds: Rounds) -> dict[str, Any]:
    """Auto by plain decoding, of every round; the whole, each stretch, and processor seconds."""
    pairs = [(own[AUTO], own[PLAIN]) for own in rounds]
    ratios = [auto["speed"] / plain["speed"] for auto, plain in pairs]
    stretches = min(len(run["parts"]) for pair in pairs for run in pair)  # some may end early
    parts = [
        [_part_speed(auto, n) / _part_speed(plain, n) for auto, plain in pairs]
        for n in range(stretches)
    ]
    cpu = [plain["cpu"] / auto["cpu"] for auto, plain in pairs]
    first = [auto["waves"][0] / plain["waves"][0] for auto, plain in pairs]
    return _common(rounds) | {
        "ratio": _rounded(median(ratios)),
        "by_round": [_rounded(ratio) for ratio in ratios],
        "parts": [_rounded(median(part)) for part in parts],
        "first_wave": _rounded(median(first)),
        "cpu_ratio": _rounded(median(cpu)),
        "wanted": WANTED,
        "met": median(ratios) >= WANTED,
    }


def against_best(rounds: Rounds) -> dict[str, Any]:
    """Auto by the best of the others' medians, both in the last stretch."""
    names = [name for name in rounds[0] if name not in _NOTES]
    speeds = {name: [_part_speed(own[name], -1) for own in rounds] for name in names}
    others = {name: median(found) for name, found in speeds.items() if name != AUTO}
    best = max(others, key=lambda name: others[name])
    ratios = [auto / other for auto, other in zip(speeds[AUTO], speeds[best], strict=True)]
    return _common(rounds) | {
        "ratio": _rounded(median(ratios)),
        "by_round": [_rounded(ratio) for ratio in ratios],
        "best": best,
        "tokens_per_second": {name: round(median(found), 1) for name, found in speeds.items()},
        "wanted": WANTED_OF_BEST,
        "met": median(ratios) >= WANTED_OF_BEST,
    }


def _common(rounds: Rounds) -> dict[str, Any]:
    auto = [own[AUTO] for own in rounds]
    steps = sum(own["target_steps"] for own in auto)
    busy = [own["others"] for own in rounds if own["others"] is not None]
    return {
        "drafted": sum(own["drafted"] for own in auto),
        "accepted": sum(own["accepted"] for own in auto),
        "tokens": sum(own["tokens"] for own in auto),
        "steps_that_drafted": _rounded(sum(own["drafting"] for own in auto) / max(1, steps)),
        "startup_seconds": round(median(own["startup"] for own in auto), 2),
        "same_text": _rounded(sum(own["same_text"] for own in rounds) / len(rounds)),
        "others_cores": round(median(busy), 2) if busy else None,
    }


def _part_speed(run: Mapping[str, Any], number: int) -> float:
    """Tokens a second of a request in one stretch: sequences that draft do not move together."""
    part = run["parts"][number]
    return float(part["tokens"] / part["seconds"])


def _rounded(value: float) -> float:
    return round(value, 3)


def cell_line(key: str, rounds: Rounds, fixed: bool) -> str:
    """One line for a cell that is complete."""
    own = (against_best if fixed else against_plain)(rounds)
    low, high = min(own["by_round"]), max(own["by_round"])
    against = f"the best ({own['best']})" if fixed else "plain"
    verdict = "met" if own["met"] else "MISSED"
    more = "" if fixed else f", by stretch {' '.join(f'{part:.3f}' for part in own['parts'])}"
    return (
        f"{key}: {own['ratio']:.3f} of {against} ({low:.3f} to {high:.3f}{more}), {verdict} "
        f"({own['wanted']}); {_drafts(own)}"
    )


def _drafts(own: Mapping[str, Any]) -> str:
    share = 100 * own["steps_that_drafted"]
    return (
        f"{own['drafted']} drafted, {own['accepted']} accepted for {own['tokens']} tokens, "
        f"{share:.1f} % of steps drafted"
    )


def as_report(record: Mapping[str, Any]) -> Report:
    """Tables of all cells, and the missed ones with what was drafted there."""
    settings, cells, about = record["settings"], record["cells"], record["machine"]
    report = Report(f"Never slower: {settings['pair']}")
    temperatures = dict.fromkeys(key.rsplit("/t", 1)[1] for key in cells)
    for temperature in temperatures:
        keys = [key for key in cells if key.rsplit("/t", 1)[1] == temperature]
        report.add(f"Temperature {temperature}", _grid(cells, keys), _details(cells, keys))
    missed = [key for key, own in cells.items() if not own["met"]]
    lines = [f"{key}: {cells[key]['ratio']:.3f}, {_drafts(cells[key])}" for key in missed]
    wanted = WANTED_OF_BEST if settings["fixed"] else WANTED
    report.add(
        f"Missed (below {wanted})", *(Text(line) for line in lines or ["none of those measured"])
    )
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    versions = f"torch {about['torch']}, transformers {about['transformers']}"
    report.add("Machine", Text(f"{about['cpu']}, {threads}, {versions}."))
    return report


def _grid(cells: Mapping[str, Any], keys: Sequence[str]) -> Table:
    """Drafters by batch sizes."""
    where = {key: tuple(key.rsplit("/", 2)[:2]) for key in keys}
    batches = list(dict.fromkeys(batch for _, batch in where.values()))
    rows = []
    for drafter in dict.fromkeys(name for name, _ in where.values()):
        own = {batch: key for key, (name, batch) in where.items() if name == drafter}
        found = [f"{cells[own[b]]['ratio']:.3f}" if b in own else "" for b in batches]
        rows.append([drafter, *found])
    note = "Auto's tokens a second by those it is held against; medians over rounds."
    return Table(["drafter", *(batch[1:] for batch in batches)], rows, note=note)


def _details(cells: Mapping[str, Any], keys: Sequence[str]) -> Table:
    rows = []
    for key in keys:
        own = cells[key]
        low, high = min(own["by_round"]), max(own["by_round"])
        middle = (
            [own["best"]]
            if "best" in own
            else [" ".join(f"{part:.2f}" for part in own["parts"]), f"{own['cpu_ratio']:.3f}"]
        )
        rows.append(
            [
                key.rsplit("/", 1)[0],
                f"{own['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
                *middle,
                f"{1000 * own['drafted'] / own['tokens']:.0f}",
                f"{own['accepted'] / max(1, own['drafted']):.2f}",
                f"{100 * own['steps_that_drafted']:.1f} %",
                f"{own['startup_seconds']:.1f} s",
                "" if own["others_cores"] is None else f"{own['others_cores']:.2f}",
            ]
        )
    fixed = any("best" in cells[key] for key in keys)
    middle_names = ["best"] if fixed else ["by stretch", "by CPU time"]
    columns = ["cell", "ratio", "by round", *middle_names, "drafted/1000", "accepted"]
    columns += ["steps drafting", "start-up", "others"]
    note = (
        "By stretch: the first tokens of each request, those in between, the late ones. Others: "
        "cores that other processes kept busy meanwhile; by CPU time is disturbed less by them."
    )
    return Table(columns, rows, note=note)
