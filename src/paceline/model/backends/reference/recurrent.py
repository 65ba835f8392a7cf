"""Recurrent layers of transformers on ragged batches: short convolutions, Mamba, delta rules.

A mixer is transformers' own module, known by its depthwise convolution, over transformers' own
cache layer. All sequences and nodes of a batch lie in one row, so its forward is called once for
each chunk of a prompt, and once for all rows of drafts (recurrences.py), or once for each of their
levels where ours cannot stand in for transformers' steps. The products with its input and for its
output do not depend on states: they are taken out of that forward and made once for all rows, so
that their weights are read once. Outside ``over_states`` it does what it did.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.batch import Batch
from paceline.core.bound import bound
from paceline.errors import UnsupportedModelError
from paceline.model.backends.reference.adapters import ROWS, with_adapters
from paceline.model.backends.reference.recurrences import at_once, stand_in
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.states import StateLevel, StatePart, StateStep, StateStore

_RUNNING: ContextVar[tuple[StateStore, StateStep] | None] = ContextVar("states", default=None)
# By name, the layers of a mixer that its forward shall not run: what they made already, or None for
# the last one, which runs later.
_READY: ContextVar[Mapping[str, Tensor | None] | None] = ContextVar("ready", default=None)


class _Mixer(nn.Module):
    """Stands before the class of a module; an instance's own forward would not survive copying.
    ``takes_cache``: the parameter of its forward that takes a cache. ``layout``: which of a cache
    layer's tensors make its state. ``first``: names of the layers that read its input, ``last``: of
    the one that gives its output, or empty; they multiply all rows of a step at once.
    ``steps_only``: its chunks forget the state before them (Jamba in transformers 5.23).
    ``at_once``: whether the rows of all levels go through one forward."""

    layer_idx: int
    takes_cache: str
    layout: list[tuple[str, int]]
    first: list[str]
    last: str
    steps_only: bool
    at_once: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        running = _RUNNING.get()
        if running is None:
            whole: Tensor = super().forward(hidden_states, *args, **kwargs)
            return whole
        store, step = running
        states, device = store.layer(self.layer_idx), hidden_states.device
        scaled = self._scaled(hidden_states)
        projected = {name: getattr(self, name)(scaled)[0] for name in self.first}
        order: list[Tensor] = []
        made: list[Tensor] = []

        def advance(rows: Tensor, parts: list[Tensor]) -> list[Tensor]:
            """The states behind ``rows [B, n]``."""
            ready = {name: values[rows] for name, values in projected.items()}
            with bound(_READY, ready | {self.last: None}), bound(ROWS, rows.flatten()):
                some, parts = self.advance(hidden_states[0, rows], parts)
            order.append(rows.flatten())
            made.append(some.flatten(0, 1))
            return parts

        for first, end, before, behind in step.chunks:
            parts = [state[before : before + 1].clone() for state in states]
            size = 1 if before != store.zero and self.steps_only else end - first
            for rows in torch.split(torch.arange(first, end, device=device)[None], size, 1):
                parts = advance(rows, parts)
            for state, part in zip(states, parts, strict=True):
                state[behind] = part[0]
        if self.at_once and step.levels:
            with at_once(step):
                advance(step.stepped[:, None], states)
        for level in () if self.at_once else step.levels:
            parts = advance(level.rows[:, None], [state[level.before].clone() for state in states])
            for state, part in zip(states, parts, strict=True):
                state[level.behind] = part
        mixed = torch.cat(made)
        mixed = torch.empty_like(mixed).index_copy_(0, torch.cat(order), mixed)[None]
        out: Tensor = getattr(self, self.last)(mixed) if self.last else mixed
        return out

    def advance(
        self, hidden: Tensor, parts: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs ``[B, n, H]`` of ``hidden`` and the states behind it; ``parts`` are those before
        it, which may be overwritten. None: a text begins, and ``layout`` is found."""
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
        out = super().forward(hidden, **{self.takes_cache: cache})
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
        """What the layers multiply that read ``hidden`` (Falcon-H1 scales it)."""
        return hidden * getattr(self, "ssm_in_multiplier", 1)

    def probe(self, hidden: Tensor) -> list[StatePart]:
        """Its parts, found with ``hidden [1, 3, H]``; on the meta device nothing else is found."""
        self.layout = []
        calls: list[tuple[str, Tensor, Tensor]] = []
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
        self.first = [name for name, given, _ in calls if torch.equal(given, scaled)]
        self.last = next((name for name, _, made in calls if made is out), "")

        def behind(factor: int) -> Tensor:
            pairs = zip(self.layout, parts, strict=True)
            before = [part * (factor if kind == "recurrent" else 1) for (kind, _), part in pairs]
            return self.advance(hidden[:, 1:], before)[0]

        self.at_once = self._steps_at_once(begin, parts)
        recurs = any(kind == "recurrent" for kind, _ in self.layout)
        self.steps_only = recurs and torch.equal(behind(0), behind(1))
        return [(tuple(part.shape[1:]), part.dtype) for part in parts]

    def _steps_at_once(self, hidden: Tensor, parts: list[Tensor]) -> bool:
        """Whether a step from one slot to another does what transformers' step does."""
        slots = [torch.cat((part, torch.zeros_like(part))) for part in parts]
        level = StateLevel(torch.arange(1), slice(0, 1), slice(0, 1), slice(1, 2))
        due, behind = self.advance(hidden, [part.clone() for part in parts])
        try:
            with at_once(StateStep((), (level,))):
                made, slots = self.advance(hidden, slots)
        except Exception:  # whatever transformers' step says to a state too many
            return False
        expected = [torch.cat(pair) for pair in zip(parts, behind, strict=True)]
        # By their norms: in bf16 theirs rounds more often, and small numbers are off by much.
        pairs = zip([made, *slots], [due, *expected], strict=True)
        return all(torch.dist(a.float(), b.float()) <= 0.03 * b.float().norm() for a, b in pairs)


def _layer(name: str) -> property:
    """An attribute of a mixer: its layer, or what stands for it while a step runs."""

    def layer(self: _Mixer) -> Any:
        ready = _READY.get()
        if ready is None or name not in ready:
            return with_adapters(self._modules[name])
        made = ready[name]
        return lambda given: given if made is None else made

    return property(layer)


def adapt_mixers(hf: Any, layers: int) -> list[list[StatePart]]:
    """Let the recurrent layers of a model go row by row through their states; returns these states'
    parts by layer, none for other layers."""
    parts: list[list[StatePart]] = [[] for _ in range(layers)]
    size, device = hf.config.get_text_config(decoder=True).hidden_size, hf.device
    hidden = torch.arange(3 * size, device=device).view(1, 3, size).sin().to(hf.dtype)
    for module in list(hf.modules()):
        if isinstance(module, _Mixer) or _is_mixer(module):
            if not isinstance(module, _Mixer):
                kind = type(module)
                module.takes_cache = cache_name(module.forward)
                layers_of = {name: _layer(name) for name, _ in module.named_children()}
                stand_in(kind.__module__)
                module.__class__ = type(kind.__name__, (_Mixer, kind), layers_of)
            parts[module.layer_idx] = module.probe(hidden)
    return parts


def over_states(batch: Batch, cache: PagedCache) -> AbstractContextManager[None]:
    """A context in which the mixers run this batch."""
    if cache.states is None:
        return nullcontext()
    return bound(_RUNNING, (cache.states, cache.states.route(batch, cache.block_size)))


def _is_mixer(module: Any) -> bool:
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and cache_name(module.forward) is not None
    )


def cache_name(forward: Callable[..., Any]) -> str | None:
    """The parameter that takes the cache: ``cache`` from transformers 5.24 on."""
    names = inspect.signature(forward).parameters
    return next(
        (name for name in ("cache", "cache_params", "past_key_values") if name in names), None
    )
