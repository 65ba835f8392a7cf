"""Load LoRA adapters from folders in peft's layout: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.adapter import Adapter
from paceline.errors import ConfigError, ModelLoadError
from paceline.files import user_path
from paceline.model.target import CausalModel
from paceline.model.tensorfile import check_finite, load_tensors
from paceline.model.text_part import plain_name

MAX_RANK = 64
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Options of peft that, if set, change more than the product of a linear module.
_CHANGING = (
    *("use_dora", "bias", "lora_bias", "modules_to_save", "trainable_token_indices", "use_qalora"),
    *("target_parameters", "layer_replication", "alora_invocation_tokens", "arrow_config"),
)
# Initialisations that change the base model's weights; the adapter fits only these.
_REBASING = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Adapters:
    """The adapters of a model, which requests select by name; any thread may load and unload."""

    def __init__(self, model: CausalModel, folders: Mapping[str, str | Path] | None) -> None:
        """Load an adapter from each of ``folders``, by name. Raises what ``load`` raises."""
        if not isinstance(folders, Mapping | None):
            raise ConfigError(f"lora is {folders!r:.80}; give adapters as {{name: folder}}")
        self._model = model
        self._by_name: dict[str, Adapter] = {}
        for name, folder in (folders or {}).items():
            self.load(name, folder)

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(self._by_name.values())

    def named(self, name: str | None) -> Adapter | None:
        """The adapter ``name``; None for None. Raises ConfigError if it is not loaded."""
        return None if name is None else self._loaded(name)

    def _loaded(self, name: str) -> Adapter:
        adapter = self._by_name.get(name) if isinstance(name, str) else None
        if adapter is None:
            names = ", ".join(self._by_name) or "none"
            raise ConfigError(f"no adapter {name!r:.80} is loaded; there are: {names}")
        return adapter

    def load(self, name: str, folder: str | Path, replace: bool = False) -> Adapter:
        """Load an adapter. ``replace``: an adapter of that name may exist, and is replaced. Raises
        ConfigError for a name in use, and what ``read_adapter`` raises."""
        named = isinstance(name, str) and name.strip()
        if not named or (name in self._by_name and not replace):
            problem = "is loaded already; unload it first" if named else "has no name; give it one"
            raise ConfigError(f"the adapter {name} {problem}, or choose another name")
        adapter = self._by_name[name] = read_adapter(name, str(folder), self._model)
        return adapter

    def unload(self, name: str) -> None:
        """Unload an adapter; running requests keep it until they end. Raises ConfigError."""
        del self._by_name[self._loaded(name).name]


def read_adapter(name: str, folder: str, model: CausalModel) -> Adapter:
    """Read an adapter for ``model``, in the model's dtype and on its device. Raises ModelLoadError
    if the folder holds no intact adapter, ConfigError if it cannot be served with this model."""
    where, path = f"the adapter {name}", user_path(folder)
    config = _read_config(where, path)
    tensors = load_tensors(path / _WEIGHTS)
    check_finite(tensors, where)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if match is None:
            raise ConfigError(
                f"{where} holds {key}, which is no LoRA weight of a linear module; only those are "
                "served, so merge it into the model (peft's merge_and_unload)"
            )
        module = match[1] if linear_sizes(match[1], model.hf) else plain_name(match[1])
        parts.setdefault(module, {})[match[2]] = tensor
    if not parts:
        raise ModelLoadError(f"{where} holds no weights; save it again")
    pairs = {module: _pair(where, module, pair, config, model) for module, pair in parts.items()}
    adapter = Adapter(name, str(path), pairs)
    model.backend.check_adapter(adapter)
    return adapter


def _read_config(where: str, path: Path) -> Mapping[str, Any]:
    """The adapter_config.json of a folder. Raises ModelLoadError, and ConfigError for options that
    are not implemented; ``where`` names the adapter in messages."""
    try:
        config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(
            f"{where}: cannot read {path / _CONFIG} ({error.strerror}); give a folder that peft's "
            "save_pretrained wrote"
        ) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: {path / _CONFIG} is not of a LoRA adapter (peft_type LORA)")
    if not (path / _WEIGHTS).is_file():
        raise ModelLoadError(f"{where}: {path} has no {_WEIGHTS}; save it with safetensors")
    for option in _CHANGING:
        value = config.get(option)
        if value and value != "none":
            raise ConfigError(
                f"{where} has {option} = {json.dumps(value):.60}; only LoRA of linear modules is "
                "served, so merge it into the model (peft's merge_and_unload)"
            )
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_REBASING):
        raise ConfigError(
            f"{where} has init_lora_weights = {start}, which changes the model's own weights; "
            "convert it (peft's path_initial_model_for_weight_conversion)"
        )
    return config


def _pair(
    where: str,
    module: str,
    pair: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    model: CausalModel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and the scaled B for a module. Raises ConfigError and ModelLoadError."""
    if pair.keys() != {"A", "B"}:
        raise ModelLoadError(f"{where} has one of lora_A and lora_B of {module}; save it again")
    a, b = pair["A"], pair["B"]
    rank = len(a) if a.dim() == 2 else 0
    if b.dim() != 2 or b.shape[1] != rank or not 0 < rank <= MAX_RANK:
        raise ConfigError(
            f"{where}: A and B of {module} are {list(a.shape)} and {list(b.shape)}; ranks from 1 "
            f"to {MAX_RANK} are served"
        )
    sizes = linear_sizes(module, model.hf)
    if sizes is None:
        part = "part of fused experts" if ".experts" in module else "no linear module"
        raise ConfigError(
            f"{where} changes {module}, which is {part} of {model.name}; merge it into the model "
            "(peft's merge_and_unload)"
        )
    if sizes != (a.shape[1], b.shape[0]):
        raise ConfigError(
            f"{where} maps {a.shape[1]} inputs of {module} to {b.shape[0]}, but {model.name} has "
            f"{sizes[0]} and {sizes[1]} there: it was trained for another model"
        )
    try:
        alphas = [  # peft takes the first pattern that the name ends with
            value
            for pattern, value in (config.get("alpha_pattern") or {}).items()
            if re.match(rf"(.*\.)?({pattern})$", module)
        ]
        alpha = float(alphas[0] if alphas else config.get("lora_alpha", 8))
    except (AttributeError, OverflowError, TypeError, ValueError, re.error):
        alpha = math.nan
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    scaled = (b.float() * scale).to(model.device, model.dtype)
    if not bool(scaled.isfinite().all()):
        raise ConfigError(
            f"{where}: lora_alpha or alpha_pattern scales B of {module} by {scale:g}, which "
            f"{model.dtype} does not hold; correct {_CONFIG}"
        )
    return a.to(model.device, model.dtype).contiguous(), scaled.contiguous()


def linear_sizes(name: str, hf: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear module that all rows go through; None for other modules."""
    module: Any = dict(hf.named_modules()).get(name)
    # A model's own subclass of nn.Linear is a router: it returns a tuple.
    own_class = type(module).__module__.startswith("transformers.models.")
    if ".experts." in name or (own_class and type(module).forward is not nn.Linear.forward):
        return None
    if hasattr(module, "in_features"):  # nn.Linear, and what backends replace it by
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # GPT-2's linear module
        return module.nx, module.nf
    return None
