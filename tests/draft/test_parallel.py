"""Draft models that draft in one pass: drafts equal a dense computation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, ConfigError, SamplingParams
from paceline.core.batch import Plan
from paceline.draft.model import ParallelDrafter
from paceline.lab.export import export
from support.cache_invariants import check_cache
from support.engine_models import write_pair

MASK = 3
PROMPTS = ["the cat sat on the mat", "a dog", "the bird and the cat " * 3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    name_mask(draft, MASK)
    return target, draft


def name_mask(folder: str, mask: int) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": mask}))


@pytest.fixture(scope="module")
def plain(pair: tuple[str, str]) -> LLM:
    return LLM(pair[0], draft="none", dtype="float32")


@pytest.mark.parametrize("options", ["", ",branching=2x2x1", ",nodes=9,width=3"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_the_text_is_that_of_plain_decoding(
    plain: LLM, pair: tuple[str, str], options: str, sampling: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    drafted = plain.with_draft(f"model:{pair[1]}{options}", draft_length=4, max_batch_size=2)
    assert isinstance(drafted.engine.drafter, ParallelDrafter)
    assert drafted.engine.drafter.passes(4) == 1
    texts = [[one.token_ids for one in llm.generate(PROMPTS, params)] for llm in (plain, drafted)]
    assert texts[0] == texts[1]
    check_cache(drafted.engine.drafter.cache)


def test_chains_equal_the_dense_computation(plain: LLM, pair: tuple[str, str]) -> None:
    drafted = plain.with_draft(f"model:{pair[1]}", draft_length=4, max_batch_size=2)
    drafter, seen = drafted.engine.drafter, list[tuple[list[int], list[int]]]()
    assert isinstance(drafter, ParallelDrafter)
    propose = drafter.propose

    def recorded(plan: Plan):
        trees = propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            if len(tree):
                seen.append((list(item.seq.tokens), tree.tokens.tolist()))
        return trees

    drafter.propose = recorded  # type: ignore[method-assign]
    drafted.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert max(len(tokens) for _, tokens in seen) == 4
    reference = AutoModelForCausalLM.from_pretrained(pair[1])
    for text, tokens in seen:
        rows = torch.tensor([text + [MASK] * (len(tokens) - 1)])
        with torch.inference_mode():
            logits = reference(rows, use_cache=False).logits[0, len(text) - 1 :]
        assert logits.argmax(-1).tolist() == tokens


def test_off_and_a_mask_that_is_no_token(plain: LLM, tmp_path: Path) -> None:
    _, draft = write_pair(tmp_path)
    name_mask(draft, 10_000)
    with pytest.raises(ConfigError, match="has 10000 as the token for parallel drafting"):
        plain.with_draft(f"model:{draft}")
    alone = plain.with_draft(f"model:{draft},parallel=off", draft_length=4)
    assert alone.engine.drafter.passes(4) == 4


def test_exports(pair: tuple[str, str]) -> None:
    target, draft = pair
    made = export("vllm", target, draft, draft_length=4)
    assert made.config["method"] == "draft_model" and made.config["parallel_drafting"] is True
    assert not made.approximations
    assert "parallel_drafting" not in export("vllm", target, f"model:{draft},parallel=off").config
    (only,) = export("sglang", target, draft, draft_length=4).approximations
    assert only.what == "a draft in one pass"
