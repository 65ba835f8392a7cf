"""Quantise the linear layers of a loaded model, in place or in a copy that shares the rest.

transformers keeps a layer's experts in two stacked tensors, but checkpoints name each expert's
matrices. So experts become separate linear modules before they are quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.quantised.rounding import ZeroPoint, gptq, round_to_nearest
from paceline.model.quantised.weights import BITS, ROW_GROUP, LinearBase, plain_linear

# Classes of transformers that compute what Experts does. Checkpoints of the first use its names.
_WRITABLE = {"Qwen3MoeExperts"}
_EXPERT_CLASSES = _WRITABLE | {"MixtralExperts", "GptOssExperts"}


class Expert(nn.Module):
    """One expert's MLP: ``down(gated(gate(x), up(x)))``, with ``gated(gate, up)``."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, gated: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.gated = gate, up, down, gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        return down


class Experts(nn.ModuleList):
    """The experts of a layer as separate modules, with views of the weights of ``fused``, a module
    with ``gate_up_proj [experts, 2 width, hidden]`` and ``down_proj [experts, hidden, width]``. In
    GPT-OSS both are transposed, gates and ups alternate, and there are biases."""

    def __init__(self, fused: Any) -> None:
        gate_up, down = fused.gate_up_proj.detach(), fused.down_proj.detach()
        biases: Any = [(None, None, None)] * len(down)
        if type(fused).__name__ == "GptOssExperts":
            pairs = [(t[:, ::2].t(), t[:, 1::2].t()) for t in gate_up]
            down, both = down.transpose(1, 2), fused.gate_up_proj_bias.detach()
            biases = zip(both[:, ::2], both[:, 1::2], fused.down_proj_bias.detach(), strict=True)
            gated: Any = partial(_clamped_silu, fused.alpha, fused.limit)
        else:
            pairs = [t.chunk(2) for t in gate_up]
            gated = partial(_activated, fused.act_fn)
        matrices = (
            map(plain_linear, (*pair, out), bias)
            for pair, out, bias in zip(pairs, down, biases, strict=True)
        )
        super().__init__(Expert(gate, up, out, gated) for gate, up, out in matrices)

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the experts' outputs ``[T, hidden]``. ``chosen [T, n]``: each row's
        experts, by index; ``weights [T, n]``: their weights."""
        total = torch.zeros_like(hidden)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, ranks = torch.where(chosen == index)
            part = self[index](hidden[rows]) * weights[rows, ranks, None]
            total.index_add_(0, rows, part.to(total.dtype))
        return total


def _activated(act_fn: Any, gate: torch.Tensor, up: torch.Tensor) -> Any:
    return act_fn(gate) * up


def _clamped_silu(alpha: float, limit: float, gate: torch.Tensor, up: torch.Tensor) -> Any:
    """What GPT-OSS's experts compute between their matrices."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def split_experts(hf: Any, writable: bool = False) -> Any:
    """Make experts of known classes separate linear modules, in place; returns ``hf``.
    ``writable``: only where transformers reads a checkpoint with the modules' names."""
    classes = _WRITABLE if writable else _EXPERT_CLASSES
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in classes:
                setattr(parent, name, Experts(child))
    return hf


_HESSIAN_BYTES = 2 << 30  # Hessians in memory at once; more take further passes over the texts
GROUP = 32  # inputs of a 4-bit weight that share a scale
EIGHT_BIT_GROUP = 64  # inputs of an 8-bit weight that share a scale, in the ``finer`` form


class Rounding(NamedTuple):
    """How a matrix is rounded: bits of a code, inputs that share a scale, and the zero points."""

    bits: int
    group: int
    zero: ZeroPoint


@dataclass(frozen=True)
class Scheme:
    """How a model is quantised. ``precision`` "int8": one scale per output channel; "int4": one
    scale per ``group`` inputs.

    ``finer``: 8-bit weights get a scale per 64 inputs where 64 divides a layer's inputs. That
    halves the error for 3 % more bytes; no other engine reads it. ``zero``: the zero points of
    4-bit weights (see rounding.py). ``head``: the precision of the language-model head; None leaves
    it unquantised. Errors of the head move every logit, but every step reads all of it;
    docs/guides/quantise.md has figures."""

    precision: str
    group: int = GROUP
    head: str | None = None
    zero: ZeroPoint = "free"
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

    def rounding_of(self, inputs: int, is_head: bool) -> Rounding | None:
        """The rounding of a matrix with ``inputs`` inputs; None if it stays unquantised."""
        precision = self.head if is_head else self.precision
        if precision is None:
            return None
        bits = BITS[precision]
        finer = self.finer and inputs % EIGHT_BIT_GROUP == 0
        group = self.group if bits == 4 else EIGHT_BIT_GROUP if finer else inputs
        if inputs % ROW_GROUP or inputs % group:
            return None
        return Rounding(bits, group, self.zero if bits == 4 else "none")


def scheme_named(name: str, group: int = GROUP, head: str | None = None) -> Scheme:
    """The scheme "int8", "int4" or "w4a16"; the last has integer zero points, which vLLM reads.
    Raises ConfigError for another name."""
    if name == "w4a16":
        return Scheme("int4", group, head, "whole")
    if name not in BITS:
        raise ConfigError(f"precision {name!r} is not known; use int8, int4 or w4a16")
    return Scheme(name, group, head)


@dataclass
class Quantised:
    """What ``quantise_module`` did: ``layers`` quantised, their bytes ``before`` and ``after``, and
    the names of the linear layers ``left`` as they were."""

    before: int = 0
    after: int = 0
    layers: int = 0
    left: list[str] = field(default_factory=list)


def quantise_module(
    hf: Any, scheme: Scheme, calibration: Sequence[Sequence[int]] | None = None
) -> Quantised:
    """Replace the linear modules of ``hf`` by ``QuantisedLinear``. ``calibration``: token ids of
    texts, for rounding by GPTQ; None: round to the nearest code. Layers that do not divide into
    groups stay as they are, and are named in the result's ``left``."""
    result = Quantised()
    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    roundings: dict[str, Rounding] = {}
    for name, module in hf.named_modules():
        # A subclass with its own forward is no linear layer: the routers of Llama 4 and PhiMoE.
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not plain and not isinstance(module, LinearBase):
            continue
        rounding = scheme.rounding_of(module.in_features, module is head)
        if rounding is not None:
            roundings[name] = rounding
        elif module is not head or scheme.head is not None:
            result.left.append(name)
    with stage("quantising", total=len(roundings), unit="layers") as progress:
        for part in _parts(hf, list(roundings), calibration is not None):
            hessians = {} if calibration is None else collect_hessians(hf, part, calibration)
            for name in part:
                module, rounding = hf.get_submodule(name), roundings[name]
                dense = resident_parameter(module, "weight").detach()
                bias = resident_parameter(module, "bias")
                if name in hessians:
                    weight = gptq(dense, hessians[name], *rounding)
                else:  # without calibration, or an expert that no calibration text was routed to
                    weight = round_to_nearest(dense, *rounding)
                result.before += dense.nbytes
                result.after += weight.nbytes
                result.layers += 1
                hf.set_submodule(name, weight.linear(name, bias))
                progress.advance()
    return result


def _parts(hf: Any, names: Sequence[str], calibrated: bool) -> Iterator[list[str]]:
    """Split ``names``, in order, into parts whose Hessians fit into memory together."""
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
def collect_hessians(
    hf: Any, names: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """``X^T X`` of each named linear module's inputs over the texts, float32 ``[in, in]``. Modules
    that read the same tensor share one matrix; modules that no text reaches are left out."""
    sums: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}  # module: the module before it that read the same tensor
    last: list[Any] = [None, ""]  # the last input, and the module that read it first

    def accumulate(name: str) -> Callable[[Any, Any], None]:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            if args[0] is last[0]:
                shared[name] = last[1]
                return
            rows = args[0].reshape(-1, args[0].shape[-1]).float()
            product = rows.t() @ rows
            sums[name] = sums[name].add_(product) if name in sums else product
            last[:] = args[0], name

        return hook

    with ExitStack() as hooks:
        for name in names:
            hook = hf.get_submodule(name).register_forward_pre_hook(accumulate(name))
            hooks.enter_context(hook)
        with stage("reading calibration text", total=len(texts), unit="texts") as progress:
            for ids in texts:
                hf(input_ids=torch.tensor([list(ids)], device=hf.device), use_cache=False)
                progress.advance()
    owners = {name: shared.get(name, name) for name in names}
    return {name: sums[owner] for name, owner in owners.items() if owner in sums}


def copy_sharing_parameters(
    module: Any,
    replacement_of: Callable[[Any], nn.Module | None],
    finish: Callable[[nn.Module], None] = lambda _: None,
) -> Any:
    """A copy of a module tree that shares all parameters. ``replacement_of(module)`` is used in
    place of a copy where it is not None; ``finish`` is called with each copied module."""
    replacement = replacement_of(module)
    if replacement is not None:
        return replacement
    copied = copy.copy(module)
    # Parameters, hooks and children are in dictionaries, which a shallow copy would share.
    vars(copied).update(
        {key: copy.copy(v) for key, v in vars(module).items() if isinstance(v, dict)}
    )
    copied._modules = {
        name: None if child is None else copy_sharing_parameters(child, replacement_of, finish)
        for name, child in module._modules.items()
    }
    finish(copied)
    return copied


def walk_children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """All descendants with their parents and names; they may be replaced during the iteration."""
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            yield parent, key, child


def resident_parameter(module: Any, name: str) -> Any:
    """A parameter of a module; an offloaded one is loaded from accelerate's hook."""
    parameter = getattr(module, name)
    if parameter is None or parameter.device.type != "meta":
        return parameter
    weight = module._hf_hook.weights_map[name].to(parameter.dtype)
    return nn.Parameter(weight, requires_grad=False)
