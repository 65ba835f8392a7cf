"""A row's bits depend on that row alone: whatever the batch, the chunks, the threads, the tree."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import SHAPES, VOCAB, Decoding, Paged, Piece, native_model, paths
from torch import nn

from paceline.kernels.library import (
    INSTRUCTIONS,
    SAME_BITS,
    choose,
    instructions,
)
from paceline.model.backends.base import relative_error
from paceline.model.backends.native.packing import PLAIN, PackedMatrix
from paceline.model.paged.int8 import INT8
from paceline.model.target import CausalModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = [(shape, dtype, "auto") for shape in sorted(SHAPES) for dtype in sorted(DTYPES)]
# Keys and values in 8 bits: heads of whole vectors and of parts of them, windows, many rows a head.
MODELS += [
    ("llama", "bfloat16", "int8"),
    ("qwen2", "bfloat16", "int8"),
    ("gemma2", "float32", "int8"),
]


@pytest.fixture
def best() -> Iterator[str]:
    """Whatever a test chooses, the next one has the best again."""
    name = instructions()
    yield name
    choose(name)


@pytest.fixture(params=INSTRUCTIONS)
def kernels(request: pytest.FixtureRequest, best: str) -> str:
    name: str = request.param
    if not choose(name):
        pytest.skip(f"this processor has no {name}")
    return name


@pytest.fixture(scope="module", params=sorted(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def decoding(request: pytest.FixtureRequest) -> Decoding:
    shape, dtype, cache = request.param
    return Decoding(native_model(shape, DTYPES[dtype], cache))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def random_tree(rng: random.Random, nodes: int) -> tuple[int, ...]:
    return tuple(rng.randrange(-1, node) for node in range(nodes))


def check(decoding: Decoding, pieces: dict[int, Piece], logits: torch.Tensor) -> None:
    wanted = [decoding.logits(path) for piece in pieces.values() for path in paths(piece)]
    for row, (got, want) in enumerate(zip(logits, wanted, strict=True)):
        assert torch.equal(got, want), f"row {row} of {len(wanted)}"


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_any_batch(decoding: Decoding, seed: int) -> None:
    """Prompts in chunks of any size beside chains and trees, on any number of threads."""
    rng = random.Random(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(rng.randrange(1, 4))
    texts = random.Random(0)  # the same ones in all examples: decoding remembers them
    pool = [text(texts, 330) for _ in range(3)]
    sequences = rng.randrange(1, 4)
    paged = Paged(decoding.model, rng, rng.choice([1, 4, 16]), sequences, 380)
    done = [0] * sequences
    for _ in range(4):
        pieces: dict[int, Piece] = {}
        for seq in rng.sample(range(sequences), rng.randrange(1, sequences + 1)):
            pending = rng.choice([1, 1, 2, 7, 40, 120])
            tokens = pool[seq][: done[seq] + pending]
            parents = random_tree(rng, rng.choice([0, 0, 1, 4, 16, 32]))
            if rng.random() < 0.3:
                parents = tuple(range(-1, len(parents) - 1))
            if len(tokens) == done[seq]:
                continue
            pieces[seq] = Piece(tokens, done[seq], parents, tuple(text(rng, len(parents))))
            done[seq] = len(tokens)
        if pieces:
            check(decoding, pieces, paged.run(pieces).logits)
    torch.set_num_threads(before)


@pytest.mark.parametrize("context", [3, 250])
def test_any_number_of_rows(decoding: Decoding, context: int) -> None:
    """1 to 40 rows of a chain, and of a star, behind contexts of one block of keys and of two."""
    tokens = text(random.Random(5), context + 1)
    nodes = tuple(text(random.Random(6), 40))
    paged = Paged(decoding.model, random.Random(1), 16, 1, context + 64)
    paged.run({0: Piece(tokens[:-1], 0)})
    for rows in (*range(1, 14), 24, 39):
        for parents in (tuple(range(-1, rows - 1)), (-1,) * rows):
            piece = {0: Piece(tokens, context, parents, nodes[:rows])}
            check(decoding, piece, paged.run(piece).logits)


@pytest.mark.parametrize(
    ("shape", "dtype", "cache"),
    [
        ("llama", "bfloat16", "auto"),
        ("gemma2", "bfloat16", "auto"),
        ("qwen2", "float32", "auto"),
        ("llama", "bfloat16", "int8"),
    ],
)
def test_infinities_stay_with_those_who_see_them(
    kernels: str, shape: str, dtype: str, cache: str
) -> None:
    """Rows in front of a token whose values are no numbers share 32 keys with it, and siblings a
    tree: neither is multiplied with what it does not see."""
    model = native_model(shape, DTYPES[dtype], cache)
    with torch.no_grad():
        model.hf.get_input_embeddings().weight[7] = torch.inf
    tokens = [token if token != 7 else 8 for token in text(random.Random(4), 70)]
    tokens[50] = 7
    paged = Paged(model, random.Random(0), 16, 1, 120)
    logits = paged.run({0: Piece(tokens, 0)}).logits
    check(Decoding(model), {0: Piece(tokens[:50], 0)}, logits[:50])
    assert logits[:50].isfinite().all() and not logits[50:].isfinite().any()
    tree = Piece(tokens[:50], 49, (-1, -1, 0, 1), (7, 5, 9, 9))
    logits = paged.run({0: tree}).logits
    check(Decoding(model), {0: Piece([*tokens[:50], 5, 9], 49)}, logits[[0, 2, 4]])
    assert logits.isfinite().all(1).tolist() == [True, False, True, False, True]


def test_any_number_of_threads(decoding: Decoding, threads: None) -> None:
    tokens = text(random.Random(7), 290)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        paged = Paged(decoding.model, random.Random(count), 16, 1, 400)
        out = paged.run({0: Piece(tokens, 0)}, features=(0, 1, 2))
        more = paged.run({0: Piece([*tokens, 5], 290)})
        results.append((out.logits, *out.features.values(), more.logits))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got, want)


def test_instruction_sets_agree(decoding: Decoding, best: str) -> None:
    """The order of sums is part of the kernels' definition, not of a processor."""
    tokens = text(random.Random(8), 300)
    nodes = tuple(text(random.Random(6), 9))
    results = {}
    for name in filter(choose, SAME_BITS):
        paged = Paged(decoding.model, random.Random(0), 16, 1, 320)
        parts = [Piece(tokens[:7], 0), Piece(tokens[:20], 7), Piece(tokens, 20)]
        parts += [Piece([*tokens, 9], 300, (-1, 0, 0, -1, 2, 3, 3, 6, 1), nodes)]
        results[name] = torch.cat([paged.run({0: piece}).logits for piece in parts])
    for logits in results.values():
        assert torch.equal(logits, results["portable"])


@pytest.mark.parametrize(("shape", "dtype"), [("llama", "bfloat16"), ("gemma2", "float32")])
def test_a_cache_in_8_bits_is_the_references(shape: str, dtype: str) -> None:
    """Both backends write the same codes but for roundings, and read them alike: apart by less
    than by what 8 bits cost, which is little."""
    native = native_model(shape, DTYPES[dtype])
    tokens = text(random.Random(8), 300)
    piece = Piece([*tokens, 9], 300, (-1, 0, 0, -1), (5, 6, 7, 8))

    def logits(model: CausalModel) -> torch.Tensor:
        paged = Paged(model, random.Random(0), 16, 1, 320)
        first = paged.run({0: Piece(tokens, 0)}).logits
        return torch.cat((first, paged.run({0: piece}).logits)).float()

    exact = logits(native)
    reference = native_model(shape, DTYPES[dtype], "int8", "reference")
    native.cache_dtype = INT8
    result = logits(native)
    wanted = logits(reference)
    cost, apart = relative_error(result, exact), relative_error(result, wanted)
    assert 0 < cost < 0.1 and apart < (cost if dtype == "float32" else 0.1)


def test_an_amd_processor_multiplies_pairs() -> None:
    """Chosen by the vendor, not by a timing: outputs must not differ from start to start."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if "AuthenticAMD" not in cpu or "avx512_bf16" not in cpu:
        pytest.skip("needs an AMD processor with AVX512-BF16")
    environment = {k: v for k, v in os.environ.items() if k != "PACELINE_NATIVE"}
    code = "import torch; from paceline.kernels.library import instructions; print(instructions())"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["dpbf16"], ran.stderr


def test_instructions_that_round_in_between(shape: str, best: str) -> None:
    """VDPBF16PS sums otherwise, but no less each row alone."""
    if not choose("dpbf16"):
        pytest.skip("this processor has no dpbf16")
    decoding = Decoding(native_model(shape, torch.bfloat16))
    tokens = text(random.Random(9), 40)
    paged = Paged(decoding.model, random.Random(2), 16, 1, 90)
    for context, end in ((0, 1), (1, 8), (8, 40)):
        check(decoding, {0: (piece := Piece(tokens[:end], context))}, paged.run({0: piece}).logits)
    tree = Piece([*tokens, 9], 40, random_tree(random.Random(3), 17), tuple(tokens[:17]))
    result = paged.run({0: tree}).logits
    check(decoding, {0: tree}, result)
    assert instructions() == "dpbf16" and choose("avx512")
    other = paged.run({0: tree}).logits.float()
    assert (result.float() - other).norm() < 0.05 * other.norm()


def in_stripes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sums as csrc/gemm.h defines them, in float64 rounded after each step."""
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], 32):
        parts = []
        for odd in (0, 1):
            part = torch.zeros(len(x), len(weight))
            for k in range(begin + odd, min(begin + 32, x.shape[1]), 2):
                exact = x[:, k, None].double() * weight[None, :, k].double()
                part = (part.double() + exact).float()
            parts.append(part)
        total = total + (parts[0] + parts[1])
    return total


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("sizes", [(1, 1), (83, 70), (64, 96), (130, 33)])
def test_products(kernels: str, dtype: str, sizes: tuple[int, int]) -> None:
    """Sums in the defined order, for 1 to 100 rows, with odd sizes; and the weight comes back."""
    outputs, inputs = sizes
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs).to(DTYPES[dtype])
    packed = PackedMatrix.pack([linear], linear.weight.dtype)
    assert torch.equal(packed.dense(PLAIN, 0, outputs), linear.weight)
    x = torch.randn(100, inputs).to(DTYPES[dtype])
    alone = torch.cat([packed.multiply(row[None]) for row in x])
    for rows in (*range(1, 41), 48, 49, 100):
        assert torch.equal(packed.multiply(x[:rows]), alone[:rows]), rows
    wanted = in_stripes(x, linear.weight.detach()) + linear.bias.detach().float()
    if (
        dtype == "bfloat16" and kernels in SAME_BITS
    ):  # there the products of two numbers are exact in float64 and float32
        assert torch.equal(alone, wanted.bfloat16())
    assert torch.allclose(alone.float(), wanted, rtol=1e-2 if dtype == "bfloat16" else 1e-5)
