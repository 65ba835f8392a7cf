"""The readable backend: the library's own modules, called on ragged batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.batch import Batch, ModelOutput, Span
from paceline.errors import UnsupportedModelError
from paceline.model.backends.base import REFERENCE, Backend
from paceline.model.backends.reference.layers import layers_in_tuples, without_layers
from paceline.model.backends.reference.rows import RowPositions
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.paged.masks import Pattern
from paceline.model.paged.segments import AttentionStep, DeviceBatch, KeyValueStore

_TRIAL = Batch((1, 2), (0, 1), (0, 1), (Span(0, 0, 0, 2),), ((0,),))


class TorchBackend(Backend):
    """Modules of transformers whose attention function is ours (model/probe.py).

    Of each layer, a first forward through ``run`` finds its ``patterns``, the ``shapes`` of its
    keys and values, and its name (``name_layers``).
    """

    name = REFERENCE

    def __init__(self, hf: Any, max_positions: int) -> None:
        """Raises UnsupportedModelError, see RowPositions."""
        self.hf = hf
        self.patterns: tuple[Pattern, ...] = ()
        self.shapes: list[LayerShape] = []
        self.layer_names: list[str] = []
        self.together = True  # decoding sequences of a step are attended by one call
        self.rows = RowPositions(hf, max_positions)
        self._keeps_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters
        self._captured: dict[int, torch.Tensor] | None = None
        self._hooked: set[int] = set()
        self._in_tuples: set[int] | None = None  # see layers.py; None: not looked yet

    def __call__(
        self,
        batch: Batch,
        cache: KeyValueStore,
        features: Sequence[int] = (),
        logits: bool = True,
    ) -> ModelOutput:
        step = AttentionStep.of(batch, cache, self.patterns, self.together, self.hf.device)
        for layer in features:
            if layer not in self._hooked:
                self._hook(layer)
        self._captured = {} if features else None
        try:
            with self.rows.of(step.batch):
                outputs = self.run(step.batch, step)
            captured = self._captured or {}
        finally:
            self._captured = None
        return ModelOutput(outputs, {layer: captured[layer] for layer in features})

    def run(self, batch: DeviceBatch, step: Any) -> torch.Tensor:
        """The modules' forward, which hands ``step`` to every call of attention."""
        rows = batch.logit_rows
        keep: dict[str, Any] = {}
        if rows is not None and self._keeps_rows:
            keep["logits_to_keep"] = rows
        out = self.hf(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            paceline_step=step,
            **keep,
        )
        logits: torch.Tensor = out.logits[0]
        return logits if rows is None or self._keeps_rows else logits.index_select(0, rows)

    def head(self, hidden: torch.Tensor, layer: Any = None) -> torch.Tensor:
        """``layer``: the head's, if not the module's own."""
        layer = self.hf.get_output_embeddings() if layer is None else layer
        logits: torch.Tensor = layer(hidden)
        config = self.hf.config.get_text_config(decoder=True)
        # What Cohere, Granite and Gemma 2 do to their logits afterwards.
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.inference_mode()
    def without(self, skipped: frozenset[int]) -> TorchBackend:
        """A view of the same modules. A trial of the first one raises UnsupportedModelError if
        layers of this model cannot be left out one by one."""
        if self._in_tuples is None:
            layers = [self.layer(n) for n in range(len(self.layer_names))]
            in_tuples = layers_in_tuples(self.hf, layers, lambda: self(_TRIAL, self._trial_cache()))
            self._check_view(self._view(skipped or frozenset((0,)), in_tuples), skipped)
            self._in_tuples = in_tuples
        return self._view(skipped, self._in_tuples)

    def _view(self, skipped: frozenset[int], in_tuples: set[int]) -> TorchBackend:
        return self.on(without_layers(self.hf, self.layer_names, skipped, in_tuples))

    def on(self, hf: Any) -> TorchBackend:
        """The same forward of other modules of the same names."""
        other = copy.copy(self)
        other.hf, other._captured, other._hooked = hf, None, set()
        return other

    def _check_view(self, view: TorchBackend, skipped: frozenset[int]) -> None:
        """Only the chosen layers may run: a patched ``forward`` may be bound to the original."""
        store = _Recording(self._trial_cache())
        logits = view(_TRIAL, store).logits
        layers = [n for n in range(len(self.shapes)) if n not in (skipped or {0})]
        if store.layers != layers or not logits.isfinite().all():
            raise UnsupportedModelError(
                f"{type(self.hf).__name__}: asked to run layers {layers} it ran {store.layers}; "
                "it cannot draft with a part of itself, use another drafter"
            )

    def _trial_cache(self) -> PagedCache:
        return PagedCache(self.shapes, 1, 2, self.hf.dtype, self.hf.device)

    # -- layers and their features -----------------------------------------------------------

    def _hook(self, layer: int) -> None:
        def keep_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._captured is not None:
                hidden = args[0] if args else kwargs["hidden_states"]
                self._captured[layer] = hidden[0]

        def keep_output(_: Any, __: Any, output: Any) -> None:
            if self._captured is not None:
                self._captured[layer] = output[0][0]

        if layer == len(self.layer_names):
            self.hf.get_submodule(self.stack_name).register_forward_hook(keep_output)
        else:
            self.layer(layer).register_forward_pre_hook(keep_input, with_kwargs=True)
        self._hooked.add(layer)

    def layer(self, layer: int) -> torch.nn.Module:
        """The decoder layer."""
        module: torch.nn.Module = self.hf.get_submodule(self.layer_names[layer])
        return module

    def name_layers(self, attention: Sequence[torch.nn.Module]) -> None:
        """By the module of each layer that attends: its entry of a module list is the layer."""
        names = {module: name.split(".") for name, module in self.hf.named_modules()}
        self.layer_names = []
        for module in attention:
            parts = names[module]
            end = max(i for i, part in enumerate(parts) if part.isdigit())
            self.layer_names.append(".".join(parts[: end + 1]))

    @property
    def stack_name(self) -> str:
        """Of the module that runs all layers and the final norm: ``a.b`` of ``a.b.layers.0``.

        Not ``hf.base_model`` or ``get_decoder``: OPT goes past the one, Llama 4 lacks the other.
        """
        return self.layer_names[0].rsplit(".", 2)[0]


class _Recording:
    """A cache that notes which layers ask for their keys and values."""

    def __init__(self, cache: PagedCache) -> None:
        self.block_size = cache.block_size
        self.layers: list[int] = []
        self._kv = cache.kv

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append(layer)
        return self._kv(layer)
