"""Tables, plots and the JSON object of the never-slower benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from paceline.tools.report.document import Figure, Report, Table, Text
from paceline.tools.report.plots import lines
from waves import Run

PLAIN, AUTO = "plain", "auto"
Rounds = Mapping[str, Sequence[Run]]  # by contestant

_TITLES = {
    "sweep": "Concurrency, greedy",
    "sampled": "Temperature 1",
    "load": "Changing load, without restarts",
}


def speed(runs: Sequence[Run]) -> float:
    return median(run.speed for run in runs)


def spread(runs: Sequence[Run]) -> float:
    """Half the distance between the fastest and the slowest round, as a share of the median."""
    speeds = [run.speed for run in runs]
    return (max(speeds) - min(speeds)) / 2 / median(speeds)


def cell_record(rounds: Rounds) -> dict[str, Any]:
    """Figures of one cell; "auto" and at least one other must have been measured."""
    speeds = {name: speed(runs) for name, runs in rounds.items()}
    others = {name: value for name, value in speeds.items() if name != AUTO}
    best = max(others, key=lambda name: others[name])
    pairs = list(zip(rounds[AUTO], rounds[best], strict=False))
    paired = [auto.speed / other.speed for auto, other in pairs]
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in speeds.items()},
        "spread": {name: round(spread(runs), 3) for name, runs in rounds.items()},
        "best": best,
        "auto_vs_best": round(speeds[AUTO] / others[best], 3),
        "auto_vs_best_by_round": [round(value, 3) for value in paired],
        "auto_vs_plain": round(speeds[AUTO] / speeds[PLAIN], 3) if PLAIN in speeds else None,
        "auto_mean_length": round(median(run.length for run in rounds[AUTO]), 2),
        "same_text": _same_text(rounds),
    }


def _same_text(rounds: Rounds) -> float | None:
    """Share of auto's texts that are plain decoding's (greedy: all but those with near ties)."""
    pairs = [
        (one, other)
        for auto, plain in zip(rounds[AUTO], rounds.get(PLAIN, ()), strict=False)
        for one, other in zip(auto.texts, plain.texts, strict=True)
    ]
    return round(sum(a == b for a, b in pairs) / len(pairs), 3) if pairs else None


def useless_record(rounds: Rounds) -> dict[str, Any]:
    pairs = list(zip(rounds[AUTO], rounds[PLAIN], strict=False))
    late = [auto.late_speed / plain.late_speed for auto, plain in pairs]
    whole = [auto.speed / plain.speed for auto, plain in pairs]
    return {
        "late_vs_plain": round(median(late), 3),
        "late_by_round": [round(value, 3) for value in late],
        "whole_vs_plain": round(median(whole), 3),
        "accepted": sum(auto.accepted for auto, _ in pairs),
        "drafted_per_1000_tokens": round(
            1000 * sum(a.drafted for a, _ in pairs) / sum(a.tokens for a, _ in pairs), 1
        ),
    }


def as_record(runs: Mapping[str, Rounds]) -> dict[str, Any]:
    """All figures, by cell; ``worst`` is the least ratio of each section."""
    record: dict[str, Any] = {}
    for key, rounds in runs.items():
        if AUTO not in rounds or len(rounds) < 2:
            continue
        record[key] = (useless_record if key.startswith("useless") else cell_record)(rounds)
    worst: dict[str, float] = {}
    for key, figures in record.items():
        section = key.partition("/")[0]
        ratio = figures["late_vs_plain"] if section == "useless" else figures["auto_vs_best"]
        worst[section] = min(ratio, worst.get(section, ratio))
    return record | {"worst": worst}


def as_report(runs: Mapping[str, Rounds], record: Mapping[str, Any]) -> Report:
    about = record["machine"]
    report = Report("Never slower")
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    versions = f"torch {about['torch']}, transformers {about['transformers']}"
    for section, title in _TITLES.items():
        keys = [key for key in record if key.partition("/")[0] == section]
        if not keys:
            continue
        blocks: list[Table | Figure] = [_table(runs, record, keys)]
        if section == "sweep" and len(keys) > 1:
            blocks.append(_sweep_figure(record, keys))
        if section == "load":
            blocks.append(_load_figure(runs, keys))
        report.add(title, *blocks)
    useless = [key for key in record if key.startswith("useless/")]
    if useless:
        report.add("A useless draft", _useless_table(record, useless))
    report.add("Machine", Text(f"{about['cpu']}, {threads}, {versions}."))
    return report


def _table(runs: Mapping[str, Rounds], record: Mapping[str, Any], keys: Sequence[str]) -> Table:
    names = list(dict.fromkeys(name for key in keys for name in runs[key]))
    names = [*(name for name in sorted(names, key=_rank) if name != AUTO), AUTO]
    rows: list[list[str]] = []
    for key in keys:
        figures, speeds = record[key], record[key]["tokens_per_second"]
        cells = [f"{speeds[name]:.0f}" if name in speeds else "" for name in names]
        widest = max(figures["spread"].values())
        by_round = figures["auto_vs_best_by_round"]
        rows.append(
            [
                key.partition("/")[2],
                *cells,
                f"{figures['auto_mean_length']:.1f}",
                figures["best"],
                f"{figures['auto_vs_best']:.3f}",
                f"{min(by_round):.2f} to {max(by_round):.2f}",
                f"{100 * widest:.0f} %",
            ]
        )
    columns = ["requests", *names, "nodes a step", "best", "auto / best", "by round", "spread"]
    note = (
        "Tokens a second, medians over rounds; numbers are fixed draft lengths. Nodes a step are "
        "auto's, of one sequence. Spread: half of fastest minus slowest round, by the median, of "
        "whoever spread most."
    )
    return Table(columns, rows, note=note)


def _rank(name: str) -> int:
    return int(name) if name.isdigit() else -1


def _useless_table(record: Mapping[str, Any], keys: Sequence[str]) -> Table:
    rows = [
        [
            key.partition("/")[2],
            f"{record[key]['late_vs_plain']:.3f}",
            f"{min(record[key]['late_by_round']):.3f} to {max(record[key]['late_by_round']):.3f}",
            f"{record[key]['whole_vs_plain']:.3f}",
            f"{record[key]['drafted_per_1000_tokens']:.0f}",
            str(record[key]["accepted"]),
        ]
        for key in keys
    ]
    columns = ["requests", "after 100 tokens", "by round", "from the start", "drafted", "accepted"]
    note = "Tokens a second by plain decoding's. Drafted: nodes per thousand tokens written."
    return Table(columns, rows, note=note)


def _sweep_figure(record: Mapping[str, Any], keys: Sequence[str]) -> Figure:
    """Tokens a second by plain decoding's: what each setting gains or loses."""
    x = [int(key.partition("/")[2]) for key in keys]
    names = sorted(record[keys[0]]["tokens_per_second"], key=_rank)
    names = [*(name for name in names if name != AUTO), AUTO]
    series = {
        (f"length {name}" if name.isdigit() else name): [
            record[key]["tokens_per_second"][name] / record[key]["tokens_per_second"][PLAIN]
            for key in keys
        ]
        for name in names
    }
    return Figure(
        "Throughput by plain decoding's",
        lambda: lines(x, series, "requests at once", "speed by plain decoding's", log_x=True),
        "never_slower",
    )


def _load_figure(runs: Mapping[str, Rounds], keys: Sequence[str]) -> Figure:
    """Draft nodes per sequence along the steps of auto's last round, averaged over 10 steps."""
    steps = [step for key in keys for step in runs[key][AUTO][-1].steps]
    width = max(1, len(steps) // 60)
    groups = [steps[n : n + width] for n in range(0, len(steps), width)]
    x = [n * width for n in range(len(groups))]
    series = {
        "draft nodes a sequence": [sum(s.nodes for s in g) / len(g) for g in groups],
        "requests at once": [sum(s.sequences for s in g) / len(g) for g in groups],
    }
    return Figure(
        "Draft length while the load changes",
        lambda: lines(x, series, "target step", "nodes, requests"),
        "never_slower_load",
    )
