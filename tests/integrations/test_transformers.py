"""``custom_generate=generate``: the text of plain ``model.generate``, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
)

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.integrations.transformers import SpeculativeOutput, forget, generate
from paceline.integrations.transformers import decode as sharing
from paceline.model.names import resolve
from paceline.model.target import CausalModel

HUB = Path(__file__).resolve().parents[2] / "examples" / "hub"
PROMPTS = ["Once upon a time", "The big dog ran to the park. The big dog ran to"]
DRAFTS = (
    "none",
    "suffix",
    "ngram",
    "paceline/tiny-draft",
    "tree:paceline/tiny-draft,branching=2x2x1",
    "eagle3:paceline/tiny-eagle3,nodes=8",
    "medusa:paceline/tiny-medusa",
    "hybrid:suffix+ngram",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve("paceline/tiny"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(resolve("paceline/tiny"), padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    """Two rows, the first of them padded."""
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


@pytest.fixture
def one(inputs: Any) -> dict[str, torch.Tensor]:
    """The longer row alone."""
    return {name: value[1:] for name, value in inputs.items()}


def ours(model: Any, inputs: Any, **more: Any) -> Any:
    options = {"custom_generate": generate, "draft": "eagle3:paceline/tiny-eagle3"}
    options |= {"draft_length": 3, "max_new_tokens": 16}
    return model.generate(**inputs, **(options | more))


def plain(model: Any, inputs: Any, **more: Any) -> Any:
    return model.generate(**inputs, **({"max_new_tokens": 16, "do_sample": False} | more))


@pytest.fixture(scope="module")
def whole(model: Any, inputs: Any) -> torch.Tensor:
    """The plain texts of both rows."""
    return plain(model, inputs)


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_of_a_padded_batch(
    model: Any, inputs: Any, whole: torch.Tensor, draft: str
) -> None:
    assert torch.equal(ours(model, inputs, draft=draft, do_sample=False), whole)


def test_an_adaptive_length(model: Any, inputs: Any, whole: torch.Tensor) -> None:
    got = ours(model, inputs, draft="ngram", draft_length="auto", do_sample=False)
    assert torch.equal(got, whole)


def test_rows_end_apart_and_are_padded(model: Any, inputs: Any, whole: torch.Tensor) -> None:
    length = inputs["input_ids"].shape[1]
    end = int(whole[0, length + 5])  # the first row ends early
    more = {"eos_token_id": end, "pad_token_id": 3}
    got = ours(model, inputs, do_sample=False, **more)
    assert torch.equal(got, plain(model, inputs, **more))
    assert int(got[0, -1]) == 3 and got.shape[1] > length + 6


def test_rows_of_one_prompt(model: Any, one: Any) -> None:
    torch.manual_seed(5)
    got = ours(model, one, do_sample=True, num_return_sequences=3, top_k=0)
    assert got.shape[0] == 3 and len({tuple(row.tolist()) for row in got}) > 1


class Reversed(LogitsProcessor):
    """A caller's own."""

    def __repr__(self) -> str:  # in the names of tests, which must not have addresses in them
        return "Reversed()"

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.flip(-1) if input_ids.shape[1] % 2 else scores


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 12, "eos_token_id": [260, 265, 300]},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[260], [265, 270]]},
        {"suppress_tokens": [260, 261, 262, 263]},
        {"begin_suppress_tokens": [260, 261]},
        {"forced_eos_token_id": 7},
        {"sequence_bias": [[[261], 4.0], [[300], -5.0]]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [270 + row, 280 + len(ids) % 3]},
        {"sequence_bias": [[[260, 261], 5.0]]},
        {"logits_processor": [Reversed()], "repetition_penalty": 1.3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_changes_the_distribution(model: Any, one: Any, options: dict[str, Any]) -> None:
    wanted = plain(model, one, **options)
    assert torch.equal(ours(model, one, do_sample=False, **options), wanted)


def test_a_prefix_function_is_told_its_row(model: Any, inputs: Any) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [300 + row]

    got = ours(model, inputs, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert got[:, -1].tolist() == [300, 301]


def test_seeds(model: Any, inputs: Any) -> None:
    """The seed decides, not the draft; without one PyTorch's own generator does."""
    options = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 0}
    drafts = ("none", "eagle3:paceline/tiny-eagle3", "paceline/tiny-draft")
    seeded = [ours(model, inputs, draft=draft, seed=7, **options) for draft in drafts]
    assert all(torch.equal(seeded[0], other) for other in seeded[1:])
    torch.manual_seed(11)
    first, second = (ours(model, inputs, **options) for _ in range(2))
    torch.manual_seed(11)
    assert torch.equal(first, ours(model, inputs, draft="none", **options))
    assert not torch.equal(first, second)


def test_seeded_rows_are_those_of_our_engine(model: Any, one: Any) -> None:
    from paceline import LLM, SamplingParams

    llm = LLM("paceline/tiny", draft="none", dtype="float32", draft_length=0)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    wanted = llm.generate([one["input_ids"][0].tolist()], params)[0].token_ids
    got = ours(model, one, do_sample=True, temperature=0.8, top_k=0, seed=3)
    assert got[0, one["input_ids"].shape[1] :].tolist() == wanted


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rules_without_seeds_repeat_after_manual_seed(model: Any, one: Any, rule: str) -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(ours(model, one, do_sample=True, rule=rule))
    assert torch.equal(*outputs)


class FromHere(StoppingCriteria):
    """Ends a row once it has a token, as seen with its padding."""

    def __init__(self, token: int) -> None:
        self.token, self.shapes = token, set[int]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.shapes.add(input_ids.shape[0])
        return input_ids[:, -1] == self.token


def test_stopping_criteria_are_asked_after_every_token(
    model: Any, inputs: Any, whole: torch.Tensor
) -> None:
    length = inputs["input_ids"].shape[1]
    token = int(whole[1, length + 7])
    wanted = plain(model, inputs, stopping_criteria=[FromHere(token)])
    criterion = FromHere(token)
    got = ours(model, inputs, do_sample=False, stopping_criteria=[criterion])
    assert torch.equal(got, wanted)
    assert criterion.shapes == {1}


def test_stop_strings_as_a_criterion(model: Any, one: Any, tokenizer: Any) -> None:
    answer = tokenizer.decode(plain(model, one)[0, one["input_ids"].shape[1] :])
    stop = answer[12:17]
    wanted = plain(model, one, stop_strings=[stop], tokenizer=tokenizer)
    got = ours(
        model, one, do_sample=False, stopping_criteria=[StopStringCriteria(tokenizer, [stop])]
    )
    assert torch.equal(got, wanted)


def test_a_criterion_that_fails_is_the_caller_s_error(model: Any, one: Any) -> None:
    def fails(input_ids: torch.Tensor, scores: Any) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ours(model, one, do_sample=False, stopping_criteria=[fails])
    assert torch.equal(ours(model, one, do_sample=False), plain(model, one))


class Recorder:
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("rows", [1, 2])
def test_streamers_see_what_transformers_gives_them(model: Any, inputs: Any, rows: int) -> None:
    batch = {name: value[2 - rows :] for name, value in inputs.items()}
    end = int(plain(model, batch)[0, batch["input_ids"].shape[1] + 5])
    theirs, mine = Recorder(), Recorder()
    more = {"eos_token_id": end, "pad_token_id": 3}
    plain(model, batch, streamer=theirs, **more)
    ours(model, batch, do_sample=False, streamer=mine, **more)
    assert mine.puts == theirs.puts
    assert (mine.ends, len(mine.puts) > 5) == (1, True)


def test_return_types(model: Any, inputs: Any, whole: torch.Tensor) -> None:
    output = ours(model, inputs, do_sample=False, return_dict_in_generate=True)
    assert isinstance(output, SpeculativeOutput) and isinstance(output, GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, whole)
    assert len(output.stats) == 2
    assert all(stats.mean_accepted_length > 1.2 for stats in output.stats)
    assert output.scores is None and "scores" not in output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 .*draft="),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2 .*draft="),
        ({"draft": "ngrams"}, "ngrams"),
        ({"draft_length": 100}, "draft_length"),
        ({"backend": "fast"}, "backend"),
        ({"rule": "typical"}, "use one of auto, token"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0"),
        ({"seed": True, "do_sample": True}, "seed is True"),
        ({"seed": 2**63, "do_sample": True}, "seed is 9223372036854775808"),
    ],
    ids=str,
)
def test_refused_by_name(model: Any, one: Any, options: dict[str, Any], named: str) -> None:
    from paceline.errors import PacelineError

    with pytest.raises(PacelineError, match=named) as caught:
        ours(model, one, **options)
    assert "\n" not in str(caught.value)


def test_inputs_that_are_refused(model: Any, one: Any, inputs: Any) -> None:
    right = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].flip(1)}
    with pytest.raises(ConfigError, match="padded on the right"):
        ours(model, right)
    cache = model(**one).past_key_values
    with pytest.raises(ConfigError, match="of an earlier call"):
        ours(model, one, past_key_values=cache)
    with pytest.raises(ConfigError, match="position_ids"):
        ours(model, one, position_ids=torch.arange(one["input_ids"].shape[1])[None] + 3)
    with pytest.raises(ConfigError, match="assistant_model"):
        ours(model, one, assistant_model=model)


def test_an_architecture_that_cannot_be_paged() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes))
    with pytest.raises(UnsupportedModelError, match="mamba"):
        model.generate(torch.tensor([[1, 2]]), custom_generate=generate, max_new_tokens=2)


# -- the engine behind it ------------------------------------------------------------------------


def test_the_engine_is_kept_until_the_weights_change(
    model: Any, one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    real: Callable[..., Any] = sharing._built
    monkeypatch.setattr(sharing, "_built", lambda *all: built.append(1) or real(*all))
    forget(model)
    for _ in range(2):
        ours(model, one, do_sample=False)
    assert len(built) == 1
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)  # tied or not: another text
    try:
        assert torch.equal(ours(model, one, do_sample=False), plain(model, one))
        assert len(built) == 2
    finally:
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
    assert torch.equal(ours(model, one, do_sample=False), plain(model, one))


def test_the_model_is_as_before(model: Any, one: Any) -> None:
    before = (model.config._attn_implementation, [id(p) for p in model.parameters()])
    ours(model, one, do_sample=False)
    assert before == (model.config._attn_implementation, [id(p) for p in model.parameters()])
    engine = sharing._engines[model].built
    assert engine is not None
    weight = engine.target.hf.model.embed_tokens.weight
    assert weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_the_backend_is_the_one_of_any_other_engine(model: Any, one: Any, backend: str) -> None:
    before = [weight.clone() for weight in model.parameters()]
    got = ours(model, one, backend=backend, do_sample=False)
    assert torch.equal(got, plain(model, one))
    engine = sharing._engines[model].built
    assert engine is not None
    usual = CausalModel.load("paceline/tiny", "float32", "cpu", backend=backend).backend.name
    assert engine.target.backend.name == usual
    assert all(map(torch.equal, model.parameters(), before)), "the caller's own weights"


def test_a_call_within_a_call_is_refused(model: Any, one: Any) -> None:
    def again(input_ids: torch.Tensor, scores: Any) -> bool:
        ours(model, one)
        return False

    with pytest.raises(ConfigError, match="with the same model"):
        ours(model, one, do_sample=False, stopping_criteria=[again])


def test_a_tokenizer_for_a_model_from_nowhere(one: Any, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve("paceline/tiny"), dtype=torch.float32)
    model.name_or_path = ""
    with pytest.raises(ConfigError, match="target_tokenizer"):
        ours(model, one, draft="paceline/tiny-draft")
    got = ours(model, one, draft="paceline/tiny-draft", target_tokenizer=tokenizer, do_sample=False)
    assert torch.equal(got, plain(model, one))


# -- as a folder, as on the hub --------------------------------------------------------------------


def test_the_folder(
    model: Any, one: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    answer = tokenizer.decode(plain(model, one)[0, one["input_ids"].shape[1] :])
    stop = {"stop_strings": [answer[12:17]], "tokenizer": tokenizer}
    theirs, mine = Recorder(), Recorder()
    wanted = plain(model, one, streamer=theirs, **stop)
    folder = {"custom_generate": str(HUB), "trust_remote_code": True}
    got = ours(model, one, streamer=mine, do_sample=False, **folder, **stop)
    assert torch.equal(got, wanted)
    assert mine.puts == theirs.puts
    with pytest.raises(ConfigError, match="tokenizer"):
        ours(model, one, **folder, stop_strings="x")
