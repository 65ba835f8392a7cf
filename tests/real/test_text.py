"""SmolLM2 with every kind of draft: greedy text is transformers', seeded text the plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, Grammar, SamplingParams
from paceline.drafters import DRAFTERS
from paceline.model.copies import quantised_copy
from paceline.model.names import PREFIX
from paceline.model.target import CausalModel

TOKENS = 20
CHATS = (
    "What is the capital of France? Answer with one word.",
    "Repeat this list exactly, nothing else: apples, pears, plums, apples, pears, plums.",
)
# Of the model itself, of another vocabulary, or of nothing: none is trained for it.
SPECS = {
    "none": "none",
    "auto": "auto",
    "ngram": "ngram:min=1",
    "suffix": "suffix",
    "lookahead": "lookahead:window=3,ngram=3",
    "recycling": "recycling:k=2,nodes=6",
    "early_exit": "early_exit:layers=8",
    "quantized": "quantized:int8",
    "layer_skip": "layer_skip:skip=10x11x12x13x14x15x16x17x18x19",
    "model": "model:paceline/tiny-draft",
    "tree": "tree:paceline/tiny-draft,nodes=6",
    "hybrid": "hybrid:suffix+ngram:min=1",
}
# Trained for it, where this version ships them.
TRAINED = {
    "eagle": "smollm2-eagle",
    "eagle2": "smollm2-eagle",
    "eagle3": "smollm2-eagle3",
    "medusa": "smollm2-medusa",
    "model": "smollm2-draft",
}
SEEDED = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_p=0.9, seed=5)
GREEDY = SamplingParams(max_tokens=TOKENS)


def prompts(llm: LLM) -> list[list[int]]:
    return [llm.render_chat([{"role": "user", "content": text}]) for text in CHATS]


@pytest.fixture(scope="module")
def by_transformers(model: str, plain: LLM) -> list[list[int]]:
    """Greedy answers of ``transformers.generate`` in float32, with its end tokens."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for ids in prompts(plain):
        out = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
        )
        answers.append(out[0, len(ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def seeded(plain: LLM) -> list[int]:
    return plain.generate(prompts(plain)[0], SEEDED)[0].token_ids


def test_every_kind_of_draft_is_here() -> None:
    without = {"datastore", "mtp", "dflash", "dspark"}  # nothing of the kind is there for it
    assert {*SPECS, *TRAINED} == set(DRAFTERS) - without


def check(llm: LLM, greedy: list[list[int]], seeded: list[int]) -> int:
    """Both greedy chats and a seeded one in one batch; the accepted tokens."""
    asked = prompts(llm)
    found = llm.generate([*asked, asked[0]], [GREEDY, GREEDY, SEEDED])
    assert [completion.token_ids for completion in found] == [*greedy, seeded]
    return sum(completion.stats.accepted_tokens for completion in found)


@pytest.mark.parametrize("kind", SPECS)
def test_text_is_that_of_transformers(
    plain: LLM, by_transformers: list[list[int]], seeded: list[int], kind: str
) -> None:
    llm = plain.with_draft(SPECS[kind], draft_length=4, kv_cache_memory=100 << 20, max_batch_size=3)
    accepted = check(llm, by_transformers, seeded)
    assert accepted or kind in ("none", "lookahead", "layer_skip", "model", "tree")
    llm.close()


@pytest.mark.parametrize("kind", TRAINED)
def test_trained_drafts(
    plain: LLM, by_transformers: list[list[int]], seeded: list[int], kind: str
) -> None:
    import paceline

    assets = Path(paceline.__file__).parent / "assets" / TRAINED[kind]
    if not any(assets.glob("*.safetensors")):
        pytest.skip(f"this version ships no {PREFIX}{TRAINED[kind]}")
    spec = f"{kind}:{PREFIX}{TRAINED[kind]}"
    llm = plain.with_draft(spec, draft_length=4, kv_cache_memory=100 << 20, max_batch_size=3)
    assert check(llm, by_transformers, seeded) > 0
    llm.close()


def test_it_answers_sensibly(plain: LLM) -> None:
    """Weights, tokenizer and chat template belong together."""
    answers = plain.generate(prompts(plain), GREEDY)
    assert "Paris" in answers[0].text
    assert answers[0].finish_reason == "stop", "the end of its turn ends the answer"
    assert "apples, pears" in answers[1].text


def test_a_stream_is_the_text_at_the_end(plain: LLM) -> None:
    llm = plain.with_draft("ngram:min=1", draft_length=4, kv_cache_memory=100 << 20)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, logprobs=2)
    for ids in prompts(llm):
        events = list(llm.stream(ids, params))
        (final,) = [event.completion for event in events if event.completion is not None]
        assert "".join(event.text for event in events) == final.text
        assert [t for event in events for t in event.token_ids] == final.token_ids
        assert plain.generate(ids, params)[0].text == final.text
    llm.close()


def test_a_schema(plain: LLM) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "river": {"enum": ["Seine", "Danube"]},
            "people": {"type": "integer", "maximum": 9_999_999},
        },
        "required": ["city", "river", "people"],
        "additionalProperties": False,
    }
    ids = plain.render_chat([{"role": "user", "content": "Describe Paris as a JSON object."}])
    params = SamplingParams(max_tokens=60, grammar=Grammar.json(schema))
    llm = plain.with_draft("hybrid:suffix+ngram:min=1", draft_length=4, kv_cache_memory=100 << 20)
    ours, theirs = llm.generate(ids, params)[0], plain.generate(ids, params)[0]
    assert ours.token_ids == theirs.token_ids and ours.finish_reason == "stop"
    assert set(json.loads(ours.text)) == {"city", "river", "people"}
    llm.close()


def test_four_bits_in_float32_run_on_the_kernels(model: str) -> None:
    """Where one code of an activation that is rounded otherwise moves all logits by 4 %."""
    target = CausalModel.load(model, "float32", "cpu")
    if target.backend.name != "native":
        pytest.skip(f"no kernels for float32 here: {target.backend_refusal}")
    assert quantised_copy(target, "int4").backend.name == "native"
    assert CausalModel.load(model, "float32", "cpu", quantize="int4").backend.name == "native"
