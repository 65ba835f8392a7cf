"""Quantised forms of models in the cache folder: the next start reads what the last one made.

    quantised/KEY.forms    header, then packed matrices as the kernels read them
    quantised/digests      SHA-256 of checkpoints' files, by path, size and times

A key is made of the content of the checkpoint, of how the model was held and of what it was rounded
to. Whatever lies here can be deleted at any time. ``PACELINE_QUANTISED_CACHE`` bounds its size
("off": nothing is kept); the forms that have not been used for longest go first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from paceline.core.sizes import parse_bytes
from paceline.core.stages import info, stage
from paceline.errors import PacelineError
from paceline.files import cache_folder, write_aside
from paceline.files.ownership import digest_of
from paceline.files.stamps import FileStamp
from paceline.model.backends.native.packing import Form, Packed

SETTING = "PACELINE_QUANTISED_CACHE"
OFF = "off"
_MAGIC = b"Written by Paceline: quantised forms 1\n"  # another layout, or other numbers: another 1
_DIGESTS = b"Written by Paceline: digests of checkpoints\n"
_MOST = 8 << 30
_SHARE = 10  # of the disk, if that is less
_REMEMBERED = 64  # files
_RECENT = 2.0  # seconds in which a file might change once more at the same time stamp


def key_of(checkpoint: Sequence[FileStamp], about: Any) -> str | None:
    """A name for what is made of a checkpoint, ``about`` saying how; None if it cannot be kept."""
    folder = _folder()
    if not checkpoint or os.environ.get(SETTING) == OFF:
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not _limit() or (not os.access(folder, os.W_OK) and not any(folder.glob("*.forms"))):
        return None
    try:
        if tuple(FileStamp.of(Path(stamp.path)) for stamp in checkpoint) != tuple(checkpoint):
            return None  # replaced since it was loaded
        contents = _contents(checkpoint)
    except OSError:
        return None
    return hashlib.sha256(json.dumps([contents, about]).encode()).hexdigest()[:40]


def read(key: str, blanks: Sequence[Callable[[Form], Packed]]) -> list[Packed] | None:
    """The matrices that were kept under a key, each in what its blank gives; None without any.

    What is damaged is said, and counts as not there.
    """
    path = _folder() / f"{key}.forms"
    try:
        with path.open("rb") as file:
            matrices = _header(file)
            packed_all = [
                blank(Form(**m["form"])) for m, blank in zip(matrices, blanks, strict=True)
            ]
            for packed, matrix in zip(packed_all, matrices, strict=True):
                buffer = packed.data.numpy().data
                if len(buffer) != matrix["bytes"] or file.readinto(buffer) != len(buffer):
                    raise ValueError("it is cut")
        if _digests(packed_all) != [matrix["sha256"] for matrix in matrices]:
            raise ValueError("a checksum differs")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        info(f"{path} is damaged ({error}) and is made anew")
        return None
    with suppress(OSError):
        os.utime(path)
    return packed_all


def write(key: str, made: Sequence[Packed]) -> None:
    """Keep matrices; where that fails, a line says so and nothing else happens."""
    folder, size = _folder(), sum(packed.data.nbytes for packed in made)
    try:
        if size > _limit() or 2 * size > shutil.disk_usage(folder).free:
            return
        _evict(folder, _limit() - size)
        matrices = [
            {"form": asdict(packed.form), "bytes": packed.data.nbytes, "sha256": digest}
            for packed, digest in zip(made, _digests(made), strict=True)
            if packed.form is not None
        ]
        text = json.dumps(matrices).encode() + b"\n"
        path = folder / f"{key}.forms"
        with (
            stage(f"keeping it in {folder}"),
            write_aside(path, "the quantised form", _is_ours, durable=False) as file,
        ):
            file.write(_MAGIC + hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            for packed in made:
                file.write(packed.data.numpy().data)
    except (OSError, PacelineError) as error:
        info(f"the quantised form is not kept for the next start: {error}")


def _folder() -> Path:
    return cache_folder() / "quantised"


def _limit() -> int:
    """Bytes that may lie here. Raises ConfigError for a setting that is no size."""
    limit = os.environ.get(SETTING)
    if limit:
        return parse_bytes(limit)
    try:
        return min(_MOST, shutil.disk_usage(_folder().parent).total // _SHARE)
    except OSError:
        return 0


def _evict(folder: Path, limit: int) -> None:
    """Delete the forms that have not been used for longest, until so many bytes are left."""
    ours = [file for file in folder.glob("*.forms") if _is_ours(file)]
    for file in sorted(ours, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        limit -= file.stat().st_size
        if limit < 0:
            file.unlink(missing_ok=True)


def _is_ours(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.readline(len(_MAGIC)) == _MAGIC


def _header(file: IO[bytes]) -> list[dict[str, Any]]:
    """Raises ValueError."""
    magic, digest, text = file.readline(), file.readline(), file.readline()
    if magic != _MAGIC or digest.strip() != hashlib.sha256(text).hexdigest().encode():
        raise ValueError("its header is none")
    matrices: list[dict[str, Any]] = json.loads(text)
    return matrices


def _digests(made: Sequence[Packed]) -> list[str]:
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(lambda p: hashlib.sha256(p.data.numpy().data).hexdigest(), made))


def _contents(checkpoint: Sequence[FileStamp]) -> list[str]:
    """SHA-256 of the files, remembered by their stamps. Raises OSError."""
    path = _folder() / "digests"
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_bytes().removeprefix(_DIGESTS))
    result, new = [], False
    for stamp in checkpoint:
        mark = [stamp.size, *stamp.changed]
        entry = known.pop(stamp.path, None)
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] == mark):
            with stage(f"reading {stamp.path} for its checksum"):
                entry, new = [mark, digest_of(Path(stamp.path))], True
        result.append(str(entry[1]))
        if time.time_ns() - max(stamp.changed[:2]) > _RECENT * 1e9:
            known[stamp.path] = entry  # the last ones are the last that were used
    if new:
        text = json.dumps(dict(list(known.items())[-_REMEMBERED:])).encode()
        with (
            suppress(OSError, PacelineError),
            write_aside(path, "the digests", _knows_digests, durable=False) as file,
        ):
            file.write(_DIGESTS + text)
    return result


def _knows_digests(file: Path) -> bool:
    return file.read_bytes().startswith(_DIGESTS)
