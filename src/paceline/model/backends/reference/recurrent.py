"""Recurrent layers of transformers on ragged batches: short convolutions, Mamba, delta rules.

A mixer is the recurrent module of a layer, recognised by its depthwise convolution; it runs over
transformers' own cache layer. As a batch packs all sequences and tree nodes into one row, the
mixer's forward is called once for each chunk of a prompt, and once for all rows of drafts
(recurrences.py), or once for each level of them where our step functions cannot replace those of
transformers. Input and output projections do not depend on states: they are taken out of these
forwards and computed once for all rows, so that their weights are read once. Outside our
forwards a mixer works as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.bound import bound
from paceline.errors import UnsupportedModelError
from paceline.model.backends.reference.attention import STEP
from paceline.model.backends.reference.recurrences import batched_steps, patch_step_functions
from paceline.model.paged.states import StateLevel, StatePart, StateStep

# Layers of a mixer that its forward must not run, by name: the outputs of input projections, which
# have been computed, and None for the output projection, which runs later.
_PRECOMPUTED: ContextVar[Mapping[str, Tensor | None] | None] = ContextVar("ready", default=None)


class Mixer(nn.Module):
    """First base of a mixer's class, as a ``forward`` of the instance would not survive copying."""

    layer_idx: int
    cache_parameter: str  # the parameter of the original forward that takes a cache
    layout: list[tuple[str, int]]  # which tensors of a cache layer make up the state
    input_projections: list[str]  # names of the layers that read the mixer's input
    output_projection: str  # name of the layer that computes its output, or empty
    steps_only: bool  # a chunk forgets the state before it (Jamba in transformers 5.23)
    steps_batched: bool  # whether the rows of all levels run in one forward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        running = STEP.get(None)
        if running is None or running.states is None:
            whole: Tensor = super().forward(hidden_states, *args, **kwargs)
            return whole
        store, step = running.states
        states, device = store.layer(self.layer_idx), hidden_states.device
        scaled = self._scaled(hidden_states)
        projected = {name: getattr(self, name)(scaled)[0] for name in self.input_projections}
        order: list[Tensor] = []
        outputs: list[Tensor] = []

        def advance(rows: Tensor, parts: list[Tensor]) -> list[Tensor]:
            """Run ``rows [B, n]``; returns the states after them."""
            ready = {name: values[rows] for name, values in projected.items()}
            ready[self.output_projection] = None
            with bound(_PRECOMPUTED, ready):
                output, parts = self.advance(hidden_states[0, rows], parts)
            order.append(rows.flatten())
            outputs.append(output.flatten(0, 1))
            return parts

        for first, end, before, after in step.chunks:
            parts = [state[before : before + 1].clone() for state in states]
            size = 1 if before != store.zero and self.steps_only else end - first
            for rows in torch.split(torch.arange(first, end, device=device)[None], size, 1):
                parts = advance(rows, parts)
            for state, part in zip(states, parts, strict=True):
                state[after] = part[0]
        if self.steps_batched and step.levels:
            with batched_steps(step):
                advance(step.stepped[:, None], states)
        for level in () if self.steps_batched else step.levels:
            parts = advance(level.rows[:, None], [state[level.before].clone() for state in states])
            for state, part in zip(states, parts, strict=True):
                state[level.after] = part
        mixed = torch.cat(outputs)
        mixed = torch.empty_like(mixed).index_copy_(0, torch.cat(order), mixed)[None]
        project = self.output_projection
        result: Tensor = getattr(self, project)(mixed) if project else mixed
        return result

    def advance(
        self, hidden: Tensor, parts: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the original forward; returns outputs ``[B, n, H]`` for ``hidden``, and the states
        after it. ``parts``: the states before it, which may be overwritten; None: a text begins,
        and ``layout`` is set."""
        from transformers.cache_utils import Cache, LinearAttentionLayer

        convolutions = sum(isinstance(child, nn.Conv1d) for child in self.children())
        layer = LinearAttentionLayer(number_of_states=convolutions)
        for (kind, index), part in zip(self.layout, parts or (), strict=parts is not None):
            getattr(layer, f"{kind}_states")[index] = part
            getattr(layer, f"is_{kind}_states_initialized")[index] = True
            layer.has_previous_state[index] = True
            layer.device, layer.dtype = part.device, part.dtype
            if kind == "conv":
                layer.conv_kernel_size[index] = part.shape[-1]
        cache = Cache(layers=[layer] * (self.layer_idx + 1))
        out = super().forward(hidden, **{self.cache_parameter: cache})
        kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
        if parts is None:
            self.layout = [
                (kind, index)
                for kind, states in kinds.items()
                for index, state in states.items()
                if state is not None
            ]
        if not isinstance(out, Tensor):
            raise UnsupportedModelError(
                f"{type(self).__name__} is a recurrence that returns more than hidden states, "
                "which is not supported; use another architecture"
            )
        return out, [kinds[kind][index] for kind, index in self.layout]

    def _scaled(self, hidden: Tensor) -> Tensor:
        """The input of the input projections: Falcon-H1 scales ``hidden``."""
        return hidden * getattr(self, "ssm_in_multiplier", 1)

    def runs_once(self, name: str) -> bool:
        """Whether the child layer ``name`` runs once for all rows of a batch."""
        return name in (*self.input_projections, self.output_projection)

    def probe(self, hidden: Tensor) -> list[StatePart]:
        """Find out how the mixer works by running it on ``hidden [1, 3, H]``; returns the shapes
        and dtypes of its state. On the meta device only these are found."""
        self.layout = []
        calls: list[tuple[str, Tensor, Tensor]] = []  # of child layers: name, input, output
        begin = hidden[:, :1]
        with ExitStack() as hooks:
            for name, child in self.named_children():
                hook = child.register_forward_hook(
                    lambda _, given, out, name=name: calls.append((name, given[0], out))
                )
                hooks.enter_context(hook)
            out, parts = self.advance(begin, None)
        kinds = [(tuple(part.shape[1:]), part.dtype) for part in parts]
        if hidden.is_meta:
            return kinds
        scaled = self._scaled(begin)
        inputs = (name for name, given, _ in calls if torch.equal(given, scaled))
        self.input_projections = list(inputs)
        self.output_projection = next((name for name, _, output in calls if output is out), "")

        def outputs_after(factor: int) -> Tensor:
            """A chunk's outputs after the recurrent states times ``factor``."""
            pairs = zip(self.layout, parts, strict=True)
            before = [part * (factor if kind == "recurrent" else 1) for (kind, _), part in pairs]
            return self.advance(hidden[:, 1:], before)[0]

        self.steps_batched = self._can_batch_steps(begin, parts)
        recurs = any(kind == "recurrent" for kind, _ in self.layout)
        self.steps_only = recurs and torch.equal(outputs_after(0), outputs_after(1))
        return [(tuple(part.shape[1:]), part.dtype) for part in parts]

    def _can_batch_steps(self, hidden: Tensor, parts: list[Tensor]) -> bool:
        """Whether a step by our functions gives what transformers' own step gives."""
        slots = [torch.cat((part, torch.zeros_like(part))) for part in parts]
        level = StateLevel(torch.arange(1), slice(0, 1), slice(0, 1), slice(1, 2))
        expected, after = self.advance(hidden, [part.clone() for part in parts])
        try:
            with batched_steps(StateStep((), (level,))):
                output, slots = self.advance(hidden, slots)
        except Exception:  # transformers' own functions may raise anything: there are two states
            return False
        expected_slots = [torch.cat(pair) for pair in zip(parts, after, strict=True)]
        # Compare norms: in bf16 theirs rounds more often, and small numbers differ by much.
        pairs = zip([output, *slots], [expected, *expected_slots], strict=True)
        return all(torch.dist(a.float(), b.float()) <= 0.03 * b.float().norm() for a, b in pairs)


def _layer(name: str) -> property:
    """A mixer's attribute: its child layer, or in a step a function with precomputed outputs."""

    def layer(self: Mixer) -> Any:
        precomputed = _PRECOMPUTED.get()
        if precomputed is None or name not in precomputed:
            return self._modules[name]
        output = precomputed[name]
        return lambda given: given if output is None else output

    return property(layer)


def adapt_mixers(hf: Any, layers: int) -> list[list[StatePart]]:
    """Make the recurrent layers of a model run each row of a batch from its own state; returns the
    shapes and dtypes of a state by layer, empty for other layers."""
    parts: list[list[StatePart]] = [[] for _ in range(layers)]
    size, device = hf.config.get_text_config(decoder=True).hidden_size, hf.device
    hidden = torch.arange(3 * size, device=device).view(1, 3, size).sin().to(hf.dtype)
    for module in list(hf.modules()):
        if isinstance(module, Mixer) or _is_mixer(module):
            if not isinstance(module, Mixer):
                kind = type(module)
                module.cache_parameter = cache_name(module.forward)
                properties = {name: _layer(name) for name, _ in module.named_children()}
                patch_step_functions(kind.__module__)
                module.__class__ = type(kind.__name__, (Mixer, kind), properties)
            parts[module.layer_idx] = module.probe(hidden)
    return parts


def _is_mixer(module: Any) -> bool:
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and cache_name(module.forward) is not None
    )


def cache_name(forward: Callable[..., Any]) -> str | None:
    """The parameter of a forward that takes the cache: ``cache`` from transformers 5.24 on."""
    names = inspect.signature(forward).parameters
    return next(
        (name for name in ("cache", "cache_params", "past_key_values") if name in names), None
    )
