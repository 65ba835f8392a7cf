"""Safetensors files: the table of tensors, and checksums.

A file begins with the length, in eight bytes, of a JSON table (dtype, shape, first and last byte of
each tensor); the table and the tensors follow. The format has no checksums. Files that we write
have the SHA-256 of each tensor's bytes in their metadata, and are verified when they are read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelLoadError
from paceline.files import write_files

if TYPE_CHECKING:
    import torch

SUMS = "paceline_sha256"  # in the metadata: a JSON object of tensor names and digests
_LARGEST_TABLE = 100_000_000  # bytes; the format's own limit
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_WIDTHS |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a table: the bytes ``start`` to ``end`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorTable:
    """A file's tensors, and its checksums by tensor, empty if it has none."""

    entries: Mapping[str, Entry]
    sums: Mapping[str, str]


def read_table(file: Path) -> TensorTable:
    """Read a file's table, and check it against the file's length. Raises ModelLoadError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(size - 8, _LARGEST_TABLE):
            raise _damaged(file, "it ends before its table of tensors does")
        try:
            table = json.loads(stream.read(length))
            sums = json.loads((table.pop("__metadata__", None) or {}).get(SUMS, "{}"))
            entries = {key: _entry(value, 8 + length) for key, value in table.items()}
            if not all(isinstance(digest, str) for digest in sums.values()):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise _damaged(file, "it has no readable table of tensors") from None
    for key, entry in sorted(entries.items(), key=lambda item: item[1].end):
        if entry.end > size:
            what = f"tensor {key} is cut: the file has {size:,} bytes, and it takes {entry.end:,}"
            raise _damaged(file, what)
        width = _WIDTHS.get(entry.dtype)
        if width is not None and entry.end - entry.start != prod(entry.shape) * width:
            raise _damaged(file, f"tensor {key} has not the bytes that its shape asks for")
    return TensorTable(entries, sums)


def _entry(value: Mapping[str, Any], base: int) -> Entry:
    first, last = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(n) is int and n >= 0 for n in (first, last, *shape)) or last < first:
        raise ValueError("an offset or size is not a natural number")
    return Entry(str(value["dtype"]), shape, base + first, base + last)


def _damaged(file: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"the weights file {file} is damaged: {what}; download or copy it again")


def verify(file: Path, table: TensorTable | None = None) -> bool:
    """Compare checksums (1 to 2 GB/s); False if the file has none. Raises ModelLoadError."""
    table = read_table(file) if table is None else table
    if not table.sums:
        return False
    for key in sorted(table.entries.keys() ^ table.sums.keys()):
        lack = "has no checksum" if key in table.entries else "is missing"
        raise _damaged(file, f"tensor {key} {lack}")
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
        for key, entry in table.entries.items():
            if _digest(content, entry) != table.sums[key]:
                raise _damaged(file, f"tensor {key} does not match its checksum (SHA-256)")
    return True


def check_sizes(name: str, config: Any, tensors: int, numbers: int) -> None:
    """Raises ModelLoadError if a config states sizes that a checkpoint of ``tensors`` tensors and
    ``numbers`` weights cannot have. transformers would first build such a model, which takes all
    memory or does not end."""
    text = config.get_text_config(decoder=True)
    limits = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), numbers)
    for key, limit in (limits | {"num_hidden_layers": tensors}).items():
        value = getattr(text, key, None)
        least = int(key != "intermediate_size")  # layers without an MLP state 0
        if tensors and isinstance(value, int) and not least <= value <= limit:
            what = "more than its weights hold" if value > 0 else "which is no size"
            raise ModelLoadError(f"{name} states {value} for {key}, {what}; copy its files again")


def _digest(content: mmap, entry: Entry) -> str:
    with memoryview(content) as view, view[entry.start : entry.end] as part:
        return hashlib.sha256(part).hexdigest()


def load_tensors(file: Path, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Read a file's tensors, or those of ``keys``, to the CPU. Raises ModelLoadError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in keys or opened.keys()}
    except (OSError, SafetensorError) as error:
        raise _damaged(file, str(error)) from None


def as_bytes(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The content of a file with checksums and ``metadata``. Equal tensors give equal bytes, as
    receipts hash files: safetensors alone writes metadata in random order."""
    import torch
    from safetensors.torch import save

    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    sums = {
        key: hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for key, value in plain.items()
    }
    marks = {"format": "pt", **(metadata or {}), SUMS: json.dumps(sums, sort_keys=True)}
    content = save(plain, metadata=marks)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(marks.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return b"".join((content[:8], text.ljust(start - 8), memoryview(content)[start:]))


def add_checksums(file: Path) -> None:
    """Add checksums to a file of another library by rewriting it; nobody may be reading it."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    content = as_bytes(load_tensors(file), metadata)
    write_files({file: content}, "the weights")


def check_finite(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises ModelLoadError if a tensor holds NaN or infinity; ``what`` names the weights."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
            continue
        wide = tensor if tensor.element_size() > 1 else tensor.float()
        low, high = wide.aminmax()  # NaN propagates
        if not (bool(low.isfinite()) and bool(high.isfinite())):
            raise ModelLoadError(
                f"{what}: tensor {key} holds NaN or infinity; copy the weights again, and if they "
                "stay so, training or conversion went wrong"
            )
