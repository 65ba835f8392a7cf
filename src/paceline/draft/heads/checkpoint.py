"""Checkpoints of heads: a config.json and one file of tensors, in a folder, built in or on the
hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.draft.spec import Target
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import replace_in
from paceline.model.hub import fetched, first_line
from paceline.model.loading import read_options
from paceline.model.tensorfile import (
    as_bytes,
    check_finite,
    fingerprint,
    load_tensors,
    read_table,
    verify,
)

_Made = TypeVar("_Made")
_Module = TypeVar("_Module", bound=torch.nn.Module)
_WEIGHTS = "paceline_weights"  # in config.json: the fingerprint of the weights it belongs to


@dataclass(frozen=True)
class Checkpoint:
    """``config``: config.json; ``tensors`` by their name in the file, on the CPU; ``noun``: what is
    wanted of it, as in "Medusa heads"."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    noun: str = ""

    @property
    def title(self) -> str:
        return f"the {self.noun} {self.name}"

    def another_kind(self) -> ModelLoadError:
        """The error for a folder that does not hold what is wanted."""
        (what, kind), name = weights_kind(self.tensors), self.name
        advice = (
            f"use --draft {kind}:{name} for that" if kind else f"give the folder of the {self.noun}"
        )
        if what == "a language model":
            advice = f"use --draft {name} to draft with it"
        return ModelLoadError(f"{name} holds no {self.noun} but {what}; {advice}")

    def check_target(
        self, target: Target, hidden: int, vocab: int, layers: int | None, by: str = ""
    ) -> None:
        """Raise ModelLoadError if the head is for a target of other sizes; ``layers`` None: any
        depth."""
        sizes = {
            "hidden size": (hidden, target.hidden_size),
            "vocabulary size": (vocab, target.vocab_size),
            "number of layers": (layers, target.num_layers),
        }
        for size, (expected, wanted) in sizes.items():
            if expected not in (None, wanted):
                raise ModelLoadError(
                    f"{self.title}{by}: made for a target with {size} {expected}, but "
                    f"this one has {wanted}; use one that was trained for this target"
                )

    def made(self, make: Callable[[], _Made]) -> _Made:
        """What ``make`` makes; its ConfigError is a ModelLoadError that names the folder."""
        try:
            return make()
        except ConfigError as error:
            raise ModelLoadError(f"{self.title} does not fit the target: {error}") from None

    def filled(self, make: Callable[[], _Module], tensors: Mapping[str, torch.Tensor]) -> _Module:
        """The module that ``make`` makes with these tensors as its weights, in their dtype and on
        their device. Raises ModelLoadError unless they are its weights by name and shape."""
        weight = max(tensors.values(), key=torch.is_floating_point)  # the first one
        with weight.device:
            module = self.made(make)
        expected = {key: list(value.shape) for key, value in module.state_dict().items()}
        actual = {key: list(value.shape) for key, value in tensors.items()}
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual:
                problem = f"lacks the weight {key}"
            elif key not in expected:
                problem = f"has an unknown weight {key}"
            elif expected[key] != actual[key]:
                problem = f"has {key} of shape {actual[key]} where {expected[key]} is due"
            else:
                continue
            raise ModelLoadError(
                f"{self.title} {problem}; its config.json and weights do not belong together"
            )
        module.load_state_dict(tensors)
        return module.to(weight.dtype)


def read_checkpoint(source: str | Checkpoint, files: Sequence[str], noun: str) -> Checkpoint:
    """Read config.json and the first of ``files`` that exists in a folder, built-in or hub name; a
    checkpoint is taken as it is. Pickled files may hold tensors only. Raises ModelLoadError."""
    if isinstance(source, Checkpoint):
        return replace(source, noun=noun)
    name = source
    folder = Path(fetched(name))
    if not folder.is_dir():
        raise ModelLoadError(f"folder {name} does not exist; give the folder that holds the {noun}")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(
            f"folder {name} has no config.json; {noun} need one beside the weights"
        )
    config = read_options(config_file)
    for file in files:
        weights = folder / file
        if weights.is_file():
            tensors = _tensors(weights, config)
            check_finite(tensors, f"the {noun} {name} cannot be used")
            return Checkpoint(name, config, tensors, noun)
    raise ModelLoadError(f"folder {name} has no {noun}: there is no {' or '.join(files)} in it")


def write_checkpoint(
    folder: Path, file: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    """Write ``file`` (safetensors, with checksums) and config.json, both or neither; the config
    last. Raises WriteError."""
    weights, sums = as_bytes(tensors)
    marked = {**config, _WEIGHTS: fingerprint(sums)}
    text = json.dumps(marked, indent=2) + "\n"
    replace_in(folder, {file: weights, "config.json": text.encode()}, "the checkpoint")


def weights_kind(names: Iterable[str]) -> tuple[str, str]:
    """What tensors of these names are, and the draft spec's kind for it ("" for models)."""
    stripped = {name.removeprefix("model.") for name in names}
    if {"fc.weight", "hidden_norm.weight"} <= stripped:
        extended = any(key.startswith(("markov_head.", "confidence_head.")) for key in stripped)
        return ("a DSpark head", "dspark") if extended else ("a DFlash head", "dflash")
    if any(key.startswith(("fc.", "midlayer.")) for key in stripped):
        third = "d2t" in stripped or any("hidden_norm" in k or "midlayer" in k for k in stripped)
        return ("an EAGLE-3 head", "eagle3") if third else ("an EAGLE head", "eagle")
    if any("medusa" in key or key[:1].isdigit() or key.startswith("blocks.") for key in stripped):
        return "Medusa heads", "medusa"
    attends = any("attn" in key for key in stripped)
    return ("a language model" if attends else "weights of another kind"), ""


def _tensors(file: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from pickle import UnpicklingError

    try:
        if file.suffix == ".safetensors":
            table = read_table(file)
            verify(file, table)
            if table.sums and config.get(_WEIGHTS, "") not in ("", fingerprint(table.sums)):
                raise ModelLoadError(
                    f"config.json and {file} were not saved together; save or copy both again"
                )
            return load_tensors(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ModelLoadError(
            f"{file} cannot be read as weights ({first_line(error)}); download or copy it again"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        raise ModelLoadError(
            f"{file} holds no table of tensors by name; it is another kind of file"
        )
    return loaded
