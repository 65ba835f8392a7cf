"""Tuned settings: the TOML file in which ``paceline tune`` stores its choice for one model.

``LLM(model, config="tuned.toml")`` takes the drafter, its draft length and the batch size from it.
Everything is checked on reading, so that a damaged or foreign file gives one clear error. Two
models count as the same if their configurations agree, whatever their paths."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from paceline.errors import ConfigError
from paceline.files import read_toml, write_files

if TYPE_CHECKING:
    from paceline.model.target import CausalModel

VERSION = 1
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_WHAT = "tuned settings"
_HEADER = (
    "# Tuned settings by `paceline tune`. Use them with LLM(model, config=FILE) or --config FILE.\n"
    "# They serve this model only. What you give by hand wins over what stands here.\n\n"
)


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


class DraftChoice(Struct, frozen=True):
    """The draft; "none" is plain decoding. ``length``: levels, or "auto"."""

    spec: str
    length: Annotated[int, Meta(ge=0)] | Literal["auto"]


class EngineChoice(Struct, frozen=True):
    """The other settings of the engine."""

    max_batch_size: Annotated[int, Meta(ge=1)]


class TunedSettings(Struct, frozen=True):
    """The content of a file. ``why``: what the choice rests on. Unknown keys are ignored: earlier
    versions wrote what they had measured as well."""

    version: int
    model: ModelIdentity
    draft: DraftChoice
    engine: EngineChoice
    why: str = ""

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

        text = _HEADER + tomli_w.dumps(to_builtins(self))
        write_files({Path(path): text.encode("utf-8")}, f"the {_WHAT}")

    def settings(self, follows: bool) -> dict[str, Any]:
        """Fields of EngineOptions. The draft length is included only if the engine ``follows`` the
        draft of the file, as it was measured with that draft."""
        stored: dict[str, Any] = to_builtins(self.engine)
        return stored | ({"draft_length": self.draft.length} if follows else {})

    def check_model(self, target: CausalModel, path: str | Path) -> None:
        """Raise ConfigError if the settings were made for another model than ``target``."""
        if self.model.config != ModelIdentity.of(target).config:
            raise ConfigError(
                f"{_WHAT} {path} were made for {self.model.name}, not for {target.name}, whose "
                "configuration differs; load that model, or run paceline tune for this one"
            )


def _refused(path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"{_WHAT} {path}{why}; make them anew with paceline tune")
