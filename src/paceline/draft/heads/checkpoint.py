"""Checkpoints of heads: a config.json and one file of tensors, in a folder, built in or on the
hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.draft.spec import Target
from paceline.errors import ModelLoadError
from paceline.files import replace_in
from paceline.model.hub import fetched, first_line
from paceline.model.loading import read_options
from paceline.model.tensorfile import as_bytes, check_finite, fingerprint, read_table, verify

_WEIGHTS = "paceline_weights"  # in config.json: the fingerprint of the weights it belongs to


@dataclass(frozen=True)
class Checkpoint:
    """``config``: config.json; ``tensors`` by their name in the file, on the CPU."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def another_kind(self, wanted: str) -> ModelLoadError:
        """The error for a folder that does not hold ``wanted``."""
        (what, kind), name = weights_kind(self.tensors), self.name
        advice = (
            f"use --draft {kind}:{name} for that" if kind else f"give the folder of the {wanted}"
        )
        if what == "a language model":
            advice = f"use --draft {name} to draft with it"
        return ModelLoadError(f"{name} holds no {wanted} but {what}; {advice}")

    def check_target(
        self, kind: str, target: Target, hidden: int, vocab: int, layers: int | None, by: str = ""
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
                    f"the {kind} {self.name}{by}: made for a target with {size} {expected}, but "
                    f"this one has {wanted}; use one that was trained for this target"
                )

    def check_shapes(
        self, kind: str, module: torch.nn.Module, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Raise ModelLoadError unless the tensors are the module's weights by name and shape."""
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
                f"the {kind} {self.name} {problem}; its config.json and weights do not belong "
                "together"
            )


def read_checkpoint(name: str, files: Sequence[str], kind: str) -> Checkpoint:
    """Read config.json and the first of ``files`` that exists; ``kind`` is for messages, as in
    "Medusa heads". Pickled files may hold tensors only. Raises ModelLoadError."""
    folder = Path(fetched(name))
    if not folder.is_dir():
        raise ModelLoadError(f"folder {name} does not exist; give the folder that holds the {kind}")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(
            f"folder {name} has no config.json; {kind} need one beside the weights"
        )
    config = read_options(config_file)
    for file in files:
        weights = folder / file
        if weights.is_file():
            tensors = _tensors(weights, config)
            check_finite(tensors, f"the {kind} {name} cannot be used")
            return Checkpoint(name, config, tensors)
    raise ModelLoadError(f"folder {name} has no {kind}: there is no {' or '.join(files)} in it")


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

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            table = read_table(file)
            verify(file, table)
            if table.sums and config.get(_WEIGHTS, "") not in ("", fingerprint(table.sums)):
                raise ModelLoadError(
                    f"config.json and {file} were not saved together; save or copy both again"
                )
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError) as error:
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
