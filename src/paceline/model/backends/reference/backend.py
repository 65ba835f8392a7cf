"""The reference backend: runs the modules of transformers on ragged batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from paceline.core.adapter import Adapter
from paceline.core.batch import Batch, ModelOutput, Span
from paceline.core.bound import bound
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.model.backends.base import REFERENCE, Backend
from paceline.model.backends.reference.adapters import applying_adapters, reads_weight_of
from paceline.model.backends.reference.attention import STEP
from paceline.model.backends.reference.recurrent import Mixer
from paceline.model.backends.reference.rows import correct_rows
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.paged.segments import AttentionStep, DeviceBatch, Pattern
from paceline.model.quantised.convert import copy_sharing_parameters

_TRIAL = Batch((1, 2), (0, 1), (0, 1), (Span(0, 0, 0, 2),), ((0,),))


class TorchBackend(Backend):
    """Runs modules of transformers, whose layers call our attention function. ``patterns``,
    ``shapes`` (of keys and values) and ``layer_names`` are by layer; the forward of model/probe.py
    finds them."""

    name = REFERENCE

    def __init__(self, hf: Any, max_positions: int) -> None:
        """Raises UnsupportedModelError for rotary embeddings that correct_rows cannot correct."""
        self.hf = hf
        self.patterns: tuple[Pattern, ...] = ()
        self.shapes: list[LayerShape] = []
        self.layer_names: list[str] = []
        self.rope_switch = correct_rows(hf, max_positions)
        # Whether the module can compute the logits of some rows only.
        self._selects_logits = "logits_to_keep" in inspect.signature(hf.forward).parameters
        self._hooked: set[int] = set()  # layers with a hook that captures features

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        step = AttentionStep.of(batch, cache, self.patterns, self.hf.device)
        for layer in set(batch.features) - self._hooked:
            self._hook(layer)
        adapting = applying_adapters(self.hf, batch.adapter_runs, len(batch.input_ids))
        with adapting, bound(STEP, step):
            outputs = self.run(step.batch)
        return ModelOutput(outputs, {layer: step.features[layer] for layer in batch.features})

    def check_adapter(self, adapter: Adapter) -> None:
        for name in adapter.pairs:
            parent, _, layer = name.rpartition(".")
            module = self.hf.get_submodule(parent)
            inner = isinstance(module, Mixer) and not module.runs_once(layer)
            if inner or reads_weight_of(module, layer):
                raise ConfigError(
                    f"the adapter {adapter.name} changes {name}, which {type(module).__name__} "
                    "multiplies by itself; merge it into the model (peft's merge_and_unload)"
                )

    def run(self, batch: DeviceBatch) -> torch.Tensor:
        """Call the module; returns the logits of ``batch.logit_rows``."""
        rows = batch.logit_rows
        options: dict[str, Any] = {}
        if rows is not None and self._selects_logits:
            options["logits_to_keep"] = rows
        out = self.hf(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            **options,
        )
        logits: torch.Tensor = out.logits[0]
        return logits if rows is None or self._selects_logits else logits.index_select(0, rows)

    def head(self, hidden: torch.Tensor, layer: Any = None) -> torch.Tensor:
        """As ``Backend.head``; ``layer`` replaces the module's own output embedding."""
        layer = self.hf.get_output_embeddings() if layer is None else layer
        logits: torch.Tensor = layer(hidden)
        config = self.hf.config.get_text_config(decoder=True)
        # Cohere and Granite scale logits, Gemma 2 caps them.
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def on(self, hf: Any) -> TorchBackend:
        """A backend that runs ``hf``, whose modules have the same names."""
        other = copy.copy(self)
        other.hf, other._hooked = hf, set()
        return other

    @torch.inference_mode()
    def without_layers(self, skipped: frozenset[int]) -> TorchBackend:
        """A view of the same modules in which skipped layers return their input. Raises
        UnsupportedModelError if a trial shows that layers cannot be left out, or if other layers
        attend to the keys of a skipped one."""
        shared = self._layers_with("store_full_length_kv") & skipped
        if shared and self._layers_with("is_kv_shared_layer") - skipped:
            raise UnsupportedModelError(
                f"{type(self.hf).__name__}: others attend to the keys of layers {sorted(shared)}, "
                "so these cannot be left out; use another drafter"
            )
        layers = [n for n, shape in enumerate(self.shapes) if any(shape) and n not in skipped]
        for in_tuple in (False, True):  # some models' layers return hidden states in a tuple
            view, cache = self._view(skipped, in_tuple), _TrialCache(self)
            with suppress(Exception):  # the modules of transformers may raise any
                logits = view(_TRIAL, cache).logits
                if cache.layers == layers and logits.dim() == 2 and logits.isfinite().all():
                    return view
        raise UnsupportedModelError(
            f"{type(self.hf).__name__} cannot draft with layers {layers} alone; use another drafter"
        )

    def _layers_with(self, flag: str) -> set[int]:
        """Layers whose attention module sets ``flag`` (Gemma 3n and 4 share keys by such flags)."""
        attention = (getattr(self.layer(n), "self_attn", None) for n in range(len(self.shapes)))
        return {n for n, module in enumerate(attention) if getattr(module, flag, False)}

    def _view(self, skipped: frozenset[int], in_tuple: bool) -> TorchBackend:
        """A backend without the skipped layers. It has copies of the modules above them, shares all
        others, and keeps the lengths of module lists, so that layers keep their indices."""
        parents, replaced = set[torch.nn.Module](), dict[torch.nn.Module, Any]()
        for layer in skipped:
            module = self.layer(layer)
            replaced[module] = _passing_through(module, in_tuple)
            parts = self.layer_names[layer].split(".")
            parents |= {self.hf.get_submodule(".".join(parts[:end])) for end in range(len(parts))}

        def replacement_of(module: torch.nn.Module) -> Any:
            return replaced.get(module, None if module in parents else module)

        return self.on(copy_sharing_parameters(self.hf, replacement_of))

    def _hook(self, layer: int) -> None:
        """Capture the input of a layer, or after the last one the final norm's output."""

        def keep(hidden: torch.Tensor) -> None:
            step = STEP.get(None)
            if step is not None and layer in step.features:
                step.features[layer] = hidden[0]

        if layer == len(self.layer_names):
            # The module with the layers and the final norm: ``a.b`` for a layer ``a.b.layers.0``.
            # OPT does not call ``hf.base_model``, and Llama 4 has no ``get_decoder``.
            stack = self.layer_names[0].rsplit(".", 2)[0]
            self.hf.get_submodule(stack).register_forward_hook(lambda *call: keep(call[2][0]))
        else:
            self.layer(layer).register_forward_pre_hook(
                lambda _, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        self._hooked.add(layer)

    def layer(self, layer: int) -> torch.nn.Module:
        """The module of a decoder layer."""
        module: torch.nn.Module = self.hf.get_submodule(self.layer_names[layer])
        return module

    def name_layers(self, attention: Sequence[torch.nn.Module]) -> None:
        """Set ``layer_names`` from the attention modules: a layer is the innermost list entry that
        contains one (LongCat's layers contain a list of two). Layers without attention are in the
        same list as the first layer with attention."""
        names = {module: name.split(".") for name, module in self.hf.named_modules()}
        self.layer_names = []
        for module in attention:
            parts = names[module]
            end = max(i for i, part in enumerate(parts[:-1]) if part.isdigit())
            self.layer_names.append(".".join(parts[: end + 1]))
        if len(attention) < len(self.shapes):
            stack = self.layer_names[0].rpartition(".")[0]
            self.layer_names = [f"{stack}.{layer}" for layer in range(len(self.shapes))]


def _passing_through(layer: Any, in_tuple: bool) -> Any:
    """A copy of a layer, with the attributes that models read, which returns its input."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None) if in_tuple else hidden

    copied = copy.copy(layer)
    copied.forward = forward
    return copied


class _TrialCache(PagedCache):
    """A cache of two tokens, which records the layers that use it."""

    def __init__(self, backend: TorchBackend) -> None:
        super().__init__(backend.shapes, 1, 2, backend.hf.dtype, backend.hf.device)
        self.layers: list[int] = []

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append(layer)
        return super().kv(layer)
