"""Quantise the linear layers of a loaded model, in place or in a copy that shares the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.quantised.rounding import Zero, gptq, round_to_nearest
from paceline.model.quantised.weights import BITS, ROW_GROUP, HeldLinear, QuantisedLinear

_HESSIAN_BYTES = 2 << 30  # held at once; a pass over the calibration text for each such part
GROUP = 32  # inputs of a four-bit weight that share a scale
EIGHT_BIT_GROUP = 64  # of eight bits, where the kernels alone read it: a span of their sums


@dataclass(frozen=True)
class Code:
    """What a matrix is rounded to: ``group`` inputs share a scale, ``zero`` as in rounding.py."""

    bits: int
    group: int
    zero: Zero


@dataclass(frozen=True)
class Scheme:
    """``precision`` "int8" has a scale per output channel, "int4" one per ``group`` inputs.

    ``finer``: eight bits have a scale for each 64 inputs where these divide a layer's, which no
    engine but ours reads; half of the error is gone for 3 % more bytes.
    ``zero`` (of four bits) says where the codes of four bits may stand (see rounding.py).
    ``head``: the precision of the language-model head; None leaves it as it is. (A head is
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

    def code_of(self, inputs: int, is_head: bool) -> Code | None:
        """Of a matrix of so many inputs; None if it stays as it is."""
        precision = self.head if is_head else self.precision
        if precision is None:
            return None
        bits = BITS[precision]
        finer = self.finer and inputs % EIGHT_BIT_GROUP == 0
        group = self.group if bits == 4 else EIGHT_BIT_GROUP if finer else inputs
        if inputs % ROW_GROUP or inputs % group:
            return None
        return Code(bits, group, self.zero if bits == 4 else "none")


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
    """Replace linear modules, in whatever form they are held, by ``QuantisedLinear``.

    ``calibration``: token ids of texts; with them rounding is GPTQ's, else to the nearest code.
    Layers that do not divide into groups stay as they are and are named in ``left``.
    """
    result = Quantised()
    head = hf.get_output_embeddings()
    codes: dict[str, Code] = {}
    for name, module in hf.named_modules():
        if not isinstance(module, nn.Linear | HeldLinear):
            continue
        code = scheme.code_of(module.in_features, module is head)
        if code is not None:
            codes[name] = code
        elif module is not head or scheme.head is not None:
            result.left.append(name)
    with stage("quantising", total=len(codes), unit="layers") as progress:
        for part in _parts(hf, list(codes), calibration is not None):
            hessians = {} if calibration is None else observe(hf, part, calibration)
            for name in part:
                module, code = hf.get_submodule(name), codes[name]
                dense, bias = (
                    resident_parameter(module, "weight").detach(),
                    resident_parameter(module, "bias"),
                )
                how = code.bits, code.group, code.zero
                if hessians:
                    weight = gptq(dense, hessians[name], *how)
                else:
                    weight = round_to_nearest(dense, *how)
                result.before += dense.nbytes
                result.after += weight.nbytes
                result.layers += 1
                hf.set_submodule(name, QuantisedLinear(weight.of_layer(name), bias))
                progress.advance()
    return result


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


def copy_beside(
    module: Any,
    stand_in: Callable[[Any], nn.Module | None],
    finish: Callable[[nn.Module], None] = lambda _: None,
) -> Any:
    """A copy with the very same parameters, in which each module that has a ``stand_in`` gives way
    to it. ``finish`` is called with every module that was copied."""
    other = stand_in(module)
    if other is not None:
        return other
    copied = copy.copy(module)
    # Tables of its own: parameters, hooks and children are looked up in them.
    vars(copied).update(
        {key: copy.copy(v) for key, v in vars(module).items() if isinstance(v, dict)}
    )
    copied._modules = {
        name: copy_beside(child, stand_in, finish) for name, child in module._modules.items()
    }
    finish(copied)
    return copied


def children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """All descendants with their parents and names; they may be replaced meanwhile."""
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            yield parent, key, child


def resident_parameter(module: Any, name: str) -> Any:
    """A parameter of a module, read from where it stays if that is not the device: offloaded
    modules have a hook of accelerate's that knows."""
    parameter = getattr(module, name)
    if parameter is None or parameter.device.type != "meta":
        return parameter
    weight = module._hf_hook.weights_map[name].to(parameter.dtype)
    return nn.Parameter(weight, requires_grad=False)
