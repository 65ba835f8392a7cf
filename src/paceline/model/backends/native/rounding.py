"""Rounding to 8 or 4 bits on all processor cores, to the same bits as the readable truth."""

from __future__ import annotations

import torch

from paceline.model.backends.native.compile import NativeUnavailableError
from paceline.model.backends.native.library import DTYPES, check, library
from paceline.model.quantised.rounding import Zero, nearest
from paceline.model.quantised.weights import QuantisedWeight

_ZEROS: dict[Zero, int] = {"none": 0, "whole": 1, "free": 2}


def round_to_nearest(
    weight: torch.Tensor, bits: int, group: int, zero: Zero = "none"
) -> QuantisedWeight:
    """``nearest`` of rounding.py, by the kernels where they can be had.

    SmolLM2's matrices take them a tenth of torch's time. ``weight`` ``[out, in]``.
    """
    rows, columns = weight.shape
    lanes = 16  # that a group's inputs are summed in
    if weight.device.type != "cpu" or columns % group or group % lanes:
        return nearest(weight, bits, group, zero)
    try:
        kernels = library()
    except NativeUnavailableError:
        return nearest(weight, bits, group, zero)
    weight = (weight if weight.dtype in DTYPES else weight.float()).contiguous()
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // group)
    offsets = None if zero == "none" else torch.empty_like(scales)
    check(
        kernels.pl_round(
            DTYPES[weight.dtype],
            weight.data_ptr(),
            *(rows, columns, group, bits, _ZEROS[zero]),
            codes.data_ptr(),
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return QuantisedWeight(codes, scales, bits, offsets, zero == "free" and bits == 4)
