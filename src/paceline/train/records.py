"""Reading JSONL(.gz) files of records; what cannot be used is counted and named, and left out."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from paceline.core.stages import warn
from paceline.errors import DataError

# What a record may hold, in the order in which it is looked for.
FORMS = ("ids", "messages", "conversations", "turns", "text")
_NAMED = 3  # refused lines that are told one by one
_TICK = 64  # lines between two reports of progress


class RefusedError(Exception):
    """Why one record cannot be used. It never leaves this package: ``Refusals`` collects it."""


@dataclass(frozen=True)
class Source:
    """One corpus file and its share of the training tokens."""

    path: Path
    weight: float

    @property
    def name(self) -> str:
        return self.path.name.split(".")[0]

    @classmethod
    def parse(cls, spec: str) -> Source:
        """``FILE`` or ``FILE=WEIGHT``; the weight is relative, 1 when left out."""
        path, _, weight = spec.partition("=")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            raise DataError(
                f"--data {spec!r}: {weight!r} is not a number; use FILE=WEIGHT"
            ) from None
        if not Path(path).is_file():
            raise DataError(f"data file {path} does not exist; give JSONL or JSONL.gz files")
        if not value > 0:
            raise DataError(f"--data {spec!r}: the weight must be above 0")
        return cls(Path(path), value)


class Refusals:
    """The lines of a file that were left out, and why: how many, and the first few."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._first: list[str] = []

    def add(self, line: int, why: str) -> None:
        self.count += 1
        if len(self._first) < _NAMED:
            self._first.append(f"line {line}: {why}")

    @property
    def named(self) -> str:
        more = self.count - len(self._first)
        return "; ".join([*self._first, f"and {more:,} more"] if more else self._first)

    def report(self, used: int) -> None:
        """Say what was left out beside ``used`` records, if anything was."""
        if self.count:
            lines = "line" if self.count == 1 else "lines"
            warn(f"{self.path}: {self.count:,} {lines} left out, {used:,} used ({self.named})")


def numbered_records(
    path: Path,
    exclude_licenses: Sequence[str] = (),
    refused: Refusals | None = None,
    advance: Callable[[int], None] = lambda size: None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records of a file, without excluded licences and what is no record.

    ``advance`` is told the bytes of the file that were read since the last time. Raises DataError
    if the file cannot be read at all.
    """
    refused = Refusals(path) if refused is None else refused
    before = 0
    try:
        with path.open("rb") as raw:
            packed = path.suffix == ".gz"
            lines = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if packed else raw
            for number, line in enumerate(lines, 1):
                if number % _TICK == 0:
                    advance(raw.tell() - before)
                    before = raw.tell()
                try:
                    record = _record(line)
                except RefusedError as why:
                    refused.add(number, str(why))
                    continue
                if record is None:
                    continue
                licence = str(record.get("license", ""))
                if not any(word in licence for word in exclude_licenses):
                    yield number, record
            advance(raw.tell() - before)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for a blank one. Raises RefusedError."""
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise RefusedError("it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise RefusedError("it is not JSON") from None
    if not isinstance(record, dict):
        raise RefusedError("it is not a JSON object")
    form = next((name for name in FORMS if record.get(name) is not None), None)
    if form is None:
        raise RefusedError(f"it has none of the fields {', '.join(FORMS)}")
    if not record[form]:
        raise RefusedError(f"its {form} is empty")
    return record


def read_records(path: Path, exclude_licenses: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Records of a JSONL(.gz) file, without those whose licence contains an excluded string."""
    for _, record in numbered_records(path, exclude_licenses):
        yield record
