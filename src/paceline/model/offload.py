"""Models larger than their device: layers stay in main memory or on disk, and every forward moves
their weights once. Accelerate does
(https://huggingface.co/docs/accelerate/concept_guides/big_model_inference); from disk they are read
out of the checkpoint, in its dtype."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.memory import free_memory
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import cache_folder
from paceline.model.loading import (
    Device,
    Dtype,
    causal_class,
    load_module,
    plain_config,
    resolve_device,
    resolve_dtype,
    weight_files,
)
from paceline.model.names import model_path
from paceline.model.quantised.convert import resident_parameter
from paceline.model.tensorfile import read_table


@dataclass(frozen=True)
class OffloadPlan:
    """Which layers stay off the device. ``device_map`` as accelerate's, by module. Bytes:
    ``resident`` on the device; ``moved`` by a forward, as stored; ``largest`` layer."""

    device_map: dict[str, str]
    layers: int
    away: int
    resident: int
    largest: int
    moved: int

    @property
    def peak(self) -> int:
        """Bytes of weights on the device while a forward runs."""
        return self.resident + (self.largest if self.away else 0)


def refuse_with_offload(offload: str, quantize: str | None, backend: str) -> None:
    """Raises ConfigError for options that need all weights on the device."""
    rounds = quantize not in (None, "none")
    if rounds or backend == "native":
        what = f"quantize={quantize!r}" if rounds else "backend='native'"
        raise ConfigError(
            f"{what} lays all weights out on the device, and offload={offload!r} leaves some "
            "elsewhere; leave one of them out"
        )


def load_offloaded(name: str, dtype: Dtype, device: Device, plan: OffloadPlan) -> Any:
    """The module of a model, its layers where the plan has them. Raises ModelLoadError."""
    # transformers writes weights there whose form on disk is not the model's.
    cache_folder().mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="offload-", dir=cache_folder())
    library = logging.getLogger("accelerate")  # it warns of offloading
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        module = load_module(
            name, dtype, device, device_map=plan.device_map, offload_folder=folder.name
        )
    finally:
        library.setLevel(level)
    module.offload_folder = folder  # lives as long as the module
    return module


def make_resident(copied: nn.Module) -> None:
    """Read the weights of a copy of an offloaded module into memory, and remove its hook."""
    if "_hf_hook" not in vars(copied):
        return
    copied._parameters = {name: resident_parameter(copied, name) for name in copied._parameters}
    for key in ("_hf_hook", "_old_forward", "forward"):  # that forward moves weights
        vars(copied).pop(key, None)


def plan_offload(
    name: str, dtype: Dtype, device: Device, offload: str, memory: int | None = None
) -> OffloadPlan:
    """Put layers into ``memory`` bytes of the device (None: half of the free ones), the others on
    ``offload``, "cpu" or "disk"; reads no weights. Raises ConfigError and ModelLoadError."""
    target = resolve_device(device)
    config, files = _offloadable(name, offload, target)
    number = resolve_dtype(dtype, target) or getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        kind: Any = causal_class(config)
        skeleton = kind(config).to(number)
    skeleton.tie_weights()
    layers = dict(decoder_layers(skeleton))
    within = tuple(f"{layer}." for layer in layers)
    rest = {
        owner: module
        for owner, module in skeleton.named_modules()
        if (module._parameters or module._buffers) and not f"{owner}.".startswith(within)
    }
    shared = {id(p): p.nbytes for m in rest.values() for p in m.parameters(recurse=False)}
    resident = sum(shared.values())
    left = (free_memory(target) // 2 if memory is None else memory) - resident
    device_map = dict.fromkeys(rest, str(target))
    sizes = {owner: sum(p.nbytes for p in layer.parameters()) for owner, layer in layers.items()}
    away: list[str] = []
    for owner, size in sizes.items():
        if away or size > left:
            away.append(owner)
        else:
            left, resident = left - size, resident + size
        device_map[owner] = offload if away else str(target)
    moved = sum(sizes[owner] for owner in away)
    if offload == "disk":
        moved = _stored(files, away) or moved
    return OffloadPlan(device_map, len(layers), len(away), resident, max(sizes.values()), moved)


def _offloadable(name: str, offload: str, device: torch.device) -> tuple[Any, list[Path]]:
    asked = f"offload={offload!r}"
    if offload == "cpu" and device.type == "cpu":
        raise ConfigError(
            f"{asked} on a processor: the weights are in its memory already; use disk for those "
            "that do not fit, or a device that has its own"
        )
    config, files = plain_config(name, asked), weight_files(Path(model_path(name)))
    if not files:
        raise ModelLoadError(f"{asked}: folder {name} has no *.safetensors to read layers from")
    return config, files


def decoder_layers(skeleton: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers by name: the longest outer list of modules. Raises ConfigError."""
    lists = [(name, m) for name, m in skeleton.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(skeleton).__name__} has no list of layers")
    owner, longest = min(lists, key=lambda item: (item[0].count("."), -len(item[1])))
    return ((f"{owner}.{index}", layer) for index, layer in enumerate(longest))


def _stored(files: list[Path], away: list[str]) -> int:
    """Bytes of layers in a checkpoint; 0 if its names are not the module's."""
    entries = {key: e for file in files for key, e in read_table(file).entries.items()}
    within = tuple(f"{layer}." for layer in away)
    return sum(e.end - e.start for key, e in entries.items() if key.startswith(within))
