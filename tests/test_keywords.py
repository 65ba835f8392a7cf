"""What users of vLLM, llama-cpp-python and transformers type."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, ConfigError, PacelineError, PromptError, SamplingParams
from paceline.core.keywords import TABLES, forgiving
from paceline.settings import EngineSettings, entries
from support.command_lines import every_command
from support.diagonal import diagonal
from support.every_drafter import SPECS, TARGET

PROMPT = "One day, the little"


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(TARGET, draft=None, max_model_len=64) as llm:
        yield llm


def test_every_name_is_mapped_to_one_of_ours_or_says_what_to_do() -> None:
    known = {item.name for _, command in every_command() for item in command.params}
    known |= {entry.name for entry in entries(EngineSettings)}
    for function in (LLM.__init__, LLM.generate, SamplingParams):
        known |= set(signature(function).parameters)
    for table in TABLES.values():
        for theirs, listed in table.items():
            for ours in [listed] if isinstance(listed, str) else listed:
                assert ours in known or " " in ours, f"{theirs}: {ours}"
                assert ours != theirs


def test_a_name_is_told_once_and_stands_for_one(caplog: pytest.LogCaptureFixture) -> None:
    @forgiving("f")
    def f(config: str = "", *, max_batch_size: int = 0) -> tuple[str, int]:
        return config, max_batch_size

    for _ in range(2):
        assert f(profile="a", max_num_seqs=3) == ("a", 3)  # type: ignore[call-arg]
    told = [(record.name, record.message) for record in caplog.records]
    assert told == [
        ("paceline", "note: f: profile is config here"),
        ("paceline", "note: f: max_num_seqs is max_batch_size here"),
    ]
    for twice in ({"config": "a"}, {}):
        with pytest.raises(ConfigError, match=r"^f: profile is config here; give it once$"):
            f(*([] if twice else ["a"]), profile="b", **twice)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"give it once"):
        f(max_num_seqs=3, concurrency=4)  # type: ignore[call-arg]


def test_what_one_writes_for_vllm() -> None:
    n_gram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    engine = {"tensor_parallel_size": 1, "max_num_seqs": 2, "speculative_config": n_gram}
    with LLM(model=TARGET, max_model_len=48, **engine) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=99, ignore_eos=True)
        outputs = llm.generate([PROMPT], sampling_params=params, use_tqdm=False)  # type: ignore[call-arg]
        assert outputs[0].outputs[0].text == outputs[0].text
        ids = llm.get_tokenizer().encode(PROMPT)
        dicts = [
            {"prompt": PROMPT},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": ids, "prompt": ""},
        ]
        assert {o.text for o in llm.generate(dicts, params)} == {outputs[0].text}  # type: ignore[arg-type]
        array, tensor = np.array(ids), torch.tensor(ids)
        arrays: list[Any] = [array, tensor[None], [array, tensor], {"prompt_token_ids": array}]
        for prompts in arrays:
            assert {o.text for o in llm.generate(prompts, params)} == {outputs[0].text}
        refused: list[Any] = [{"prompt": PROMPT, "multi_modal_data": 1}, array / 2, array[0]]
        for prompts in (*refused, llm.tokenizer(PROMPT)):  # type: ignore[operator]
            with pytest.raises(PromptError, match="give texts or lists of token ids"):
                llm.generate(prompts, params)
        assert llm.max_model_len == 48
        assert len(llm.get_tokenizer().encode(PROMPT)) + len(outputs[0].token_ids) == 48
        assert llm.engine.scheduler.config.max_batch_size == 2
        assert llm.drafts == ("ngram:min=4,length=3,candidates=1",)
    with pytest.raises(PacelineError, match="closed"):
        llm.generate(PROMPT)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_model_length": 5}, "no keyword max_model_length; did you mean max_model_len?"),
        ({"gpu_memory_utilization": 0.9}, "kv_cache_memory=.*--kv-cache-memory 2G"),
        ({"max_num_seqs": 4, "max_batch_size": 4}, "max_num_seqs is max_batch_size here"),
        ({"logits_processors": [print]}, "SamplingParams"),
        ({"enable_lora": True}, "give adapters as lora={name: folder}"),
        ({"max_loras": 4}, "any number of adapters"),
        ({"max_lora_rank": 32}, "ranks up to 64"),
        ({"lora_modules": ["sql=adapters/sql"]}, "lora is .*give adapters as"),
        ({"speculative_config": {"method": "warp"}}, "num_speculative_tokens"),
        ({"max_model_len": 10**6, "draft": None}, "sees"),
        ({"threads": 1}, "OMP_NUM_THREADS"),
        ({"max_num_batched_tokens": 2048}, "leave it out"),  # not: did you mean max_batch_size?
        ({"data_parallel_size": 2}, "behind a router"),
        ({"load_in_4bit": True}, 'use quantize="int4"'),
        ({"quantization": "awq"}, "quantize is 'awq'; .*AWQ, GPTQ .* are recognised without it"),
        ({"qwertz": 1}, "it knows model, draft"),
    ],
)
def test_what_an_llm_refuses(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")) as refused:
        LLM(TARGET, **keywords)
    assert "\n" not in str(refused.value)


def test_what_parameters_and_calls_refuse(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="did you mean max_tokens"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"Grammar\.json"):
        SamplingParams(guided_decoding=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean params"):
        plain.generate(PROMPT, param=SamplingParams())  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean sampling_params"):
        plain.generate(PROMPT, sampling_parms=SamplingParams())  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r'LLM\(lora={"sql": folder}\), and name it'):
        plain.generate(PROMPT, lora_request=object())  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="give functions"):
        SamplingParams(logits_processors=("no",))
    assert SamplingParams(repeat_penalty=1.5).repetition_penalty == 1.5  # type: ignore[call-arg]


def capitals(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on the text: an even token after an odd one."""
    return logits.masked_fill(torch.arange(len(logits)) % 2 == len(output) % 2, -torch.inf)


SAMPLED: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5}}


@pytest.mark.parametrize(
    ("kind", "sampled"), diagonal([kind for kind in SPECS if kind != "none"], list(SAMPLED))
)
def test_logits_processors_give_the_same_text_with_every_drafter(
    plain: LLM, kind: str, sampled: str
) -> None:
    params = SamplingParams(max_tokens=20, logits_processors=(capitals,), **SAMPLED[sampled])
    (expected,) = plain.generate(PROMPT, params)
    assert [token % 2 for token in expected.token_ids[:4]] == [1, 0, 1, 0]
    beside = plain.with_draft(SPECS[kind], draft_length=3)
    assert beside.generate(PROMPT, params)[0].token_ids == expected.token_ids


def test_what_a_logits_processor_gets_wrong_ends_its_request(plain: LLM) -> None:
    params = SamplingParams(max_tokens=5, logits_processors=(lambda output, logits: None,))
    bad, good = plain.generate([PROMPT] * 2, [params, SamplingParams(max_tokens=5)])
    assert bad.finish_reason == "error" and "return its logits" in str(bad.error)
    assert good.error is None
