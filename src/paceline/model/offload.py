"""Models larger than their device: some layers stay in main memory or on disk, and every forward
moves their weights to the device once. The library accelerate does this
(https://huggingface.co/docs/accelerate/concept_guides/big_model_inference); layers on disk are read
from the checkpoint, in its dtype."""

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
from paceline.files import cache_folder, write_errors
from paceline.model.loading import (
    Device,
    Dtype,
    causal_class,
    load_module,
    plain_config,
    resolve_device,
    resolve_dtype,
)
from paceline.model.names import model_path, weight_files
from paceline.model.quantised.convert import resident_parameter
from paceline.model.tensorfile import read_table


@dataclass(frozen=True)
class OffloadPlan:
    """How many of a model's ``layers`` are ``offloaded``, and accelerate's ``device_map``."""

    device_map: dict[str, str]
    layers: int
    offloaded: int
    resident_bytes: int  # weights that stay on the device
    largest_layer_bytes: int
    moved_bytes: int  # weights that a forward moves, in the dtype in which they are stored

    @property
    def peak_bytes(self) -> int:
        """Bytes of weights on the device while a forward runs."""
        return self.resident_bytes + (self.largest_layer_bytes if self.offloaded else 0)


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
    """Load a model's module with its layers where ``plan`` puts them. Raises ModelLoadError."""
    # transformers writes weights into this folder if the checkpoint has them in another layout.
    with write_errors("offloaded weights (PACELINE_CACHE names the folder)", cache_folder()):
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="offload-", dir=cache_folder())
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns that layers are offloaded
    module = load_module(
        name, dtype, device, device_map=plan.device_map, offload_folder=folder.name
    )
    module.offload_folder = folder  # keeps the folder as long as the module lives
    return module


def make_resident(copied: nn.Module) -> None:
    """Load the weights of a copied offloaded module into memory, and remove accelerate's hook."""
    if "_hf_hook" not in vars(copied):
        return
    copied._parameters = {name: resident_parameter(copied, name) for name in copied._parameters}
    for key in ("_hf_hook", "_old_forward", "forward"):  # accelerate's forward moves weights
        vars(copied).pop(key, None)


def plan_offload(
    name: str, dtype: Dtype, device: Device, offload: str, memory: int | None = None
) -> OffloadPlan:
    """Keep as many layers as fit into ``memory`` bytes on the device (None: half of its free
    memory), and put the others on ``offload``, "cpu" or "disk". Weights that belong to no layer
    stay on the device. Reads no weights. Raises ConfigError and ModelLoadError."""
    target = resolve_device(device)
    config, files = _check_offloadable(name, offload, target)
    torch_dtype = resolve_dtype(dtype, target) or getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        kind: Any = causal_class(config)
        skeleton = kind(config).to(torch_dtype)
    skeleton.tie_weights()
    layers = dict(decoder_layers(skeleton))
    prefixes = tuple(f"{layer}." for layer in layers)
    others = {
        name: module
        for name, module in skeleton.named_modules()
        if (module._parameters or module._buffers) and not f"{name}.".startswith(prefixes)
    }
    parameters = {id(p): p.nbytes for m in others.values() for p in m.parameters(recurse=False)}
    resident = sum(parameters.values())
    free = (free_memory(target) // 2 if memory is None else memory) - resident
    device_map = dict.fromkeys(others, str(target))
    sizes = {name: sum(p.nbytes for p in layer.parameters()) for name, layer in layers.items()}
    offloaded: list[str] = []
    for layer, size in sizes.items():
        if offloaded or size > free:
            offloaded.append(layer)
        else:
            free, resident = free - size, resident + size
        device_map[layer] = offload if offloaded else str(target)
    moved, largest = sum(sizes[layer] for layer in offloaded), max(sizes.values())
    if offload == "disk":
        moved = _stored_bytes(files, offloaded) or moved
    return OffloadPlan(device_map, len(layers), len(offloaded), resident, largest, moved)


def _check_offloadable(name: str, offload: str, device: torch.device) -> tuple[Any, list[Path]]:
    """The config and weight files of a model. Raises ConfigError or ModelLoadError if its layers
    cannot be offloaded."""
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
    """The decoder layers with their names: the longest of the outermost lists of modules. Raises
    ConfigError if there is no list of modules."""
    lists = [(name, m) for name, m in skeleton.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(skeleton).__name__} has no list of layers")
    name, longest = min(lists, key=lambda item: (item[0].count("."), -len(item[1])))
    return ((f"{name}.{index}", layer) for index, layer in enumerate(longest))


def _stored_bytes(files: list[Path], layers: list[str]) -> int:
    """Bytes of ``layers`` in a checkpoint; 0 if it names its tensors unlike the module."""
    entries = {key: e for file in files for key, e in read_table(file).items()}
    prefixes = tuple(f"{layer}." for layer in layers)
    return sum(e.nbytes for key, e in entries.items() if key.startswith(prefixes))
