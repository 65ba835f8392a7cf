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
from paceline.model.backends.reference.rows import RowPositions
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.paged.masks import Pattern
from paceline.model.paged.segments import AttentionStep, DeviceBatch, KeyValueStore

_TRIAL = Batch((1, 2), (0, 1), (0, 1), (Span(0, 0, 0, 2),), ((0,),))


class TorchBackend(Backend):
    """Modules of transformers whose attention function is ours (model/probe.py). Of each layer, a
    first forward through ``run`` finds its ``patterns``, the ``shapes`` of its keys and values, and
    its name (``name_layers``)."""

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
        self._in_tuples: set[int] | None = None  # layers; None: not looked yet

    def __call__(self, batch: Batch, cache: KeyValueStore) -> ModelOutput:
        step = AttentionStep.of(batch, cache, self.patterns, self.hf.device)
        for layer in set(batch.features) - self._hooked:
            self._hook(layer)
        self._captured = {} if batch.features else None
        try:
            with self.rows.of(step.batch):
                outputs = self.run(step.batch, step)
            captured = self._captured or {}
        finally:
            self._captured = None
        return ModelOutput(outputs, {layer: captured[layer] for layer in batch.features})

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

    def on(self, hf: Any) -> TorchBackend:
        """The same forward of other modules of the same names."""
        other = copy.copy(self)
        other.hf, other._captured, other._hooked = hf, None, set()
        return other

    # -- fewer layers, at no cost of memory ------------------------------------------------------
    #
    # embedding -> layer 0 -> (layer 1) -> layer 2 -> ... -> final norm -> head
    #                         left out

    @torch.inference_mode()
    def without(self, skipped: frozenset[int]) -> TorchBackend:
        """A view of the same modules, in which skipped layers pass their input on. A trial of the
        first one raises UnsupportedModelError if layers cannot be left out one by one."""
        if self._in_tuples is None:
            self._in_tuples = self._layers_in_tuples()
            try:
                self._check_view(skipped or frozenset((0,)))
            except UnsupportedModelError:
                self._in_tuples = None
                raise
        return self._view(skipped)

    def _view(self, skipped: frozenset[int]) -> TorchBackend:
        """New are the modules on the way from the top to a skipped layer, and nothing else. Lists
        of layers keep their length, as models look up masks and rotary tables by the index."""
        top, in_tuples = self.hf, self._in_tuples or set()
        for layer in skipped:
            passing = _passing(self.layer(layer), layer in in_tuples)
            top = _replaced(top, self.layer_names[layer].split("."), passing)
        return self.on(top)

    def _layers_in_tuples(self) -> set[int]:
        """Layers that return their hidden states within a tuple, in a forward. Raises
        UnsupportedModelError for one that returns more than hidden states."""
        in_tuples: set[int] = set()

        def note(layer: int, output: Any) -> None:
            tensors = [output]
            if isinstance(output, tuple):
                in_tuples.add(layer)
                # A second stream beside the hidden states: what would it be?
                tensors = [part for part in output if isinstance(part, torch.Tensor)]
            if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
                raise UnsupportedModelError(
                    f"{type(self.hf).__name__}: layer {layer} does not return hidden states alone, "
                    "so it cannot be left out; use another drafter"
                )

        hooks = [
            self.layer(n).register_forward_hook(lambda *call, n=n: note(n, call[2]))
            for n in range(len(self.layer_names))
        ]
        try:
            self(_TRIAL, self._trial_cache())
        finally:
            for hook in hooks:
                hook.remove()
        return in_tuples

    def _check_view(self, skipped: frozenset[int]) -> None:
        """Only the chosen layers may run: a patched ``forward`` may be bound to the original."""
        store = _Recording(self._trial_cache())
        logits = self._view(skipped)(_TRIAL, store).logits
        layers = [n for n in range(len(self.shapes)) if n not in skipped]
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
            # The module that runs all layers and the final norm: ``a.b`` of ``a.b.layers.0``. Not
            # ``hf.base_model`` or ``get_decoder``: OPT goes past the one, Llama 4 lacks the other.
            stack = self.layer_names[0].rsplit(".", 2)[0]
            self.hf.get_submodule(stack).register_forward_hook(keep_output)
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


def _replaced(module: Any, path: Sequence[str], new: Any) -> Any:
    """A copy of a module that differs in one descendant; all the others are shared."""
    name, *rest = path
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied._modules[name] = _replaced(copied._modules[name], rest, new) if rest else new
    return copied


def _passing(layer: Any, in_tuple: bool) -> Any:
    """A layer that returns its input; all attributes stay, as models read some of them."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if in_tuple else hidden

    copied = copy.copy(layer)
    copied.forward = forward
    return copied


class _Recording:
    """A cache that notes which layers ask for their keys and values."""

    def __init__(self, cache: PagedCache) -> None:
        self.block_size = cache.block_size
        self.layers: list[int] = []
        self._kv = cache.kv

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append(layer)
        return self._kv(layer)
