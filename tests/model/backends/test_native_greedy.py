"""The kernels' own greedy choices are those of ``greedy_choice``, and the verifier goes by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_models import COMMON
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.core.batch import Batch, Span
from paceline.core.params import SamplingParams
from paceline.core.sampling import greedy_choice
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from paceline.kernels.library import INSTRUCTIONS, choose, instructions
from paceline.model.backends.native.model import NativeModel
from paceline.model.backends.native.recognise import DecoderShape, describe_decoder
from paceline.model.probe import register
from paceline.model.target import CausalModel
from paceline.verify.verifier import Verifier
from support.spans import judged

WIDTH = 1003  # of the vocabulary: whole vectors, and some numbers behind them


def tied(head: torch.Tensor) -> None:
    """Whatever is largest, is so twice, but for the last three."""
    head[500:1000] = head[:500]


def unknown(head: torch.Tensor) -> None:
    head[417] = torch.nan


def unknown_at_the_end(head: torch.Tensor) -> None:
    head[-1] = torch.nan


def infinite(head: torch.Tensor) -> None:
    """Above all others in some rows, below them in the rest."""
    head[2] *= 1e38
    head[2] *= 4


@pytest.fixture(params=INSTRUCTIONS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    before, name = instructions(), request.param
    if not choose(name):
        pytest.skip(f"this processor has no {name}")
    yield name
    choose(before)


def model_of(dtype: torch.dtype, change: Callable[[torch.Tensor], None]) -> CausalModel:
    register()
    torch.manual_seed(4)
    config = LlamaConfig(**{**COMMON, "vocab_size": WIDTH})
    hf: Any = AutoModelForCausalLM.from_config(config, attn_implementation="paceline").to(dtype)
    model = CausalModel(hf, "llama")
    shape = describe_decoder(hf, model.cache_shapes, model.patterns)
    change(hf.lm_head.weight.data)
    assert isinstance(shape, DecoderShape)
    model.backend = NativeModel(hf, shape)  # unasked: some of these are not finite
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", [tied, unknown, unknown_at_the_end, infinite])
def test_choices_of_the_kernels(
    kernels: str, dtype: torch.dtype, change: Callable[[torch.Tensor], None]
) -> None:
    model, rows = model_of(dtype, change), range(40)
    ids = [row * 7 + 3 for row in rows]
    batch = Batch(ids, rows, rows, (Span(0, 0, 0, 40),), ((0, 1, 2),), rows[3:])
    cache = model.new_cache(3, 16)
    out, alone = (model(b, cache) for b in (batch, replace(batch, choices_only=True)))
    wanted = greedy_choice(out.logits).tolist()
    assert out.greedy == alone.greedy == wanted and len(wanted) == 37
    assert not len(alone.logits)
    if change is tied:
        assert all(0 <= choice < 500 or choice >= 1000 for choice in wanted)
        assert len(set(wanted)) > 4
    elif change is infinite:
        assert 0 < wanted.count(-1) < 37
    else:
        assert set(wanted) == {-1}


def test_the_verifier_goes_by_them() -> None:
    """A chain of which all but the last holds, without a look at the logits; not where more than
    an argmax is asked for."""
    tree = TokenTree.chain([4, 5, 6])
    checks = [
        judged(SequenceState(0, [1, 2], 2, SamplingParams()), 1, tree),
        judged(SequenceState(1, [1], 1, SamplingParams()), 5, TokenTree.empty()),
        judged(SequenceState(2, [1], 1, SamplingParams()), 6, TokenTree.empty()),
    ]
    unread = torch.full((7, 8), torch.nan)
    first, second, third = Verifier()(unread, checks, [9, 4, 5, 7, -1, 3, -1])
    assert (first.path, first.tokens, first.choices) == ((0, 1), (4, 5, 7), (4, 5, 7, 0))
    assert second.tokens == (3,) and third.error is not None
    logits = torch.nn.functional.one_hot(torch.tensor([2]), 8).float()
    for params in (SamplingParams(logprobs=1), SamplingParams(logit_bias={3: -1.0})):
        check = judged(SequenceState(3, [1], 1, params), 0, TokenTree.empty())
        assert Verifier()(logits, [check], [5])[0].tokens == (2,)
