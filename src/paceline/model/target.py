"""``CausalModel``: a causal language model of transformers that runs ragged batches over a paged KV
cache."""

from __future__ import annotations

import copy
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
from paceline.model.loading import dtype_to_load, load_module, resolve_device, resolve_dtype
from paceline.model.names import first_line, model_path, stamps_of
from paceline.model.offload import load_offloaded, plan_offload, refuse_with_offload
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.states import StateStore, bytes_per_state
from paceline.model.precision import dequantise, quantise_loaded
from paceline.model.probe import ATTENTION, probe, verify
from paceline.model.tensorfile import check_finite

UNLIMITED_POSITIONS = 1 << 20  # ``max_positions`` of models whose config states no limit


class CausalModel:
    """A transformers model whose keys and values live in the engine's paged cache.

    ``hf``: the module of transformers; ``backend`` runs the forwards. ``vocab_size``: width of the
    logits; ``max_positions``: most tokens of a sequence. By layer: ``cache_shapes`` (KV heads, key
    width, value width), ``patterns`` (which keys a row attends to), ``state_parts`` (shapes and
    dtypes of a recurrent layer's state, empty for other layers)."""

    def __init__(self, hf: Any, name: str) -> None:
        """Adapt a module with ``attn_implementation="paceline"``. Raises UnsupportedModelError if a
        trial shows that it keeps state outside the cache's keys and values."""
        self.hf = hf.eval()
        self.name = name
        self.device: torch.device = hf.device
        self.dtype: torch.dtype = hf.dtype
        self.cache_dtype = self.dtype  # of keys and values; INT8: quantised to 8 bits
        config = hf.config.get_text_config(decoder=True)
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and limit < 0:
            raise ModelLoadError(
                f"max_position_embeddings of {name} is {limit}; correct its config.json"
            )
        self.max_positions: int = limit or UNLIMITED_POSITIONS
        self.eos_token_ids = _eos_ids(hf, config)
        self.reference = TorchBackend(hf, self.max_positions)
        self.backend: Backend = self.reference
        # With longrope, longer sequences use the long RoPE factors; None: there is one set of them.
        self.rope_switch = self.reference.rope_switch
        self.quantize: str | None = None  # the precision that the user asked for
        self.requested_backend = AUTO  # the backend that the user asked for
        self.backend_refusal: str | None = None  # why that backend does not run the model
        self.offload: str | None = None  # "cpu" or "disk" if some layers are offloaded there
        self.load_note = ""  # what the user should know about how the model was loaded
        self.checkpoint: tuple[FileStamp, ...] = ()  # its files, as they were when it was loaded
        self.packed = False  # whether a backend has changed the modules
        self.ranks: Ranks | None = None  # tensor-parallel processes that share the weights
        with _explaining_failure(hf, name):
            self.vocab_size, self.state_parts = probe(self.reference, self.num_layers)
        self.cache_shapes, self.patterns = self.reference.shapes, self.reference.patterns
        verify(self)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence; 0 without recurrent layers."""
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

        ``dtype`` "auto": bfloat16 where the native kernels run and on CPUs with bf16 instructions,
        float32 on other CPUs, the checkpoint's dtype on CUDA. ``check_values``: refuse weights that
        are NaN or infinite (offloaded weights are not checked). ``quantize`` "int8" or "int4"
        rounds the weights, on a CPU; "none" dequantises a quantised checkpoint; None keeps it
        quantised where the kernels run. ``backend``: a name of backends/base.py. ``offload`` "cpu"
        or "disk": where the layers go that do not fit into ``weights_memory`` bytes of the device.

        Raises ModelLoadError, UnsupportedModelError, ConfigError."""
        limit_threads()
        check_backend(backend)
        if offload is not None:
            refuse_with_offload(offload, quantize, backend)
            plan = plan_offload(name_or_path, dtype, device, offload, weights_memory)
            if plan.offloaded:
                model = cls(load_offloaded(name_or_path, dtype, device, plan), name_or_path)
                model.requested_backend, model.offload = backend, offload
                model.backend_refusal = f"layers stay on {offload}"
                model.load_note = (
                    f"{plan.offloaded} of {plan.layers} layers stay on {offload}: "
                    f"a step moves {plan.moved_bytes / 1e6:,.0f} MB"
                )
                return model
        target = resolve_device(device)
        torch_dtype = resolve_dtype(dtype, target)  # the best one for the reference backend
        native_dtype = dtype_to_load(dtype, target, backend)
        checkpoint = stamps_of(model_path(name_or_path))

        def load(loaded_dtype: torch.dtype | None, backend: str) -> CausalModel:
            keep = quantize is None and backend != REFERENCE
            module = load_module(name_or_path, loaded_dtype or dtype, target, keep_quantised=keep)
            if check_values:
                check_finite(module.state_dict(), f"the draft model {name_or_path} cannot be used")
            if quantize is not None:
                quantise_loaded(name_or_path, module, quantize)
            model = cls(module, name_or_path)
            model.requested_backend, model.checkpoint = backend, checkpoint
            return model.use_requested_backend(keeps_blocks=keep)

        model = load(native_dtype, backend)
        if model.backend.runs_torch and (model.packed or torch_dtype not in (None, native_dtype)):
            # The kernels cannot run it, and torch is faster with plain modules in its own dtype.
            refused = model.backend_refusal
            del model  # never two models in memory
            model = load(torch_dtype, REFERENCE)
            model.requested_backend, model.backend_refusal = backend, refused
        return model

    @classmethod
    def from_module(cls, module: Any, name: str, backend: str = AUTO) -> CausalModel:
        """Adapt a module of transformers that is already loaded: copies its modules and shares its
        weights, so the caller's module stays usable."""
        weights: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        copied = copy.deepcopy(module, weights)
        copied.set_attn_implementation(ATTENTION)
        model = cls(copied, name)
        model.requested_backend = backend
        return model.use_requested_backend()

    def use_requested_backend(self, keeps_blocks: bool = False) -> CausalModel:
        """Switch to the backend that was asked for, if it can run the model; returns ``self``.
        ``keeps_blocks``: the blocks of a GGUF file were kept, for the native kernels only."""
        name = NATIVE if self.requested_backend == AUTO else self.requested_backend
        if name == REFERENCE:
            self.backend_refusal = "asked for"
        elif self.requested_backend == AUTO and self.device.type != "cpu":
            self.backend_refusal = f"the device is {self.device}"
        else:
            self.use_backend(name)
        unused = keeps_blocks and self.backend is self.reference and gguf_file(self.name)
        if unused and dequantise(self.hf):
            info(f"{self.name} is dequantised: only the native kernels are fast with its blocks")
        return self

    @torch.inference_mode()
    def use_backend(self, name: str) -> bool:
        """Switch to the backend ``name``; returns whether it can run the model. If not, the
        reference backend runs it, and ``refused`` and a warning say why. Raises ConfigError if no
        backend has this name."""
        self.backend, self.backend_refusal = self.reference, None
        if name != REFERENCE:
            stateful = any(self.state_parts)
            backend = "its layers have states" if stateful else make_backend(name, self)
            if isinstance(backend, str):
                self.backend_refusal = backend
                if name != NATIVE or not is_off():
                    warn(f"{self.name} runs on the reference backend: {backend}")
            else:
                self.backend = backend
        return self.backend_refusal is None

    @property
    def backend_reason(self) -> str:
        """The backend's description; for the reference backend also why no other one is used."""
        why = self.backend_refusal
        return f"{REFERENCE} ({why})" if why else self.backend.description

    @property
    def dtype_text(self) -> str:
        """The dtype as text, with the cache's dtype if that differs: "bfloat16, cache int8"."""
        weights = str(self.dtype).removeprefix("torch.")
        cached = str(self.cache_dtype).removeprefix("torch.")
        return weights if weights == cached else f"{weights}, cache {cached}"

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        """One forward: returns the logits of ``batch.logit_rows``, and writes keys and values into
        the cache at ``batch.slots``. Raises ConfigError if ``batch.features`` names a layer that
        does not exist."""
        for layer in batch.features:
            if not 0 <= layer <= self.num_layers:
                raise ConfigError(
                    f"{self.name} has {self.num_layers} layers, so there is no layer {layer} to "
                    f"take features from; use 0 to {self.num_layers}"
                )
        return self.backend(batch, cache)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[..., vocab]`` for final-norm outputs ``[..., hidden]``."""
        return self.backend.head(hidden)

    def embedding(self, side: Literal["input", "output"]) -> Any:
        """The embedding ("input") or the language-model head ("output"). With tensor parallelism
        the whole layer is gathered from all ranks."""
        if self.ranks is not None:
            return self.ranks.embedding(side)
        return getattr(self.hf, f"get_{side}_embeddings")()

    def new_cache(
        self, num_blocks: int, block_size: int, share: bool = True, slots: int = 1
    ) -> PagedCache:
        """An empty cache for this model. ``share``: find full blocks again by their content;
        ``slots``: recurrent states that it can hold."""
        return PagedCache(
            *(self.cache_shapes, num_blocks, block_size, self.cache_dtype, self.device),
            *(share, self.rope_switch, self.new_states(slots)),
        )

    def new_states(self, slots: int = 1) -> StateStore | None:
        """An empty store for ``slots`` recurrent states; None without recurrent layers."""
        parts = self.state_parts
        return StateStore(parts, slots, self.device) if any(parts) else None

    def free_memory(self) -> int:
        """Bytes free for caches on the model's device; with ranks, on the one with the fewest."""
        return free_memory(self.device) if self.ranks is None else self.ranks.free_memory()


@contextmanager
def _explaining_failure(hf: Any, name: str) -> Iterator[None]:
    """Turns an error that library modules raise in the first forward into an UnsupportedModelError.
    Errors of memory and files pass through."""
    try:
        yield
    except (PacelineError, MemoryError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):  # torch's error for memory that there is not
            raise
        raise UnsupportedModelError(
            f"{name}: a batch of several texts in one row fails in {type(hf).__name__} "
            f"({type(error).__name__}: {first_line(error)}); use another form of the model, or "
            "another architecture"
        ) from error


def _eos_ids(hf: Any, config: Any) -> frozenset[int]:
    """The end-of-sequence ids of the generation config, or else of the model's config. Raises
    ModelLoadError if they are not token ids."""
    generation = getattr(hf, "generation_config", None)
    for source in (generation, config):
        ids = getattr(source, "eos_token_id", None)
        id_list = [ids] if isinstance(ids, int) else ids or []
        if not isinstance(id_list, list) or not all(type(token) is int for token in id_list):
            raise ModelLoadError(
                f"the eos_token_id of {hf.name_or_path} is {ids!r}; it must be a token's id or a "
                "list of ids: correct its generation_config.json"
            )
        if id_list:
            return frozenset(id_list)
    return frozenset()
