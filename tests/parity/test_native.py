"""On the native kernels drafting never changes a bit: no tie excuses another text, in any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.llm import LLM
from paceline.model.paged.cache import bytes_per_token
from paceline.request.completion import Completion
from support.every_drafter import SPECS

PROMPTS = [
    "Once upon a time, there was a little fox who lived in the woods.",
    "<|user|>Tom has 12 apples and buys 30 more. How many apples has he?<|end|><|assistant|>",
    "def add(a, b):\n",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "Once upon a time, there was a little fox who lived in the woods. " * 4,
]
TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
REQUESTS = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=1.0, seed=4),
    "top-p": replace(GREEDY, temperature=0.8, top_p=0.9, seed=5),
}
# Longer drafts, and the length that adapts itself.
MORE = {
    "model, adaptive": ("paceline/tiny-draft", "auto"),
    "hybrid, adaptive": ("hybrid:suffix+eagle3:paceline/tiny-eagle3", "auto"),
    "ngram, long": ("ngram", 16),
}
DRAFTS: dict[str, tuple[str, int | str]] = {name: (spec, 4) for name, spec in SPECS.items()} | MORE


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def texts(
    llm: LLM, part: slice = slice(None), tokens: int = TOKENS, without: str = ""
) -> dict[str, list[list[int]]]:
    found: dict[str, list[Completion]] = {}
    for name, params in REQUESTS.items():
        if name != without:
            found[name] = llm.generate(PROMPTS[part], replace(params, max_tokens=tokens))
    return {name: [one.token_ids for one in many] for name, many in found.items()}


@pytest.fixture(scope="module")
def alone(dtype: str) -> Iterator[LLM]:
    """Plain decoding, one request at a time."""
    llm = LLM("paceline/tiny", draft="none", dtype=dtype, backend="native", max_batch_size=1)
    assert llm.target.backend.name == "native"
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def coded() -> Iterator[LLM]:
    """Plain decoding, one request at a time, with keys and values in 8 bits."""
    llm = LLM(
        "paceline/tiny",
        draft="none",
        dtype="bfloat16",
        backend="native",
        max_batch_size=1,
        kv_cache_dtype="int8",
    )
    assert llm.target.backend.name == "native" and llm.engine.cache.dtype == torch.int8
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def coded_plain(coded: LLM) -> dict[str, list[list[int]]]:
    return texts(coded)


@pytest.fixture(scope="module")
def plain(alone: LLM) -> dict[str, list[list[int]]]:
    return texts(alone)


@pytest.mark.parametrize("draft", list(DRAFTS))
def test_the_same_text(
    alone: LLM, plain: dict[str, list[list[int]]], dtype: str, draft: str
) -> None:
    """Every drafter alone in one dtype and in company in the other; both ways in both dtypes. So
    with what is sampled, from all tokens or from the likeliest."""
    spec, length = DRAFTS[draft]
    in_company = (list(DRAFTS).index(draft) + (dtype == "float32")) % 2 == 0
    part = slice(None) if in_company else slice(1, 3)  # one after another takes longer
    llm = alone.with_draft(spec, draft_length=length, max_batch_size=4 if in_company else 1)
    found = texts(llm, part, without="top-p" if in_company else "seeded")
    llm.close()
    assert found == {name: plain[name][part] for name in found} and len(found) == 2


# One without a cache of its own, one with, those that read the target's, one that reads features.
@pytest.mark.parametrize("draft", ["ngram", "model", "early_exit", "quantized", "eagle3"])
def test_the_same_text_of_a_cache_in_8_bits(
    coded: LLM, coded_plain: dict[str, list[list[int]]], draft: str
) -> None:
    llm = coded.with_draft(SPECS[draft], draft_length=4, max_batch_size=4)
    assert texts(llm) == coded_plain


def test_more_fits_into_a_cache_in_8_bits(coded: LLM) -> None:
    memory, target = 1 << 20, coded.target
    cache = coded.with_draft(kv_cache_memory=memory).engine.cache
    exact, few = (
        bytes_per_token(target.cache_shapes, kind) for kind in (target.dtype, cache.dtype)
    )
    assert cache.num_blocks == memory // (16 * few) > 1.5 * (memory // (16 * exact))
    held = sum(part.nbytes for n in range(target.num_layers) for part in cache.kv(n))
    assert held == cache.num_blocks * 16 * few


def test_shared_beginnings_in_8_bits(coded: LLM) -> None:
    prompts, params = [PROMPTS[-1] + more for more in ("One", "Two")], REQUESTS["greedy"]
    apart = coded.with_draft(prefix_sharing=False).generate(prompts, params)
    llm = coded.with_draft()
    one, two = (llm.generate(prompt, params)[0] for prompt in prompts)
    assert two.stats.cached_tokens > 0
    assert [one.token_ids, two.token_ids] == [done.token_ids for done in apart]


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("draft", ["model", "eagle", "eagle3", "medusa"])
def test_acceptance_is_reproducible(alone: LLM, draft: str) -> None:
    """Drafts' bits are a row's own, too: in company the very same tokens are drafted."""
    counts = []
    for batch in (1, 4):
        llm = alone.with_draft(SPECS[draft], draft_length=4)
        found = llm.generate(PROMPTS[:batch], REQUESTS["greedy"])
        counts.append([(one.draft_mask, one.stats.target_steps) for one in found[:1]])
        llm.close()
    assert counts[0] == counts[1] and any(counts[0][0][0])


def test_chunks_and_preemption(alone: LLM, plain: dict[str, list[list[int]]]) -> None:
    """A cache too small for all, so that sequences give up their blocks and are read again."""
    target = alone.target
    llm = alone.with_draft(
        "ngram",
        draft_length=4,
        max_batch_size=5,
        kv_cache_memory=208 * bytes_per_token(target.cache_shapes, target.dtype),
    )
    scheduler = llm.engine.scheduler
    scheduler.config = replace(scheduler.config, prefill_chunk=7)
    found = texts(llm, tokens=40)  # shorter ones are promised all that they may need
    assert scheduler.preemptions > 0
    llm.close()
    assert {name: [own[:TOKENS] for own in many] for name, many in found.items()} == plain
