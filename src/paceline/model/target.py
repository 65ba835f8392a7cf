"""Any causal language model of transformers, called on ragged batches over a paged cache."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from paceline.core.batch import Batch, ModelOutput
from paceline.core.memory import free_memory, limit_threads
from paceline.core.stages import info, warn
from paceline.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.files import FileStamp
from paceline.kernels.compile import is_off
from paceline.model.backends.base import (
    AUTO,
    NATIVE,
    REFERENCE,
    Backend,
    Ranks,
    check_backend,
    make_backend,
)
from paceline.model.backends.reference.backend import TorchBackend
from paceline.model.gguf import gguf_file
from paceline.model.loading import (
    dtype_to_load,
    load_module,
    resolve_device,
    resolve_dtype,
    weight_files,
)
from paceline.model.names import first_line, model_path, stamps_of
from paceline.model.offload import load_offloaded, plan_offload, refuse_with_offload
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.states import StateStore, bytes_per_state
from paceline.model.precision import dequantise, is_quantised, quantise_loaded, quantization_of
from paceline.model.probe import ATTENTION, probe, verify
from paceline.model.tensorfile import check_finite

UNLIMITED_POSITIONS = 1 << 20  # for models without a stated limit


class CausalModel:
    """A transformers model whose keys and values live in the engine's paged cache. ``vocab_size``:
    width of logits; ``max_positions``: tokens of a sequence; ``hf``: transformers' module;
    ``backend`` runs the forwards. By layer: ``cache_shapes`` (kv heads, key width, value width),
    ``patterns`` (what rows see), ``state_parts`` (of a recurrent layer's state, none for
    others)."""

    def __init__(self, hf: Any, name: str) -> None:
        """Adapt a module with ``attn_implementation="paceline"``. Raises UnsupportedModelError if a
        probe shows state beside our keys and values."""
        self.hf = hf.eval()
        self.name = name
        self.device: torch.device = hf.device
        self.dtype: torch.dtype = hf.dtype
        self.cache_dtype = self.dtype  # or INT8: keys and values in 8 bits
        config = hf.config.get_text_config(decoder=True)
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        limit = getattr(config, "max_position_embeddings", None)
        self.max_positions: int = limit or UNLIMITED_POSITIONS
        self.eos_token_ids = _eos_ids(hf, config)
        self.reference = TorchBackend(hf, self.max_positions)
        self.backend: Backend = self.reference
        self.rope_switch = self.reference.rows.switch  # longer sequences are rotated otherwise
        self.quantize: str | None = None  # as asked for
        self.asked = AUTO  # the backend that was asked for
        self.refused: str | None = None  # why that does not run the model
        self.offload: str | None = None  # "cpu" or "disk": layers stay there
        self.note = ""  # what the user should know about how it was loaded
        self.checkpoint: tuple[FileStamp, ...] = ()  # files that it was loaded from, as of then
        self.ranks: Ranks | None = None  # processes that share the weights
        with _naming_the_cause(hf, name):
            self.vocab_size, self.state_parts = probe(self.reference, self.num_layers)
        self.cache_shapes, self.patterns = self.reference.shapes, self.reference.patterns
        verify(self, exact=self.dtype == torch.float32 and not is_quantised(hf))

    @property
    def state_bytes(self) -> int:
        """Of a sequence's state."""
        return bytes_per_state(self.state_parts)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        check_values: bool = False,
        quantize: str | None = None,
        backend: str = "auto",
        offload: str | None = None,
        weights_memory: int | None = None,
    ) -> CausalModel:
        """Load a built-in model, a local folder or a hub name.

        dtype "auto": bfloat16 where the native kernels run and on CPUs with bf16 instructions,
        float32 on others, the checkpoint's own on CUDA. ``check_values`` refuses weights that are
        NaN or infinite, but for offloaded ones. ``quantize`` "int8" or "int4" rounds the weights on
        a CPU; "none" dequantises a quantised file, which else stays quantised where the kernels
        run. ``backend``: see backends/base.py. ``offload`` "cpu" or "disk" leaves layers there that
        do not fit into ``weights_memory`` bytes.

        Raises ModelLoadError, UnsupportedModelError, ConfigError."""
        limit_threads()
        check_backend(backend)
        if offload is not None:
            refuse_with_offload(offload, quantize, backend)
            plan = plan_offload(name_or_path, dtype, device, offload, weights_memory)
            if plan.away:
                model = cls(load_offloaded(name_or_path, dtype, device, plan), name_or_path)
                model.asked, model.offload = backend, offload
                model.refused = f"layers stay on {offload}"
                model.note = (
                    f"{plan.away} of {plan.layers} layers stay on {offload}: "
                    f"a step moves {plan.moved / 1e6:,.0f} MB"
                )
                return model
        on = resolve_device(device)
        asked, number = resolve_dtype(dtype, on), dtype_to_load(dtype, on, backend)
        checkpoint = stamps_of(model_path(name_or_path), weight_files)

        def load(number: torch.dtype | None, backend: str) -> CausalModel:
            packed = quantize is None and backend != REFERENCE
            module = load_module(name_or_path, number or dtype, on, packed=packed)
            if check_values:
                check_finite(module.state_dict(), f"the draft model {name_or_path} cannot be used")
            if quantize is not None:
                quantise_loaded(name_or_path, module, quantize)
            model = cls(module, name_or_path)
            model.asked, model.checkpoint = backend, checkpoint
            return model.optimised()

        model = load(number, backend)
        if model.backend.runs_torch and number != asked and asked is not None:
            refused = model.refused
            del model  # never two at a time; torch is fast with another dtype
            model = load(asked, REFERENCE)
            model.asked, model.refused = backend, refused
        return model

    @classmethod
    def around(cls, module: Any, name: str, backend: str = AUTO) -> CausalModel:
        """A module of transformers that is loaded: modules of its own around the same weights."""
        weights: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        copied = copy.deepcopy(module, weights)
        copied.set_attn_implementation(ATTENTION)
        model = cls(copied, name)
        model.asked = backend
        return model.optimised()

    def optimised(self) -> CausalModel:
        """Itself, on the backend that was asked for."""
        name = NATIVE if self.asked == AUTO else self.asked
        if name == REFERENCE:
            self.refused = "asked for"
        elif self.asked == AUTO and self.device.type != "cpu":
            self.refused = f"the device is {self.device}"
        elif self.use(name):
            return self
        if self.asked == AUTO and gguf_file(self.name) and dequantise(self.hf):
            info(f"{self.name} is dequantised: only the native kernels are fast with its blocks")
        return self

    @torch.inference_mode()
    def use(self, name: str) -> bool:
        """Run on another backend. If that cannot run the model, the reference does, ``refused`` and
        a warning say why. Raises ConfigError for a name that is not known."""
        self.backend, self.refused = self.reference, None
        if name != REFERENCE:
            stateful = any(self.state_parts)
            made = "its layers have states" if stateful else make_backend(name, self)
            if isinstance(made, str):
                self.refused = made
                if name != NATIVE or not is_off():
                    warn(f"{self.name} runs on the reference backend: {made}")
            else:
                self.backend = made
        return self.refused is None

    @property
    def backend_reason(self) -> str:
        """The backend's description, or why it is not the one that was asked for."""
        return f"{REFERENCE} ({self.refused})" if self.refused else self.backend.description

    @property
    def numbers(self) -> str:
        """The dtype in words, and that of the cache if it is another."""
        weights = str(self.dtype).removeprefix("torch.")
        cached = str(self.cache_dtype).removeprefix("torch.")
        return weights if weights == cached else f"{weights}, cache {cached}"

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        """One forward: ``logits`` of ``batch.logit_rows``, keys and values into ``batch.slots``.
        Raises ConfigError for ``batch.features`` of layers that the model does not have."""
        for layer in batch.features:
            if not 0 <= layer <= self.num_layers:
                raise ConfigError(
                    f"{self.name} has {self.num_layers} layers, so there is no layer {layer} to "
                    f"take features from; use 0 to {self.num_layers}"
                )
        return self.backend(batch, cache)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab]`` of final-norm outputs ``[..., hidden]``."""
        return self.backend.head(hidden)

    def embedding(self, side: Literal["input", "output"]) -> Any:
        """The embedding ("input") or the language-model head; whole, also on several ranks."""
        if self.ranks is not None:
            return self.ranks.whole(side)
        return getattr(self.hf, f"get_{side}_embeddings")()

    def new_cache(
        self, num_blocks: int, block_size: int, share: bool = True, slots: int = 1
    ) -> PagedCache:
        """An empty cache of its keys and values, and with ``slots`` of recurrent states."""
        return PagedCache(
            *(self.cache_shapes, num_blocks, block_size, self.cache_dtype, self.device),
            *(share, self.rope_switch, self.new_states(slots)),
        )

    def new_states(self, slots: int = 1) -> StateStore | None:
        """Slots of its recurrent layers' states; None without such layers."""
        parts = self.state_parts
        return StateStore(parts, slots, self.device) if any(parts) else None

    def free_memory(self) -> int:
        """Bytes free for caches on the model's device; with ranks, on the one with the least."""
        return free_memory(self.device) if self.ranks is None else self.ranks.free_memory()


@contextmanager
def _naming_the_cause(hf: Any, name: str) -> Iterator[None]:
    """What the modules of a library raise in the first forward becomes an UnsupportedModelError.
    Errors that no other architecture would avoid (memory, files, our own code) stay as they are."""
    options = quantization_of(hf.config)
    try:
        yield
    except (PacelineError, MemoryError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        packages = [frame.f_globals["__name__"].partition(".")[0] for frame in frames]
        ours = next(name for name in reversed(packages) if name != "torch") == "paceline"
        if ours or "DefaultCPUAllocator" in str(error):
            raise
        if options is None:
            raise UnsupportedModelError(
                f"{type(hf).__name__} cannot run a batch of several texts in one row "
                f"({type(error).__name__}: {first_line(error)}); use another architecture"
            ) from error
        raise UnsupportedModelError(
            f"{name} is quantised in the format {options.get('quant_method')}, whose library "
            f"cannot run it here ({first_line(error)}); take another form of the model"
        ) from None


def _eos_ids(hf: Any, config: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation config, else of the model's. Raises ModelLoadError."""
    generation = getattr(hf, "generation_config", None)
    for source in (generation, config):
        ids = getattr(source, "eos_token_id", None)
        listed = [ids] if isinstance(ids, int) else ids or []
        if not isinstance(listed, list) or not all(isinstance(token, int) for token in listed):
            raise ModelLoadError(
                f"the eos_token_id of {hf.name_or_path} is {ids!r}; it must be a token's id or a "
                "list of ids: correct its generation_config.json"
            )
        if listed:
            return frozenset(listed)
    return frozenset()
