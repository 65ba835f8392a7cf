"""What is asked of the model hub: nothing for what cannot be there, and one thing at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest

from paceline.draft.heads.checkpoint import read_checkpoint
from paceline.drafters import parse_draft
from paceline.errors import ConfigError, ModelLoadError
from paceline.lab.doctor.models import read_files
from paceline.model import names
from paceline.model.loading import load_module, load_tokenizer, read_config
from paceline.model.names import model_path
from support.command_lines import paceline


@pytest.fixture(autouse=True)
def nothing_asked_yet() -> None:
    names._download.cache_clear()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*_: object, **__: object) -> None:
        raise AssertionError("a hub was asked")

    for name in ("snapshot_download", "hf_hub_download", "HfApi"):
        monkeypatch.setattr(huggingface_hub, name, asks)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("draft", "meant"),
    [
        ("ngarm", "did you mean ngram?"),
        ("Ngram", "did you mean ngram?"),
        ("sufix:memory", "did you mean suffix?"),
        ("hybird:ngram+sufix", "did you mean hybrid?"),
        ("egale3:head", "did you mean eagle3?"),
        ("qwertyuiop", "use one of none, ngram"),
    ],
)
def test_a_near_miss_of_a_drafter_is_answered_at_once(draft: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="there is no drafter") as caught:
        parse_draft(draft)
    assert meant in str(caught.value)


def test_folders_and_hub_names_are_no_near_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngarm").mkdir()
    for name in ("ngarm", "./ngrma", "owner/ngarm", "ngrma.gguf"):
        assert str(parse_draft(name)) in (name, f"model:{name}")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["smolm2", "tinny", "gpt2", "owner/"])
def test_no_hub_is_asked_for_names_without_an_owner(name: str) -> None:
    ways = (
        lambda: model_path(name),
        lambda: load_module(name, "float32", "cpu"),
        lambda: load_tokenizer(name),
        lambda: read_config(name, name),
        lambda: read_checkpoint(name, ("model.safetensors",), "Medusa heads"),
        lambda: read_files(name),
    )
    for way in ways:
        with pytest.raises(ModelLoadError) as caught:
            way()
        assert "\n" not in str(caught.value)
        assert "paceline/smollm2" in str(caught.value)


def test_all_files_of_a_model_come_at_one_asking(
    monkeypatch: pytest.MonkeyPatch, tiny_pair: object
) -> None:
    asked = []

    def snapshot(name: str, **options: object) -> str:
        asked.append((name, options["allow_patterns"]))
        return tiny_pair.target  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    name = "owner/model"
    load_module(name, "float32", "cpu", attention="sdpa")
    load_tokenizer(name)
    assert read_config(name, model_path(name)).model_type == "llama"
    assert len(asked) == 1 and asked[0][0] == name
    assert "*.safetensors" in asked[0][1]


def test_a_hub_that_fails_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, **_: object) -> str:
        asked.append(name)
        raise ConnectionError("Connection refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for _ in range(3):
        for way in (model_path, load_tokenizer):
            with pytest.raises(ModelLoadError, match="the model hub does not deliver it"):
                way("owner/model")
    assert asked == ["owner/model"]


class Hub(BaseHTTPRequestHandler):
    """One that knows nothing, and notes what it was asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("no_hub")
def test_a_command_with_a_misspelt_drafter_asks_nothing() -> None:
    """The finding: six requests."""
    done = paceline("generate", "Once", "--model", "paceline/tiny", "--draft", "ngarm")
    assert done.exit_code == 1 and "did you mean ngram?" in done.stderr, done.stderr


@pytest.mark.slow  # a process more
def test_one_request_over_http(server: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "http", "HTTP"))}
    environment |= {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    words = ["generate", "Once", "--model", "paceline/tiny", "--draft", "owner/ngarm"]
    done = subprocess.run(
        [sys.executable, "-c", "from paceline.__main__ import main; main()", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "the model hub does not deliver it" in done.stderr, done.stderr
    # The client may ask about itself, too.
    assert sum("owner/ngarm" in path for path in Hub.asked) == 1, Hub.asked
