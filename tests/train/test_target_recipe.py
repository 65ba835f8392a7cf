"""The recipe of the embedded target in a few seconds: learning, resuming, what it leaves behind."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from embedded_target import TargetConfig, TargetTrainer
from paceline import ConfigError, DataError
from paceline.train.trainer import learning_rate_scale, write_card
from support import training_runs

train = partial(training_runs.train, TargetTrainer)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of one form: 64 of them, so that a tiny model learns the form at once."""
    path, rng = tmp_path_factory.mktemp("corpus") / "toy.train.jsonl", random.Random(0)
    texts = [training_runs.sentence(rng, choices=4) + " It was a good day." for _ in range(300)]
    training_runs.write_records(path, texts[:270])
    with path.open("a") as file:
        file.writelines(
            json.dumps({"text": text, "license": "CC-BY-SA-4.0"}) + "\n" for text in texts[270:]
        )
    return path


@pytest.fixture(scope="module")
def config(corpus: Path) -> TargetConfig:
    return TargetConfig(
        data=(f"{corpus}=2",),
        seq_len=32,
        long_every=4,
        batch_tokens=256,
        micro_tokens=128,
        steps=24,
        **training_runs.TALKING | {"vocab_size": 300, "max_positions": 64},
    )


def test_the_loss_goes_down(learnt: training_runs.Learnt) -> None:
    seen, trainer = learnt.seen, learnt.trainer
    assert [item.step for item in seen] == list(range(1, 25))
    assert seen[-1].loss < 0.6 * seen[0].loss
    assert [entry["step"] for entry in trainer.history] == [12, 24]


def test_a_resumed_run_ends_with_the_same_weights(
    config: TargetConfig, finished: TargetTrainer, tmp_path: Path
) -> None:
    again = training_runs.resumed(
        lambda: TargetTrainer(config, tmp_path, device="cpu"), 9, eval_every=12
    )
    assert training_runs.same_weights(again.model, finished.model)
    assert again.history == finished.history


def test_other_options_do_not_resume(config: TargetConfig, finished: TargetTrainer) -> None:
    with pytest.raises(ConfigError, match="other options"):
        TargetTrainer(replace(config, lr=0.5), finished.out, device="cpu")


def test_a_finished_run_may_be_lengthened(config: TargetConfig, finished: TargetTrainer) -> None:
    longer = TargetTrainer(replace(config, steps=30), finished.out, device="cpu")
    assert longer.step == 24


def test_the_result_is_a_transformers_model_in_bf16(finished: TargetTrainer) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.out / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    assert model.config.eos_token_id == ends
    ids = tokenizer("Today Lily saw a red ball. It was a good", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " day"


def test_records_with_excluded_licences_are_left_out(
    config: TargetConfig, corpus: Path, tmp_path: Path
) -> None:
    everything = TargetTrainer(replace(config, exclude_licenses=()), tmp_path / "all", device="cpu")
    free = TargetTrainer(config, tmp_path / "free", device="cpu")
    separator = free.tokenizer.bos_token_id
    assert (everything.documents.streams[0].ids == separator).sum() == 300
    assert (free.documents.streams[0].ids == separator).sum() == 270


def test_learning_rate_rises_and_falls() -> None:
    scales = [learning_rate_scale(step, 10, 4) for step in range(11)]
    assert scales[:4] == [0.25, 0.5, 0.75, 1.0]
    assert scales[4] == 1.0
    assert scales[10] == 0.0
    assert all(a > b for a, b in pairwise(scales[4:]))


def test_missing_data_is_refused(config: TargetConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        TargetTrainer(replace(config, data=("no.jsonl",)), tmp_path, device="cpu")


def test_the_card_says_where_the_weights_come_from(finished: TargetTrainer, corpus: Path) -> None:
    path = write_card(finished, "embedded_target.py --data toy.train.jsonl")
    assert path == finished.out / "model" / "README.md"
    card = path.read_text(encoding="utf-8")
    assert "embedded_target.py --data toy.train.jsonl" in card
    assert "| `toy.train.jsonl` | 2 | MIT 270 |" in card
    assert "licence contains: CC-BY-SA" in card
    assert f"{finished.model.num_parameters():,} parameters" in card
    assert str(corpus.parent) not in card
