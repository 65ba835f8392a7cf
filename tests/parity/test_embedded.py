"""Parity on the embedded pair, in float32 and in bf16.

In bf16 the same logits come out a rounding step apart when a row is computed in another batch
shape, so a tie may fall the other way. Each difference is re-scored: the two tokens' scores must
be within one rounding step of the logits, or the test fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, adjusted, laws_of_scores
from paceline.core.sequence import Sequence
from paceline.llm import LLM
from paceline.model.target import CausalModel

PROMPTS: list[str | list[int]] = [
    "Once upon a time, there was a little fox who lived in the woods.",
    "<|user|>Tom has 12 apples and buys 30 more. How many apples has he?<|end|><|assistant|>",
    "def add(a, b):\n",
    "<|user|>How do I list all files of a folder?<|end|><|assistant|>",
    "The cat sat on the mat. The cat sat on the mat. The cat",
]
REQUESTS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "temperature 0.7": SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True),
    "temperature 1": SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True),
    "top-p": SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True),
}
DRAFTERS = {
    "model": ("paceline/tiny-draft", 4),
    "model, adaptive": ("paceline/tiny-draft", "auto"),
    "ngram": ("ngram", 6),
    "tree": ("tree:paceline/tiny-draft,branching=3x2x1", 3),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM("paceline/tiny", dtype=request.param)
    yield llm
    llm.close()


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_same_text_as_plain_decoding(plain: LLM, drafter: str, batch: int) -> None:
    draft, length = DRAFTERS[drafter]
    dtype = str(plain.target.dtype).removeprefix("torch.")
    llm = LLM("paceline/tiny", draft, dtype=dtype, draft_length=length, max_batch_size=batch)
    for params in REQUESTS.values():
        expected = plain.generate(PROMPTS, params)
        accepted = 0
        for want, got in zip(expected, llm.generate(PROMPTS, params), strict=True):
            accepted += got.stats.accepted_tokens
            if got.token_ids != want.token_ids:
                assert plain.target.dtype != torch.float32, "float32 has no excuse"
                explain(plain, want.prompt, want.token_ids, got.token_ids, params)
        assert accepted > 0 or drafter == "ngram"
    llm.close()


def explain(
    llm: LLM, prompt: str | list[int], want: list[int], got: list[int], params: SamplingParams
) -> None:
    """Assert that the first difference is a near-tie of one rounding step of the logits."""
    at = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
    tokens = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    length = len(tokens)
    tokens += want[:at]
    logits = fresh_logits(llm.target, tokens)
    step = rounding_step(float(logits[[want[at], got[at]]].abs().max()), llm.target.dtype)
    seq = Sequence(0, tokens, length, params)
    rows = Rows((seq,), (0,))
    scores = adjusted(logits[None], rows)
    scale = 1.0
    if not params.greedy:
        scale = 1.0 / params.temperature
        noise = gumbel([params.seed or 0], [len(tokens)], logits.shape[0])
        law = laws_of_scores(scores, [params])
        # Two tokens may both be at the edge of the nucleus: compare what would be without it.
        scores = scores * scale + noise
        assert float(law[0, want[at]]) > 0 or float(law[0, got[at]]) > 0
    gap = abs(float(scores[0, want[at]] - scores[0, got[at]]))
    on_edge = params.top_p < 1 and min(float(law[0, want[at]]), float(law[0, got[at]])) == 0
    assert gap <= 2 * step * scale or on_edge, (
        f"token {at}: {want[at]} or {got[at]}, {gap} apart, a rounding step is {step}"
    )


def rounding_step(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of ``dtype`` at ``value``."""
    return float(torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(value, 1e-6))))


@torch.inference_mode()
def fresh_logits(model: CausalModel, tokens: list[int]) -> torch.Tensor:
    """float32 [vocab] after the last token, from one forward without any history."""
    from paceline.build import new_cache
    from paceline.model.cache import Feed

    cache = new_cache(model, 2 + len(tokens) // 16)
    cache.admit(0, tokens)
    cache.reserve(0, len(tokens))
    return model(cache.pack([Feed(0, 0, tokens)]), cache).logits[-1].float()
