"""What weights are stored as, what they will lie in memory as, and what will multiply by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.memory import free_memory
from paceline.draft.auto import Circumstances, Composition, compose
from paceline.errors import ConfigError
from paceline.kernels.compile import NativeUnavailableError, is_built
from paceline.kernels.library import instructions
from paceline.lab.doctor.findings import Finding, finding
from paceline.lab.doctor.machine import DeviceSettings, size
from paceline.lab.doctor.models import Model
from paceline.model import held
from paceline.model.backends.base import REFERENCE
from paceline.model.gguf import GgufFile
from paceline.model.precision import keeps, library_of
from paceline.model.quantised.blocks import can_keep
from paceline.model.quantised.weights import BITS


@dataclass(frozen=True)
class Rounding:
    """How weights are rounded when they are loaded, and what runs forwards."""

    target: str | None = None  # int8, int4, or None
    draft: str | None = None
    backend: str = "auto"

    def of(self, about: str) -> str | None:
        return self.target if about == "target" else self.draft


def rounded_bytes(
    model: Model, precision: str, dtype: torch.dtype | None, rounding: Rounding
) -> int:
    """Of the matrices alone, in memory; the head in 8 bits."""
    width = (dtype or torch.bfloat16).itemsize
    return held.rounded_bytes(model.skeleton, precision, width, rounding.backend == REFERENCE)


def weight_bytes(model: Model, setting: DeviceSettings, rounding: Rounding) -> int:
    """All weights in memory, as they are kept or rounded."""
    dtype, precision = setting.dtype, rounding.of(model.about)
    width = (dtype or torch.bfloat16).itemsize
    file = model.files.gguf
    if file is not None and _kept_types(file, setting, rounding, precision):
        return file.stored_bytes + model.vocab_size * model.hidden_size * width
    if precision is None or model.quantisation is not None:
        return model.weight_bytes(dtype) + _second_head(model, setting) * width
    whole = sum(parameter.numel() for parameter in model.skeleton.parameters())
    linear = [m for m in model.skeleton.modules() if isinstance(m, nn.Linear)]
    matrices = sum(module.weight.numel() for module in linear)
    if getattr(model.config, "tie_word_embeddings", False):
        # The embedding keeps its own numbers beside the rounded head.
        matrices -= model.skeleton.get_output_embeddings().weight.numel()
    return rounded_bytes(model, precision, dtype, rounding) + int(whole - matrices) * width


def _second_head(model: Model, setting: DeviceSettings) -> int:
    """Numbers of a head that is tied to the embedding: on a processor it is laid out anew, beside
    it."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    if setting.device.type != "cpu" or not tied:
        return 0
    return int(model.skeleton.get_output_embeddings().weight.numel())


def _kept_types(
    file: GgufFile, setting: DeviceSettings, rounding: Rounding, precision: str | None
) -> list[str]:
    """The packed types of a file that stay as they are."""
    if setting.device.type != "cpu" or rounding.backend == REFERENCE or precision is not None:
        return []
    return [kind for kind in file.quantised if can_keep(kind)]


def held_bits(model: Model, setting: DeviceSettings, rounding: Rounding) -> int:
    """Bits in which most numbers of the matrices will be held."""
    asked, options, file = rounding.of(model.about), model.quantisation_options, model.files.gguf
    if asked in BITS:
        return BITS[asked]
    if options is not None and keeps(options, setting.device):
        return int(_of_weights(options, ("num_bits", "bits", "w_bit")) or 8)
    kept = [] if file is None else _kept_types(file, setting, rounding, asked)
    if kept:
        return int(next(letter for letter in kept[0] if letter.isdecimal()))
    return 8 * (setting.dtype or torch.bfloat16).itemsize


def composed_draft(
    model: Model, setting: DeviceSettings, rounding: Rounding, resident: int
) -> Composition:
    """What ``auto`` would take for a target that is not loaded, of which ``resident`` bytes will
    lie in memory."""
    weights = weight_bytes(model, setting, rounding)
    return compose(
        Circumstances(
            model.name,
            "" if setting.kernels else "which do not run it here",
            held_bits(model, setting, rounding),
            weights,
            rounded_bytes(model, "int4", setting.dtype, rounding),
            free_memory(setting.device) - resident,
        )
    )


def check_precision(model: Model, setting: DeviceSettings, rounding: Rounding) -> Iterator[Finding]:
    """What the weights are, and become. Raises ConfigError on a precision that there is not."""
    about, asked = model.about, rounding.of(model.about)
    if asked is not None and asked not in BITS:
        raise ConfigError(f"precision {asked!r} is not known; use {' or '.join(BITS)}")
    options = model.quantisation_options
    if model.files.gguf is not None:
        yield _gguf(model.files.gguf, about, setting, rounding)
    if options is not None:
        yield _stored(model, options, setting)
        if asked is not None:
            text = f"{model.name} is quantised already, and quantize={asked!r} would round it again"
            yield finding("quantised-twice", about, text)
    elif asked is not None and setting.device.type != "cpu":
        text = f"quantize={asked!r} works on a processor, not on {setting.device}"
        yield finding("quantised-twice", about, text, cure="Write a checkpoint: paceline quantize.")
    elif asked is not None:
        before = size(model.weight_bytes(setting.dtype))
        after = size(weight_bytes(model, setting, rounding))
        text = f"rounded to {asked} when loaded: {after} of weights in memory where it was {before}"
        yield finding("quantised-when-loaded", about, text)


def _stored(model: Model, options: Mapping[str, Any], setting: DeviceSettings) -> Finding:
    held = f"{_format(options)}, {size(model.files.stored_bytes)}"
    if keeps(options, setting.device):
        text = f"the weights are quantised ({held}) and stay so"
        return finding("quantised-kept", model.about, text)
    text = f"the weights are quantised ({held}); the package {library_of(options)} multiplies them"
    return finding("quantised", model.about, text)


def _gguf(file: GgufFile, about: str, setting: DeviceSettings, rounding: Rounding) -> Finding:
    """Which of its blocks stay, and what the others take."""
    kinds = ", ".join(f"{number} tensors in {name}" for name, number in file.types.items())
    stored = f"{file.path.name} ({kinds}) takes {size(file.stored_bytes)} on the disk"
    kept = _kept_types(file, setting, rounding, rounding.of(about))
    if kept:
        text = f"{stored}; matrices in {', '.join(kept)} stay as they are in memory"
        return finding("gguf-kept", about, text)
    text = (
        f"{stored} and, dequantised, {size(file.parameters * torch.bfloat16.itemsize)} of memory "
        f"in bfloat16 or {size(file.parameters * torch.float32.itemsize)} in float32"
    )
    return finding("gguf-dequantised", about, text)


def _format(options: Mapping[str, Any]) -> str:
    """``gptq, 4 bits in groups of 128``."""
    words = str(options.get("quant_method") or "unknown")
    bits = _of_weights(options, ("num_bits", "bits", "w_bit"))
    group = _of_weights(options, ("group_size", "q_group_size"))
    if bits is not None:
        words += f", {bits} bits"
    return words + (f" in groups of {group}" if isinstance(group, int) and group > 0 else "")


def _of_weights(options: Mapping[str, Any], names: Sequence[str]) -> Any:
    """What the first group of layers says of its weights under one of these names."""
    groups = options.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else options
    weights = first.get("weights", first) if isinstance(first, Mapping) else {}
    return next((weights[name] for name in names if name in weights), None)


def check_kernels(setting: DeviceSettings, rounding: Rounding, few: bool) -> Finding:
    """What will run the forwards. ``few``: there are quantised weights."""
    if setting.device.type != "cpu":
        return finding("kernels-run", "machine", f"forwards run on torch, on {setting.device}")
    if rounding.backend == REFERENCE:
        code = "kernels-readable" if few else "kernels-run"
        return finding(code, "machine", "forwards run on torch, as --backend reference asks for")
    try:
        built = instructions() if is_built() else "which the first run builds"
        text = f"models of a shape that they know run on the native kernels, {built}"
        return finding("kernels-run", "machine", text)
    except NativeUnavailableError as error:
        code = "kernels-readable" if few else "kernels-absent"
        return finding(code, "machine", f"there are no native kernels: {error}")
