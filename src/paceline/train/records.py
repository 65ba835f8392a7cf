"""Reading JSONL(.gz) files of records; what cannot be used is counted and named, and left out."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from paceline.core.params import is_unicode
from paceline.core.stages import warn
from paceline.errors import DataError

# What a record may hold, in the order in which it is looked for.
FORMS = ("ids", "messages", "conversations", "turns", "text")
_NAMED = 3  # refused lines that are told one by one
_TICK = 64  # lines between two reports of progress
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class RefusedError(Exception):
    """Why one record cannot be used. It never leaves this package: ``Records`` collects it."""


def unicode_text(text: object) -> str:
    """The text itself. Raises RefusedError for anything else."""
    if not isinstance(text, str):
        raise RefusedError("its text is no text")
    if not is_unicode(text):
        raise RefusedError("it has half a surrogate pair, which is no character")
    return text


@dataclass(frozen=True)
class Source:
    """One corpus file and its share of the pieces that are learnt."""

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
            why = "is a folder" if Path(path).is_dir() else "does not exist"
            raise DataError(f"data file {path} {why}; give JSONL or JSONL.gz files")
        if not value > 0:
            raise DataError(f"--data {spec!r}: the weight must be above 0")
        return cls(Path(path), value)


class Records:
    """The records of a JSONL(.gz) file, without those whose licence contains an excluded string and
    without lines that cannot be used (``named``)."""

    def __init__(self, path: Path, exclude_licenses: Sequence[str] = ()) -> None:
        self.path, self._exclude = path, exclude_licenses
        self.refused = 0
        self._first: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises DataError if the file cannot be read at all."""
        return (record for _, record in self.numbered())

    def numbered(
        self, advance: Callable[[int], None] = lambda size: None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Records with their line numbers; ``advance`` is told the bytes read since the last time.
        Raises DataError if the file cannot be read at all."""
        before = 0
        try:
            with self.path.open("rb") as raw:
                packed = self.path.suffix == ".gz"
                lines = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if packed else raw
                for number, record in self.made(_record, enumerate(lines, 1)):
                    if number % _TICK == 0:
                        advance(raw.tell() - before)
                        before = raw.tell()
                    licence = str((record or {}).get("license", ""))
                    if record is not None and not any(word in licence for word in self._exclude):
                        yield number, record
                advance(raw.tell() - before)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read {self.path}: {reason}; check the path") from None

    def made(
        self, make: Callable[[_In], _Out], numbered: Iterable[tuple[int, _In]]
    ) -> Iterator[tuple[int, _Out]]:
        """What ``make`` makes of numbered lines or records; those that it refuses are left out."""
        for number, item in numbered:
            try:
                made = make(item)
            except RefusedError as why:
                self.refused += 1
                if self.refused <= _NAMED:
                    self._first.append(f"line {number}: {why}")
                continue
            yield number, made

    @property
    def named(self) -> str:
        """The first lines that were left out, and why."""
        more = self.refused - len(self._first)
        return "; ".join([*self._first, f"and {more:,} more"] if more else self._first)

    def report(self, used: int) -> None:
        """Say what was left out beside ``used`` records, if anything was."""
        if self.refused:
            lines = "line" if self.refused == 1 else "lines"
            warn(f"{self.path}: {self.refused:,} {lines} left out, {used:,} used ({self.named})")


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
