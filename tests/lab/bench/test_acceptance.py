"""Draft acceptance: what bench counts in the engine is what transformers says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.core.params import SamplingParams
from paceline.lab.bench.engines import EngineFactory
from paceline.lab.bench.result import draft_figures
from paceline.lab.bench.runner import BenchRequest, Method
from paceline.llm import LLM
from support.engine_models import write_pair
from support.tiny_models import SMALL
from support.walked_drafts import Walk, greedy_drafts, greedy_texts, walk


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=31, initializer_range=0.3)).eval()


def test_walk_counts_by_hand() -> None:
    # From 0: [7, 8] agrees, 0 does not -> 2 accepted, the text's own 9 follows. From 3: only one
    # token may be drafted before the last; it is wrong. From 4: nothing is left to draft.
    text = [7, 8, 9, 5, 6]
    drafts = [[7, 8, 0], [1, 1, 1], [1, 1, 1], [4, 4, 4], [6, 6, 6]]
    counts = Walk(3)
    walk(text, drafts, 3, counts)
    assert (counts.steps, counts.drafted, counts.accepted, counts.committed) == (3, 4, 2, 5)
    assert counts.summary()["per_position"] == [0.5, 1.0, 0.0]
    assert counts.summary()["acceptance"] == 0.5


def test_drafts_equal_one_by_one_decoding() -> None:
    model = tiny(1)
    prompt, text = [3, 9, 4, 1], [2, 30, 11, 5, 5, 8]
    drafts = greedy_drafts(model, prompt, text, 4)
    for i, draft in enumerate(drafts):
        ids = prompt + text[:i]
        for token in draft:
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    assert len(drafts) == len(text)


def test_a_model_accepts_itself() -> None:
    model = tiny(2)
    counts = Walk(4)
    prompts = [[3, 9, 4, 1], [7, 2]]
    texts = greedy_texts(model, prompts, 21, frozenset())
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) == 21
        walk(text, greedy_drafts(model, prompt, text, 4), 4, counts)
    assert counts.accepted == counts.drafted == 2 * (4 * 4)  # 4 x (4 + 1) tokens, then one more
    assert counts.summary()["mean_accepted_length"] == 4.2


def test_texts_end_after_a_stop_token() -> None:
    model = tiny(2)
    free = greedy_texts(model, [[3, 9, 4, 1]], 16, frozenset())[0]
    stop = free[5]
    cut = greedy_texts(model, [[3, 9, 4, 1]], 16, frozenset([stop]))[0]
    assert cut == free[: free.index(stop) + 1]


def test_the_engine_accepts_what_transformers_says(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    llm = LLM(target, draft="none", dtype="float32")
    prompts = [[3, 9, 4, 1, 7], [7, 2], [11, 30, 5, 5, 8, 2, 19]]
    params = SamplingParams(max_tokens=16)
    engine = EngineFactory(llm).create(Method("draft", f"model:{draft}", 4), 2)
    measured = draft_figures(engine.run([BenchRequest(tuple(ids), params) for ids in prompts]))
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (target, draft)]
    counts, later = Walk(4), Walk(4)
    for prompt in prompts:
        (text,) = greedy_texts(models[0].eval(), [prompt], 16, llm.end_tokens)
        drafts = greedy_drafts(models[1].eval(), prompt, text, 4)
        for walked in (counts, later):
            walk(text, drafts, 4, walked)
        # The step that reads the prompt drafts, too; mean_accepted_tokens does not count it.
        run = next((n for n in range(min(4, len(text) - 1)) if drafts[0][n] != text[n]), 4)
        later.steps, later.committed = later.steps - 1, later.committed - run - 1
    expected = counts.summary()
    assert measured["drafted"] == expected["drafted"]
    assert measured["acceptance_rate"] == pytest.approx(expected["acceptance"], abs=1e-3)
    length = expected["mean_accepted_length"]
    assert measured["mean_accepted_length"] == pytest.approx(length, abs=1e-3)
    length = later.summary()["mean_accepted_length"]
    assert measured["mean_accepted_tokens"] == pytest.approx(length, abs=1e-3)
