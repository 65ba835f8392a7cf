"""Safetensors files and checks of their tensors, with one line for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import ModelLoadError

if TYPE_CHECKING:
    import torch


class Entry(NamedTuple):
    """A tensor as a file's header describes it; ``dtype`` is a name such as "F32"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # "BOOL" has none
        return prod(self.shape) * (8 if bits is None else int(bits[0])) // 8


@contextmanager
def _opened(file: Path, framework: str) -> Iterator[Any]:
    """Raises ModelLoadError for a damaged file and one that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    try:
        file.open("rb").close()  # its error says more than that of the library
        with safe_open(file, framework=framework) as opened:
            yield opened
    except SafetensorError as error:
        raise ModelLoadError(
            f"the weights file {file} is damaged ({error}); download or copy it again"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"the weights file {file} cannot be read: {reason}") from None


def read_table(file: Path) -> dict[str, Entry]:
    """The tensors of a file, by its header. Raises ModelLoadError."""
    with _opened(file, "numpy") as opened:
        slices = [(key, opened.get_slice(key)) for key in opened.keys()]  # noqa: SIM118
        return {key: Entry(s.get_dtype(), tuple(s.get_shape())) for key, s in slices}


def load_tensors(file: Path, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """A file's tensors, or those of ``keys``, mapped into memory. Raises ModelLoadError."""
    with _opened(file, "pt") as opened:
        return {key: opened.get_tensor(key) for key in keys or opened.keys()}


def as_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The content of a file. Equal tensors give equal bytes, as receipts hash files."""
    from safetensors.torch import save

    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return save(plain, metadata={"format": "pt"})


def check_layers(name: str, config: Any, tensors: int) -> None:
    """Raises ModelLoadError if a config states more layers than a checkpoint of ``tensors`` tensors
    can have: transformers would first build them all."""
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if tensors and not 1 <= layers <= tensors:
        raise ModelLoadError(
            f"{name} states {layers} layers, but has {tensors} tensors; copy its files again"
        )


def check_finite(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises ModelLoadError if a tensor holds NaN or infinity; ``what`` names the weights."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
            continue
        wide = tensor if tensor.element_size() > 1 else tensor.float()
        low, high = wide.aminmax()  # NaN propagates
        if not (bool(low.isfinite()) and bool(high.isfinite())):
            raise ModelLoadError(
                f"{what}: tensor {key} holds NaN or infinity; copy the weights again, and if they "
                "stay so, training or conversion went wrong"
            )
