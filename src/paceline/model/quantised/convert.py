"""Quantise the linear layers of a loaded model, in place, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.model.quantised.rounding import Zero, gptq, nearest
from paceline.model.quantised.weights import BITS, ROW_GROUP, QuantisedLinear, QuantisedWeight
from paceline.stages import stage

_HESSIAN_BYTES = 2 << 30  # held at once; a pass over the calibration text for each such part
GROUP = 32  # inputs of a four-bit weight that share a scale
EIGHT_BIT_GROUP = (
    64  # the same of eight bits, where the kernels alone read it: a span of their sums
)


@dataclass(frozen=True)
class Scheme:
    """``precision`` "int8" has a scale per output channel, "int4" one per ``group`` inputs.

    ``finer``: eight bits have a scale for each 64 inputs where these divide a layer's, which no
    engine but ours reads; half of the error is gone for 3 % more bytes.
    ``zero`` (of four bits) says where the codes of four bits may stand (see rounding.py).
    ``head``: the precision of the language-model head, or None for that of the file. (A head is
    read whole in every step, and errors in it move every logit; docs/quantise.md has the figures.)
    """

    precision: str
    group: int = GROUP
    head: str | None = None
    zero: Zero = "free"
    finer: bool = False

    def __post_init__(self) -> None:
        for name in (self.precision, self.head):
            if name is not None and name not in BITS:
                raise ConfigError(f"precision {name!r} is not known; use {' or '.join(BITS)}")
        if self.group < ROW_GROUP or self.group % ROW_GROUP:
            raise ConfigError(
                f"group {self.group} is not a multiple of {ROW_GROUP}, in which activations are "
                f"rounded; use {ROW_GROUP}, 64 or 128"
            )


def scheme_named(name: str, group: int = GROUP, head: str | None = None) -> Scheme:
    """Of a checkpoint to be written. "w4a16", as vLLM calls it, has whole zero points, which int4
    has not: a model of its own. Raises ConfigError."""
    if name == "w4a16":
        return Scheme("int4", group, head, "whole")
    if name not in BITS:
        raise ConfigError(f"precision {name!r} is not known; use int8, int4 or w4a16")
    return Scheme(name, group, head)


@dataclass
class Quantised:
    """What became of a model's linear layers: bytes before and after, and what was left."""

    before: int = 0
    after: int = 0
    layers: int = 0
    left: list[str] = field(default_factory=list)


def quantise_module(
    hf: Any, scheme: Scheme, calibration: Sequence[Sequence[int]] | None = None
) -> Quantised:
    """Replace linear modules by ``QuantisedLinear``.

    ``calibration``: token ids of texts; with them rounding is GPTQ's, else to the nearest code.
    Layers that do not divide into groups stay as they are and are named in ``left``.
    """
    found = Quantised()
    head = hf.get_output_embeddings()
    names = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear)]
    usable = []
    for name in names:
        module = hf.get_submodule(name)
        if module is head and scheme.head is None:
            continue
        group = _group_of(module, head, scheme)
        if module.in_features % ROW_GROUP or module.in_features % group:
            found.left.append(name)
        else:
            usable.append(name)
    with stage("quantising", total=len(usable), unit="layers") as progress:
        for part in _parts(hf, usable, calibration is not None):
            hessians = {} if calibration is None else observe(hf, part, calibration)
            for name in part:
                module = hf.get_submodule(name)
                weight = _round(module, head, scheme, hessians.get(name))
                found.before += module.weight.nbytes
                found.after += weight.nbytes
                found.layers += 1
                parent, _, last = name.rpartition(".")
                setattr(hf.get_submodule(parent), last, QuantisedLinear(weight, module.bias))
                progress.advance()
    return found


def _precision_of(module: nn.Module, head: nn.Module | None, scheme: Scheme) -> str:
    return scheme.head if module is head and scheme.head is not None else scheme.precision


def _group_of(module: nn.Linear, head: nn.Module | None, scheme: Scheme) -> int:
    if _precision_of(module, head, scheme) == "int4":
        return scheme.group
    finer = scheme.finer and module.in_features % EIGHT_BIT_GROUP == 0
    return EIGHT_BIT_GROUP if finer else module.in_features


def _round(
    module: nn.Linear, head: nn.Module | None, scheme: Scheme, hessian: torch.Tensor | None
) -> QuantisedWeight:
    bits = BITS[_precision_of(module, head, scheme)]
    zero: Zero = scheme.zero if bits == 4 else "none"
    group = _group_of(module, head, scheme)
    weight = module.weight.detach()
    if hessian is None:
        return nearest(weight, bits, group, zero)
    return gptq(weight, hessian, bits, group, zero)


def _parts(hf: Any, names: Sequence[str], hold: bool) -> Iterator[list[str]]:
    """Names in order, in parts whose matrices of inputs fit into memory together."""
    part: list[str] = []
    held = 0
    for name in names:
        size = 4 * hf.get_submodule(name).in_features ** 2 if hold else 0
        if part and held + size > _HESSIAN_BYTES:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    if part:
        yield part


@torch.inference_mode()
def observe(
    hf: Any, names: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """``X^T X`` of the inputs of each named linear module over the texts, ``[in, in]`` float32.

    Modules that are given the very same tensor share one matrix.
    """
    sums: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    last: list[Any] = [None, ""]

    def watch(name: str) -> Callable[[Any, Any], None]:
        def seen(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            if args[0] is last[0]:
                shared[name] = last[1]
                return
            rows = args[0].reshape(-1, args[0].shape[-1]).float()
            product = rows.t() @ rows
            sums[name] = sums[name].add_(product) if name in sums else product
            last[:] = args[0], name

        return seen

    hooks = [hf.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with stage("reading calibration text", total=len(texts), unit="texts") as progress:
            for ids in texts:
                hf(input_ids=torch.tensor([list(ids)], device=hf.device), use_cache=False)
                progress.advance()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: sums[shared.get(name, name)] for name in names}
