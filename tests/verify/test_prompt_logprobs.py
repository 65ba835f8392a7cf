"""How likely a prompt is: as transformers says, however the prompt is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import LLM, SamplingParams
from paceline.build import EngineOptions, cache_blocks
from paceline.core.batch import Batch, ModelOutput
from paceline.errors import ConfigError
from paceline.model.paged.cache import bytes_per_token
from paceline.model.target import CausalModel
from paceline.verify import logprobs as prompts
from paceline.verify.logprobs import _MAX_LOGITS_AT_ONCE, prompt_logprobs

TEXT = "Once upon a time there was a little girl named Lily. She loved to play in the garden. " * 3


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("paceline/tiny", dtype="float32", draft="ngram", draft_length=4)


def reference(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens behind every token but the last, by transformers alone."""
    from transformers import AutoModelForCausalLM

    from paceline.model.names import resolve

    model = AutoModelForCausalLM.from_pretrained(resolve("paceline/tiny"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1)


def scored(llm: LLM, prompts: list[list[int]], **fields: int) -> list[list[float]]:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 3), prompt_logprobs=2, **fields)
    completions = llm.generate(prompts, params)
    for completion in completions:
        entries = completion.prompt_logprobs
        assert entries is not None and isinstance(completion.prompt, list)
        assert [entry.token_id for entry in entries] == completion.prompt[1:]
        assert all(len(entry.top) == 2 for entry in entries)
    return [
        [entry.logprob for entry in completion.prompt_logprobs or ()] for completion in completions
    ]


def test_as_transformers_says(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    table = reference(llm, ids)
    expected = table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    scores = torch.tensor(scored(llm, [ids])[0])
    assert torch.allclose(scores, expected, atol=2e-4)
    completion = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=3))[0]
    for row, entry in zip(table, completion.prompt_logprobs or (), strict=True):
        best = torch.topk(row, 3)
        assert [token for token, _ in entry.top] == best.indices.tolist()


def test_whatever_is_cached_or_runs_beside_it(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    alone = scored(llm, [ids])[0]
    llm.generate([ids], SamplingParams(max_tokens=2))  # its blocks are there to be shared
    assert scored(llm, [ids])[0] == pytest.approx(alone, abs=2e-4)
    both = scored(llm, [ids, ids[:7], ids[:1], ids], n=2)
    assert len(both) == 8
    for scores in (*both[:2], *both[6:]):
        assert scores == pytest.approx(alone, abs=2e-4)
    assert both[2] == pytest.approx(alone[:6], abs=2e-4) and both[4] == []


@pytest.mark.parametrize("chunk", [5, 16])
def test_in_chunks_and_after_giving_up_the_cache(llm: LLM, chunk: int) -> None:
    """The cache holds one and a half of the sequences: the younger is read twice."""
    ids = llm.tokenizer.encode(TEXT)
    alone = scored(llm, [ids])[0]
    small = llm.with_draft("ngram", draft_length=4, max_batch_size=4)
    scheduler = small.engine.scheduler
    object.__setattr__(scheduler.config, "prefill_chunk", chunk)
    pool = small.engine.cache.pool
    kept = pool.allocate(pool.available - 2 * (len(ids) + 60) // 16 - 2, None)
    texts = scored(small, [ids, ids], max_tokens=60)
    for block in kept:
        pool.release(block)
    for scores in texts:
        assert scores == pytest.approx(alone, abs=2e-4)


class Sizes(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


def test_rows_are_scored_in_parts() -> None:
    """A chunk of 512 rows of a large vocabulary in float32 would be 307 MB, and several of them."""
    torch.manual_seed(0)
    logits = torch.randn(150, 50_000, dtype=torch.bfloat16)
    tokens = torch.randint(50_000, (150,)).tolist()
    with Sizes() as made:
        entries = prompt_logprobs(logits, tokens, 2)
    assert made.largest <= 4 * _MAX_LOGITS_AT_ONCE
    whole = torch.log_softmax(logits.float(), -1)
    assert [entry.token_id for entry in entries] == tokens
    assert [entry.logprob for entry in entries] == whole[range(150), tokens].tolist()
    best = whole.topk(2).values.tolist()
    assert [[value for _, value in entry.top] for entry in entries] == best


def test_rows_of_a_step_are_bounded_and_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = llm.tokenizer.encode(TEXT)
    alone = scored(llm, [ids])[0]
    width = llm.target.vocab_size
    monkeypatch.setattr(prompts, "_MAX_LOGITS_PER_STEP", 7 * width)
    few, most = llm.with_draft(), 0

    call = CausalModel.__call__

    def watched(model: CausalModel, batch: Batch, *more: Any) -> ModelOutput:
        nonlocal most
        out = call(model, batch, *more)
        most = max(most, len(out.logits))
        return out

    monkeypatch.setattr(CausalModel, "__call__", watched)
    both = scored(few, [ids, ids])
    assert most == 7 + 1  # seven scored, and the last of a prompt that is done, to go on from
    assert all(scores == pytest.approx(alone, abs=2e-4) for scores in both)


def test_what_scoring_takes_is_no_memory_of_the_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, target = EngineOptions(max_batch_size=64), llm.target
    monkeypatch.setattr(CausalModel, "free_memory", lambda self: 2**28)
    blocks, needed = [], []
    for rows in (1, 512):
        monkeypatch.setattr(prompts, "_MAX_LOGITS_PER_STEP", rows * target.vocab_size)
        blocks.append(cache_blocks(options, target))
        needed.append(prompts.scoring_bytes(target.vocab_size, 2048))
    assert needed[1] >= 512 * target.vocab_size * 4
    per_block = 16 * bytes_per_token(target.cache_shapes, target.cache_dtype)
    fewer = (needed[1] - needed[0]) / 4 / per_block  # of a quarter of the memory
    assert blocks[0] - blocks[1] == pytest.approx(fewer, abs=1)


def test_a_completion_without_them_has_none(llm: LLM) -> None:
    assert llm.generate("Once", SamplingParams(max_tokens=1))[0].prompt_logprobs is None
    for wrong in (-1, 21, 0.5, True):
        with pytest.raises(ConfigError, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=wrong)


def test_lower_priorities_start_first(llm: LLM) -> None:
    small = llm.with_draft(max_batch_size=1)
    started = []
    for place, priority in enumerate((5, 0, -3, 0, 5)):
        params = SamplingParams(max_tokens=2, priority=priority)
        (request,) = small.prepare("Once upon", params, place)
        started.append(request)
    small.owner.enqueue(started)
    while small.engine.has_work:
        small.owner.step()
    order = sorted(started, key=lambda request: request.seq.started)
    assert [request.number for request in order] == [2, 1, 3, 0, 4]


def test_the_first_event_of_a_stream_has_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, prompt_logprobs=2)
    first, *rest = list(llm.stream("Once upon a time", params))
    done = rest[-1].completion
    assert done is not None and done.prompt_logprobs
    assert first.prompt_logprobs == done.prompt_logprobs
    assert all(event.prompt_logprobs is None for event in rest)
