"""Parity on the embedded pair on the reference backend, in float32 and in bf16.

In bf16 the same logits come out a rounding step apart when a row is computed in another batch
shape, so a tie may fall the other way. Each difference is re-scored: the two tokens' scores must
tie within the rounding of the logits (`paceline.lab.certify.decoding`), or the test fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.lab.certify.decoding import explain
from paceline.llm import LLM
from paceline.request.completion import Completion

PROMPTS = [
    "Once upon a time, there was a little fox who lived in the woods.",
    "<|user|>Tom has 12 apples and buys 30 more. How many apples has he?<|end|><|assistant|>",
    "def add(a, b):\n",
    "<|user|>How do I list all files of a folder?<|end|><|assistant|>",
    "The cat sat on the mat. The cat sat on the mat. The cat",
]
REQUESTS = {
    "greedy": SamplingParams(max_tokens=11, ignore_eos=True),
    "temperature 0.7": SamplingParams(max_tokens=11, temperature=0.7, seed=3, ignore_eos=True),
    "temperature 1": SamplingParams(max_tokens=11, temperature=1.0, seed=4, ignore_eos=True),
    "top-p": SamplingParams(max_tokens=11, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True),
}
DRAFTERS = {
    "model": ("paceline/tiny-draft", 4),
    "model, adaptive": ("paceline/tiny-draft", "auto"),
    "ngram": ("ngram", 6),
    "medusa": ("medusa:paceline/tiny-medusa", 4),
    "tree": ("tree:paceline/tiny-draft,branching=3x2x1", 3),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM("paceline/tiny", draft="none", dtype=request.param, backend="reference")
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[str, list[Completion]]:
    return {name: plain.generate(PROMPTS, params) for name, params in REQUESTS.items()}


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_same_text_as_plain_decoding(
    plain: LLM, expected: dict[str, list[Completion]], drafter: str
) -> None:
    """Every drafter alone in one dtype and in company in the other; both ways in both dtypes."""
    draft, length = DRAFTERS[drafter]
    exact = plain.target.dtype == torch.float32
    in_company = (list(DRAFTERS).index(drafter) + exact) % 2 == 0
    part = slice(None) if in_company else slice(1, 3)  # one after another takes longer
    llm = plain.with_draft(draft, draft_length=length, max_batch_size=5 if in_company else 1)
    others = [name for name in REQUESTS if name != "greedy"]
    for name in ("greedy", others[(list(DRAFTERS).index(drafter) + exact) % len(others)]):
        params, accepted = REQUESTS[name], 0
        found = llm.generate(PROMPTS[part], params)
        for want, got in zip(expected[name][part], found, strict=True):
            accepted += got.stats.accepted_tokens
            prompt = plain.tokenizer.encode(want.prompt)
            other = explain(plain.target, prompt, want.token_ids, got.token_ids, params)
            if other is not None:
                assert not exact, "float32 has no excuse"
                assert other.is_tie, other
        # The adaptive length may find plain decoding faster, and ngram nothing.
        assert accepted > 0 or drafter in ("ngram", "model, adaptive")
    llm.close()
