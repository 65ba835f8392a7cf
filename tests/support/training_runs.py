"""Training runs of a few seconds: texts to learn from, sizes, power cuts and Ctrl-C."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from typer.testing import CliRunner

from embedded_target import TargetConfig, TargetTrainer
from paceline import LLM, SamplingParams
from paceline.cli.main import app
from paceline.train.acceptance import AcceptanceCounts, total
from paceline.train.trainer import Progress

PEOPLE = ("Lily", "Tom", "the cat", "a little dog", "the old man", "my friend")
DEEDS = ("saw", "liked", "found", "painted", "wanted", "gave away")
THINGS = ("a red ball", "the big tree", "some cake", "a shiny stone", "two books", "the sun")

SMALLEST = {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "ffn_size": 32}
SHORTEST = {"max_positions": 32, "seq_len": 16, "batch_tokens": 64, "warmup": 1}
# A target that says something: heads have nothing to learn from a random one.
TALKING = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_size": 64}
TALKING |= {"max_positions": 128, "warmup": 4, "lr": 0.02, "adam_lr": 0.02}

# A run of heads that learn something.
HEAD_RUN = {"dtype": "float32", "seq_len": 40, "long_every": 5, "max_positions": 64, "steps": 60}
HEAD_RUN |= {"batch_tokens": 640, "micro_tokens": 320, "warmup": 4}
HEAD_RUN |= {"held_out": 12, "held_out_tokens": 40}

Trainer = TypeVar("Trainer")


def write_records(path: Path, texts: Iterable[str], **more: str) -> str:
    """JSON lines, under the MIT licence unless ``more`` says another."""
    lines = [json.dumps({"text": text, "license": "MIT", **more}) + "\n" for text in texts]
    path.write_text("".join(lines))
    return str(path)


def sentence(rng: random.Random, choices: int = 6) -> str:
    """Of one form: what comes next is often, but not always, clear."""
    who, did, what = (rng.choice(words[:choices]) for words in (PEOPLE, DEEDS, THINGS))
    return f"Today {who} {did} {what}."


def write_stories(path: Path, count: int = 300, sentences: int = 4, seed: int = 0) -> str:
    rng = random.Random(seed)
    return write_records(
        path, (" ".join(sentence(rng) for _ in range(sentences)) for _ in range(count))
    )


def write_words(path: Path) -> str:
    """Words in no order."""
    rng = random.Random(0)
    words = ("the", "dog", "cat", "saw", "a", "ball", "and", "ran")
    return write_records(path, (" ".join(rng.choices(words, k=20)) for _ in range(40)))


def smallest_run(corpus: str, **changes: Any) -> TargetConfig:
    """Four steps of the smallest model."""
    sizes = {**SMALLEST, **SHORTEST, "vocab_size": 280, "steps": 4}
    return TargetConfig(data=(corpus,), **{**sizes, **changes})


def talking_target(corpus: str, out: Path, **changes: Any) -> str:
    """The folder of a target that has learnt the stories in a few seconds."""
    sizes = {**TALKING, "vocab_size": 320, "seq_len": 48, "long_every": 0, "steps": 60}
    rows = {"batch_tokens": 768, "micro_tokens": changes.get("batch_tokens", 768)}
    config = TargetConfig(data=(corpus,), **{**sizes, **rows, **changes})
    return str(TargetTrainer(config, out, device="cpu").run(eval_every=100))


def train(
    kind: Callable[..., Trainer],
    config: Any,
    out: Path,
    report: Callable[[Any], None] = lambda progress: None,
    eval_every: int = 12,
) -> Trainer:
    trainer: Any = kind(config, out, device="cpu")
    trainer.run(report, eval_every=eval_every)
    return trainer


@dataclass(frozen=True)
class Learnt:
    """A run from beginning to end: its trainer, what it measured on held-out texts before the
    first step (trainers of drafts do), and what it reported after each step."""

    trainer: Any
    before: AcceptanceCounts
    seen: list[Progress]


def learnt(kind: Callable[..., Any], config: Any, out: Path, eval_every: int = 12) -> Learnt:
    """``train``, watched."""
    trainer, seen = kind(config, out, device="cpu"), list[Progress]()
    before = total(trainer.measure().values() if hasattr(trainer, "measure") else ())
    trainer.run(seen.append, eval_every=eval_every)
    return Learnt(trainer, before, seen)


class Cut(Exception):
    """Stands for a power cut between two steps."""


def resumed(make: Callable[[], Trainer], saved: int, eval_every: int) -> Trainer:
    """A run that was cut two steps behind its checkpoint, taken up again by another trainer."""
    first: Any = make()

    def cut(progress: Any) -> None:
        if progress.step == saved:
            first.save_checkpoint()
        if progress.step == saved + 2:  # two steps that the checkpoint does not know
            raise Cut

    with pytest.raises(Cut):
        first.run(cut, eval_every=eval_every)
    again: Any = make()
    assert again.step == saved
    again.run(eval_every=eval_every)
    return again


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def check_held_out(trainer: Any, llm: LLM) -> AcceptanceCounts:
    """What a trainer measures on its held-out texts is what the engine measures."""
    measured = total(trainer.measure().values())
    texts = json.loads((trainer.out / "held_out.json").read_text())["texts"]
    prompts = [text["token_ids"][: text["prompt"]] for text in texts]
    done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for completion, text in zip(done, texts, strict=True):
        assert completion.token_ids == text["token_ids"][text["prompt"] :]
    steps = sum(completion.stats.target_steps for completion in done)
    tokens = sum(len(completion.token_ids) for completion in done)
    assert measured.tokens == tokens
    assert measured.mean_accepted_length == pytest.approx(tokens / steps, rel=0.05)
    return measured


# -- commands --------------------------------------------------------------------------------------


def options(**values: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def check_ctrl_c(arguments: list[str], word: str) -> int:
    """Ctrl-C when a line has this word saves, and the same command goes on; the step of it."""
    command = [sys.executable, "-m", "paceline", *arguments]
    command += ["--steps=1000000", "--eval-every=5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if word in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        code = process.wait(timeout=60)
    return _check_resumed(arguments, code, rest)


def check_interrupt(
    arguments: list[str],
    trainer: type[Trainer],
    at: int,
    sent: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """The same within this process: the signal comes in the middle of step ``at`` + 1."""
    kind: Any = trainer
    whole = kind.train_step

    def interrupted(self: Any) -> float:
        if self.step == at:
            assert signal.getsignal(sent) is not signal.SIG_DFL  # which would end the tests
            signal.raise_signal(sent)
        loss: float = whole(self)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(kind, "train_step", interrupted)
        result = CliRunner().invoke(app, [*arguments, "--steps=1000000", "--eval-every=5"])
    return _check_resumed(arguments, result.exit_code, result.stderr)


def _check_resumed(arguments: list[str], code: int, rest: str) -> int:
    assert code == 130, rest
    last = rest.splitlines()[-1]
    assert last.startswith("interrupted at step ")
    assert "run the same command again to resume" in last
    assert "Traceback" not in rest
    step = int(last.split(";")[0].split()[-1])
    # A shorter schedule than the step reached: the resumed run has nothing left but to finish.
    result = CliRunner().invoke(app, [*arguments, "--steps", str(step), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == step
    return step
