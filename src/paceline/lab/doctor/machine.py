"""What the machine makes of a pair: dtype, kernels, what weights are held as, and memory."""

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
from paceline.model.quantised.weights import BITS

_SHARE = 4  # by default the cache takes at most one part in so many of the free memory
_LARGE = 1 << 30  # bytes of weights from which on a processor is slow


@dataclass(frozen=True)
class Setting:
    """How a pair would be run. ``dtype`` None: as the checkpoint has it. ``cache_dtype``: of the
    target's. ``kernels``: whether the native ones are expected to run."""

    options: EngineOptions
    device: torch.device
    dtype: torch.dtype | None
    cache_dtype: torch.dtype = torch.bfloat16
    kernels: bool = False

    @classmethod
    def of(cls, options: EngineOptions) -> Setting:
        """Raises ConfigError on an unusable device or dtype."""
        device = resolve_device(options.device)
        moved = options.offload is not None or options.tensor_parallel > 1
        run = REFERENCE if moved else options.backend
        dtype = dtype_to_load(options.dtype, device, run)
        cached = cache_dtype(options.kv_cache_dtype, dtype or torch.bfloat16)
        return cls(options, device, dtype, cached, has_kernels(device, run))

    @property
    def loaded(self) -> torch.dtype:
        """``dtype``, taken for bf16 where only the checkpoint knows."""
        return self.dtype or torch.bfloat16

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return self.loaded.itemsize

    def precision(self, model: Model) -> str | None:
        """That which a model is rounded to when it is loaded."""
        target = model.about == "target"
        asked = self.options.quantize if target else self.options.draft_quantize
        return None if asked == "none" else asked


def has_kernels(device: torch.device, backend: str) -> bool:
    """Whether there are native kernels for what a backend runs here."""
    return device.type == "cpu" and backend != REFERENCE and are_kernels_here()


@dataclass(frozen=True)
class Needs:
    """Bytes that models and heads take: ``weights``, of cache and features for every token, and of
    a ``state`` of recurrent layers. ``loading``: at the most while they are read, the pages of
    their ``files`` (real paths) included."""

    weights: int = 0
    cache_bytes: int = 0
    feature_bytes: int = 0
    loading: int = 0
    state: int = 0
    files: tuple[str, ...] = ()

    @classmethod
    def of_model(cls, model: Model, setting: Setting, cached: torch.dtype | None) -> Needs:
        """``cached``: what its keys and values are held in."""
        loading = model.files.stored_bytes + _unrounded_bytes(model, setting)
        cache_bytes = model.cache_bytes(cached or torch.bfloat16)
        state = model.state_bytes(setting.loaded)
        files = tuple(model.files.mapped)
        return cls(weight_bytes(model, setting), cache_bytes, 0, loading, state, files)

    def __add__(self, other: Needs) -> Needs:
        """With another one, which is loaded after it."""
        return Needs(
            self.weights + other.weights,
            self.cache_bytes + other.cache_bytes,
            self.feature_bytes + other.feature_bytes,
            max(self.loading, self.weights + other.loading),
            self.state + other.state,
            self.files + other.files,
        )

    def shared(self, ranks: int) -> Needs:
        return Needs(self.weights // ranks, self.cache_bytes // ranks, 0, self.loading // ranks)


def rounded_bytes(model: Model, precision: str, setting: Setting) -> int:
    """Of the matrices alone, in memory; the head in 8 bits."""
    readable = setting.options.backend == REFERENCE
    return precisions.rounded_bytes(model.skeleton, precision, setting.width, readable)


def weight_bytes(model: Model, setting: Setting) -> int:
    """All weights in memory, as they are kept or rounded."""
    precision, file, width = setting.precision(model), model.files.gguf, setting.width
    tied = getattr(model.config, "tie_word_embeddings", False)
    head = int(model.skeleton.get_output_embeddings().weight.numel()) if tied else 0
    if file is not None and _kept_types(file, setting, precision):
        return file.stored_bytes + model.vocab_size * model.hidden_size * width
    if precision is None or model.quantisation is not None:
        # On a processor a head that is tied to the embedding is laid out anew, beside it.
        return _unrounded_bytes(model, setting) + head * width * (setting.device.type == "cpu")
    whole = sum(parameter.numel() for parameter in model.skeleton.parameters())
    linear = [m for m in model.skeleton.modules() if isinstance(m, nn.Linear)]
    # A tied embedding keeps its own numbers beside the rounded head.
    matrices = sum(module.weight.numel() for module in linear) - head
    return rounded_bytes(model, precision, setting) + int(whole - matrices) * width


def _unrounded_bytes(model: Model, setting: Setting) -> int:
    if (setting.dtype is None or model.quantisation is not None) and model.files.stored_bytes:
        return model.files.stored_bytes
    return model.parameters * setting.width


def _kept_types(file: GgufFile, setting: Setting, precision: str | None) -> list[str]:
    """The packed types of a file that stay as they are."""
    runs = setting.device.type == "cpu" and setting.options.backend != REFERENCE
    return [kind for kind in file.quantised if kind in KINDS and runs and precision is None]


def held_bits(model: Model, setting: Setting) -> int:
    """Bits in which most numbers of the matrices will be held."""
    asked, options, file = setting.precision(model), model.quantisation, model.files.gguf
    if asked in BITS:
        return BITS[asked]
    if options is not None and stays_quantised(options, setting.device):
        return int(_of_weights(options, "num_bits", "bits", "w_bit") or 8)
    kept = [] if file is None else _kept_types(file, setting, asked)
    if kept:
        return int(next(letter for letter in kept[0] if letter.isdecimal()))
    return 8 * setting.width


def check_precision(model: Model, setting: Setting) -> Iterator[Finding]:
    """What the weights are, and become."""
    asked, file = setting.precision(model), model.files.gguf
    if file is not None:
        kinds = ", ".join(f"{number} tensors in {name}" for name, number in file.types.items())
        kept, described = _kept_types(file, setting, asked), f"{file.path.name} ({kinds})"
        stored, unpacked = size(file.stored_bytes), size(setting.width * file.parameters)
        values: Any = {"kept": ", ".join(kept), "dtype": _name(setting.loaded)}
        code = "gguf-kept" if kept else "gguf-dequantised"
        yield finding(code, file=described, stored=stored, unpacked=unpacked, **values)
    if model.quantisation is not None:
        yield _packed(model, model.quantisation, setting)
        if asked is not None:
            yield finding("quantised-twice", name=model.name, asked=asked)
    elif asked is not None and setting.device.type != "cpu":
        text = f"quantize={asked!r} works on a processor, not on {setting.device}"
        yield finding("quantised-twice", text, cure="Write a checkpoint: paceline quantize.")
    elif asked is not None:
        before, after = size(_unrounded_bytes(model, setting)), size(weight_bytes(model, setting))
        yield finding("quantised-when-loaded", asked=asked, before=before, after=after)


def _packed(model: Model, options: Mapping[str, Any], setting: Setting) -> Finding:
    words = [str(options.get("quant_method") or "unknown")]
    bits = _of_weights(options, "num_bits", "bits", "w_bit")
    group = _of_weights(options, "group_size", "q_group_size")
    if bits is not None:
        words.append(f"{bits} bits" + (f" in groups of {group}" if (group or -1) > 0 else ""))
    words.append(size(model.files.stored_bytes))
    code = "quantised-kept" if stays_quantised(options, setting.device) else "quantised"
    return finding(code, how=", ".join(words), library=library_of(options))


def _of_weights(options: Mapping[str, Any], *names: str) -> Any:
    """What the first group of layers says of its weights under one of these names."""
    groups = options.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else options
    weights = first.get("weights", first) if isinstance(first, Mapping) else {}
    return next((weights[name] for name in names if name in weights), None)


def check_dtype(setting: Setting, weights: int) -> Iterator[Finding]:
    """Whether a forward over a draft's rows costs about what one over a single row costs."""
    if setting.device.type != "cpu":
        name = "the checkpoint's own dtype" if setting.dtype is None else _name(setting.dtype)
        text = f"{name} on {torch.cuda.get_device_name(setting.device)}"
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        suits = has_bf16 or setting.loaded != torch.bfloat16
        yield finding("dtype-suits" if suits else "bfloat16-emulated", text)
        return
    has_bf16 = cpu_has_bf16()
    processor = f"a processor ({platform.machine()}) {'with' if has_bf16 else 'without'}"
    text = f"{_name(setting.loaded)} on {processor} bf16 instructions"
    if not has_bf16 and setting.kernels:
        text += "; the native kernels do not need them"
    slow = {torch.float32: "verify-float32", torch.float16: "float16-on-cpu"}
    usual = "dtype-suits" if has_bf16 or setting.kernels else "bfloat16-emulated"
    yield finding(slow.get(setting.loaded, usual), text)
    if weights >= _LARGE:
        yield finding("gpu-absent", weights=size(weights), gpus=torch.cuda.device_count())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_kernels(setting: Setting, quantised: bool) -> Finding:
    """What will run the forwards; ``quantised``: of quantised weights."""
    if setting.device.type != "cpu":
        return finding("kernels-run", f"forwards run on torch, on {setting.device}")
    code, text = "kernels-run", "forwards run on torch, as --backend reference asks for"
    if setting.options.backend != REFERENCE:
        try:
            built = f"{instructions()}, {origin()}" if is_built() else "which the first run builds"
            text = f"the native kernels ({built}) run the architectures that they know"
            return finding(code, text)
        except NativeUnavailableError as error:
            code, text = "kernels-absent", f"there are no native kernels: {error}"
    return finding("kernels-readable" if quantised else code, text)


def check_memory(setting: Setting, needs: Needs, context: int) -> Finding:
    """Whether weights and a cache for sequences of ``context`` tokens fit into what is free."""
    free = free_memory(setting.device)
    if needs.weights > free:
        return finding("memory-short", what=f"weights of {size(needs.weights)}", left=size(free))
    left, given = free - needs.weights, setting.options.kv_cache_memory
    if given is not None and given > left:
        what = f"a cache of {size(given)} beside the weights"
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
    cost = f"weights of {size(needs.weights)}, {size(needs.cache_bytes)} of cache a token"
    if states:
        cost += f", {size(states * needs.state)} for {states} states of recurrent layers"
    text = f"{cost}, {size(free)} free: the cache holds {tokens:,} tokens"
    # The pages of the files that the doctor has looked into are counted as weights.
    process = held_memory(needs.files) if setting.device.type == "cpu" else None
    if process is not None:  # there Python and the libraries count, which this process has as well
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
    moved, seconds = size(plan.moved_bytes), plan.moved_bytes / 2**30
    return finding("weights-offloaded", **layers, moved=moved, seconds=seconds)


def size(count: float) -> str:
    """Bytes for people: 20.0 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(max(1.0, count)) // 10)))
    return f"{count / 1024**power:.{min(1, power)}f} {units[power]}"
