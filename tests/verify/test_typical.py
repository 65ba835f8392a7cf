"""Typical acceptance: what it accepts, that it is lossy, and that nobody gets it by accident."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paceline.build import EngineOptions
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.verify.typical import TypicalVerifier, longest, surprise
from paceline.verify.verifier import RULES, Verifier
from support.engine_models import write_pair
from support.spans import judged


def request(seq_id: int = 0, **params) -> SequenceState:
    return SequenceState(seq_id, [1, 2, 3], 2, SamplingParams(**params), frozenset({4}))


# -- the pure function ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "threshold"),
    [
        ([0.97, 0.01, 0.01, 0.01], 0.09),  # sure: epsilon
        ([0.25, 0.25, 0.25, 0.25], 0.075),  # delta * exp(-log 4)
        ([1.0, 0.0, 0.0, 0.0], 0.09),
    ],
)
def test_threshold_of_the_paper(distribution: list[float], threshold: float) -> None:
    p = torch.tensor([distribution, distribution])
    entropy = -sum(x * math.log(x) for x in distribution if x)
    assert threshold == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)))
    for token, chance in enumerate(distribution):
        (cost,) = surprise(p, torch.tensor([token]), ((-1,),)).tolist()
        assert (cost >= 0) == (chance > threshold)
        if cost > 0:
            assert cost / 2**20 == pytest.approx(-math.log(chance), abs=1e-5)


def test_each_node_is_judged_by_its_parents_row() -> None:
    certain = torch.eye(3)[[0, 1, 2, 0, 1]]  # row r wants token r mod 3
    shapes = ((-1, 0, 0), (-1,))  # rows 0 to 3, then 0 to 1
    probs = torch.cat((certain[:4], certain[2:4]))
    tokens = torch.tensor([0, 1, 2, 2])
    assert surprise(probs, tokens, shapes).tolist() == [0, 0, -1, 0]


def test_the_longest_path_wins_then_the_likeliest() -> None:
    parents = (-1, -1, 0, 1, 1, 4)
    assert longest(parents, [1, 2, 9, 9, 8, -1]) == (0, 2)  # 10 against 11 and 10: the first
    assert longest(parents, [1, 2, -1, 9, 8, -1]) == (1, 4)
    assert longest(parents, [1, 9, 9, 9, 9, 0]) == (1, 4, 5)
    assert longest(parents, [-1, -1, 0, 0, 0, 0]) == ()
    assert longest((), []) == ()


# -- the verifier --------------------------------------------------------------------------------


def test_plausible_drafts_are_taken_whatever_the_chances() -> None:
    """Every drafted token has p = 1/4 > 0.075: all are accepted, each time."""
    check = judged(request(temperature=1.0), 0, TokenTree.chain([3, 1, 2]))
    (verdict,) = TypicalVerifier(torch.Generator().manual_seed(0))(torch.zeros(4, 4), [check])
    assert verdict.path == (0, 1, 2) and verdict.tokens[:3] == (3, 1, 2)


def test_a_mixed_batch_with_logprobs_and_ids_beyond_the_logits() -> None:
    logits = torch.zeros(9, 4)
    logits[:, 2] = 20.0
    wide = TokenTree(torch.tensor([2, 9]), chain_parents(2))
    q = torch.full((2, 4), 0.25)
    sampled = TokenTree(torch.tensor([0, 2]), (-1, -1), Draw.WITHOUT_REPLACEMENT, q)
    checks = [
        judged(request(0), 0, wide),
        judged(request(1, temperature=1.0, seed=3, logprobs=1), 3, wide),
        judged(request(2, temperature=1.0), 6, sampled),
    ]
    first, second, third = TypicalVerifier()(logits, checks)
    assert (first.path, first.tokens) == ((0,), (2, 2))
    assert (second.path, second.tokens) == ((0,), (2, 2))
    assert second.logprobs is not None and len(second.logprobs) == 2
    assert (third.path, third.tokens) == ((1,), (2, 2))


def test_greedy_requests_stay_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 6, generator=generator) * 0.01  # nearly flat: typical takes anything
    greedy = judged(request(0), 0, TokenTree(torch.tensor([1, 2, 3]), (-1, -1, 0)))
    other = judged(request(1, temperature=1.0), 4, TokenTree.chain([1, 2, 3]))
    together = TypicalVerifier()(logits, [greedy, other])
    exact = Verifier()(logits, [greedy])[0]
    assert (together[0].path, together[0].tokens) == (exact.path, exact.tokens)
    assert together[1].path == (0, 1, 2)


def test_one_transfer_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: calls.append(tensor.shape) or tolist(tensor)
    )
    check = judged(request(temperature=1.0), 0, TokenTree.chain([3, 1, 2]))
    TypicalVerifier()(torch.zeros(4, 4), [check])
    assert len(calls) == 1


# -- the engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("typical")))


def test_only_by_name() -> None:
    with pytest.raises(ConfigError, match=r"not lossless.*lossy=True"):
        EngineOptions(rule="typical")
    for rule in RULES[1:]:
        with pytest.raises(ConfigError, match="lossy asks for typical acceptance"):
            EngineOptions(rule=rule, lossy=True)
    with pytest.raises(ConfigError, match="use one of auto, token, block, coupled"):
        Verifier("typical")
    assert "typical" not in RULES and not Verifier.lossy


def test_every_output_of_a_lossy_engine_says_so(folders: tuple[str, str]) -> None:
    target, draft = folders
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=4, ignore_eos=True)
    for rule in ("auto", "typical"):
        llm = LLM(target, draft, dtype="float32", draft_length=3, rule=rule, lossy=True)
        assert isinstance(llm.engine.verifier, TypicalVerifier)
        (completion,) = llm.generate("Once upon", params)
        assert completion.lossy and completion.stats.lossy
        event = list(llm.stream("Once upon", params))[-1]
        assert event.completion is not None and event.completion.lossy
    plain = LLM(target, draft, dtype="float32", draft_length=3)
    (completion,) = plain.generate("Once upon", params)
    assert not completion.lossy and not completion.stats.lossy
    assert type(plain.engine.verifier) is Verifier


def test_it_is_faster_and_it_changes_seeded_text(folders: tuple[str, str]) -> None:
    """The comparison that every lossless rule passes (tests/parity) fails here, as it must."""
    target, draft = folders
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=5, ignore_eos=True)
    prompts = ["Once upon a time", "The quick brown fox", "What is 12 + 30?"]
    (lossless, lossy) = (
        LLM(target, draft, dtype="float32", draft_length=4, lossy=lossy).generate(prompts, params)
        for lossy in (False, True)
    )
    assert [c.token_ids for c in lossless] != [c.token_ids for c in lossy]
    steps = [sum(c.stats.target_steps for c in done) for done in (lossless, lossy)]
    assert steps[1] < steps[0]
