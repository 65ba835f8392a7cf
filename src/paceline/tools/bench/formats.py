"""Files of prompts: JSON lines, a JSON list or plain text, gzipped or not, into records."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import DataError

_TEXT = (".txt", ".md", ".text")
_SEPARATOR = "---"


def read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, each with where it stands ("prompts.jsonl, line 3").

    Plain text (.txt, .md, .text) gives one record ``{"text": ...}``, or one for each part between
    lines that hold ``---`` and nothing else. Everything else is JSON: an object a line, a list of
    objects, or one object. Raises DataError, in one line.
    """
    text = _text_of(file)
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    if suffix.lower() in _TEXT:
        yield from _parts(file, text)
    else:
        yield from _objects(file, text)


def _text_of(file: Path) -> str:
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"no prompt file {file}; give the path of one") from None
    except IsADirectoryError:
        raise DataError(f"{file} is a folder; give one file of prompts") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is not a whole gzip file ({error}); pack it again") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def _parts(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    part: list[str] = []
    number = 0
    for line in [*text.splitlines(), _SEPARATOR]:
        if line.strip() != _SEPARATOR:
            part.append(line)
            continue
        joined = "\n".join(part).strip("\n")
        if joined.strip():
            number += 1
            yield f"{file}, part {number}", {"text": joined}
        part = []


def _objects(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        whole = json.loads(text)
    except ValueError:
        yield from _lines(file, text)
        return
    if isinstance(whole, list):
        for number, record in enumerate(whole, 1):
            place = f"{file}, item {number}"
            yield place, _object(record, place)
    else:
        yield f"{file}, line 1", _object(whole, f"{file}, line 1")


def _lines(file: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # Not splitlines: JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            reason = getattr(error, "msg", error)
            raise DataError(
                f"{place}: not JSON ({reason}); write one object a line, "
                "or name a file of plain text .txt"
            ) from None
        yield place, _object(record, place)


def _object(record: object, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{place}: no JSON object; each record is one, with a prompt")
    return record
