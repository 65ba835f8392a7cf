"""Stages and how they are shown: bars on a terminal, lines in a pipe, or not at all."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from paceline.cli.output import measuring
from paceline.core.stages import info, is_heard, stage
from paceline.lab.budget import Budget
from paceline.request.progress import OpenStage, bars, showing
from support.command_lines import paceline
from support.simulated_clock import Clock


@pytest.fixture(autouse=True)
def hushed() -> None:
    """Undoes what hushes the other commands under test."""


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- nobody listens -------------------------------------------------------------------------------


def test_without_a_listener_stages_cost_and_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert not is_heard()
    with stage("tokenising", 3) as begun:
        begun.advance(1, "x")
        info("a line")
    assert capfd.readouterr() == ("", "")


# -- a pipe ---------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("paceline.request.progress.monotonic", clock)
    return clock


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is open for 20 ms gets its line."""
    monkeypatch.setattr("paceline.request.progress._BEGIN_SECONDS", 0.02)


def test_a_pipe_gets_whole_lines_without_bars(soon: None) -> None:
    console = pipe()
    with showing(console), stage("reading a [very] long name.jsonl, over forty characters"):
        time.sleep(0.2)
        info("kept [this]")
    text = shown(console)
    assert text.splitlines() == [
        "reading a [very] long name.jsonl, over forty characters ...",
        "kept [this]",
    ]


def test_stages_of_a_moment_have_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.request.progress._BEGIN_SECONDS", 0.3)
    console = pipe()
    with showing(console):
        for number in range(3):
            with stage(f"short {number}"):
                pass
        for _ in range(2):
            with stage("loading"):  # a single call that blocks
                time.sleep(0.6)
        time.sleep(0.4)
    assert shown(console) == "loading ...\n"


def test_what_advances_has_a_line_in_twenty_seconds(clock: Clock) -> None:
    console = pipe()
    with showing(console), stage("training", 100, "steps") as training:
        for step in range(1, 101):
            with stage("decoding", 1, "answers"):
                clock.now += 1
            training.advance(1, f"loss {step}")
    lines = shown(console).splitlines()
    assert lines[0] == "training: 20 of 100 steps, loss 20"
    assert lines[1] == "training: 40 of 100 steps, loss 40" and len(lines) == 5


@pytest.mark.parametrize("make", [pipe, terminal])
def test_an_error_inside_ends_the_stage_and_passes(make) -> None:
    console = make()
    with pytest.raises(KeyError, match="lost"), showing(console), stage("outer"):
        with pytest.raises(ValueError), stage("inner"):
            raise ValueError
        raise KeyError("lost")
    assert not is_heard()


def test_a_reader_that_goes_away_ends_no_work(capfd: pytest.CaptureFixture[str]) -> None:
    class Gone(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise BrokenPipeError

    gone = Gone()
    with showing(Console(file=gone, force_terminal=False)):
        info("a line")
        print("the result")
    assert gone.tries
    assert capfd.readouterr() == ("the result\n", "")


# -- a terminal -----------------------------------------------------------------------------------


def test_a_terminal_has_bars_that_go() -> None:
    console = terminal()
    with showing(console):
        with stage("reading [a].jsonl", 10, "records") as begun:
            begun.advance(4, "chat")
            time.sleep(0.5)  # bars are drawn ten times a second
            info("a line [that] stays")
        with stage("reading [b].jsonl"):
            begun.advance()  # of a thread that is late
    text = shown(console)
    assert "reading [a].jsonl: chat" in text and "4 of 10 records" in text
    assert "━" in text and "a line [that] stays" in text and "reading [b].jsonl" in text
    assert "\x1b[2K" in text.rpartition("records")[2]  # the bar is wiped at the end


def test_what_is_printed_meanwhile_goes_where_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """stderr is a terminal and stdout a file: results must not land on the terminal."""
    console = terminal()
    with showing(console), stage("decoding"):
        print("the result")
    assert capsys.readouterr().out == "the result\n"
    assert "the result" not in shown(console)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    with showing(console), stage("loading"):
        time.sleep(0.2)
    assert shown(console) == "loading ...\n"


def test_a_call_from_python_has_bars_if_it_asks_for_them(soon: None) -> None:
    for asked in (True, False):
        with bars(asked), stage("decoding", 2, "answers"):
            assert is_heard() == asked
    console = pipe()
    with showing(console), bars(True), stage("decoding"):  # the command shows them
        time.sleep(0.2)
    assert shown(console) == "decoding ...\n"


# -- what a line says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "total", "unit", "counts"),
    [
        (0, None, "", ""),
        (120, 2000, "records", "120 of 2,000 records"),
        (120, None, "records", "120 records"),
        (31e6, 93e6, "B", "31.0 MB of 93.0 MB"),
    ],
)
def test_counts(done: float, total: float | None, unit: str, counts: str) -> None:
    opened = OpenStage("copying", total, unit, lambda stage: None)
    opened.advance(done)
    assert opened.counts == counts


def test_with_a_budget_its_seconds_are_counted(clock: Clock) -> None:
    console = pipe()
    with showing(console):
        with measuring("certifying", Budget(180, clock), 99) as measured:
            clock.now = 63
            measured.advance("greedy: chat/0")
            clock.now = 200
            measured.advance("the end")
        clock.now = 300
        with measuring("certifying", Budget(None, clock), 99) as measured:
            measured.advance("greedy: chat/0")
    assert shown(console).splitlines() == [
        "certifying: 63 of 180 s, greedy: chat/0",
        "certifying: 180 of 180 s, the end",
        "certifying: 1 of 99, greedy: chat/0",
    ]


# -- a command ------------------------------------------------------------------------------------


def test_a_piped_command_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.request.progress._BEGIN_SECONDS", 0.0)
    done = paceline("generate", "Once", "--draft", "none", "--max-tokens", "2")
    assert done.exit_code == 0, done.stderr
    assert "loading paceline/tiny ...\n" in done.stderr
    assert "loading" not in done.stdout
