"""Tuned settings: what they hold, what they refuse, and what an LLM makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from paceline import LLM, ConfigError, SamplingParams
from paceline.control.adaptive import AdaptiveController
from paceline.model.target import CausalModel
from paceline.settings import tuned
from paceline.settings.tuned import ModelIdentity, TunedSettings
from support.tiny_models import TinyPair

PROMPT = "Once upon a time there was a little"
FREE = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target(random_pair: tuple[str, str]) -> CausalModel:
    return CausalModel.load(random_pair[0], dtype="float32")


@pytest.fixture(scope="module")
def settings(random_pair: tuple[str, str], target: CausalModel) -> TunedSettings:
    return TunedSettings(
        version=tuned.VERSION,
        model=ModelIdentity.of(target),
        draft=tuned.DraftChoice(f"model:{random_pair[1]}", "auto"),
        engine=tuned.EngineChoice(3),
        why='it was faster, says "so"',
    )


@pytest.fixture
def path(settings: TunedSettings, tmp_path: Path) -> Path:
    settings.write(tmp_path / "tuned.toml")
    return tmp_path / "tuned.toml"


# -- the file --------------------------------------------------------------------------------


def test_round_trip(settings: TunedSettings, path: Path) -> None:
    assert TunedSettings.read(path) == settings
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Tuned settings by `paceline tune`")


Damage = Callable[[str], str]


def swap(old: str, new: str) -> Damage:
    def change(text: str) -> str:
        assert re.search(old, text, re.M), old
        return re.sub(old, new, text, count=1, flags=re.M)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap(r"^version = 1", "version = 9"), "have version 9, but this paceline reads 1"),
        (lambda text: "x = [", "is not valid TOML"),
        (lambda text: "", "have version None"),
        (swap(r"^spec = .*\n", ""), "missing required field `spec` - at `draft`"),
        (swap(r"^spec = .*", "spec = 5"), "Expected `str`, got `int` - at `draft.spec`"),
        (swap(r"^max_batch_size = 3", "max_batch_size = true"), "Expected `int`, got `bool`"),
        (swap(r"^max_batch_size = 3", "max_batch_size = 0"), ">= 1 - at `engine.max_batch_size`"),
        (swap(r'^length = "auto"', 'length = "long"'), "at `draft.length`"),
        (swap(r'^length = "auto"', "length = -1"), ">= 0 - at `draft.length`"),
        (swap(r"^length = .*", "length = 1.5"), "got `float` - at `draft.length`"),
        (lambda text: "engine = 3\n" + text.partition("[engine]")[0], "got `int` - at `engine`"),
    ],
)
def test_a_damaged_file_is_one_line(path: Path, damage: Damage, message: str) -> None:
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        TunedSettings.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_of_before(settings: TunedSettings, path: Path) -> None:
    """Versions before had more to say about the model and the measurements."""
    text = path.read_text(encoding="utf-8")
    text = text.replace("[model]\n", "[model]\nlayers = 3\n") + "\n[costs]\nbatches = [1, 2]\n"
    path.write_text(text, encoding="utf-8")
    assert TunedSettings.read(path) == settings


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*; make one with paceline tune"):
        TunedSettings.read(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        TunedSettings.read(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        TunedSettings.read(tmp_path / "bytes")


def test_settings_cannot_be_written_everywhere(settings: TunedSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the tuned settings"):
        settings.write(tmp_path / "file" / "tuned.toml")


# -- whose it is -----------------------------------------------------------------------------


def test_a_model_is_known_by_its_configuration(
    random_pair: tuple[str, str], target: CausalModel, tiny_pair: TinyPair
) -> None:
    mine = ModelIdentity.of(target)
    assert ModelIdentity.of(CausalModel.load(random_pair[0], dtype="bfloat16")) == mine
    deeper = ModelIdentity.of(CausalModel.load(tiny_pair.target, dtype="float32"))
    assert mine.config != deeper.config


@pytest.mark.parametrize("keyword", ["config", "profile"])  # the latter as before 0.2.0
def test_settings_of_another_model_are_refused(
    keyword: str, path: Path, tiny_pair: TinyPair
) -> None:
    given: dict[str, Any] = {keyword: path}
    with pytest.raises(ConfigError, match=r"were made for .*target, not for .*whose configuration"):
        LLM(str(tiny_pair.target), dtype="float32", **given)


# -- what an LLM takes from it ---------------------------------------------------------------


def test_an_llm_takes_what_is_left_open(path: Path, random_pair: tuple[str, str]) -> None:
    plain = LLM(random_pair[0], dtype="float32")
    llm = LLM(random_pair[0], dtype="float32", config=path)
    assert llm.setup_notes == ()
    assert llm.drafters == ("model",)
    assert llm.engine.scheduler.config.max_batch_size == 3
    (fast,), (slow,) = llm.generate(PROMPT, FREE), plain.generate(PROMPT, FREE)
    assert fast.token_ids == slow.token_ids
    assert isinstance(llm.engine.controller, AdaptiveController)


def test_what_is_given_wins(path: Path, random_pair: tuple[str, str]) -> None:
    llm = LLM(
        random_pair[0],
        dtype="float32",
        config=path,
        draft_length=2,
        max_batch_size=1,
        rule="token",
    )
    assert llm.engine.scheduler.config.max_batch_size == 1
    stats = llm.generate(PROMPT, FREE)[0].stats
    assert 1 < stats.drafted_tokens / stats.target_steps <= 2
    own = LLM(random_pair[0], "ngram", dtype="float32", config=path)
    assert own.drafters == ("ngram",)
    assert own.engine.scheduler.config.max_batch_size == 3
    none = LLM(random_pair[0], "none", dtype="float32", config=path)
    assert none.generate(PROMPT, FREE)[0].stats.drafted_tokens == 0
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        LLM(random_pair[0], config=path, max_batch_size=0)


def test_a_fixed_length_comes_from_the_file(
    settings: TunedSettings, tmp_path: Path, random_pair: tuple[str, str]
) -> None:
    fixed = replace(settings, draft=replace(settings.draft, length=3))
    fixed.write(tmp_path / "p.toml")
    llm = LLM(random_pair[0], dtype="float32", config=tmp_path / "p.toml")
    stats = llm.generate(PROMPT, FREE)[0].stats
    assert 2 < stats.drafted_tokens / stats.target_steps <= 3


# -- elsewhere -------------------------------------------------------------------------------


def test_an_export_takes_what_was_tuned(path: Path, random_pair: tuple[str, str]) -> None:
    from paceline.lab.export import export

    made = export("vllm", random_pair[0], config=path, rule="block")
    assert made.config["model"] == str(Path(random_pair[1]).resolve())
    assert made.config["rejection_sample_method"] == "block"
    assert made.command[made.command.index("--max-num-seqs") + 1] == "3"
    assert any("adaptive draft length" in line for line in made.approximations)
    own = export("vllm", random_pair[0], "ngram", config=path, draft_length=2, max_batch_size=5)
    assert (own.config["method"], own.config["num_speculative_tokens"]) == ("ngram", 2)
    assert "--max-num-seqs" in own.command and "5" in own.command
