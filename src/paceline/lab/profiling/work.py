"""The bytes that a step must move and the FLOPs it does, counted operator by operator.

Every operator that Python calls is seen with its tensors, and our own kernels tell what they do, so
the count holds for any model and any drafter: a weight counts each time that a product reads it,
keys and values as long as attention reads them. Other tensors count from 256 KiB on; smaller ones
do not leave a core's own cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.model.backends.counters import OPERATOR, NativeWork, counted

LARGE = 256 * 2**10  # bytes; half of the smallest second-level cache of present servers

# Place of the rows and of the weight among the arguments.
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::mv": (0, 1),
    "aten::matmul": (0, 1),
    "aten::linear": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::_grouped_mm": (0, 1),
    "mkldnn::_linear_pointwise": (0, 1),
}
_ATTENTION = frozenset(
    {
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
# What reads only as much of its first argument as it puts out, or writes only what it is given.
_PARTIAL = frozenset(
    {"embedding", "index_select", "index", "gather", "index_copy_", "index_put_", "scatter_"}
)


def is_kernel(name: str) -> bool:
    """Whether an operator is a product or an attention: where the work of a model is."""
    is_operator = name.startswith(OPERATOR)
    return is_operator or name in _PRODUCTS or name in _ATTENTION or name == "aten::einsum"


@dataclass
class Work:
    """What one phase did. ``weights``: elements and bytes of each distinct one that was read."""

    ops: int = 0
    kernels: int = 0  # of them, products and attention
    flops: int = 0
    product_flops: int = 0
    weight_elements: int = 0  # each time that they were read
    weight_bytes: int = 0
    cache_bytes: int = 0  # keys and values read by attention
    other_bytes: int = 0  # large tensors read or written by anything else
    weights: dict[object, tuple[int, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    @property
    def parameters(self) -> int:
        """Distinct weight elements that were read."""
        return sum(elements for elements, _ in self.weights.values())

    @property
    def distinct_bytes(self) -> int:
        return sum(size for _, size in self.weights.values())

    @property
    def rows(self) -> float:
        """Rows of an average product; 0 without any."""
        return self.product_flops / (2 * self.weight_elements) if self.weight_elements else 0.0


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the work of every operator called in ``phase("step")`` to the innermost phase there;
    what lies between the phases of a step is "other"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Work] = {}
        self._phase = "other"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "step":
            with self, counted(self._native):
                yield
            return
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def _native(self, done: NativeWork) -> None:
        """A call of our own kernels, which is one operator."""
        work = self.phases.setdefault(self._phase, Work())
        work.ops += 1
        work.kernels += 1
        for weight in done.products:
            flops = 2 * weight.elements * weight.rows
            work.flops += flops
            work.product_flops += flops
            work.weight_elements += weight.elements
            work.weight_bytes += weight.bytes
            work.weights[weight.key] = (weight.elements, weight.bytes)
        work.flops += done.attention_flops
        work.cache_bytes += done.cache_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name == "aten::einsum":  # its products are seen one by one
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        work = self.phases.setdefault(self._phase, Work())
        work.ops += 1
        work.kernels += is_kernel(name)
        if name in _PRODUCTS:
            row_place, weight_place = _PRODUCTS[name]
            _count_product(work, name, args[row_place], args[weight_place], result)
        elif name in _ATTENTION:
            _count_attention(work, *args[:3])
        elif not _is_view(func, (args, kwargs), result):
            _count_other(work, name, (args, kwargs), result)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_view(func: Any, arguments: Any, result: Any) -> bool:
    """Whether nothing was moved: also a reshape or conversion that had nothing to do."""
    if func.is_view:
        return True
    if func._schema.is_mutable or not isinstance(result, torch.Tensor):
        return False
    if result.layout != torch.strided:
        return False
    pointer = result.untyped_storage().data_ptr()
    strided = (t for t in _tensors(arguments) if t.layout == torch.strided)
    return any(t.untyped_storage().data_ptr() == pointer for t in strided)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _key(weight: torch.Tensor) -> object:
    """The same for every use of a weight; prepacked ones have no address, but stay one object."""
    if weight.layout != torch.strided:
        return id(weight)
    return weight.untyped_storage().data_ptr(), weight.storage_offset(), tuple(weight.shape)


def _count_product(
    work: Work, name: str, rows: torch.Tensor, weight: torch.Tensor, result: torch.Tensor
) -> None:
    flops = 2 * result.numel() * rows.shape[-1]
    elements = weight.numel()
    if name == "aten::_grouped_mm":  # at most one expert for each row is read
        elements = elements // weight.shape[0] * min(weight.shape[0], rows.shape[0])
    work.flops += flops
    work.product_flops += flops
    work.weight_elements += elements
    work.weight_bytes += elements * weight.dtype.itemsize
    work.weights[_key(weight)] = (elements, elements * weight.dtype.itemsize)
    work.other_bytes += sum(_size(t) for t in (rows, result) if _size(t) >= LARGE)


def _count_attention(
    work: Work, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Scores and weighted sum, two FLOPs a multiplication."""
    queries = math.prod(query.shape[:-1])
    work.flops += 2 * queries * key.shape[-2] * (key.shape[-1] + value.shape[-1])
    work.cache_bytes += _size(key) + _size(value)


def _count_other(work: Work, name: str, arguments: Any, result: Any) -> None:
    put_out, taken = _tensors(result), _tensors(arguments)
    if name.partition("::")[2] in _PARTIAL:
        if name.endswith("_"):  # the first argument is the whole of what a part is written to
            put_out = taken[1:]
        taken = put_out
    work.other_bytes += sum(_size(t) for t in (*taken, *put_out) if _size(t) >= LARGE)
