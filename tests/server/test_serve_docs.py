"""The page about the server and the files for deploying it say what is so."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.main import app
from paceline.server.api.protocol import ChatRequest, CompletionRequest, Speculation
from paceline.server.config import ServeConfig, configure, keys
from support.running_server import Running

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
REFERENCE = ROOT / "docs" / "reference" / "server.md"
FIRST = ROOT / "docs" / "get-started" / "first-server.md"
# The pages show the real model; the tests ask the server that they have.
PAGE, FIRST_PAGE = (
    page.read_text(encoding="utf-8").replace("smollm2", "tiny") for page in (REFERENCE, FIRST)
)


def blocks(language: str) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for page in (PAGE, FIRST_PAGE) for block in fence.findall(page)]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The flags of a command line; wrong ones fail."""
    group: Any = typer.main.get_command(app)
    context = group.commands["serve"].make_context("serve", arguments)
    return dict(context.params)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_examples(server: Running) -> None:
    commands = [block for block in blocks("sh") if block.startswith("curl")]
    assert commands
    for command in commands:
        here = command.replace("http://127.0.0.1:8000", server.url).replace("curl", "curl -sf", 1)
        done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert '"choices"' in done.stdout


def test_python_examples(server: Running) -> None:
    examples = blocks("python")
    assert len(examples) == 2
    for block in examples:
        here = block.replace("http://127.0.0.1:8000", server.url)
        command = [sys.executable, "-c", here]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout) > 10


def test_commands_of_the_page() -> None:
    commands = [shlex.split(b) for b in blocks("sh") if b.startswith("paceline serve")]
    assert commands
    for command in commands:
        configure(flags_only(parsed(command[2:])))


def flags_only(params: dict[str, Any]) -> dict[str, Any]:
    given = {e.name: params.get(e.name) for e in keys()}
    return {name: value for name, value in given.items() if value not in ([], ())}  # (): typer 0.26


def test_every_endpoint_is_on_the_page(server: Running) -> None:
    from paceline.server.app import create_app

    documented = set(create_app(server.service).openapi()["paths"])
    assert documented
    for path in documented:
        assert path.replace("{name}", "NAME") in PAGE, path


def test_every_field_is_on_the_page() -> None:
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    fields |= {f"speculation.{name}" for name in Speculation.model_fields}
    missing = [name for name in fields - {"speculation"} if f"`{name}" not in PAGE]
    assert not missing


def test_flags_of_the_page() -> None:
    known = {entry.flag for entry in keys()} | {"--config", "--print-config", "--help"}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known
    default = ServeConfig()
    assert "| `--max-queue` | 64 |" in PAGE and default.max_queue == 64
    assert "| `--deadline` | 600 |" in PAGE and default.deadline == 600
    assert "`--drain-seconds` (30)" in PAGE and default.drain_seconds == 30
    assert "| 4M |" in PAGE and default.max_request_bytes == 4 * 2**20


def test_links_of_the_page() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links and all((REFERENCE.parent / link).is_file() for link in links)


# -- deploying -------------------------------------------------------------------------------------


def test_example_configuration() -> None:
    config = configure({}, DEPLOY / "paceline.toml")
    assert config.draft == ("paceline/tiny-draft", "ngram")
    assert config.host == "127.0.0.1"


def unit() -> dict[str, str]:
    lines = (DEPLOY / "paceline.service").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_s_command() -> None:
    settings = unit()
    program, *arguments = shlex.split(settings["ExecStart"])
    assert program.endswith("/paceline") and arguments[0] == "serve"
    params = parsed(arguments[1:])
    assert [*params["config"]] == ["/etc/paceline/paceline.toml"]  # a tuple with the oldest typer
    name = settings["LoadCredential"].split(":")[0]
    assert params["api_key_file"] == f"${{CREDENTIALS_DIRECTORY}}/{name}"
    # systemd must not kill before the drain and the closing of connections are over.
    drain = configure({}, DEPLOY / "paceline.toml").drain_seconds
    assert int(settings["TimeoutStopSec"]) > drain + 5


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "paceline.service").read_text(encoding="utf-8")
    here = tmp_path / "paceline.service"
    here.write_text(text.replace("/opt/paceline/bin/paceline", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "paceline.service" not in done.stderr, done.stderr


def test_the_image_s_command_and_files() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [line.split(" ", 1) for line in text.splitlines() if line and line[0] not in "# "]
    copied = [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]
    copied = [source for source in copied if source not in ("--from=build", "/opt/paceline")]
    assert copied and all((ROOT / source).exists() for source in copied)
    said = {name: re.findall(r'"([^"]*)"', rest) for name, rest in steps}
    assert said["ENTRYPOINT"] == ["paceline", "serve"]
    assert configure(flags_only(parsed(said["CMD"]))).host == "0.0.0.0"
    assert dict(steps)["EXPOSE"] == str(ServeConfig().port)
    assert dict(steps)["USER"] == "1000:1000"  # by number, as runAsNonRoot wants it
