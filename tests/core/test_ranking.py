"""Two stages find what one finds: places, ties, infinities and what is no number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import ranking
from paceline.core.draws import sample_by_inversion
from paceline.core.ranking import row_max, stable_top_k, top_k_indices

WIDTHS = (512, 513, 640, 767, 4096, 50257)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_MIN_TWO_STAGE", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_is_torchs(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(9, width, generator=generator).to(dtype)
    assert torch.equal(row_max(scores)[1], scores.to(torch.float32).argmax(-1))
    coarse = scores.to(torch.float32).round().to(dtype)  # ties everywhere
    assert torch.equal(row_max(coarse)[1], coarse.to(torch.float32).argmax(-1))
    assert torch.equal(row_max(scores)[0], scores.to(torch.float32).amax(-1))


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from(WIDTHS[:4]),
    marks=st.lists(st.tuples(st.integers(0, 511), st.sampled_from([0.0, 1.0, INF, -INF, NAN]))),
    floor=st.sampled_from([0.0, -INF]),
)
def test_the_first_of_equals_wins(width: int, marks: list[tuple[int, float]], floor: float) -> None:
    scores = torch.full((1, width), floor)
    for place, value in marks:
        scores[0, (place * 7) % width] = value
    assert torch.equal(row_max(scores)[1], scores.argmax(-1))


@pytest.mark.parametrize("width", [4096, 4224, 5000])
@pytest.mark.parametrize("k", [1, 8, 20])
def test_the_best_are_torchs(width: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.rand(7, width, generator=generator)
    scores[0] = scores[0].sort().values  # all of them in one stretch
    scores[1] = -INF
    scores[2, 5:] = -INF
    indices, wanted = top_k_indices(scores, k), scores.topk(k, dim=-1)
    assert torch.equal(scores.gather(1, indices), wanted.values)
    assert all(len(set(row)) == k and max(row) < width for row in indices.tolist())


@pytest.mark.parametrize("width", [40, 4096, 5000])
@pytest.mark.parametrize("k", [0, 1, 8, 20])
def test_what_is_ranked_lists_equals_by_their_ids(width: int, k: int) -> None:
    scores = torch.rand(7, width, generator=torch.Generator().manual_seed(k)).mul_(30).round_()
    scores[1] = -INF
    scores[2, 5:] = -INF
    scores[3, 7] = NAN
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(stable_top_k(scores, k)[[0, 1, 2, 4, 5, 6]], wanted[[0, 1, 2, 4, 5, 6]])
    assert all(len(set(row)) == k for row in stable_top_k(scores, k).tolist())


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(5, 5000)
    cut = wide[:, :4096]
    assert torch.equal(row_max(cut)[1], cut.argmax(-1))
    assert torch.equal(top_k_indices(cut, 3), cut.topk(3).indices)


@settings(max_examples=80, deadline=None)
@given(
    weights=st.dictionaries(
        st.integers(0, 639), st.sampled_from([1e-38, 1e-20, 1e-3, 1.0, 1e30]), min_size=1
    ),
    uniform=st.sampled_from([0.0, 1e-300, 1e-17, 0.5, 1 - 2**-53]),
)
def test_what_weighs_nothing_is_never_drawn(weights: dict[int, float], uniform: float) -> None:
    probs = torch.zeros(1, 640)
    for place, weight in weights.items():
        probs[0, place] = weight
    index = sample_by_inversion(probs, torch.tensor([uniform], dtype=torch.float64))
    assert probs[0, int(index)] > 0


def test_rows_without_a_distribution_are_told_by_their_sums() -> None:
    probs = torch.zeros(4, 640)
    probs[1, 5], probs[2, 630], probs[3, 7] = NAN, INF, 1.0
    drawn = sample_by_inversion(probs, torch.full((4,), 0.5, dtype=torch.float64))
    assert drawn.tolist() == [-1, -1, -1, 7]
