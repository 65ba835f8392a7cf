"""One report, three ways to show it."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from paceline.errors import ConfigError
from paceline.lab.report.document import (
    Column,
    Report,
    Table,
    Text,
    milliseconds,
    number,
    record_of,
    share,
    table_across,
    table_of,
    times,
)
from paceline.lab.report.render import as_table, print_report, print_table, write


def sample() -> Report:
    report = Report("Speed")
    table = Table(("method", "speedup", "left"), (("a|b", "1.83x", 2), ("<i>", "0.9x", None)))
    report.add(
        "Methods",
        table,
        Text("Mind the gap & the step.", warning=True),
    )
    return report


def test_terminal() -> None:
    out = io.StringIO()
    print_report(sample(), Console(file=out, width=80))
    text = out.getvalue()
    assert "Methods" in text and "1.83x" in text and "<i>" in text and "Mind the gap" in text


def test_no_heading_breaks_on_a_narrow_screen() -> None:
    """A wide table is printed in parts, which all have the columns that identify a row."""
    out, names = io.StringIO(), [f"long_name_{n}" for n in range(12)]
    rows = [[4, method, *(f"{n}.00x" for n in range(12))] for method in ("plain", "ngram")]
    print_table(
        Table(["clients", "method", *names], rows, note="Once."), Console(file=out, width=80)
    )
    text = out.getvalue()
    assert all(name in text for name in names) and text.count("Once.") == 1
    assert text.count("method") == text.count("ngram") == 3
    assert max(map(len, text.splitlines())) <= 80


def test_a_note_is_as_wide_as_the_screen_below_a_narrow_table() -> None:
    """It was as narrow as the last part of the table: a word a line."""
    out, note = io.StringIO(), "Every draft and every decision of one step, enumerated."
    table = Table([*(f"long_name_{n}" for n in range(6)), "far"], [list(range(7))], "Of six", note)
    print_table(table, Console(file=out, width=60))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert note in lines and lines.count("Of six") == 1
    assert sum("long_name_0" in line for line in lines) == 2


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_breaks_on_a_narrow_screen(width: int) -> None:
    """Columns of long texts share the remaining width; the widest word of each fits."""
    found = "drafts 3,072 of the target's 4,096 tokens"
    consequence = "Tokens outside the draft vocabulary are never drafted: right for other names."
    cure = "Nothing to do unless your text is of another kind than the training data."
    row = ["note", "draft 3 (eagle3)", found, consequence, cure]
    out = io.StringIO()
    headings = ["", "about", "found", "consequence", "cure"]
    print_table(Table(headings, [row]), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = Counter(word for line in lines[1:] for word in line.split())
    for word, count in Counter(" ".join([*headings, *row]).split()).items():
        assert shown[word] == count, word


def test_a_word_wider_than_its_column_is_folded() -> None:
    out, path = io.StringIO(), "/a/path/" + 20 * "folder/"
    print_table(Table(["file", "size"], [[path, 3]]), Console(file=out, width=60))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 and path in "".join(
        line.split("3")[0].strip() for line in lines
    )


def test_markdown(tmp_path: Path) -> None:
    write(sample(), tmp_path / "sub" / "r.md")
    text = (tmp_path / "sub" / "r.md").read_text(encoding="utf-8")
    assert "| a\\|b | 1.83x | 2 |" in text
    assert "|---|---:|---:|" in text


def test_html_is_one_file_without_outside_requests(tmp_path: Path) -> None:
    write(sample(), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "&lt;i&gt;" in text and "gap &amp; the step" in text
    assert "src=" not in text and "<link" not in text and "<script" not in text
    body = text[text.index("<body>") : text.index("</html>")]
    assert [cell.text for cell in ET.fromstring(body).iter("td")][:2] == ["a|b", "1.83x"]


def test_bad_file_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"end its name in \.md or \.html"):
        write(Report("x"), "r.pdf")
    with pytest.raises(ConfigError, match="cannot write"):
        write(Report("x"), "/proc/none/r.md")


def test_table_with_title_and_note() -> None:
    text = as_table(Table(("a",), ((1.23456,),), title="T", note="N"))
    assert text == "**T**\n\n| a |\n|---:|\n| 1.23 |\n\n*N*"


def test_a_column_is_described_once() -> None:
    """With a key it is in JSON, with a heading in tables; an unknown value is an empty cell."""
    columns = (
        Column("speed", "tok/s", "rate.median", "{:.0f}".format),
        Column("share", "", "share", stored=str),
        Column("", "at best", "best", "{:.1f}x".format),
    )
    item = SimpleNamespace(rate=SimpleNamespace(median=12.34), share=0.5, best=None)
    assert record_of(item, columns) == {"speed": 12.34, "share": "0.5"}
    assert table_of([item], columns) == Table(["tok/s", "at best"], [["12", None]])
    across = table_across("", {"a": item}, columns[::2], "N")
    assert across == Table(["", "a"], [["tok/s", "12"], ["at best", None]], note="N")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.00364, "3.64"), (0.0178, "17.8"), (0.1178, "118"), (1.5, "1500")],
)
def test_milliseconds(seconds: float, expected: str) -> None:
    assert milliseconds(seconds) == expected


def test_formats() -> None:
    assert (times(1.5), number(2.913), share(0.617)) == ("1.50x", "2.91", "62%")
