"""Reads JSONL(.gz) files of records. Unusable lines are skipped, counted and reported."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from paceline.core.params import is_unicode
from paceline.core.stages import warn
from paceline.errors import DataError

# The fields with a record's content; the first one that a record has is used.
FORMS = ("ids", "messages", "conversations", "turns", "text")
_MAX_REPORTED = 3  # unusable lines that are reported one by one
_PROGRESS_LINES = 64  # lines between two updates of the progress
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class RecordError(Exception):
    """Why a record cannot be used. ``Records.convert`` catches it."""


def checked_text(text: object) -> str:
    """Return ``text``. Raises RecordError if it is not a string of valid Unicode."""
    if not isinstance(text, str):
        raise RecordError("its text is not a string")
    if not is_unicode(text):
        raise RecordError("it has half a surrogate pair, which is no character")
    return text


@dataclass(frozen=True)
class Source:
    """A data file and its share of the training data."""

    path: Path
    weight: float

    @property
    def name(self) -> str:
        return self.path.name.split(".")[0]

    @classmethod
    def parse(cls, spec: str) -> Source:
        """``FILE`` or ``FILE=WEIGHT``; the weight is relative, 1 when left out."""
        path, _, weight = spec.rpartition("=")
        if not path or Path(spec).is_file():  # its folder may be called a=1
            path, weight = spec, ""
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            raise DataError(
                f"--data {spec!r}: {weight!r} is not a number; use FILE=WEIGHT"
            ) from None
        if not Path(path).is_file():
            why = "is a folder" if Path(path).is_dir() else "does not exist"
            raise DataError(f"data file {path} {why}; give JSONL or JSONL.gz files")
        if not 0 < value < inf:
            raise DataError(f"--data {spec!r}: the weight must be above 0, and finite")
        return cls(Path(path), value)


def held_out_sources(specs: Sequence[str]) -> list[Source]:
    """The files of ``--valid``. Raises DataError, also for a weight, and for two of one name."""
    sources: dict[str, Source] = {}
    for spec in specs:
        source = Source.parse(spec)
        if Path(spec) != source.path:
            raise DataError(f"--valid {spec!r}: these files have no weights; give {source.path}")
        if source.name in sources:
            raise DataError(
                f"--valid has two files called {source.name}, the name by which their acceptance "
                "is reported; rename one"
            )
        sources[source.name] = source
    return [*sources.values()]


class Records:
    """The records of a JSONL(.gz) file, without those whose licence contains an excluded string and
    without unusable lines (``refused_lines``)."""

    def __init__(self, path: Path, exclude_licenses: Sequence[str] = ()) -> None:
        self.path, self._exclude = path, [*filter(None, exclude_licenses)]  # "" is in any text
        self.refused = 0
        self._first: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises DataError if the file cannot be read at all."""
        return (record for _, record in self.numbered())

    def numbered(
        self, advance: Callable[[int], None] = lambda size: None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The records with their line numbers. ``advance`` is called with the bytes read since its
        last call. Raises DataError if the file cannot be read at all."""
        before = 0
        try:
            with self.path.open("rb") as raw:
                compressed = self.path.suffix == ".gz"
                lines = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if compressed else raw
                for number, record in self.convert(_parse_line, enumerate(lines, 1)):
                    if number % _PROGRESS_LINES == 0:
                        advance(raw.tell() - before)
                        before = raw.tell()
                    licence = str((record or {}).get("license", ""))
                    if record is not None and not any(word in licence for word in self._exclude):
                        yield number, record
                advance(raw.tell() - before)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read {self.path}: {reason}; check the path") from None

    def convert(
        self, function: Callable[[_In], _Out], numbered: Iterable[tuple[int, _In]]
    ) -> Iterator[tuple[int, _Out]]:
        """Apply a function to numbered lines or records; those with a RecordError are reported."""
        for number, item in numbered:
            try:
                converted = function(item)
            except RecordError as error:
                self.refused += 1
                if self.refused <= _MAX_REPORTED:
                    self._first.append(f"line {number}: {error}")
                continue
            yield number, converted

    @property
    def refused_lines(self) -> str:
        """The first unusable lines, with the reasons."""
        more = self.refused - len(self._first)
        return "; ".join([*self._first, f"and {more:,} more"] if more else self._first)

    def report(self, used: int) -> None:
        """Warn about unusable lines, if there are any; ``used`` is the number of used records."""
        if self.refused:
            lines = "line" if self.refused == 1 else "lines"
            counts = f"{self.refused:,} {lines} left out, {used:,} used"
            warn(f"{self.path}: {counts} ({self.refused_lines})")


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for a blank one. Raises RecordError."""
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8-sig"))  # some editors begin files with a mark
    except UnicodeDecodeError:
        raise RecordError("it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise RecordError("it is not JSON") from None
    if not isinstance(record, dict):
        raise RecordError("it is not a JSON object")
    form = next((name for name in FORMS if record.get(name) is not None), None)
    if form is None:
        raise RecordError(f"it has none of the fields {', '.join(FORMS)}")
    if not record[form]:
        raise RecordError(f"its {form} is empty")
    return record
