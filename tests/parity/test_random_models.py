"""Speculative text equals plain text token for token: greedy, and sampled with a seed.

float32, so every difference is a bug. The draft is the target with noise: right often, not always.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.batch import Plan
from paceline.core.params import SamplingParams
from paceline.core.tree import TokenTree
from paceline.draft.base import with_members
from paceline.draft.hybrid import HybridDrafter
from paceline.drafters import DRAFTERS, RECORDS
from paceline.llm import LLM
from paceline.model.loading import read_config
from paceline.request.completion import Completion
from support.cache_invariants import check_cache
from support.engine_models import cramped
from support.every_drafter import write_texts
from support.medusa_models import write_medusa
from support.mtp_models import write_mtp
from support.random_heads import write_block, write_eagle

PROMPTS: list[str | list[int]] = [
    "Once upon a time there was",
    "The quick brown fox jumps over the lazy dog, and the dog",
    "def add(a, b):\n    return",
    "What is 12 + 30? What is 12 + 30? What is",
    [5],
]
EXAMPLES = [example for kind in DRAFTERS if kind != "none" for example in DRAFTERS[kind].examples]
# Every drafter at every length and alone as well as in company; every length with both. Each is
# asked for greedy text and a third of the rest, so that every drafter gets all requests. One length
# of each is for the slow tests.
CASES = [
    pytest.param(
        example,
        length,
        (1, 5)[(row + column) % 2],
        (row + column) % 3,
        marks=pytest.mark.slow if (row - column) % 3 == 2 else (),
    )
    for row, example in enumerate(EXAMPLES)
    for column, length in enumerate((1, 4, "auto"))
]
MANY = DRAFTERS["hybrid"].examples[1]
REQUESTS = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "temperature 0.7": SamplingParams(max_tokens=24, temperature=0.7, seed=11),
    "temperature 1": SamplingParams(max_tokens=24, temperature=1.0, seed=12),
    "top-p": SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=13),
    "top-k, min-p": SamplingParams(max_tokens=24, temperature=1.0, top_k=7, min_p=0.05, seed=14),
    "penalties": SamplingParams(
        **{"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        **{"max_tokens": 24, "temperature": 0.8, "seed": 15},
    ),
    "greedy, penalised": SamplingParams(
        max_tokens=24, repetition_penalty=1.2, frequency_penalty=0.2, min_tokens=20
    ),
    "bias": SamplingParams(max_tokens=24, temperature=1.0, logit_bias={9: 3.0, 4: -9.0}, seed=1),
}


@pytest.fixture(scope="module")
def folders(pair_room: tuple[Path, dict[str, str]]) -> dict[str, str]:
    root, pair = pair_room
    plain = LLM(pair["target"], draft="none", dtype="float32")
    written = texts(plain, REQUESTS["greedy"], PROMPTS)
    plain.close()
    return pair | {
        "mtp": write_mtp(root / "mtp", read_config("target", pair["target"])),
        "datastore": write_texts(root, pair["target"], written * 2),
        "medusa": write_medusa(root / "medusa", pair["target"], heads=4, layers=2, shared=True),
        "eagle": write_eagle(root, pair["target"], 1),
        "eagle3": write_eagle(root, pair["target"], 3),
        "dflash": write_block(root, pair["target"], "dflash"),
        "dspark": write_block(root, pair["target"], "dspark"),
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str, str]) -> Iterator[LLM]:
    llm = LLM(folders["target"], draft="none", dtype="float32")
    yield llm
    llm.close()


def texts(llm: LLM, params: SamplingParams, prompts: list[str | list[int]]) -> list[list[int]]:
    return [completion.token_ids for completion in answers(llm, params, prompts)]


def answers(llm: LLM, params: SamplingParams, prompts: list[str | list[int]]) -> list[Completion]:
    """The completions; behind them the caches are whole, and nothing is kept."""
    result = llm.generate(prompts, params)
    check_cache(llm.engine.cache)
    for drafter in with_members(llm.engine.drafter):
        drafts = getattr(drafter, "cache", None)
        if drafts is not None:
            check_cache(drafts)
            assert drafts.pool.available == drafts.num_blocks, "the draft's cache leaks"
    assert llm.engine.cache.pool.available == llm.engine.cache.num_blocks
    return result


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[str, list[list[int]]]:
    """Plain answers to all prompts, by request; seeded text does not depend on the batch."""
    return {name: texts(plain, params, PROMPTS) for name, params in REQUESTS.items()}


@pytest.mark.parametrize(("example", "length", "batch", "third"), CASES)
def test_same_tokens_as_plain_decoding(
    plain: LLM,
    folders: dict[str, str],
    expected: dict[str, list[list[int]]],
    example: str,
    length: int | str,
    batch: int,
    third: int,
) -> None:
    llm = plain.with_draft(example.format(**folders), draft_length=length, max_batch_size=batch)
    accepted = 0
    part = slice(None) if batch > 1 else slice(1, 3)
    for name in ("greedy", *list(REQUESTS)[1 + third :: 3]):
        found = answers(llm, REQUESTS[name], PROMPTS[part])
        assert [c.token_ids for c in found] == expected[name][part], name
        accepted += sum(c.stats.accepted_tokens for c in found)
    # An adaptive length may find that the draft does not pay, and then rightly draft nothing.
    ours = DRAFTERS[example.partition(":")[0]] in RECORDS
    assert accepted or length == "auto" or not ours, "no wrong acceptance would have been seen"
    llm.close()


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_target_as_its_own_draft_is_always_right(
    plain: LLM, folders: dict[str, str], rule: str
) -> None:
    """With q = p every rule accepts everything: any mix-up of rows or positions would show."""
    llm = plain.with_draft(folders["target"], draft_length=3, rule=rule, seed=5)
    params = SamplingParams(max_tokens=21, temperature=1.0, ignore_eos=True)
    for completion in llm.generate(PROMPTS, params):
        assert completion.stats.acceptance_rate > 0.99
        assert len(completion.token_ids) == 21


def test_mixed_requests_in_one_batch(folders: dict[str, str], plain: LLM) -> None:
    """Greedy, seeded, penalised and unseeded requests side by side; each gets its own
    distribution."""
    params_list = [*list(REQUESTS.values())[:4], SamplingParams(max_tokens=24, temperature=1.0)]
    llm = plain.with_draft(f"model:{folders['draft']}", draft_length=3)
    got = llm.generate(PROMPTS, params_list)
    for prompt, params, completion in list(zip(PROMPTS, params_list, got, strict=True))[:4]:
        assert completion.token_ids == plain.generate(prompt, params)[0].token_ids


def test_members_of_a_hybrid_may_take_any_turns(
    folders: dict[str, str], plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drafts, and whatever is withdrawn: members catch up, the text stays."""
    chance, propose = random.Random(4), HybridDrafter.propose

    def any_member(self: HybridDrafter, plan: Plan) -> list[TokenTree]:
        items = [
            replace(
                item,
                drafter=chance.choice(self.names),
                draft_length=chance.randint(0, item.draft_length),
            )
            for item in plan.slices
        ]
        return propose(self, Plan(tuple(items)))

    monkeypatch.setattr(HybridDrafter, "propose", any_member)
    spec = MANY + "+lookahead+recycling+early_exit:layers=1+layer_skip:skip=0"
    llm = plain.with_draft(spec.format(**folders), draft_length=4)
    for name in ("greedy", "temperature 1", "penalties"):
        params = REQUESTS[name]
        assert texts(llm, params, PROMPTS) == texts(plain, params, PROMPTS), name
    unseeded = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=1.0))
    assert sum(completion.stats.accepted_tokens for completion in unseeded) > 0
    llm.close()


@pytest.mark.parametrize("length", [3, "auto"])
def test_drafters_side_by_side_in_one_batch(
    folders: dict[str, str], plain: LLM, length: int | str
) -> None:
    """Every request picks its drafter; its text is what it always is."""
    hybrid = DRAFTERS["hybrid"].examples[0]
    specs = ("ngram:max=3,length=6,candidates=1", "model:{target}", hybrid, "eagle3:{eagle3}")
    drafts = [spec.format(**folders) for spec in specs]
    llm = plain.with_draft(drafts, draft_length=length)
    assert llm.drafters == ("ngram", "model", "hybrid", "eagle3")
    for sampled in ({}, {"temperature": 0.8, "seed": 31}):
        params_list = [
            SamplingParams(max_tokens=40, ignore_eos=True, drafter=name, **sampled)
            for name in ("model", None, "hybrid", "eagle3", "none")
        ]
        got = llm.generate(PROMPTS, params_list)
        for prompt, asked, completion in zip(PROMPTS, params_list, got, strict=True):
            expected = plain.generate(prompt, replace(asked, drafter=None))[0]
            assert completion.token_ids == expected.token_ids
        drafted = [completion.stats.drafted_tokens for completion in got]
        assert drafted[-1] == 0
        assert length == "auto" or min(drafted[0], drafted[2], drafted[3]) > 0
        # Whoever drafted is named, not the hybrid.
        assert length == "auto" or got[2].stats.drafters.keys() <= {"ngram", "model"}
    for drafter in with_members(llm.engine.drafter):
        own = getattr(drafter, "cache", None)
        assert own is None or own.pool.available == own.num_blocks
    llm.close()


def test_plain_greedy_equals_transformers(folders: dict[str, str], plain: LLM) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, plain.generate(PROMPTS, params), strict=True):
        ids = plain.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == out[0, len(ids) :].tolist()


def test_seeded_text_does_not_depend_on_preemption_or_chunks(
    plain: LLM, folders: dict[str, str]
) -> None:
    """A cache far too small for five sequences: they are preempted and computed again."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=21, ignore_eos=True)
    unlimited = plain.with_draft(f"model:{folders['draft']}", draft_length=3)
    expected = [c.token_ids for c in unlimited.generate(PROMPTS, params)]
    tight = cramped(folders["target"], f"model:{folders['draft']}", blocks=10)
    assert [c.token_ids for c in tight.generate(PROMPTS, params)] == expected
    assert tight.engine.scheduler.preemptions > 0
    check_cache(tight.engine.cache)
