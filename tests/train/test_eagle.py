"""Training EAGLE heads on a tiny target: unrolling, resuming, and what the engine measures."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline import LLM, ConfigError, DataError, ModelLoadError, SamplingParams
from paceline.draft.eagle_head import EagleHead
from paceline.train.acceptance import total
from paceline.train.eagle import EagleTrainConfig, EagleTrainer, UnrolledAttention
from paceline.train.heads import HeadProgress
from paceline.train.lm import LMConfig, LMTrainer

PEOPLE = ("Lily", "Tom", "the cat", "a little dog", "the old man", "my friend")
DEEDS = ("saw", "liked", "found", "painted", "wanted", "gave away")
THINGS = ("a red ball", "the big tree", "some cake", "a shiny stone", "two books", "the sun")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "toy.jsonl"
    with path.open("w") as file:
        for _ in range(300):
            story = [
                f"Today {rng.choice(PEOPLE)} {rng.choice(DEEDS)} {rng.choice(THINGS)}."
                for _ in range(4)
            ]
            file.write(json.dumps({"text": " ".join(story), "license": "MIT"}) + "\n")
    return path


@pytest.fixture(scope="module")
def target(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that says something: a head has nothing to learn from a random one."""
    config = LMConfig(
        data=(str(corpus),),
        vocab_size=320,
        hidden_size=32,
        layers=3,
        heads=2,
        kv_heads=1,
        ffn_size=64,
        max_positions=128,
        seq_len=48,
        long_every=0,
        batch_tokens=768,
        micro_tokens=768,
        steps=60,
        warmup=4,
        lr=0.02,
        adam_lr=0.02,
    )
    return str(LMTrainer(config, tmp_path_factory.mktemp("target"), device="cpu").run())


@pytest.fixture(scope="module")
def config(corpus: Path, target: str) -> EagleTrainConfig:
    return EagleTrainConfig(
        target=target,
        data=(str(corpus),),
        valid=(str(corpus),),
        dtype="float32",
        draft_vocab_size=150,
        feature_layers=(1, 2, 3),
        ttt_steps=3,
        seq_len=40,
        long_every=5,
        max_positions=64,
        batch_tokens=640,
        micro_tokens=320,
        steps=60,
        warmup=4,
        lr=0.02,
        adam_lr=0.02,
        held_out=12,
        held_out_tokens=40,
    )


@pytest.fixture(scope="module")
def finished(config: EagleTrainConfig, tmp_path_factory: pytest.TempPathFactory) -> EagleTrainer:
    return train(config, tmp_path_factory.mktemp("run"))


def train(
    config: EagleTrainConfig,
    out: Path,
    report: Callable[[HeadProgress], None] = lambda progress: None,
) -> EagleTrainer:
    trainer = EagleTrainer(config, out, device="cpu")
    trainer.run(report, eval_every=30)
    return trainer


def weights(trainer: EagleTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.head.state_dict().items()}


# -- the unrolled forward --------------------------------------------------------------------


def chain_by_hand(head: EagleHead, embeds: torch.Tensor, fused: torch.Tensor, t: int) -> list[int]:
    """Greedy drafts from position t: rows 0 to t, then one drafted row after the other."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scaling: float
    ) -> torch.Tensor:
        fresh = not keys
        keys.append(key)
        values.append(value)
        out = F.scaled_dot_product_attention(
            query,
            torch.cat(keys, 2),
            torch.cat(values, 2),
            is_causal=fresh,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    hidden = head(embeds[1 : t + 2], fused[: t + 1], torch.arange(t + 1), attend)[-1:]
    tokens = [int(head.to_target_ids(head.logits(hidden).argmax(-1)))]
    for j in range(1, 3):
        row = embeds[t + 1 + j : t + 2 + j]
        hidden = head(row, hidden, torch.tensor([t + j]), attend)
        tokens.append(int(head.to_target_ids(head.logits(hidden).argmax(-1))))
    return tokens


def test_drafts_of_all_positions_at_once_equal_drafting_from_each(finished: EagleTrainer) -> None:
    stream = finished.mixture.streams[0]
    ids = torch.from_numpy(stream[:20].astype("int64"))[None]
    with torch.inference_mode():
        seen = finished.observe(ids)
        drafts = finished.drafts(seen, 3)
        fused = finished.head.fuse(seen.features[0])
        for t in (0, 5, 16):
            assert drafts[t].tolist() == chain_by_hand(finished.head, seen.embeds[0], fused, t)


def test_windows_of_a_batch_do_not_see_each_other(finished: EagleTrainer) -> None:
    stream = torch.from_numpy(finished.mixture.streams[0].astype("int64"))
    windows = stream[:120].view(3, 40)
    with torch.no_grad():
        whole = float(finished.loss(finished.observe(windows)))
        alone = [float(finished.loss(finished.observe(row[None]))) for row in windows]
    assert whole == pytest.approx(sum(alone) / 3, rel=1e-4)


def test_later_steps_see_what_came_before_and_their_own_chain() -> None:
    """Values that name their row, keys that are all alike: the output counts what is seen."""
    attend = UnrolledAttention(1)
    zero, length = torch.zeros(1, 1, 4, 16), 4
    for step in range(3):
        rows = torch.eye(16)[step * length : (step + 1) * length][None, None]
        out = attend(zero, zero, rows, layer=0, scaling=1.0)[0, :, 0]
    seen = [sorted(row.nonzero().flatten().tolist()) for row in out]
    assert seen == [[0, 4, 8], [0, 1, 5, 9], [0, 1, 2, 6, 10], [0, 1, 2, 3, 7, 11]]
    torch.testing.assert_close(out[3].max(), torch.tensor(1 / 6))


# -- training --------------------------------------------------------------------------------


def test_the_head_learns_what_the_target_says(config: EagleTrainConfig, tmp_path: Path) -> None:
    seen: list[HeadProgress] = []
    trainer = EagleTrainer(config, tmp_path, device="cpu")
    before = total(trainer.measure().values()).mean_accepted_length
    trainer.run(seen.append, eval_every=30)
    assert seen[-1].loss < 0.6 * seen[0].loss
    after = total(seen[-1].acceptance.values()).mean_accepted_length
    assert after > 1.5
    assert after > before + 0.4
    assert [entry["step"] for entry in trainer.history] == [30, 60]
    assert trainer.history[-1]["acceptance"]["toy"]["mean_accepted_length"] == pytest.approx(after)


@pytest.mark.parametrize("steps", [1, 2])
def test_version_1_predicts_features_and_tokens(
    config: EagleTrainConfig, tmp_path: Path, steps: int
) -> None:
    own = replace(config, version=1, feature_layers=(), draft_vocab_size=0, ttt_steps=steps)
    seen: list[HeadProgress] = []
    trainer = train(replace(own, steps=30), tmp_path, seen.append)
    assert trainer.feature_layers == (3,)
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert total(seen[-1].acceptance.values()).mean_accepted_length > 1.2


def test_the_draft_vocabulary_is_the_most_frequent_tokens(finished: EagleTrainer) -> None:
    stream = torch.from_numpy(finished.mixture.streams[0].astype("int64"))
    counts = torch.bincount(stream, minlength=320)
    chosen = finished.head.t2d
    assert int(chosen.sum()) == 150
    assert int(counts[chosen].min()) >= int(counts[~chosen].max())


class Cut(Exception):
    """Stands for a power cut between two steps."""


@pytest.mark.parametrize("pool", [0, 5])
def test_a_resumed_run_ends_with_the_same_weights(
    config: EagleTrainConfig, tmp_path: Path, pool: int
) -> None:
    short = replace(config, steps=12, cache_windows=pool)

    def cut(progress: HeadProgress) -> None:
        if progress.step == 5:
            trainer.save_checkpoint()
        if progress.step == 7:  # two steps that the checkpoint does not know
            raise Cut

    whole = train(short, tmp_path / "whole")
    trainer = EagleTrainer(short, tmp_path / "cut", device="cpu")
    with pytest.raises(Cut):
        trainer.run(cut, eval_every=30)
    resumed = EagleTrainer(short, tmp_path / "cut", device="cpu")
    assert resumed.step == 5
    resumed.run(eval_every=30)
    expected, found = weights(whole), weights(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resumed.history == whole.history


def test_cached_features_are_those_of_the_target(config: EagleTrainConfig, tmp_path: Path) -> None:
    trainer = EagleTrainer(replace(config, cache_windows=4, steps=3), tmp_path, device="cpu")
    cache = trainer._cache
    assert cache is not None
    windows, numbers = trainer._batch(0)
    assert numbers is not None and set(numbers) <= set(range(4))
    first, again = cache.look(windows, numbers), cache.look(windows, numbers)
    streamed = trainer.observe(windows)
    for name in ("ids", "embeds", "features", "logits", "final"):
        torch.testing.assert_close(getattr(first, name), getattr(streamed, name))
        assert torch.equal(getattr(first, name), getattr(again, name))
    trainer.run()
    assert len(list((tmp_path / "features").iterdir())) <= 4


# -- what comes out --------------------------------------------------------------------------


def test_held_out_acceptance_is_what_the_engine_measures(
    finished: EagleTrainer, target: str
) -> None:
    folder = finished.out / "head"
    measured = total(finished.measure().values())
    texts = json.loads((finished.out / "held_out.json").read_text())["texts"]
    length = finished.config.draft_length
    llm = LLM(
        target,
        draft=f"eagle3:{folder},nodes=0",
        dtype="float32",
        device="cpu",
        draft_length=length,
    )
    prompts = [text["token_ids"][: text["prompt"]] for text in texts]
    done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for completion, text in zip(done, texts, strict=True):
        assert completion.token_ids == text["token_ids"][text["prompt"] :]
    steps = sum(completion.stats.target_steps for completion in done)
    tokens = sum(len(completion.token_ids) for completion in done)
    assert measured.tokens == tokens
    assert measured.mean_accepted_length == pytest.approx(tokens / steps, rel=0.05)
    assert measured.mean_accepted_length > 1.5  # or the comparison would say little


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"feature_layers": (1, 9)}, ConfigError, r"feature layers \[9\] do not exist"),
        ({"version": 1, "feature_layers": (1, 2)}, ConfigError, "one target layer"),
        ({"data": ("no.jsonl",)}, DataError, "no.jsonl does not exist"),
        ({"target": "./no-model"}, ModelLoadError, "no tokenizer in ./no-model|does not exist"),
        ({"seq_len": 127}, ConfigError, "exceed the target's context of 128"),
        ({"argmax_weight": 1.5}, ConfigError, "argmax_weight is a share"),
        ({"ttt_steps": 0}, ConfigError, "--ttt-steps"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(
    config: EagleTrainConfig,
    tmp_path: Path,
    changes: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    out = tmp_path / "run"
    with pytest.raises(error, match=message) as caught:
        EagleTrainer(replace(config, **changes), out, device="cpu")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": ""}'], "no usable records"),
        (['{"text": "hello"}'], "only .* tokens of text"),
        (['{"story": "hello"}'], "line 1: not a JSON object"),
    ],
)
def test_a_file_without_usable_text_is_refused(
    config: EagleTrainConfig, tmp_path: Path, lines: list[str], message: str
) -> None:
    file, out = tmp_path / "bad.jsonl", tmp_path / "run"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        EagleTrainer(replace(config, data=(*config.data, str(file))), out, device="cpu")
    assert not out.exists()


def test_a_folder_with_another_run_is_refused(
    config: EagleTrainConfig, finished: EagleTrainer
) -> None:
    with pytest.raises(ConfigError, match=r"other options \(lr, ttt_steps\)"):
        EagleTrainer(replace(config, lr=0.5, ttt_steps=2), finished.out, device="cpu")
    longer = EagleTrainer(replace(config, steps=90), finished.out, device="cpu")
    assert longer.step == 60


def test_a_damaged_checkpoint_is_named(config: EagleTrainConfig, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged"):
        EagleTrainer(config, tmp_path, device="cpu")
