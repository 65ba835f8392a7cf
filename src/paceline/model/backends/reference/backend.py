"""The readable backend: the library's own modules, called on ragged batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch

from paceline.core.adapter import Adapter
from paceline.core.batch import Batch, ModelOutput, Span
from paceline.core.bound import bound
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.model.backends.base import REFERENCE, Backend
from paceline.model.backends.reference.adapters import adapting, reads_weight
from paceline.model.backends.reference.attention import STEP
from paceline.model.backends.reference.recurrent import over_states
from paceline.model.backends.reference.rows import RowPositions
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.paged.segments import AttentionStep, DeviceBatch, Pattern
from paceline.model.quantised.convert import copy_beside

_TRIAL = Batch((1, 2), (0, 1), (0, 1), (Span(0, 0, 0, 2),), ((0,),))


class TorchBackend(Backend):
    """Modules of transformers that call our attention function. The probe's forward
    (model/probe.py) sets the layers' ``patterns``, ``shapes`` of keys and values, and names."""

    name = REFERENCE

    def __init__(self, hf: Any, max_positions: int) -> None:
        """Raises UnsupportedModelError, see RowPositions."""
        self.hf = hf
        self.patterns: tuple[Pattern, ...] = ()
        self.shapes: list[LayerShape] = []
        self.layer_names: list[str] = []
        self.rows = RowPositions(hf, max_positions)
        self._keeps_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters
        self._captured: dict[int, torch.Tensor] | None = None
        self._hooked: set[int] = set()

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        step = AttentionStep.of(batch, cache, self.patterns, self.hf.device)
        for layer in set(batch.features) - self._hooked:
            self._hook(layer)
        self._captured = {} if batch.features else None
        try:
            with (
                self.rows.of(step.batch),
                adapting(self.hf, batch.adapter_runs, len(batch.input_ids)),
                over_states(batch, cache),
                bound(STEP, step),
            ):
                outputs = self.run(step.batch)
            captured = self._captured or {}
        finally:
            self._captured = None
        return ModelOutput(outputs, {layer: captured[layer] for layer in batch.features})

    def check_adapter(self, adapter: Adapter) -> None:
        for name in adapter.pairs:
            above, _, layer = name.rpartition(".")
            if reads_weight(module := self.hf.get_submodule(above), layer):
                raise ConfigError(
                    f"the adapter {adapter.name} changes {name}, whose weight "
                    f"{type(module).__name__} multiplies by itself; merge it into the model "
                    "(peft's merge_and_unload)"
                )

    def run(self, batch: DeviceBatch) -> torch.Tensor:
        """The modules' forward."""
        rows = batch.logit_rows
        keep: dict[str, Any] = {}
        if rows is not None and self._keeps_rows:
            keep["logits_to_keep"] = rows
        out = self.hf(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            **keep,
        )
        logits: torch.Tensor = out.logits[0]
        return logits if rows is None or self._keeps_rows else logits.index_select(0, rows)

    def head(self, hidden: torch.Tensor, layer: Any = None) -> torch.Tensor:
        """``layer``: the head's, if not the module's own."""
        layer = self.hf.get_output_embeddings() if layer is None else layer
        logits: torch.Tensor = layer(hidden)
        config = self.hf.config.get_text_config(decoder=True)
        # As Cohere, Granite and Gemma 2 scale and cap logits.
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def on(self, hf: Any) -> TorchBackend:
        """The same forward of other modules with the same names."""
        other = copy.copy(self)
        other.hf, other._captured, other._hooked = hf, None, set()
        return other

    @torch.inference_mode()
    def without(self, skipped: frozenset[int]) -> TorchBackend:
        """A view of the same modules in which skipped layers return their input. Raises
        UnsupportedModelError if a trial shows that layers cannot be left out, or attend to the keys
        of a skipped one."""
        lent = self._sharing("store_full_length_kv") & skipped
        if lent and self._sharing("is_kv_shared_layer") - skipped:
            raise UnsupportedModelError(
                f"{type(self.hf).__name__}: others attend to the keys of layers {sorted(lent)}, so "
                "these cannot be left out; use another drafter"
            )
        view, cache = self._view(skipped), _TrialCache(self)
        logits = view(_TRIAL, cache).logits
        layers = [n for n, shape in enumerate(self.shapes) if any(shape) and n not in skipped]
        if cache.layers != layers or not logits.isfinite().all():  # as a patched forward might
            raise UnsupportedModelError(
                f"{type(self.hf).__name__}: asked to run layers {layers} it ran {cache.layers}; "
                "it cannot draft with a part of itself, use another drafter"
            )
        return view

    def _sharing(self, role: str) -> set[int]:
        """Layers whose attention has this flag (Gemma 3n and 4)."""
        attention = (getattr(self.layer(n), "self_attn", None) for n in range(len(self.shapes)))
        return {n for n, module in enumerate(attention) if getattr(module, role, False)}

    def _view(self, skipped: frozenset[int]) -> TorchBackend:
        """Copies the modules above a skipped layer; lists keep their length, for their indices."""
        above, passing = set[torch.nn.Module](), dict[torch.nn.Module, Any]()
        for layer in skipped:
            passing[self.layer(layer)] = _passing(self.layer(layer), self._in_tuples.get(layer, 0))
            parts = self.layer_names[layer].split(".")
            above |= {self.hf.get_submodule(".".join(parts[:end])) for end in range(len(parts))}
        return self.on(copy_beside(self.hf, lambda m: passing.get(m, None if m in above else m)))

    @cached_property
    def _in_tuples(self) -> dict[int, int]:
        """Layers that return tuples, and of how many parts. Raises UnsupportedModelError for more
        than hidden states."""
        in_tuples: dict[int, int] = {}

        def note(layer: int, output: Any) -> None:
            tensors = [output]
            if isinstance(output, tuple):
                in_tuples[layer] = len(output)
                tensors = [part for part in output if isinstance(part, torch.Tensor)]
            if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
                raise UnsupportedModelError(
                    f"{type(self.hf).__name__}: layer {layer} does not return hidden states alone, "
                    "so it cannot be left out; use another drafter"
                )

        with ExitStack() as hooks:
            for n in range(len(self.layer_names)):
                hook = self.layer(n).register_forward_hook(lambda *call, n=n: note(n, call[2]))
                hooks.enter_context(hook)
            self(_TRIAL, _TrialCache(self))
        return in_tuples

    def _hook(self, layer: int) -> None:
        def keep(hidden: torch.Tensor) -> None:
            if self._captured is not None:
                self._captured[layer] = hidden[0]

        if layer == len(self.layer_names):
            # The module of all layers and the final norm: ``a.b`` of ``a.b.layers.0``. OPT does not
            # call ``hf.base_model``, and Llama 4 has no ``get_decoder``.
            stack = self.layer_names[0].rsplit(".", 2)[0]
            self.hf.get_submodule(stack).register_forward_hook(lambda *call: keep(call[2][0]))
        else:
            self.layer(layer).register_forward_pre_hook(
                lambda _, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        self._hooked.add(layer)

    def layer(self, layer: int) -> torch.nn.Module:
        module: torch.nn.Module = self.hf.get_submodule(self.layer_names[layer])
        return module

    def name_layers(self, attention: Sequence[torch.nn.Module]) -> None:
        """Of attention modules: a layer is the innermost list entry that holds one (LongCat's holds
        a list of two). Layers without attention stand beside the first that has it."""
        names = {module: name.split(".") for name, module in self.hf.named_modules()}
        self.layer_names = []
        for module in attention:
            parts = names[module]
            end = max(i for i, part in enumerate(parts[:-1]) if part.isdigit())
            self.layer_names.append(".".join(parts[: end + 1]))
        if len(attention) < len(self.shapes):
            stack = self.layer_names[0].rpartition(".")[0]
            self.layer_names = [f"{stack}.{layer}" for layer in range(len(self.shapes))]


def _passing(layer: Any, parts: int) -> Any:
    """A layer that returns its input, as the first of so many parts, or alone for 0; with the
    attributes that models read."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *(None,) * (parts - 1)) if parts else hidden

    copied = copy.copy(layer)
    copied.forward = forward
    return copied


class _TrialCache(PagedCache):
    """Of two tokens; records which layers read it."""

    def __init__(self, backend: TorchBackend) -> None:
        super().__init__(backend.shapes, 1, 2, backend.hf.dtype, backend.hf.device)
        self.layers: list[int] = []

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append(layer)
        return super().kv(layer)
