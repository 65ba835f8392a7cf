"""Load a causal language model of transformers from a folder, a GGUF file or the hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.kernels.compile import are_kernels_here
from paceline.model.backends.base import REFERENCE
from paceline.model.gguf import dequantising, gguf_file, read_gguf
from paceline.model.gguf_config import complete_config
from paceline.model.gguf_weights import check_all_tensors_used, keep_blocks
from paceline.model.names import (
    check_hub_name,
    first_line,
    hub_message,
    is_path,
    model_path,
    weight_files,
)
from paceline.model.precision import (
    library_of,
    load_quantised,
    quantization_of,
    restore_quantised,
    stays_quantised,
)
from paceline.model.probe import ATTENTION, STATELESS, register
from paceline.model.quantised.formats import check_fields
from paceline.model.tensorfile import check_layers, read_table
from paceline.model.text_part import key_mapping, text_part
from paceline.model.tokenizer import load_tokenizer as load_tokenizer

Dtype = str | torch.dtype
Device = str | torch.device
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
_UNDECLARED_ATTENTION = {"biogpt", "stablelm"}  # they use the interface without declaring it
_BOTH = {"hybrid", "hybrid_sliding"}  # layers with attention and a recurrence
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_ATTENTION_LAYERS |= _BOTH
_RECURRENT_LAYERS = {"conv", "linear_attention", "mamba"} | _BOTH


def load_module(
    name: str,
    dtype: Dtype,
    device: Device,
    attention: str | None = None,
    keep_quantised: bool = False,
    config: Any = None,
    **placement: Any,
) -> Any:
    """Load a transformers module in eval mode that calls our attention function. ``attention``:
    another attention function of transformers, for use outside the engine. ``keep_quantised``: on
    a CPU, GGUF weights stay in 8 or 4 bits where possible. ``config``: in place of the model's own,
    with fewer layers. ``placement``: where the weights go, as options of ``from_pretrained``."""
    target = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, target)
    attention = attention or ATTENTION
    path = model_path(name)
    gguf = gguf_file(path)
    register()
    if gguf is not None:
        module = _load_gguf(name, gguf, torch_dtype, attention, config)
        if keep_quantised and target.type == "cpu" and read_gguf(gguf).quantised:
            keep_blocks(gguf, read_gguf(gguf).architecture, module)
        return module.to(target)
    check_folder(name, Path(path))
    tensors = _check_weights(name, Path(path))
    with quiet():
        config = read_config(name, path) if config is None else config
        check_architecture(config)
        check_layers(name, config, tensors)
        options = quantization_of(config)
        if options is not None and stays_quantised(options, target):
            torch_dtype = torch_dtype or torch.float32
            dense, weights = load_quantised(weight_files(Path(path)), options, torch_dtype)
            del config.quantization_config  # so that transformers builds an unquantised model
            module = _load_weights(name, path, config, torch_dtype, attention, dense)
            restore_quantised(name, module, weights)
        else:
            module = _load_weights(name, path, config, torch_dtype, attention, **placement)
    return module if placement else module.to(target)


def _load_gguf(
    name: str, path: Path, dtype: torch.dtype | None, attention: str, config: Any = None
) -> Any:
    """Load a GGUF file, dequantised; ``dtype`` None: float32 for float32 files, bf16 for others."""
    file = read_gguf(path)
    if dtype is None:
        plain = not file.quantised and not {"F16", "BF16"} & set(file.types)
        dtype = torch.float32 if plain else torch.bfloat16
    with quiet(), dequantising(path):
        options = read_config(name, str(path)) if config is None else config
        check_layers(name, options, len(file.tensor_names))
        module = _load_weights(name, str(path), options, dtype, attention)
    if config is None:  # a given config may leave out layers of the file
        check_all_tensors_used(file, module)
    # The weights are dequantised. With these marks transformers refuses to save or cast the module.
    vars(module.config).pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(module).pop(name, None)
    if file.end_tokens:
        module.generation_config.eos_token_id = file.end_tokens
    for key, value in file.sampling.items():
        setattr(module.generation_config, key, value)
    return module


def resolve_device(device: Device) -> torch.device:
    """The torch device; "auto" is CUDA where available. Raises ConfigError if it is unusable."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        if resolved.type != "cuda":  # torch may know a device type that this machine does not have
            torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError, ImportError):
        raise ConfigError(
            f"device {str(device)!r} is not known; use auto, cpu, cuda or cuda:N"
        ) from None
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {resolved} asked for, but PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; use auto or cpu"
        )
    return resolved


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype | None:
    """The dtype to load a model in; None keeps the checkpoint's dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type != "cpu":
            return None
        return torch.bfloat16 if cpu_has_bf16() else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def dtype_to_load(dtype: Dtype, device: torch.device, backend: str) -> torch.dtype | None:
    """Like ``resolve_dtype``, but "auto" is bf16 where the native kernels may run: they then read
    half as much (SmolLM2 on Zen 3: 13.2 ms per step, in float32 24.3 ms)."""
    if dtype == "auto" and device.type == "cpu" and backend != REFERENCE and are_kernels_here():
        return torch.bfloat16
    return resolve_dtype(dtype, device)


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware (AVX-512 BF16, AMX, or Arm BF16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def check_folder(name: str, folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json. Raises ModelLoadError if there is none."""
    if not folder.exists():
        raise ModelLoadError(f"model folder {name} does not exist; check the path")
    if not folder.is_dir():
        raise ModelLoadError(
            f"{name} is a file; give a .gguf file, or the folder that holds config.json"
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"folder {name} has no config.json, so it is not a transformers model; "
            "give the folder written by save_pretrained or downloaded from the hub"
        )
    return read_options(folder / "config.json")


def read_options(config: Path) -> dict[str, Any]:
    """The content of a config.json. Raises ModelLoadError if it is no JSON object."""
    try:
        options = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{config} is not valid JSON ({first_line(error)}); copy the file again"
        ) from None
    if not isinstance(options, dict):
        raise ModelLoadError(f"{config} holds no JSON object; copy the file again")
    return options


def _check_weights(name: str, folder: Path) -> int:
    """Check a folder's weight files; returns the number of their tensors. Raises ModelLoadError."""
    if not any(match for pattern in _WEIGHTS for match in folder.glob(pattern)):
        raise ModelLoadError(
            f"folder {name} has a config.json but no weights (*.safetensors); "
            "finish the download, or give another folder"
        )
    return sum(len(read_table(file)) for file in weight_files(folder))


def read_config(name: str, path: str) -> Any:
    """The transformers config of a folder, hub name or GGUF file. Raises ModelLoadError, or
    UnsupportedModelError for an option of a GGUF file or quantised checkpoint that is unknown."""
    from transformers import AutoConfig

    source, options = _source(path)
    if not is_path(path):
        check_hub_name(name)
    try:
        config = text_part(AutoConfig.from_pretrained(source, **options))
        if options:
            check_architecture(config)  # first, as its message says more
            config = complete_config(config, read_gguf(Path(source, options["gguf_file"])))
        check_fields(name, quantization_of(config) or {})
        return config
    except PacelineError:
        raise
    except Exception as error:  # transformers raises all kinds of errors for a wrong value
        if is_path(path):
            what = "header" if options else "config.json"
            raise ModelLoadError(
                f"the {what} of {name} cannot be used: {first_line(error)}; "
                "a newer transformers may know this model type"
            ) from None
        raise ModelLoadError(hub_message(name, error)) from None


def plain_config(name: str, asked: str) -> Any:
    """The config of a model, which the option ``asked`` needs to be in safetensors, unquantised and
    without recurrent layers. Raises ConfigError and ModelLoadError."""
    path = model_path(name)
    if gguf_file(path) is not None:
        raise ConfigError(f"{asked}: {name} is a GGUF file; give the model in safetensors")
    check_folder(name, Path(path))
    config = read_config(name, path)
    if quantization_of(config) is not None:
        raise ConfigError(f"{asked}: {name} is quantised; give the model that it was made from")
    if recurrent_layers(config):
        raise ConfigError(f"{asked}: {name} has recurrent layers; leave the option out")
    return config


def _source(path: str) -> tuple[str, dict[str, str]]:
    """Arguments of ``from_pretrained`` for a folder, a hub name or a GGUF file."""
    gguf = gguf_file(path) if is_path(path) else None
    return (path, {}) if gguf is None else (str(gguf.parent), {"gguf_file": gguf.name})


def causal_class(config: Any) -> Any | None:
    """The class of transformers that loads a checkpoint as a causal language model, or None. For
    configs that transformers maps to no class (Emu3's text part): the one in ``architectures``."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    for name in set(config.architectures or ()) & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        model_class = getattr(transformers, name)
        if model_class.config_class is type(config):
            return model_class
    return None


def _layer_kinds(config: Any) -> Sequence[str]:
    """The type of each layer; empty if the config does not list them."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()


def recurrent_layers(config: Any) -> list[str]:
    """The type of each recurrent layer."""
    return [kind for kind in _layer_kinds(config) if kind in _RECURRENT_LAYERS]


def layers_without_keys(config: Any) -> int:
    return sum(kind not in _ATTENTION_LAYERS for kind in _layer_kinds(config))


def check_architecture(config: Any) -> None:
    """Raises UnsupportedModelError for models whose cache cannot be paged or rolled back. Hybrids
    of attention and recurrences pass here; they are tried out after loading (probe.py)."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder model with cross-attention layers; "
            "use a decoder-only language model"
        )
    model = causal_class(config)
    if model is None:
        raise UnsupportedModelError(f"{kind} is not a causal language model; use one that is")
    kinds = {*_layer_kinds(config)}
    hybrid = bool(kinds & _RECURRENT_LAYERS and kinds & _ATTENTION_LAYERS)
    known = _ATTENTION_LAYERS | STATELESS | (_RECURRENT_LAYERS if hybrid else set())
    unknown = ", ".join(sorted(kinds - known))
    if unknown or (getattr(model, "_is_stateful", False) and not hybrid):
        layers = f"{unknown} layers" if unknown else "recurrent layers (state space, RWKV, ...)"
        raise UnsupportedModelError(
            f"{kind} has {layers}, whose state cannot be rolled back when draft tokens are "
            "rejected; use a model that has attention layers"
        )
    declared = getattr(model, "_supports_attention_backend", False)
    if not (declared or hybrid or kind in _UNDECLARED_ATTENTION):
        raise UnsupportedModelError(
            f"the attention layers of {kind} do not go through the attention interface of "
            "transformers, so their keys and values cannot be paged; use another architecture"
        )


def _load_weights(
    name: str,
    path: str,
    config: Any,
    dtype: torch.dtype | None,
    attention: str,
    tensors: dict[str, torch.Tensor] | None = None,
    **placement: Any,
) -> Any:
    """The module with its weights from ``path``, or from ``tensors`` if given."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    source, options = _source(path)
    model_class: Any = causal_class(config)
    mapped = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and tensors is None  # takes no state_dict
    loader: Any = AutoModelForCausalLM if mapped else model_class
    placement["key_mapping"] = key_mapping(model_class)
    if not getattr(model_class, "_supports_sdpa", True) and attention == "sdpa":
        attention = "eager"  # GPT-OSS, for its sinks
    try:
        module, info = loader.from_pretrained(
            source if tensors is None else None,
            **options,
            state_dict=tensors,
            config=config,
            dtype=dtype or "auto",
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below in one line
            **placement,
        )
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{name} holds weights in a quantisation that is not read here; take another one, such "
            "as Q8_0, Q4_K_M or F16"
        ) from None
    except ImportError as error:
        if (quantization := quantization_of(config)) is None:
            raise
        raise ModelLoadError(
            f"{name} is quantised in the format {quantization.get('quant_method')}, whose library "
            f"is missing or too old ({first_line(error)}); pip install "
            f"{library_of(quantization)}, or take another form of the model"
        ) from None
    except Exception as error:  # transformers raises all kinds of errors for a wrong config
        raise ModelLoadError(
            f"the weights of {name} cannot be read: {first_line(error)}; finish the download, or "
            "copy the model again"
        ) from None
    check_loaded(name, info)
    return module


def check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if weights are missing or have other shapes, by the ``info`` that
    transformers gives."""
    for key, what in (("missing_keys", "lacks"), ("mismatched_keys", "has other shapes for")):
        if bad := sorted(str(item[0] if isinstance(item, tuple) else item) for item in info[key]):
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise ModelLoadError(
                f"the checkpoint {name} {what} the weight {bad[0]}{more}, which its configuration "
                "asks for; give files that belong together"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """A context without transformers' progress bars and warnings."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
