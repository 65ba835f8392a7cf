"""The arithmetic of quantised weights: exact in a group, in order between groups, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, ModelLoadError
from paceline.model.quantised.rounding import ZeroPoint, gptq, nearest
from paceline.model.quantised.weights import (
    QuantisedLinear,
    QuantisedWeight,
    quantise_rows,
    quantised_product,
)


def weight_of(bits: int, group: int, zero: ZeroPoint = "none") -> QuantisedWeight:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(bits)) + 0.3
    return nearest(weight, bits, group, zero)


def by_hand(x: torch.Tensor, weight: QuantisedWeight, row: int, out: int) -> float:
    """The formulas of weights.py, with Python's whole numbers and one rounding to float32 each."""
    total = torch.tensor(0.0)
    most = 127 * 256 if weight.int16_activations else 127
    for start in range(0, x.shape[1], weight.span):
        part = (
            x[row] if weight.int16_activations else x[row, start // 32 * 32 : start // 32 * 32 + 32]
        )
        scale = part.abs().max() / most
        codes = (x[row, start : start + weight.span] * (1 / scale)).round().clamp(-most, most)
        group = start // weight.group
        whole = [int(code) for code in codes]
        exact = sum(int(weight.codes[out, start + k]) * whole[k] for k in range(weight.span))
        term = torch.tensor(float(exact)) * weight.scales[out, group]
        if weight.offsets is not None:
            term = term + torch.tensor(float(sum(whole))) * weight.offsets[out, group]
        total = total + (term if weight.int16_activations else term * scale)
    return float(total * scale if weight.int16_activations else total)


@pytest.mark.parametrize("zero", ["none", "whole", "free"])
@pytest.mark.parametrize(
    ("bits", "group", "span"), [(8, 128, 64), (8, 32, 32), (8, 16, 16), (4, 32, 32), (4, 64, 32)]
)
def test_a_product_is_what_the_formulas_say(
    bits: int, group: int, span: int, zero: ZeroPoint
) -> None:
    weight = weight_of(bits, group, zero)
    assert weight.span == span
    assert (weight.offsets is None) == (zero == "none")
    is_what_the_formulas_say(weight)


def test_gates_and_heads_have_activations_of_8_bits() -> None:
    weight = weight_of(8, 128)
    assert weight.linear("model.layers.0.mlp.down_proj", None).int16_activations
    for name in ("model.layers.0.mlp.gate_proj", "lm_head"):
        narrow = weight.linear(name, None).quantised
        assert (narrow.int16_activations, narrow.span) == (False, 32)
        assert not narrow.rows(slice(3)).int16_activations
        is_what_the_formulas_say(narrow)


def is_what_the_formulas_say(weight: QuantisedWeight) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(7))
    result = quantised_product(x, weight)
    for row in range(3):
        for out in range(weight.shape[0]):
            assert float(result[row, out]) == by_hand(x, weight, row, out)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 40), pick=st.integers(0, 39), bits=st.sampled_from([4, 8]))
def test_a_row_has_the_same_bits_whatever_rides_along(rows: int, pick: int, bits: int) -> None:
    weight = weight_of(bits, 32 if bits == 4 else 128)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    row = pick % rows
    alone = quantised_product(x[row : row + 1], weight)
    assert torch.equal(quantised_product(x, weight)[row], alone[0])


@pytest.mark.parametrize(("bits", "group", "limit"), [(8, 128, 0.011), (4, 32, 0.1)])
def test_a_quantised_layer_is_near_the_plain_one(bits: int, group: int, limit: float) -> None:
    plain = torch.nn.Linear(128, 24)
    x = torch.randn(2, 5, 128)
    result = QuantisedLinear(nearest(plain.weight.detach(), bits, group), plain.bias)(x)
    wanted = plain(x).detach()
    assert result.shape == wanted.shape
    assert float((result - wanted).norm() / wanted.norm()) < limit


def test_beside_eight_bits_activations_lose_next_to_nothing() -> None:
    """Not even where one of them is a thousand times the others, as models' are."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    x[:, 5] = 1000
    codes, scales = quantise_rows(x, int16=True)
    assert codes.abs().max() == 127 * 256
    assert float((codes * scales - x)[:, 6:].norm() / x[:, 6:].norm()) < 0.01
    weight = weight_of(8, 128)
    wanted = x @ weight.dense().t()
    assert float((quantised_product(x, weight) - wanted).norm() / wanted.norm()) < 1e-4


def test_a_row_of_zeros_is_zero() -> None:
    for int16 in (False, True):
        codes, scales = quantise_rows(torch.zeros(2, 64), int16)
        assert not codes.any()
        assert not scales.any()
    assert not quantised_product(torch.zeros(2, 128), weight_of(4, 32)).any()


def test_gptq_leaves_less_error_in_what_the_layer_computes() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 128, generator=generator)
    x = torch.randn(400, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    x += 0.1 * torch.randn(400, 128, generator=generator)

    def error(rounded: QuantisedWeight) -> float:
        return float((x @ (rounded.dense() - weight).t()).norm())

    assert error(gptq(weight, x.t() @ x, 4, 32)) < 0.6 * error(nearest(weight, 4, 32))


def test_gptq_without_relations_between_inputs_is_nearest_rounding() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    rounded, wanted = gptq(weight, torch.eye(64), 4, 32), nearest(weight, 4, 32)
    assert torch.equal(rounded.codes, wanted.codes)
    assert torch.equal(rounded.scales, wanted.scales)


def test_scales_can_be_stored_in_bf16_and_lose_least() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    scales = nearest(weight, 4, 32, "none").scales
    assert torch.equal(scales, scales.bfloat16().float())
    widest = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7
    codes = (weight.unflatten(1, (-1, 32)) / widest[..., None]).round()
    plain = (codes * widest[..., None]).flatten(1)
    assert float((nearest(weight, 4, 32).dense() - weight).norm()) < float((plain - weight).norm())


def test_a_free_offset_finds_back_the_numbers_of_sixteen_steps() -> None:
    """What GGUF's Q4_1 stands for is on such a grid, wherever it begins: nothing is lost."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (16, 2, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.rand(16, 2, 1, generator=generator).half().float()
    weight = codes * scales + torch.randn(16, 2, 1, generator=generator).half().float()
    numbers = nearest(weight.flatten(1), 4, 32, "free").dense()
    assert torch.allclose(numbers, weight.flatten(1), atol=1e-5)


def test_whole_zero_points_fit_a_shifted_group_better_than_none() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)) + 1

    def error(zero: ZeroPoint) -> float:
        return float((nearest(weight, 4, 32, zero).dense() - weight).norm())

    assert error("free") <= error("whole") < 0.8 * error("none")


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide into groups of 32"):
        nearest(torch.randn(4, 40), 4, 32, "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.zeros(24, 4)}, r"the scale of layer\.weight at row 0, group 0 is 0"),
        ({"scales": torch.full((24, 4), math.nan)}, "is nan; quantise the model again"),
        ({"scales": torch.ones(24, 3)}, "divides no weight of"),
        ({"offsets": torch.zeros(24, 2)}, r"has zero points \[24, 2\]"),
    ],
)
def test_what_can_be_no_weight_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    good = weight_of(4, 32)
    bad = QuantisedWeight(
        good.codes, change.get("scales", good.scales), 4, change.get("offsets", good.offsets)
    )
    with pytest.raises(ModelLoadError, match=message):
        bad.check("layer.weight")


def test_bytes_are_those_that_a_product_reads() -> None:
    four, eight = weight_of(4, 32), weight_of(8, 128)
    assert four.nbytes == 24 * 128 // 2 + 4 * 24 * 4
    assert eight.nbytes == 24 * 128 + 4 * 24
