"""Which model and draft commands take by themselves, and what they say about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.bench import TargetOptions
from paceline.cli.main import app
from paceline.cli.options import ModelOptions
from paceline.files import cache_folder
from paceline.lab.tune import candidates
from paceline.lab.tune.candidates import at_hand
from paceline.model import names
from paceline.model.names import EMBEDDED, REAL, default_drafts, default_model
from paceline.request.progress import showing
from paceline.server.config import ServeConfig
from support import real_model
from support.pulled_model import plant
from support.tiny_models import TinyPair


@pytest.fixture
def nothing_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.delenv("PACELINE_MODEL")


@pytest.fixture
def real_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair: TinyPair) -> Path:
    return plant(monkeypatch, tmp_path / "cache", tiny_pair.target)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that ships what is trained for the real model."""
    monkeypatch.setattr(names, "has_assets", lambda name: True)
    monkeypatch.setattr(candidates, "has_assets", lambda name: True)


def test_the_suite_sees_nobodys_cache() -> None:
    assert default_model() == (EMBEDDED, None)
    assert names.pulled(names.SMOLLM2) is None
    assert real_model.folder() is None or real_model.folder() != names.model_folder(names.SMOLLM2)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_the_toy_where_nothing_was_pulled(
    nothing_pulled: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with showing():
        assert ModelOptions().model == TargetOptions().model == EMBEDDED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert "paceline/tiny, a toy, because paceline/smollm2 has not been pulled" in lines[0]
    assert ModelOptions().resolved_draft == "auto"


def test_the_real_one_where_it_was(real_pulled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with showing():
        assert ModelOptions().model == TargetOptions().model == REAL
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "paceline/smollm2, because it has been pulled" in lines[0]
    assert names.resolve(REAL) == str(real_pulled)


def test_what_is_named_wins(
    real_pulled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_MODEL", "somebody/model")
    with showing():
        assert ModelOptions(model="other").model == "other"
        assert ModelOptions().model == TargetOptions().model == "somebody/model"
    assert capsys.readouterr().err == ""


def test_what_a_server_loads(heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig(model=REAL).drafts == (
        "auto",
        "ngram",
        "eagle3:paceline/smollm2-eagle3",
    )
    assert {"smollm2-draft", "smollm2-eagle3", "smollm2-medusa"} <= {
        item.spec.partition(",")[0].rpartition("/")[2] for item in at_hand(REAL, [])
    }
    monkeypatch.setattr(names, "has_assets", lambda name: "tiny" in name)
    assert default_drafts(REAL) == ("auto", "ngram")
    assert default_drafts("other") == ("auto",)
    assert ServeConfig(model="other", draft=("none",)).drafts == ("none",)


def test_every_default_is_a_spec_that_can_be_read() -> None:
    from paceline.drafters import parse_draft

    for spec in (spec for model in names.MADE_FOR for spec in default_drafts(model)):
        assert str(parse_draft(spec)) == spec


def test_a_shipped_head_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As soon as its files lie among the assets."""
    monkeypatch.setattr(names, "ASSETS", tmp_path)
    name = "paceline/smollm2-eagle3"
    with pytest.raises(names.ModelLoadError, match="there is no built-in model"):
        names.resolve(name)
    (tmp_path / "smollm2-eagle3").mkdir()
    (tmp_path / "smollm2-eagle3" / "model.safetensors").write_bytes(b"")
    assert names.resolve(name) == str(tmp_path / "smollm2-eagle3")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "Once", "--max-tokens", "3", "--json"),
        ("chat", "Hello", "--max-tokens", "3", "--json"),
        ("doctor", "--json"),
        ("serve", "--print-config"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_take_it(arguments: tuple[str, ...], real_pulled: Path) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    assert "model: paceline/smollm2, because it has been pulled" in result.stderr
    if arguments[0] == "doctor":
        assert json.loads(result.stdout)["model"] == REAL
    if arguments[0] == "serve":
        assert 'model = "paceline/smollm2"' in result.stdout
