"""The kernels of quantised weights against the readable truth, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import INSTRUCTIONS, choose, instructions
from paceline.lab.perplexity import perplexity
from paceline.model.backends.native.packing import PackedFormat, PackedMatrix
from paceline.model.quantised.rounding import ZeroPoint, nearest, round_to_nearest
from paceline.model.quantised.weights import (
    QuantisedLinear,
    QuantisedWeight,
    in_common_format,
    quantised_product,
)
from paceline.model.target import CausalModel

try:
    BEST = instructions()
except NativeUnavailableError as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


@pytest.fixture(params=INSTRUCTIONS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    if not choose(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    choose(BEST)


def linear_of(bits: int, group: int, zero: str, rows: int = 70) -> QuantisedLinear:
    generator = torch.Generator().manual_seed(bits + group)
    if zero == "e2m1":
        codes = E2M1[torch.randint(16, (rows, 192), generator=generator)]
        scales = torch.exp2(torch.randint(-9, 2, (rows, 6), generator=generator).float())
        return QuantisedLinear(QuantisedWeight(codes, scales, 4, e2m1=True), torch.randn(rows))
    weight = torch.randn(rows, 192, generator=generator) * 0.05 + 0.01
    # "least": codes of 0 to 15, as in GGUF's Q4_1
    grid = {"least": "free", "narrow": "none"}.get(zero, zero)
    rounded = nearest(weight, bits, group, cast(ZeroPoint, grid))
    rounded = replace(rounded, int8_activations=zero == "narrow")
    assert rounded.unsigned == (zero == "least")
    return QuantisedLinear(rounded, torch.randn(rows))


E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
FORMS = [
    *(
        (8, 192, "none"),
        (8, 64, "none"),
        (8, 64, "free"),
        (8, 64, "narrow"),
        (8, 192, "narrow"),
        (8, 32, "none"),
        (8, 16, "none"),
        (8, 16, "free"),
    ),
    *((4, 32, "none"), (4, 32, "whole"), (4, 64, "whole"), (4, 32, "least"), (4, 96, "least")),
    (4, 32, "e2m1"),
]


@pytest.mark.parametrize(("bits", "group", "zero"), FORMS)
def test_products_are_those_of_the_readable_truth(
    kernels: str, bits: int, group: int, zero: str
) -> None:
    linear = linear_of(bits, group, zero)
    packed = PackedMatrix.pack([linear], torch.float32)
    x = torch.randn(13, 192, generator=torch.Generator().manual_seed(1))
    wanted = quantised_product(x, linear.quantised) + linear.bias
    result = packed.multiply(x)
    assert float((result - wanted).abs().max() / wanted.abs().max()) < 1e-6


@pytest.mark.parametrize("zero", ["none", "whole", "least", "e2m1"])
def test_sums_of_the_largest_codes_do_not_overflow(kernels: str, zero: str) -> None:
    weight = linear_of(4, 32, zero).quantised
    low, high = int(weight.codes.min()), int(weight.codes.max())
    signs = torch.randint(2, weight.codes.shape, generator=torch.Generator().manual_seed(3)) == 1
    codes = torch.where(signs, low, high).to(torch.int8)
    codes[0], codes[1] = low, high
    linear = QuantisedLinear(replace(weight, codes=codes), None)
    x = torch.cat((torch.ones(1, 192), -torch.ones(1, 192), 2.0 * signs[2:] - 1))
    wanted = quantised_product(x, linear.quantised)
    result = PackedMatrix.pack([linear], torch.float32).multiply(x)
    assert float((result - wanted).abs().max() / wanted.abs().max()) < 1e-6


@pytest.mark.parametrize(("bits", "group", "zero"), FORMS)
def test_a_row_has_the_same_bits_alone_and_in_every_instruction_set(
    kernels: str, bits: int, group: int, zero: str
) -> None:
    packed = PackedMatrix.pack([linear_of(bits, group, zero)], torch.bfloat16)
    x = torch.randn(100, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    every = packed.multiply(x)
    alone = torch.cat([packed.multiply(row[None]) for row in x])
    assert torch.equal(alone, every)
    for rows in (*range(2, 20), 33, 47, 48, 49, 97):  # tiles of every size, and passes of 48
        assert torch.equal(packed.multiply(x[:rows]), every[:rows])
    choose(BEST)
    assert torch.equal(packed.multiply(x), every)


@pytest.mark.parametrize(("bits", "group", "zero"), FORMS)
@pytest.mark.parametrize("gated", [False, True])
def test_what_was_packed_is_had_back(bits: int, group: int, zero: str, gated: bool) -> None:
    linears = [linear_of(bits, group, zero), linear_of(bits, group, zero)]
    packed = PackedMatrix.pack(linears, torch.float32, gated)
    for index, linear in enumerate(linears):
        place, first = (1 + index, 0) if gated else (0, 70 * index)
        unpacked = packed.quantised(place, first, 70)
        assert torch.equal(unpacked.codes, linear.quantised.codes)
        assert torch.equal(unpacked.scales, linear.quantised.scales)
        assert unpacked.unsigned == linear.quantised.unsigned
        assert unpacked.e2m1 == linear.quantised.e2m1
        assert unpacked.int16_activations == linear.quantised.int16_activations
        if unpacked.offsets is not None:
            assert torch.equal(unpacked.offsets, linear.quantised.offsets)


@pytest.mark.parametrize(
    ("forms", "bits", "group"),
    [
        ([(4, 32, "none"), (4, 32, "whole")], 4, 32),
        ([(4, 32, "least"), (4, 32, "none")], 8, 32),
        ([(4, 32, "e2m1"), (4, 32, "none")], 8, 32),
        ([(4, 32, "least"), (8, 16, "none"), (4, 64, "whole")], 8, 16),
        ([(8, 192, "none"), (4, 96, "least")], 8, 96),
    ],
)
def test_matrices_of_several_forms_are_packed_in_one_without_loss(
    forms: list[tuple[int, int, str]], bits: int, group: int
) -> None:
    linears = [linear_of(*form) for form in forms]
    weights = in_common_format([linear.quantised for linear in linears])
    assert {(w.bits, w.group) for w in weights} == {(bits, group)}
    for weight, linear in zip(weights, linears, strict=True):
        assert torch.equal(weight.dense(), linear.weight)
    packed = PackedMatrix.pack(linears, torch.float32)
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(3))
    both = zip(weights, linears, strict=True)
    wanted = torch.cat([quantised_product(x, weight) + m.bias for weight, m in both], 1)
    assert float((packed.multiply(x) - wanted).abs().max() / wanted.abs().max()) < 1e-6


@pytest.mark.parametrize("zero", ["none", "whole", "free"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 64), (8, 576)])
def test_rounding_has_the_bits_of_the_readable_truth(
    kernels: str, bits: int, group: int, zero: ZeroPoint
) -> None:
    """Also where halves do not hold the scales of some rows, and in groups without a range."""
    weight = 0.03 * torch.randn(150, 576, generator=torch.Generator().manual_seed(bits))
    weight[3:5], weight[7], weight[140] = 0.0, 0.5, weight[140] * 1e-4
    weight[20] += 9
    for numbers in (weight, weight.bfloat16(), weight.half(), weight * 1e9):
        rounded = round_to_nearest(numbers, bits, group, zero)
        wanted = nearest(numbers, bits, group, zero)
        assert torch.equal(rounded.codes, wanted.codes)
        assert torch.equal(rounded.scales, wanted.scales)
        assert (rounded.offsets is None) == (wanted.offsets is None) == (zero == "none")
        if rounded.offsets is not None and wanted.offsets is not None:
            assert torch.equal(rounded.offsets, wanted.offsets)
        assert rounded.unsigned == wanted.unsigned


def test_scales_are_stored_in_the_fewest_bytes_that_hold_them() -> None:
    linear = linear_of(4, 32, "none")
    assert PackedFormat.of([linear.quantised]).scale_kind == 1  # bf16
    linear.quantised.scales.copy_(torch.rand(70, 6).half().float() * 0.01)
    linear.quantised.scales.copy_(linear.quantised.scales.half().float())
    assert PackedFormat.of([linear.quantised]).scale_kind == 2  # half
    packed = PackedMatrix.pack([linear], torch.float32)
    assert torch.equal(packed.quantised(0, 0, 70).scales, linear.quantised.scales)
    linear.quantised.scales[0, 0] = 1 / 3
    assert PackedFormat.of([linear.quantised]).scale_kind == 0


def test_what_is_rounded_to_a_free_grid_has_scales_of_two_bytes() -> None:
    linear = linear_of(4, 32, "least")
    assert PackedFormat.of([linear.quantised]).scale_kind == 2
    tiny = QuantisedLinear(nearest(linear.weight * 1e-5, 4, 32, "free"), None)
    assert PackedFormat.of([tiny.quantised]).scale_kind == 0  # half would lose digits of these
    error = (tiny.weight - linear.weight * 1e-5).norm() / (linear.weight * 1e-5).norm()
    assert float(error) < 0.01


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_model_runs_on_the_kernels(
    plain_folder: Path, precision: str, dtype: str
) -> None:
    texts = [list(range(10, 150)), [7, 7, 9] * 20]
    nats = []
    for backend in ("native", "reference"):
        model = CausalModel.load(
            str(plain_folder), dtype, "cpu", quantize=precision, backend=backend
        )
        assert model.backend.name == backend
        nats.append(perplexity(model, texts).nats)
    assert nats[0] == pytest.approx(nats[1], rel=1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_text_is_plain_decodings_with_every_kind_of_draft(
    plain_folder: Path, precision: str
) -> None:
    """In bf16, greedy and seeded, chains and trees, with a draft model that is quantised itself."""
    from paceline import LLM, SamplingParams

    prompts = [[5, 9, 7, 5, 9, 7, 5, 9], list(range(20, 60)), [11] * 9]
    plain = LLM(
        str(plain_folder),
        draft="none",
        dtype="bfloat16",
        device="cpu",
        backend="native",
        quantize=precision,
    )
    drafts = ("ngram", f"model:{plain_folder}", f"tree:{plain_folder},branching=3x2", "recycling")
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=4),
    ):
        wanted = [completion.token_ids for completion in plain.generate(prompts, params)]
        for draft in drafts:
            llm = plain.with_draft(draft, draft_length=3, draft_quantize="int4")
            assert [
                completion.token_ids for completion in llm.generate(prompts, params)
            ] == wanted, draft


@pytest.mark.parametrize("precision", [None, "int4"])
def test_models_run_on_the_kernels_unless_told_otherwise(
    plain_folder: Path, precision: str | None
) -> None:
    model = CausalModel.load(str(plain_folder), device="cpu", quantize=precision)
    assert model.backend.name == "native" and model.backend_reason.startswith("native (")
    options = {"device": "cpu", "quantize": precision, "backend": "reference"}
    model = CausalModel.load(str(plain_folder), **options)
    assert model.backend.name == "reference" and model.backend_reason == "reference (asked for)"
