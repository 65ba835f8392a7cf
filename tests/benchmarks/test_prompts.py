"""The prompts of the benchmarks: files, shipped ones, and the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

import real
from paceline.lab.bench.prompts import evenly
from prompts import ALL_SUITES, SHIPPED, encode, load_suites, read_texts
from support.real_prompts import write_prompts


def test_prompts(tmp_path: Path) -> None:
    assert set(SHIPPED) == set(ALL_SUITES)
    assert {form for form, _ in read_texts(tmp_path, "arith")} == {"chat"}
    record = {"id": "x", "format": "completion", "turns": ["first", "second"]}
    (tmp_path / "arith.jsonl").write_text(json.dumps(record) + "\n")
    assert read_texts(tmp_path, "arith") == [("completion", "first")]
    assert evenly(list(range(10)), 3) == [0, 3, 6]
    assert evenly(list(range(3)), None) == evenly(list(range(3)), 9) == [0, 1, 2]


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = "U:{{ messages[0]['content'] }}A:"
    return tokenizer


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(encode(tokenizer, "chat", "hi")) == "U:hiA:"
    assert tokenizer.decode(encode(tokenizer, "completion", "hi")) == "hi"
    texts = ("What is 345 + 278?", "What is 345 + 278 + 4567?")
    lines = [json.dumps({"format": "chat", "turns": [text]}) for text in texts]
    (tmp_path / "arith.jsonl").write_text("\n".join(lines) + "\n")
    suites = load_suites(tmp_path, ["arith"], tokenizer, 25)
    assert [len(ids) for ids in suites["arith"]] == [22]  # the other is longer


def test_no_prompt_of_the_real_model_comes_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_prompts(tmp_path))
    texts = real.texts(folder, real.SETS)
    assert set(texts) == set(real.SETS)
    everything = [text for by_set in texts.values() for text in by_set]
    assert len(everything) == len(set(everything)) == 4 * len(real.SETS)
    alone = real.texts(folder, ["math_reasoning"])
    assert len(alone["math_reasoning"]) == 5
    with pytest.raises(SystemExit, match="no prompt of gsm8k fits into 3 tokens"):
        real.load_sets(folder, ["gsm8k"], lambda text: [0] * 4, 3)
    sizes = iter((2, 9, 2, 2))
    real.load_sets(folder, ["gsm8k"], lambda text: [0] * next(sizes), 3)
    assert "gsm8k: 1 of 4 prompts are too long" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no shipped prompts for 'alpaca'"):
        real.texts(folder, ["alpaca"])
