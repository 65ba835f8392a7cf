"""Stages and how they are shown: bars on a terminal, lines in a pipe, or not at all."""

from __future__ import annotations

import io
import re
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.output import measuring
from paceline.core.stages import info, is_heard, stage
from paceline.lab.budget import Budget
from paceline.model.target import CausalModel
from paceline.request import progress
from paceline.request.progress import OpenStage, bars, duration, showing
from support.command_lines import paceline
from support.simulated_clock import Clock


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what hushes the other commands under test; seconds become hundredths."""
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.01)
    monkeypatch.setattr(progress, "_LINE_INTERVAL", 0.01)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def until(console: Console, words: str) -> None:
    """Wait for words; the heartbeat must not need the main thread."""
    end = time.monotonic() + 20
    while words not in shown(console):
        assert time.monotonic() < end, shown(console)
        time.sleep(0.005)


# -- nobody listens -------------------------------------------------------------------------------


def test_without_a_listener_stages_cost_and_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert not is_heard()
    with stage("tokenising", 3) as begun:
        begun.advance(1, "x")
        begun.resize(5)
        info("a line")
    assert capfd.readouterr() == ("", "")


# -- a pipe ---------------------------------------------------------------------------------------


def test_a_pipe_gets_whole_lines_without_bars() -> None:
    console = pipe()
    with showing(console, seconds=0.02), stage("tokenising a [very] long name.jsonl", 2000, "rows"):
        until(console, "tokenising")
        info("kept [this]")
    text = shown(console)
    assert "\x1b" not in text and "━" not in text
    assert text.splitlines()[0] == "tokenising a [very] long name.jsonl: 0 of 2,000 rows"
    assert "kept [this]" in text.splitlines()  # neither wrapped at 40 nor read as markup


def test_a_blocked_main_thread_has_a_heartbeat() -> None:
    """A library's call that takes minutes: nobody advances, and lines come all the same."""
    console, seen = pipe(), []
    with showing(console, seconds=0.02), stage("converting"):
        deadline = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < deadline:
            blocked = threading.Event()
            blocked.wait(0.02)
            seen = shown(console).splitlines()
    assert len(seen) >= 3
    assert all(line.startswith("converting") for line in seen)


def test_the_innermost_stage_is_what_happens_and_the_outer_comes_back() -> None:
    console = pipe()
    with showing(console, seconds=0.02), stage("training"):
        until(console, "training")
        with stage("loading the target"):
            until(console, "loading the target")
        before = len(shown(console).splitlines())
        while len(shown(console).splitlines()) < before + 3:
            time.sleep(0.005)
    assert shown(console).splitlines()[-1].startswith("training")


def test_after_the_block_nothing_is_said_any_more() -> None:
    console = pipe()
    with showing(console, seconds=0.01), stage("loading"):
        until(console, "loading")
    text = shown(console)
    time.sleep(0.05)
    assert shown(console) == text
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_of_many_alike_within_a_longer_one_the_longer_one_is_told() -> None:
    console, began = pipe(), time.monotonic()
    with showing(console, seconds=0.4), stage("measuring", 60, "prompts") as outer:
        until(console, "measuring")
        for _ in range(60):
            with stage("decoding", 1, "answers"):
                time.sleep(0.02)
            outer.advance()
    lines = shown(console).splitlines()
    assert sum(line.startswith("decoding") for line in lines) <= 1
    assert sum(line.startswith("measuring") for line in lines[1:]) >= 1
    assert len(lines) < 9 + (time.monotonic() - began) / 0.4


def test_many_short_stages_are_not_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_INTERVAL", 1000.0)
    console = pipe()
    with showing(console, seconds=1000.0):
        with stage("first"):
            until(console, "first")
        for number in range(20):
            with stage(f"short {number}"):
                time.sleep(0.02)
    assert shown(console).splitlines() == ["first ..."]


@pytest.mark.parametrize("make", [pipe, terminal])
def test_an_error_inside_ends_the_stage_and_passes(make) -> None:
    console = make()
    with pytest.raises(KeyError, match="lost"), showing(console, seconds=0.01), stage("outer"):
        with pytest.raises(ValueError), stage("inner"):
            raise ValueError
        until(console, "outer")  # the inner one is not shown as open
        raise KeyError("lost")
    assert not is_heard()
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_reader_that_goes_away_ends_no_work(capfd: pytest.CaptureFixture[str]) -> None:
    class Gone(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise BrokenPipeError

    gone = Gone()
    with showing(Console(file=gone, force_terminal=False), seconds=0.01), stage("loading"):
        deadline = time.monotonic() + 20
        while gone.tries < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        print("the result")
    assert capfd.readouterr() == ("the result\n", "")


# -- a terminal -----------------------------------------------------------------------------------


def test_a_terminal_has_bars_that_go() -> None:
    console = terminal()
    with showing(console), stage("reading [a].jsonl", 10, "records") as begun:
        begun.advance(4, "chat")
        until(console, "reading [a].jsonl: chat")
        until(console, "4 of 10 records")
        info("a line [that] stays")
    text = shown(console)
    assert "━" in text and "a line [that] stays" in text
    assert "\x1b[2K" in text.rpartition("records")[2]  # the bar is wiped at the end


def test_what_is_printed_meanwhile_goes_where_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """stderr is a terminal and stdout a file: results must not land on the terminal."""
    console = terminal()
    with showing(console), stage("decoding"):
        print("the result")
    assert capsys.readouterr().out == "the result\n"
    assert "the result" not in shown(console)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    with showing(console, seconds=0.02), stage("loading"):
        until(console, "loading")
    assert "━" not in shown(console)


def test_a_call_from_python_has_bars_if_it_asks_for_them() -> None:
    for asked in (True, False):
        with bars(asked), stage("decoding", 2, "answers"):
            assert is_heard() == asked
    console = pipe()
    with showing(console, seconds=0.02), bars(True), stage("decoding"):  # a command shows them
        until(console, "decoding")


def test_a_call_from_python_has_lines_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    """It had nothing at all there."""
    with bars(True), stage("decoding", 2, "answers"):
        time.sleep(1.0)
    assert "decoding: 0 of 2 answers" in capfd.readouterr().err


# -- what a line says -----------------------------------------------------------------------------


def line_of(done: float, total: float | None, unit: str = "", note: str | None = None) -> str:
    made = OpenStage("copying", total, unit)
    made.advance(done, note)
    return made.line()


@pytest.mark.parametrize(
    ("done", "total", "unit", "line"),
    [
        (0, None, "", "copying ..."),
        (120, 2000, "records", "copying: 120 of 2,000 records"),
        (120, None, "records", "copying: 120 records"),
        (31e6, 93e6, "B", "copying: 31 of 93 MB"),
        (5e3, 9e3, "B", "copying: 5,000 of 9,000 B"),
        (172, 160, "turns", "copying: 172 turns"),  # the total was a guess
    ],
)
def test_counts(done: float, total: float | None, unit: str, line: str) -> None:
    assert line_of(done, total, unit) == line


def test_time_passed_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = OpenStage("copying", 100, "")
    made.advance(25, "part two")
    made.start -= 60
    assert made.line() == "copying: 25 of 100, part two, 1 min so far, about 3 min left"
    made.resize(50)
    assert made.line().endswith("about 1 min left")


def test_with_a_budget_its_seconds_are_counted() -> None:
    clock, console = Clock(), pipe()
    with showing(console, seconds=0.02):
        with measuring("certifying", Budget(180, clock), 99) as measured:
            clock.now = 63
            measured.advance("greedy: chat/0")
            until(console, "certifying: 63 of 180 s, greedy: chat/0")
            clock.now = 200
            measured.advance("the end")
            until(console, "certifying: 180 of 180 s, the end")
        with measuring("certifying", Budget(None, clock), 99) as measured:
            measured.advance("greedy: chat/0")
            until(console, "certifying: 1 of 99, greedy: chat/0")
    made = OpenStage("certifying", 180, "s")
    made.advance(60)
    made.start -= 20  # loading came before
    assert made.line() == "certifying: 60 of 180 s, 20 s so far, about 2 min left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (45, "45 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (1500, "25 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# -- a command ------------------------------------------------------------------------------------


def test_a_piped_command_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    load = CausalModel.load

    def slow(*arguments: Any, **options: Any) -> CausalModel:
        time.sleep(0.5)
        return load(*arguments, **options)

    monkeypatch.setattr(CausalModel, "load", slow)
    done = paceline("generate", "Once", "--draft", "none", "--max-tokens", "2")
    assert done.exit_code == 0, done.stderr
    assert re.match(r"(starting|loading paceline/tiny)(: \d+ s so far| \.\.\.)", done.stderr)
    assert re.search(r"^loading paceline/tiny(: \d+ s so far| \.\.\.)$", done.stderr, re.M)
    assert "loading" not in done.stdout
