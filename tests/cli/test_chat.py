"""A conversation: its commands in a pipe, and Ctrl-C, Markdown and pasting at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.__main__ import main
from paceline.cli.generate import _stream_markdown
from support.command_lines import paceline

BASE = ["--model", "paceline/tiny", "--draft", "ngram", "--max-tokens", "12"]


def prompts(*lines: str, flags: Sequence[str] = ()) -> list[str]:
    """What the model was asked, for these lines of a pipe."""
    talk = "".join(f"{line}\n" for line in lines)
    done = paceline("chat", *BASE, "--json", *flags, input=talk)
    assert done.exit_code == 0, done.output
    return [json.loads(line)["prompt"] for line in done.stdout.splitlines()]


def test_texts_of_several_lines() -> None:
    (asked,) = prompts('"""one', "two", 'three"""')
    assert "one\ntwo\nthree" in asked


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ("/help", "hello", "/set temperature 0.7", "/set seed 4", "/set stop x", "/draft none")
    first, second, third = prompts(
        *lines, "more", "/save it.json", "/save", "/clear", "/set", "new"
    )
    assert second.startswith(first) and first != third and "more" not in third
    saved = json.loads((tmp_path / "it.json").read_text())
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert len(list(tmp_path.glob("chat-*.json"))) == 1
    done = paceline("chat", *BASE, input="/save it.json\n")  # another session wrote it
    assert done.exit_code == 1 and "it.json exists already; name another file" in done.stderr
    assert json.loads((tmp_path / "it.json").read_text()) == saved


def test_paragraphs_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """They were printed as separate documents, without the empty line between them."""
    pieces = ("One.\n", "\nTwo", ".\n\n```\nx\n\ny\n```\n\nThree.")
    events = (SimpleNamespace(text=text, from_draft=(), completion=None) for text in pieces)
    text = _stream_markdown(cast(Any, SimpleNamespace(stream=lambda *_: events)), [1], cast(Any, 0))
    shown = "\n".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert text == "".join(pieces) and "One.\n\nTwo.\n\n" in shown
    assert re.search(r"x\n\ny\n+Three\.", shown)


def test_without_drafts_nothing_is_said_of_them() -> None:
    """It said "no draft was tried: it would not have paid"."""
    done = paceline("chat", "hello", *BASE, "--draft", "none")
    assert "tokens/s" in done.output and "draft" not in done.output


@pytest.mark.parametrize("flags", [["--json"], []])
def test_any_bytes_pass_streams_that_are_ascii(
    monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    sink, errors = (TextIOWrapper(BytesIO(), "ascii", write_through=True) for _ in range(2))
    source = TextIOWrapper(BytesIO("¿Él? 🙂\nok\n".encode() + b"caf\xe9\n"), "ascii")
    for name, stream in (("stdin", source), ("stdout", sink), ("stderr", errors)):
        monkeypatch.setattr(sys, name, stream)
    says = ["--logit-bias", "131=100", "--max-tokens", "1"]  # half a character
    monkeypatch.setattr(sys, "argv", ["paceline", "chat", *BASE, *says, *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    out, said = (cast(BytesIO, each.buffer).getvalue().decode("ascii") for each in (sink, errors))
    assert ended.value.code == 1 and "error: a prompt is not UTF-8 text" in said
    if flags:
        first, second = map(json.loads, out.splitlines())
        assert "¿Él? 🙂" in first["prompt"] and second["text"] == "\ufffd"
    else:
        assert out.splitlines() == ["\\ufffd"] * 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/halp", "there is no /halp; did you mean /help?"),
        ("/set temprature 1", "temperature?"),
        ("/set temperature hot", "'hot' is not a value of temperature"),
        ("/set temperature -3", "temperature is -3"),
        ("/draft ngrm", "did you mean ngram?"),
    ],
)
def test_commands_that_make_no_sense(line: str, words: str) -> None:
    done = paceline("chat", *BASE, input=f"{line}\n")
    assert done.exit_code == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_the_drafter_is_named_where_none_is_given() -> None:
    """It switched drafts off."""
    done = paceline("chat", *BASE, input="/draft\n")
    assert done.exit_code == 0 and "drafting with ngram; /draft SPEC changes it" in done.stderr


class Terminal:
    """A chat at a terminal of its own."""

    def __init__(self) -> None:
        self.leader, follower = pty.openpty()
        command = [sys.executable, "-m", "paceline", "chat", *BASE]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
        self.process = subprocess.Popen(
            [*command, "--max-tokens", "900", "--ignore-eos", "--backend", "reference"],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )
        os.close(follower)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What was shown since the last call, up to this pattern."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern} in {self.seen!r}"
            if select.select([self.leader], [], [], 0.1)[0]:
                with suppress(OSError):
                    self.seen += os.read(self.leader, 65536).decode(errors="replace")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.leader)


@pytest.mark.slow  # a process is interrupted
def test_at_a_terminal(terminal: Terminal) -> None:
    terminal.until("you> ")
    terminal.type("Tell me a long story\r")
    terminal.until(r"story\r\n[^y]*\w+ \w+ \w+")
    terminal.type("\x03")
    assert re.search(r"\d+ tokens \(stopped\) · \d+ tokens/s", terminal.until("you> "))
    terminal.type("/set max_tokens 8\r")
    terminal.until("you> ")
    terminal.type("one\rtwo\r")  # pasted: one question
    assert re.search(r"8 tokens .*tokens/s", terminal.until("you> "))
    time.sleep(0.5)  # Python misses a signal between writing the prompt and waiting (readline.c)
    terminal.type("\x03")
    assert "Ctrl-D" in terminal.until("you> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
