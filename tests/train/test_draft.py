"""Drafts distilled for a target: losses, held-out acceptance, resumption, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import ConfigError, DataError, VocabularyMismatchError
from paceline.core.params import SamplingParams
from paceline.llm import LLM
from paceline.model.tensorfile import load_tensors
from paceline.train.acceptance import AcceptanceCounts, HeldOutText, total
from paceline.train.checkpoint import write_state
from paceline.train.draft import DraftConfig, DraftTrainer
from paceline.train.losses import total_variation
from paceline.train.optimizer import Float32Muon
from paceline.train.unrolled import MaskedRows
from support import training_runs
from support.tiny_models import TinyPair

NO_SHAPE: dict[str, Any] = {name: getattr(DraftConfig, name) for name in training_runs.SMALLEST}
train = partial(training_runs.train, DraftTrainer)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("corpus")
    names = {"train": "toy.train.jsonl", "one": "one.valid.jsonl", "two": "two.valid.jsonl"}
    return {
        key: training_runs.write_stories(root / name, count=200, sentences=3, seed=seed)
        for seed, (key, name) in enumerate(names.items())
    }


@pytest.fixture(scope="module")
def target(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("target")
    sizes = {"seq_len": 32, "batch_tokens": 512, "steps": 40, "long_every": 10}
    return training_runs.talking_target(files["train"], out, **sizes)


@pytest.fixture(scope="module")
def config(files: dict[str, str], target: str) -> DraftConfig:
    return DraftConfig(
        data=(files["train"],),
        valid=(files["one"], files["two"]),
        model=target,
        **training_runs.TALKING
        | training_runs.SMALLEST
        | {"hidden_size": 32, "warmup": 2, "seq_len": 32, "steps": 24},
        **{"batch_tokens": 512, "micro_tokens": 256, "long_every": 4},
        **{"held_out": 6, "held_out_tokens": 40},
    )


def test_acceptance_rises_while_training(learnt: training_runs.Learnt) -> None:
    before, seen = learnt.before, learnt.seen
    measured = [progress.acceptance for progress in seen if progress.acceptance]
    assert [set(found) for found in measured] == [{"one", "two"}] * 2
    after = total(measured[-1].values())
    assert after.mean_accepted_length > before.mean_accepted_length + 0.1
    assert after.accepted[0] > 2 * before.accepted[0]
    assert seen[-1].loss < seen[0].loss


def test_held_out_acceptance_equals_the_engines(finished: DraftTrainer, target: str) -> None:
    """Of the texts that the engine writes, greedy: as many target steps as it took.

    In float32, where a processor's rounding turns no choice.
    """
    assert total(finished.measure().values()).steps > 50
    assert as_the_engine(finished, target, passes=4).accepted[0] > 20


@pytest.mark.slow  # it learns
def test_a_draft_learns_to_draft_in_one_pass(
    config: DraftConfig, target: str, tmp_path: Path
) -> None:
    """Later tokens, too, which it drafts behind masks: far more often than untrained."""
    own = replace(config, parallel=True, steps=60)
    trainer = DraftTrainer(own, tmp_path, device="cpu")
    before = total(trainer.measure().values())
    trainer.run(eval_every=60)
    after = total(trainer.measure().values())
    assert after.mean_accepted_length > before.mean_accepted_length + 0.1
    assert after.accepted[1] > 2 * before.accepted[1] + 10
    assert as_the_engine(trainer, target, passes=1).accepted[1] > 10


@pytest.mark.parametrize(
    ("has_bf16", "asked", "computed", "written"),
    [
        (True, "auto", torch.bfloat16, torch.bfloat16),
        (False, "auto", torch.float32, torch.bfloat16),
        (True, "float32", torch.float32, torch.float32),
        (False, "bfloat16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_products_are_in_a_precision_that_the_processor_has(
    config: DraftConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_bf16: bool,
    asked: str,
    computed: torch.dtype,
    written: torch.dtype,
) -> None:
    monkeypatch.setattr("paceline.model.loading.cpu_has_bf16", lambda: has_bf16)
    trainer = DraftTrainer(replace(config, dtype=asked), tmp_path, device="cpu")
    assert trainer.model.dtype == trainer.target.dtype == computed
    muon = trainer.optimizer._optimizers[0][0]
    assert isinstance(muon, Float32Muon) == (computed == torch.float32)
    trainer.write_result()
    file = trainer.folder / "model.safetensors"
    assert {tensor.dtype for tensor in load_tensors(file).values()} == {written}


def test_masks_behind_unlikely_tokens_count_less(
    config: DraftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = DraftTrainer(replace(config, parallel=True), tmp_path, device="cpu")
    windows = trainer.micro_batches(0)[0]
    weighted = float(trainer.loss(windows).detach())
    seen: list[torch.Tensor] = []

    def equal(masks: MaskedRows, log_probs: torch.Tensor) -> torch.Tensor:
        seen.append(log_probs)
        return torch.ones(len(log_probs), len(masks.positions))

    monkeypatch.setattr(MaskedRows, "reach_probs", equal)
    assert abs(float(trainer.loss(windows).detach()) - weighted) > 1e-3
    ids = windows.ids[:1, :-1]  # as the target's logits have it
    logs = trainer.target(input_ids=ids).logits.float().log_softmax(-1)[:, :-1]
    expected = logs.gather(-1, ids[:, 1:, None])[..., 0]
    assert seen[0][0, 0] == 0
    assert torch.allclose(seen[0][:1, 1:], expected, atol=1e-4)


def test_an_option_that_a_run_did_not_have_has_its_default(
    config: DraftConfig, tmp_path: Path
) -> None:
    short = replace(config, steps=1, valid=())
    trainer = DraftTrainer(short, tmp_path, device="cpu")
    trainer.run()
    saved = torch.load(trainer.checkpoint, weights_only=True)
    del saved["config"]["dtype"]  # a run of an earlier version
    write_state(trainer.checkpoint, saved)
    assert DraftTrainer(replace(short, steps=2), tmp_path, device="cpu").step == 1
    with pytest.raises(ConfigError, match=r"other options \(dtype\)"):
        DraftTrainer(replace(short, dtype="float32"), tmp_path, device="cpu")


def test_masks_see_the_text_before_them_and_their_own_chain() -> None:
    rows = MaskedRows.of(9, 5, 3, first=1)
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 3, 4]
    seen = [sorted(row.nonzero().flatten().tolist()) for row in rows.attention_mask]
    assert seen[3:] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 5],
        [0, 1, 2, 6],
        [0, 1, 5, 7],
        [0, 1, 2, 6, 8],
    ]
    assert rows.inputs(torch.zeros(1, 5).long())["input_ids"].tolist() == [[0] * 5 + [9] * 4]
    chances = torch.tensor([[1.0, 0.5, 0.25, 0.5, 0.125]])  # of tokens 0 to 4
    reached = rows.reach_probs(chances.log())[0].tolist()
    assert reached == pytest.approx([1, 1, 1, 1, 1, 0.25, 0.5, 0.125, 0.0625])
    sizes = []
    for seed in (0, 1):  # as many rows at every step, of others
        dropped = MaskedRows.of(9, 40, 4, generator=torch.Generator().manual_seed(seed))
        sizes.append(dropped.positions.shape)
        assert bool((dropped.attention_mask.sum(1) > dropped.positions - 3).all())
    assert sizes == [(40 + 25 + 18 + 12,)] * 2


def as_the_engine(trainer: DraftTrainer, target: str, passes: int) -> AcceptanceCounts:
    """What a trainer counts on the engine's texts, which takes as many steps and tokens."""
    config = trainer.config
    held_out = json.loads((trainer.out / "held_out.json").read_text())["texts"]
    prompts = [text["token_ids"][: text["prompt"]] for text in held_out]
    spec = f"model:{trainer.out / 'model'}"
    llm = LLM(target, spec, dtype="float32", draft_length=config.draft_length)
    assert llm.engine.drafter.passes(4) == passes
    params = SamplingParams(temperature=0, max_tokens=config.held_out_tokens)
    done = llm.generate(prompts, params)
    texts = [
        HeldOutText("held out", len(prompt), [*prompt, *completion.token_ids])
        for prompt, completion in zip(prompts, done, strict=True)
    ]
    stored, trainer.model = trainer.model, trainer.stored().float()
    try:
        predicted = total(trainer.acceptance_of(text) for text in texts)
    finally:
        trainer.model = stored
    assert predicted.tokens == sum(len(completion.token_ids) for completion in done)
    assert predicted.steps == sum(completion.stats.target_steps for completion in done)
    return predicted


def test_a_resumed_run_ends_with_the_same_weights(
    config: DraftConfig, finished: DraftTrainer, tmp_path: Path
) -> None:
    def make() -> DraftTrainer:
        assert not (tmp_path / "model").exists()
        return DraftTrainer(config, tmp_path, device="cpu")

    again = training_runs.resumed(make, 9, eval_every=12)
    assert training_runs.same_weights(again.model, finished.model)
    assert again.history == finished.history
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", "tokens", "checkpoint.pt", "held_out.json"}


@pytest.mark.parametrize("tv_weight", [0.5, 1.0])
def test_training_of_a_draft_can_be_continued(
    config: DraftConfig, finished: DraftTrainer, tmp_path: Path, tv_weight: float
) -> None:
    """From the weights of another run, with another loss."""
    start = str(finished.out / "model")
    further = replace(config, init=start, tv_weight=tv_weight, **NO_SHAPE)
    further = replace(further, adam_lr=0.005)
    trainer = DraftTrainer(further, tmp_path, device="cpu")
    assert training_runs.same_weights(trainer.stored(), finished.stored())
    losses: list[float] = []
    trainer.run(lambda progress: losses.append(progress.loss), eval_every=50)
    assert sum(losses[-6:]) < sum(losses[:6])


def test_target_and_draft_of_other_architectures(config: DraftConfig, tmp_path: Path) -> None:
    """Both GPT-2, with padded logits; windows stay within the shorter context."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(config.model)
    folders = []
    for name, width, context in (("target", 330, 96), ("draft", 324, 48)):
        shape = GPT2Config(
            vocab_size=width, n_positions=context, n_embd=16, n_layer=1, n_head=2, eos_token_id=0
        )
        GPT2LMHeadModel(shape).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    own = replace(config, model=folders[0], init=folders[1], valid=(), steps=4, **NO_SHAPE)
    trainer = train(own, tmp_path / "run")
    assert trainer.packed_length == 48
    assert type(trainer.model).__name__ == "GPT2LMHeadModel"
    assert trainer.history[-1]["acceptance"] == {}


# -- losses ---------------------------------------------------------------------------------------


def probs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 5, 7, generator=generator)
    return logits, teacher


def test_total_variation_is_the_probability_of_rejection() -> None:
    logits, teacher = probs()
    p, q = teacher.softmax(-1), logits.softmax(-1)
    expected = 0.5 * (p - q).abs().sum(-1).mean()
    torch.testing.assert_close(total_variation(p, q).mean(), expected)
    assert float(total_variation(p, p).mean()) == pytest.approx(0.0, abs=1e-6)


def test_total_variation_pulls_the_draft_to_the_target() -> None:
    """Descending it, tokens drafted too often lose and those drafted too seldom gain."""
    logits, teacher = probs()
    logits = logits[:1].requires_grad_()
    p = teacher[:1].softmax(-1)
    total_variation(p, logits.softmax(-1)).mean().backward()
    too_often = logits.detach().softmax(-1) > p
    assert logits.grad is not None
    step = torch.where(too_often, logits.grad, -logits.grad)
    q = logits.detach().softmax(-1)
    # d/dz_i of -sum min(p, q) = q_i (mass of q below p - [q_i below p])
    below = (q * ~too_often).sum()
    torch.testing.assert_close(logits.grad, q * (below - (~too_often).float()))
    assert bool((step > 0).all())
    before = float(total_variation(p, q).mean())
    for _ in range(600):
        loss = total_variation(p, logits.softmax(-1)).mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.2 * gradient).detach().requires_grad_()
    assert float(loss.detach()) < 0.1 * before


# -- refusals -------------------------------------------------------------------------------------


def test_invalid_options_are_refused(config: DraftConfig, tmp_path: Path) -> None:
    wrong = {
        "--tv-weight": {"tv_weight": 1.5},
        "--heads": {"heads": 3},
        "--hidden-size is an option of new models, but --init x has": {"init": "x"},
    }
    for word, values in wrong.items():
        with pytest.raises(ConfigError, match=word):
            DraftTrainer(replace(config, **values), tmp_path / "new", device="cpu")
    for word, valid in ((": these files have no weights", "=3"), ("two files called one", "")):
        specs = (f"{config.valid[0]}{valid}", config.valid[0])
        with pytest.raises(DataError, match=word):
            DraftTrainer(replace(config, valid=specs), tmp_path / "new", device="cpu")
    assert not (tmp_path / "new").exists()


def test_a_draft_of_another_vocabulary(
    config: DraftConfig, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    with pytest.raises(VocabularyMismatchError, match=r"vocabulary entries .* leave out --init"):
        DraftTrainer(replace(config, init=tiny_pair.foreign, **NO_SHAPE), tmp_path, device="cpu")


def test_no_usable_text(config: DraftConfig, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"text": "Not free.", "license": "CC-BY-SA-4.0"}) + "\n")
    with pytest.raises(DataError, match="no usable records"):
        DraftTrainer(replace(config, data=(str(empty),)), tmp_path / "a", device="cpu")
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "To", "license": "MIT"}) + "\n")
    with pytest.raises(DataError, match="no document of 4 tokens"):
        DraftTrainer(replace(config, data=(str(short),)), tmp_path / "b", device="cpu")


def test_a_folder_of_another_run(config: DraftConfig, finished: DraftTrainer) -> None:
    with pytest.raises(ConfigError, match=r"other options \(seed, tv_weight\)"):
        DraftTrainer(replace(config, tv_weight=1.0, seed=1), finished.out, device="cpu")


def test_a_damaged_checkpoint(config: DraftConfig, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(ConfigError, match="delete it"):
        DraftTrainer(config, tmp_path, device="cpu")
