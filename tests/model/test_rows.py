"""Models whose rotations or scales transformers takes from the whole batch: each sequence's text is
that of ``generate`` for it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.core.params import SamplingParams
from paceline.errors import UnsupportedModelError
from paceline.lab.certify.decoding import Start, next_probabilities
from paceline.llm import LLM
from paceline.model.backends.reference.rows import correct_rows
from paceline.model.target import CausalModel
from support.cache_invariants import check_cache
from support.tiny_models import SENTENCES

SWITCH = 48
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": SWITCH,
}
MINISTRAL: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0},
    **{"original_max_position_embeddings": SWITCH, "mscale_all_dim": 1.0},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# name -> configuration, its options, options of transformers' generate
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Without a cache: that of 5.17 loses the text where a Phi becomes long, and that of other
    # architectures lets keys with short factors stand beside those with long ones.
    "phi3": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH},
        {"use_cache": False},
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.5},
            "original_max_position_embeddings": SWITCH,
            **EXPERTS,
        },
        {"use_cache": False},
    ),
    "llama": ("LlamaConfig", {"rope_parameters": LONGROPE, "head_dim": 8}, {"use_cache": False}),
    "ministral3": ("Ministral3Config", {"rope_parameters": MINISTRAL, "head_dim": 8}, {}),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"intermediate_size_mlp": 40, "num_local_experts": 2, "num_experts_per_tok": 1},
            **{"attention_chunk_size": 32, "no_rope_layers": [1, 0], "head_dim": 8},
            "layer_types": ["chunked_attention", "full_attention"],
            **{"attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.5},
        },
        {},
    ),
}
LENGTHS = (10, 40, 47, 48, 49, 90)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def tiny(kind: str, **changes: Any) -> Any:
    name, options, _ = KINDS[kind]
    config = getattr(transformers, name)(
        **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 40},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 256, "initializer_range": 0.3},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **options | changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    found = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in LENGTHS]
    found[2][:32] = found[5][:32]  # whole blocks of a longer one
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    from embedded_target import train_tokenizer

    tokenizer = train_tokenizer(SENTENCES, 320)
    root = tmp_path_factory.mktemp("rows")

    def folder(kind: str) -> str:
        if not (root / kind).exists():
            tiny(kind).save_pretrained(root / kind)
            tokenizer.save_pretrained(root / kind)
        return str(root / kind)

    return folder


@cache
def expected(folder: str, kind: str) -> list[list[int]]:
    return [alone(folder, kind, prompt) for prompt in prompts()]


def alone(folder: str, kind: str, prompt: list[int]) -> list[int]:
    """What transformers generates from one prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=PARAMS.max_tokens,
        do_sample=False,
        eos_token_id=None,
        **KINDS[kind][2],
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("draft", [None, "ngram", "self"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_texts_of_a_batch_are_those_of_transformers_one_by_one(
    saved: Callable[[str], str], kind: str, draft: str | None
) -> None:
    """Below the length at which rotations change, across it and above it; in chunks, with
    shared prefixes, and once more from the cache."""
    folder = saved(kind)
    spec = f"model:{folder}" if draft == "self" else draft
    options: dict[str, Any] = {} if spec is None else {"draft_length": 5}
    llm = LLM(folder, spec, dtype="float32", max_batch_size=6, **options)
    llm.engine.scheduler.config = replace(
        llm.engine.scheduler.config, prefill_chunk=20, max_step_tokens=70
    )
    for _ in range(2):
        found = llm.generate(prompts(), PARAMS)
        assert [c.token_ids for c in found] == expected(folder, kind)
        if draft == "self":  # whose rotations are the target's, in long texts as well
            assert all(c.stats.acceptance_rate == 1 for c in found)
    check_cache(llm.engine.cache)
    llm.close()


def test_a_sequence_that_becomes_long_is_read_once_more(saved: Callable[[str], str]) -> None:
    llm = LLM(saved("phi3"), draft="none", dtype="float32", max_batch_size=6)
    assert llm.engine.cache.rope_switch == SWITCH
    llm.generate(prompts(), PARAMS)
    crossing = [n for n in LENGTHS if n <= SWITCH < n + PARAMS.max_tokens - 1]
    assert llm.engine.scheduler.preemptions == len(crossing) == 3
    llm.close()


def test_prompts_are_scored_as_the_prompt_alone(saved: Callable[[str], str]) -> None:
    """Also those of a sequence that becomes long later."""
    llm = LLM(saved("phi3"), draft="none", dtype="float32")
    prompt = prompts()[1]
    short, long = (
        llm.generate([prompt], replace(PARAMS, max_tokens=n, prompt_logprobs=0))[0]
        for n in (1, PARAMS.max_tokens)
    )
    assert short.prompt_logprobs == long.prompt_logprobs
    assert len(short.prompt_logprobs or ()) == len(prompt) - 1
    llm.close()


def test_a_certification_scores_each_text_by_its_own_length(saved: Callable[[str], str]) -> None:
    """The beginning that texts have in common is rotated as the shortest of them."""
    start = Start(tuple(prompts()[2]), SamplingParams(temperature=1.0))
    model = CausalModel.load(saved("phi3"), "float32", "cpu", backend="reference")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved("phi3"), dtype=torch.float32)
    strings = [(), (7,), (8, 9), (7, 7, 7)]
    distributions = next_probabilities(model, start, strings)
    for string, distribution in zip(strings, distributions, strict=True):
        ids = torch.tensor([[*start.tokens, *string]])
        with torch.inference_mode():
            wanted = theirs(ids, use_cache=False).logits[0, -1].softmax(-1)
        assert torch.allclose(distribution, wanted, atol=1e-5), string


def test_only_a_context_beyond_the_original_one_has_two_rotations() -> None:
    assert correct_rows(tiny("phi3"), 256) == SWITCH
    assert correct_rows(tiny("phi3"), SWITCH) is None
    assert correct_rows(tiny("phi3", rope_parameters=None), 256) is None


def test_rotations_that_go_on_changing_are_refused() -> None:
    """Dynamic scaling is plain within the context that it starts from, and refused beyond."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny("llama", rope_parameters=rope)
    assert correct_rows(model, 256) is None
    with pytest.raises(UnsupportedModelError, match=r"type dynamic goes on changing .* from 256"):
        correct_rows(model, 1024)


def test_outside_our_forwards_a_module_stays_as_it_was(tmp_path: Path) -> None:
    """The hooks are on the user's own module where ``generate`` of transformers is ours."""
    one, other = tiny("phi3"), tiny("phi3")
    correct_rows(other, 256)
    ids = torch.tensor([prompts()[5], prompts()[5][::-1]])
    with torch.no_grad():
        assert torch.equal(one(ids).logits, other(ids).logits)
