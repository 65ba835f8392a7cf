"""Checks of a pair on this machine: dtype, kernels, precision of the weights, and memory."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.build import MIN_STATES_PER_SEQUENCE, EngineOptions, max_feature_tokens, slots_within
from paceline.core.memory import free_memory, held_memory
from paceline.drafters import BLOCK_SIZE
from paceline.kernels.compile import NativeUnavailableError, are_kernels_here, is_built, origin
from paceline.kernels.library import instructions
from paceline.lab.doctor.findings import ERROR, Finding, finding
from paceline.lab.doctor.models import Model
from paceline.model import precision as precisions
from paceline.model.backends.base import REFERENCE
from paceline.model.gguf import GgufFile
from paceline.model.gguf_weights import KINDS
from paceline.model.loading import cpu_has_bf16, dtype_to_load, resolve_device
from paceline.model.offload import OffloadPlan
from paceline.model.paged.cache import blocks_within
from paceline.model.paged.int8 import cache_dtype
from paceline.model.precision import library_of, stays_quantised
from paceline.model.quantised.mxfp4 import METHOD as MXFP4
from paceline.model.quantised.weights import BITS

_SHARE = 4  # the cache takes at most a quarter of the free memory by default
_BITS = "num_bits", "bits", "w_bit"  # names of an option in configurations of quantised weights


@dataclass(frozen=True)
class Setting:
    """How a pair would be run. ``dtype``: None is that of the checkpoint. ``cache_dtype``: of the
    target's KV cache. ``kernels``: whether the native kernels are expected to run."""

    options: EngineOptions
    device: torch.device
    dtype: torch.dtype | None
    cache_dtype: torch.dtype = torch.bfloat16
    kernels: bool = False

    @classmethod
    def of(cls, options: EngineOptions) -> Setting:
        """Raises ConfigError for an unusable device or dtype."""
        device = resolve_device(options.device)
        torch_only = options.offload is not None or options.tensor_parallel > 1
        backend = REFERENCE if torch_only else options.backend
        dtype = dtype_to_load(options.dtype, device, backend)
        cached = cache_dtype(options.kv_cache_dtype, dtype or torch.bfloat16)
        return cls(options, device, dtype, cached, has_kernels(device, backend))

    @property
    def loaded(self) -> torch.dtype:
        """``dtype``, or bf16 if that of the checkpoint is used."""
        return self.dtype or torch.bfloat16

    @property
    def width(self) -> int:
        """Bytes per number."""
        return self.loaded.itemsize

    def precision(self, model: Model) -> str | None:
        """The precision to which a model is quantised when it is loaded; None for none."""
        target = model.about == "target"
        asked = self.options.quantize if target else self.options.draft_quantize
        return None if asked == "none" else asked


def has_kernels(device: torch.device, backend: str) -> bool:
    """Whether the backend can use native kernels on this machine."""
    return device.type == "cpu" and backend != REFERENCE and are_kernels_here()


@dataclass(frozen=True)
class Needs:
    """Memory of models and heads in bytes: ``weights``, cache and features per token, and a
    ``state`` of recurrent layers. ``loading``: the peak while they are loaded, including the pages
    of their ``files`` (real paths)."""

    weights: int = 0
    cache_bytes: int = 0
    feature_bytes: int = 0
    loading: int = 0
    state: int = 0
    files: tuple[str, ...] = ()

    @classmethod
    def of_model(cls, model: Model, setting: Setting, cached: torch.dtype | None) -> Needs:
        """``cached``: the dtype of its keys and values."""
        loading = model.files.stored_bytes + _unrounded_bytes(model, setting)
        cache_bytes = model.cache_bytes(cached or torch.bfloat16)
        state = model.state_bytes(setting.loaded)
        files = tuple(model.files.mapped)
        return cls(weight_bytes(model, setting), cache_bytes, 0, loading, state, files)

    def __add__(self, other: Needs) -> Needs:
        """The needs of both, of which ``other`` is loaded last."""
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Needs(**sums | {"loading": max(self.loading, self.weights + other.loading)})

    def shared(self, ranks: int) -> Needs:
        return Needs(self.weights // ranks, self.cache_bytes // ranks, 0, self.loading // ranks)


def rounded_bytes(model: Model, precision: str, setting: Setting) -> int:
    """Memory of the quantised matrices alone; the head has 8 bits."""
    readable = setting.options.backend == REFERENCE
    return precisions.rounded_bytes(model.skeleton, precision, setting.width, readable)


def weight_bytes(model: Model, setting: Setting) -> int:
    """Memory of all weights, as stored or quantised."""
    precision, file, width = setting.precision(model), model.files.gguf, setting.width
    tied = getattr(model.config, "tie_word_embeddings", False)
    head = int(model.skeleton.get_output_embeddings().weight.numel()) if tied else 0
    if file is not None and _kept_types(file, setting, precision):
        return file.stored_bytes + model.vocab_size * model.hidden_size * width
    if precision is None or model.quantisation is not None:
        # On a CPU a tied head is copied into another layout.
        return _unrounded_bytes(model, setting) + head * width * (setting.device.type == "cpu")
    whole = sum(parameter.numel() for parameter in model.skeleton.parameters())
    linear = [m for m in model.skeleton.modules() if isinstance(m, nn.Linear)]
    # A tied embedding is kept unquantised in addition to the quantised head.
    matrices = sum(module.weight.numel() for module in linear) - head
    return rounded_bytes(model, precision, setting) + int(whole - matrices) * width


def _unrounded_bytes(model: Model, setting: Setting) -> int:
    if (setting.dtype is None or model.quantisation is not None) and model.files.stored_bytes:
        return model.files.stored_bytes
    return model.parameters * setting.width


def _kept_types(file: GgufFile, setting: Setting, precision: str | None) -> list[str]:
    """The quantised types of a GGUF file that are kept in memory."""
    keeps = setting.device.type == "cpu" and setting.options.backend != REFERENCE
    return [kind for kind in file.quantised if kind in KINDS and keeps and precision is None]


def held_bits(model: Model, setting: Setting) -> int:
    """Bits per number of most matrices in memory."""
    asked, options, file = setting.precision(model), model.quantisation, model.files.gguf
    if asked in BITS:
        return BITS[asked]
    if options is not None and stays_quantised(options, setting.device):
        return int(_bits_of(options) or 8)
    kept = [] if file is None else _kept_types(file, setting, asked)
    if kept:
        return int(next(letter for letter in kept[0] if letter.isdecimal()))
    return 8 * setting.width


def check_precision(model: Model, setting: Setting) -> Iterator[Finding]:
    """Describe the precision of the weights, as stored and as loaded."""
    asked, file = setting.precision(model), model.files.gguf
    if file is not None:
        kinds = ", ".join(f"{number} tensors in {name}" for name, number in file.types.items())
        kept, described = _kept_types(file, setting, asked), f"{file.path.name} ({kinds})"
        stored, unpacked = size(file.stored_bytes), size(setting.width * file.parameters)
        values: Any = {"kept": ", ".join(kept), "dtype": _name(setting.loaded)}
        code = "gguf-kept" if kept else "gguf-dequantised"
        yield finding(code, file=described, stored=stored, unpacked=unpacked, **values)
    if (options := model.quantisation) is not None:
        how, bits = str(options.get("quant_method") or "unknown"), _bits_of(options)
        if bits is not None:
            how += f", {bits} bits"
        how += f", {size(model.files.stored_bytes)}"
        code = "quantised-kept" if stays_quantised(options, setting.device) else "quantised"
        yield finding(code, how=how, library=library_of(options))
        if asked is not None:
            yield finding("quantised-twice", name=model.name, asked=asked)
    elif asked is not None and setting.device.type != "cpu":
        text = f"quantize={asked!r} works on a CPU, not on {setting.device}"
        cure = "Write a quantised checkpoint with paceline quantize."
        yield finding("quantised-twice", text, cure)
    elif asked is not None:
        before, after = size(_unrounded_bytes(model, setting)), size(weight_bytes(model, setting))
        yield finding("quantised-when-loaded", asked=asked, before=before, after=after)


def _bits_of(options: Mapping[str, Any]) -> Any:
    return 4 if options.get("quant_method") == MXFP4 else _of_weights(options, *_BITS)


def _of_weights(options: Mapping[str, Any], *names: str) -> Any:
    """An option of the weights of the first group of layers, under the first of the ``names``."""
    groups = options.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else options
    weights = first.get("weights", first) if isinstance(first, Mapping) else {}
    return next((weights[name] for name in names if name in weights), None)


def check_dtype(setting: Setting) -> Finding:
    """Whether the dtype lets a forward over several rows cost about as much as one over one row."""
    if setting.device.type != "cpu":
        name = "the checkpoint's dtype" if setting.dtype is None else _name(setting.dtype)
        text = f"{name} on {torch.cuda.get_device_name(setting.device)}"
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        suits = has_bf16 or setting.loaded != torch.bfloat16
        return finding("dtype-suits" if suits else "bfloat16-emulated", text)
    has_bf16 = cpu_has_bf16()
    processor = f"a CPU ({platform.machine()}) {'with' if has_bf16 else 'without'}"
    text = f"{_name(setting.loaded)} on {processor} bf16 instructions"
    if not has_bf16 and setting.kernels:
        text += "; the native kernels do not need them"
    slow = {torch.float32: "verify-float32", torch.float16: "float16-on-cpu"}
    usual = "dtype-suits" if has_bf16 or setting.kernels else "bfloat16-emulated"
    return finding(slow.get(setting.loaded, usual), text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_kernels(setting: Setting, quantised: bool) -> Finding:
    """What runs the forwards. ``quantised``: whether weights are quantised."""
    if setting.device.type != "cpu":
        return finding("kernels-run", f"torch runs the forwards on {setting.device}")
    code, text = "kernels-run", "torch runs the forwards, because of --backend reference"
    if setting.options.backend != REFERENCE:
        try:
            built = f"{instructions()}, {origin()}" if is_built() else "built by the first run"
            text = f"the native kernels ({built}) run the architectures that they support"
            return finding(code, text)
        except NativeUnavailableError as error:
            code, text = "kernels-absent", f"there are no native kernels: {error}"
    return finding("kernels-readable" if quantised else code, text)


def check_memory(setting: Setting, needs: Needs, context: int) -> Finding:
    """Whether weights and a cache for sequences of ``context`` tokens fit into the free memory."""
    free = free_memory(setting.device)
    if needs.weights > free:
        return finding("memory-short", what=f"weights of {size(needs.weights)}", left=size(free))
    left, given = free - needs.weights, setting.options.kv_cache_memory
    if given is not None and given > left:
        what = f"a cache of {size(given)} in addition to the weights"
        return finding("memory-short", what=what, left=size(left))
    batch, budget = setting.options.max_batch_size, left // _SHARE if given is None else given
    states = slots_within(budget, needs.state, batch) if needs.state else 0
    if needs.state and states < (needed := batch * MIN_STATES_PER_SEQUENCE):
        text = f"{batch} sequences need {needed} states of recurrent layers of "
        text += f"{size(needs.state)}, and half of the cache is {size(budget // 2)}"
        cure = "Lower --max-batch-size, or raise --kv-cache-memory."
        return finding("memory-short", text, cure=cure)
    budget -= states * needs.state
    a_token = needs.cache_bytes, needs.feature_bytes
    tokens = BLOCK_SIZE * blocks_within(budget, *a_token, max_feature_tokens(batch), BLOCK_SIZE)
    cost = f"weights of {size(needs.weights)}, {size(needs.cache_bytes)} of cache per token"
    if states:
        cost += f", {size(states * needs.state)} for {states} states of recurrent layers"
    text = f"{cost}, {size(free)} free: the cache holds {tokens:,} tokens"
    # The pages of the files that the doctor has read are counted as weights.
    process = held_memory(needs.files) if setting.device.type == "cpu" else None
    if process is not None:  # on a CPU, Python and the libraries count as well
        wanted = batch * (-(-context // BLOCK_SIZE) + 1) * BLOCK_SIZE
        cache = min(tokens, wanted) * needs.cache_bytes + states * needs.state
        peak = process + max(needs.loading, needs.weights + cache)
        text += f", and the process at its peak {size(peak)}"
    if tokens < max(context, 2 * BLOCK_SIZE):
        severity = ERROR if tokens < 2 * BLOCK_SIZE else None
        return finding("cache-short", cache=text, context=context, severity=severity)
    wanted = batch * context
    code = "cache-partial" if tokens < wanted else "memory-fits"
    return finding(code, cache=text, batch=batch, context=context, wanted=wanted)


def check_offload(plan: OffloadPlan, offload: str) -> Finding:
    if not plan.offloaded:
        return finding("offload-idle", layers=plan.layers, offload=offload)
    layers: Any = {"away": plan.offloaded, "layers": plan.layers, "offload": offload}
    moved = plan.moved_bytes
    return finding("weights-offloaded", **layers, moved=size(moved), seconds=moved / 2**30)


def size(count: float) -> str:
    """A number of bytes with a binary unit: 20.0 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(max(1.0, count)) // 10)))
    return f"{count / 1024**power:.{min(1, power)}f} {units[power]}"
