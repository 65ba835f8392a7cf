"""Quantise the linear layers of a loaded model, in place or in a copy that shares the rest.

transformers holds a layer's experts in two tensors; checkpoints name every matrix by itself, so
they are made linear modules first, one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.quantised.rounding import Zero, gptq, round_to_nearest
from paceline.model.quantised.weights import (
    BITS,
    ROW_GROUP,
    LinearBase,
    QuantisedLinear,
    plain_linear,
)

# Modules of transformers that compute what Experts does, and whose checkpoints have its names.
_NAMED = {"Qwen3MoeExperts"}


class Expert(nn.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act_fn: Any) -> None:
        """``gate_up [2 width, hidden]`` and ``down [hidden, width]`` are shared, not copied."""
        super().__init__()
        self.gate_proj, self.up_proj = map(plain_linear, gate_up.chunk(2))
        self.down_proj, self.act_fn = plain_linear(down), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


class Experts(nn.ModuleList):
    """The experts of a layer, from a module with ``gate_up_proj [experts, 2 width, hidden]`` and
    ``down_proj [experts, hidden, width]``, which is emptied."""

    _emptied: Any

    def __init__(self, whole: Any) -> None:
        pairs = zip(whole.gate_up_proj.detach(), whole.down_proj.detach(), strict=True)
        super().__init__(Expert(*pair, whole.act_fn) for pair in pairs)
        self.__dict__["_emptied"] = whole  # not a submodule: it has no weights
        whole.gate_up_proj = whole.down_proj = None

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Of ``hidden [T, hidden]``; ``chosen [T, n]`` are indexes of experts."""
        total = torch.zeros_like(hidden)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == index)
            part = self[index](hidden[rows]) * weights[rows, places, None]
            total.index_add_(0, rows, part.to(total.dtype))
        return total

    def whole(self) -> Any:
        """The module it was made from, with its weights; itself if they are quantised."""
        matrices: list[list[Any]] = [[e.gate_proj, e.up_proj, e.down_proj] for e in self]
        if any(type(linear) is not nn.Linear for expert in matrices for linear in expert):
            return self
        weights = [[linear.weight for linear in expert] for expert in matrices]
        module = copy.copy(self._emptied)
        tensors = {
            "gate_up_proj": torch.stack([torch.cat((gate, up)) for gate, up, _ in weights]),
            "down_proj": torch.stack([down for _, _, down in weights]),
        }
        module._parameters = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
        }
        return module


def split_experts(hf: Any) -> Any:
    """``hf`` itself, with the experts that are known by name as linear modules."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _NAMED:
                setattr(parent, name, Experts(child))
    return hf


_HESSIAN_BYTES = 2 << 30  # in memory at once; each such part takes a pass over the calibration text
GROUP = 32  # inputs of a four-bit weight that share a scale
EIGHT_BIT_GROUP = 64  # inputs of an eight-bit weight that share one, if only the kernels read it


class Code(NamedTuple):
    """What a matrix is rounded to: ``group`` inputs share a scale, ``zero`` as in rounding.py."""

    bits: int
    group: int
    zero: Zero


@dataclass(frozen=True)
class Scheme:
    """``precision`` "int8" has a scale per output channel, "int4" one per ``group`` inputs.

    ``finer``: in eight bits a scale per 64 inputs where these divide a layer's inputs, which halves
    the error for 3 % more bytes; no other engine reads it. ``zero``: the zero points of four bits
    (see rounding.py). ``head``: the precision of the language-model head; None leaves it as it is.
    Its errors move every logit, and every step reads it whole; docs/guides/quantise.md has
    figures."""

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
        """For a matrix of so many inputs; None if it is not quantised."""
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
    """For "int8", "int4" or vLLM's "w4a16", with whole zero points. Raises ConfigError."""
    if name == "w4a16":
        return Scheme("int4", group, head, "whole")
    if name not in BITS:
        raise ConfigError(f"precision {name!r} is not known; use int8, int4 or w4a16")
    return Scheme(name, group, head)


@dataclass
class Quantised:
    """What became of the linear layers: bytes before and after, and the names of those ``left``."""

    before: int = 0
    after: int = 0
    layers: int = 0
    left: list[str] = field(default_factory=list)


def quantise_module(
    hf: Any, scheme: Scheme, calibration: Sequence[Sequence[int]] | None = None
) -> Quantised:
    """Replace the linear modules of ``hf`` by ``QuantisedLinear``. ``calibration``: token ids of
    texts, which GPTQ needs; without them rounding is to the nearest code. Layers that do not divide
    into groups stay and are named in ``left``."""
    result = Quantised()
    split_experts(hf)
    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    codes: dict[str, Code] = {}
    for name, module in hf.named_modules():
        # A linear layer with a forward of its own is none: routers of Llama 4 and PhiMoE.
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not plain and not isinstance(module, LinearBase):
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
                dense = resident_parameter(module, "weight").detach()
                bias = resident_parameter(module, "bias")
                if name in hessians:  # else no calibration text reached it: an expert
                    weight = gptq(dense, hessians[name], *code)
                else:
                    weight = round_to_nearest(dense, *code)
                result.before += dense.nbytes
                result.after += weight.nbytes
                result.layers += 1
                hf.set_submodule(name, QuantisedLinear(weight.of_layer(name), bias))
                progress.advance()
    return result


def _parts(hf: Any, names: Sequence[str], calibrated: bool) -> Iterator[list[str]]:
    """The names in order, in parts whose Hessians fit into memory together."""
    part: list[str] = []
    total = 0
    for name in names:
        size = 4 * hf.get_submodule(name).in_features ** 2 if calibrated else 0
        if part and total + size > _HESSIAN_BYTES:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


@torch.inference_mode()
def observe(
    hf: Any, names: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """``X^T X`` of the inputs of the named linear modules over the texts, ``[in, in]`` float32.
    Modules with the same input tensor share one matrix; those that no text reaches have none."""
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

    with ExitStack() as hooks:
        for name in names:
            hook = hf.get_submodule(name).register_forward_pre_hook(watch(name))
            hooks.enter_context(hook)
        with stage("reading calibration text", total=len(texts), unit="texts") as progress:
            for ids in texts:
                hf(input_ids=torch.tensor([list(ids)], device=hf.device), use_cache=False)
                progress.advance()
    owners = {name: shared.get(name, name) for name in names}
    return {name: sums[owner] for name, owner in owners.items() if owner in sums}


def copy_beside(
    module: Any,
    stand_in: Callable[[Any], nn.Module | None],
    finish: Callable[[nn.Module], None] = lambda _: None,
) -> Any:
    """A copy that shares all parameters. A module with a ``stand_in`` is replaced by that;
    ``finish`` is called with each module that was copied."""
    other = stand_in(module)
    if other is not None:
        return other
    copied = copy.copy(module)
    # Parameters, hooks and children are entries of these tables.
    vars(copied).update(
        {key: copy.copy(v) for key, v in vars(module).items() if isinstance(v, dict)}
    )
    copied._modules = {
        name: None if child is None else copy_beside(child, stand_in, finish)
        for name, child in module._modules.items()
    }
    finish(copied)
    return copied


def children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """All descendants with their parents and names; they may be replaced during the iteration."""
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            yield parent, key, child


def resident_parameter(module: Any, name: str) -> Any:
    """A parameter of a module; one that is offloaded is read from its hook of accelerate's."""
    parameter = getattr(module, name)
    if parameter is None or parameter.device.type != "meta":
        return parameter
    weight = module._hf_hook.weights_map[name].to(parameter.dtype)
    return nn.Parameter(weight, requires_grad=False)
