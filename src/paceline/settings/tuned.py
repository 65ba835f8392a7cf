"""Tuned settings: the TOML file in which ``paceline tune`` stores its results for one model on one
machine.

``LLM(model, config="tuned.toml")`` takes the drafter, its draft length, the batch size and the
acceptance rule from it and, on the machine it was made on, the measured costs as well. Everything
is checked on reading, so that a damaged or foreign file gives one clear error. Two models count as
the same if their configurations agree, whatever their paths."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from paceline.errors import ConfigError
from paceline.files import read_toml, write_files

if TYPE_CHECKING:
    from paceline.model.target import CausalModel

_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


class ModelIdentity(Struct, frozen=True):
    """A model's name and a digest of its configuration, which identifies it."""

    name: str
    config: str

    @classmethod
    def of(cls, target: CausalModel) -> ModelIdentity:
        config = target.hf.config.to_dict()
        kept = {key: value for key, value in config.items() if key not in _IGNORED}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
        return cls(target.name, digest.hexdigest()[:16])


VERSION = 1
_NUMBERS = re.compile(r"\[\s+([-+.\deE,\s]+?),?\s+\]")  # an array in TOML
_WHAT = "tuned settings"
_HEADER = (
    "# Tuned settings by `paceline tune`. Use them with LLM(model, config=FILE) or --config FILE.\n"
    "# They serve this model only; on another machine the costs are measured anew.\n"
    "# Times are in seconds. What you give by hand wins over what stands here.\n\n"
)


class MachineIdentity(Struct, frozen=True):
    """The machine on which costs were measured, the software, and the date."""

    processor: str
    device: str
    threads: int
    dtype: str
    backend: str
    torch: str
    transformers: str
    paceline: str
    python: str
    date: str  # ISO 8601, UTC

    @classmethod
    def of(cls, target: CausalModel) -> MachineIdentity:
        """This machine with the device, dtype and backend of ``target``."""
        from datetime import datetime, timezone
        from importlib.metadata import version

        import torch

        device = target.device
        cuda = device.type == "cuda"
        return cls(
            processor=torch.cuda.get_device_name(device) if cuda else _processor(),
            device=device.type,
            threads=0 if cuda else torch.get_num_threads(),
            dtype=target.dtype_text,
            backend=target.backend.name,
            torch=str(torch.__version__),
            transformers=version("transformers"),
            paceline=version("paceline"),
            python=platform.python_version(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _processor() -> str:
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class DraftChoice(Struct, frozen=True):
    """The draft; "none" is plain decoding. ``length``: levels, or "auto" up to ``max_length``."""

    spec: str
    length: Annotated[int, Meta(ge=0)] | Literal["auto"]
    max_length: Annotated[int, Meta(ge=1)]


class EngineChoice(Struct, frozen=True):
    """The other settings of the engine."""

    max_batch_size: Annotated[int, Meta(ge=1)]
    rule: str


class Measured(Struct, frozen=True):
    """The measurements behind the choice."""

    concurrency: int
    temperature: float
    prompts: str
    prompt_count: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    tokens_per_step: float
    acceptance: tuple[float, ...]
    why: tuple[str, ...]


class TunedSettings(Struct, frozen=True):
    """The content of a file. Lists are tuples, so that the object is immutable."""

    version: int
    model: ModelIdentity
    draft: DraftChoice
    engine: EngineChoice
    measured: Measured
    machine: MachineIdentity

    @classmethod
    def read(cls, path: str | Path) -> TunedSettings:
        """Read a file. Raises ConfigError if it is damaged or has another version."""
        table = read_toml(path, f"{_WHAT} file", "make one with paceline tune")
        version = table.get("version")
        if version != VERSION:
            raise _refused(path, f" have version {version}, but this paceline reads {VERSION}")
        try:
            return convert(table, cls)
        except ValidationError as error:
            raise _refused(path, f": {error}".replace("$.", "")) from None

    def write(self, path: str | Path) -> None:
        """Write the file. Raises WriteError."""
        import tomli_w

        # tomli-w gives every number of an array a line of its own.
        text = tomli_w.dumps(_plain(to_builtins(self)))
        text = _HEADER + _NUMBERS.sub(lambda array: f"[{' '.join(array[1].split())}]", text)
        write_files({Path(path): text.encode("utf-8")}, f"the {_WHAT}")

    def settings(self, follows: bool) -> dict[str, Any]:
        """Fields of EngineOptions. The draft length is included only if the engine ``follows`` the
        draft of the file, as it was measured with that draft."""
        stored: dict[str, Any] = to_builtins(self.engine)
        if follows:
            stored["draft_length"] = self.draft.length
            stored["max_draft_length"] = self.draft.max_length
        return stored

    def check_model(self, target: CausalModel, path: str | Path) -> None:
        """Raise ConfigError if the settings were made for another model than ``target``."""
        if self.model.config != ModelIdentity.of(target).config:
            raise ConfigError(
                f"{_WHAT} {path} were made for {self.model.name}, not for {target.name}, whose "
                "configuration differs; load that model, or run paceline tune for this one"
            )


def _refused(path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"{_WHAT} {path}{why}; make them anew with paceline tune")


def _plain(value: Any) -> Any:
    """Convert tuples to lists for TOML, and round numbers to four digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
