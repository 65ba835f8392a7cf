"""Writing aside: what is seen of it, and what is not."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ConfigError, DataError, WriteError
from paceline.files import (
    LongRecord,
    atomic_folder,
    atomic_write,
    check_new,
    write_files,
)
from support.full_disk import PLACES, content_of, full_disk, no_space, small_files


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def put(file: Path, text: str) -> None:
    write_files({file: text.encode()}, "the file")


def test_a_file_is_there_only_when_it_is_whole(place: Path) -> None:
    file = place / "file"
    file.write_bytes(b"old")
    with atomic_write(file, "the file") as sink:
        sink.write(b"new")
        assert file.read_bytes() == b"old"
    assert content_of(place) == {"file": b"new"}


def test_an_error_of_the_caller_leaves_the_old_file_and_nothing_else(place: Path) -> None:
    (place / "file").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), atomic_write(place / "file", "the file") as sink:
        sink.write(b"new")
        _ = 1 / 0
    assert content_of(place) == {"file": b"old"}


@pytest.mark.parametrize("fault", PLACES)
@pytest.mark.parametrize("before", [b"old", None], ids=["over an old one", "new"])
def test_a_full_disk(place: Path, fault: str, before: bytes | None) -> None:
    file = place / "file"
    if before is not None:
        file.write_bytes(before)
    with full_disk(fault), pytest.raises(WriteError) as caught:
        put(file, "new" * 100)
    message = str(caught.value)
    assert message.startswith(f"cannot write the file {file}: No space left on device; make room")
    assert "\n" not in message
    assert content_of(place) == ({} if before is None else {"file": before})


@pytest.mark.parametrize("fault", PLACES)
def test_of_several_files_all_stay(place: Path, fault: str) -> None:
    before = {"a": b"1", "c": b"3"}
    for name, content in before.items():
        (place / name).write_bytes(content)
    with full_disk(fault), pytest.raises(WriteError):
        write_files({place / name: b"new" * 50 for name in "abc"}, "the files")
    assert content_of(place) == before


def test_a_folder_is_replaced_as_a_whole(place: Path) -> None:
    folder = place / "model"
    for text in ("old", "new"):
        with atomic_folder(folder, "the model") as partial:
            (partial / text).write_text(text)
    assert content_of(place) == {"model/new": b"new"}


def fill(folder: Path, name: str) -> None:
    with atomic_folder(folder, "the model") as partial:
        (partial / name).write_text(name)


@pytest.mark.parametrize("fault", ["fsync", "replace"])
def test_a_folder_stays_when_the_disk_is_full(place: Path, fault: str) -> None:
    folder = place / "model"
    fill(folder, "old")
    before = content_of(place)
    with full_disk(fault), pytest.raises(WriteError, match="No space left"):
        fill(folder, "new")
    assert content_of(place) == before


def test_a_folder_comes_back_if_the_second_rename_fails(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "model"
    fill(folder, "old")
    before, real = content_of(place), os.replace

    def fails(source: Path, target: Path) -> None:
        if Path(source).name == "new":
            no_space()
        real(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(WriteError):
        fill(folder, "new")
    assert content_of(place) == before


def test_libraries_that_hide_why_they_failed(place: Path) -> None:
    """torch.save, safetensors and tokenizers each have an error of their own for it."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    weights = {"w": torch.zeros(10_000)}
    words = Tokenizer(models.WordLevel({str(n): n for n in range(9000)}, unk_token="0"))
    with small_files(4096):
        with (
            pytest.raises(WriteError, match="File too large"),
            atomic_write(place / "x.pt", "the state") as sink,
        ):
            torch.save(weights, sink)
        for write in (
            lambda folder: save_file(weights, folder / "w.safetensors"),
            lambda folder: words.save(str(folder / "tokenizer.json")),
        ):
            with (
                pytest.raises(WriteError, match="File too large"),
                atomic_folder(place / "model", "the model") as partial,
            ):
                write(partial)
    assert content_of(place) == {}


def test_places_that_cannot_be_written(place: Path) -> None:
    with pytest.raises(WriteError, match=r"Is a directory; .*choose another place"):
        put(place, "x")
    with pytest.raises(WriteError, match="File exists"):
        (place / "file").touch()
        put(place / "file" / "x", "x")


def test_a_place_is_tried_before_the_work(place: Path) -> None:
    check_new(place / "no" / "model", "the model", folder=True)
    check_new("/dev/null", "the report")
    (place / "file").touch()
    with pytest.raises(WriteError, match="Not a directory"):
        check_new(place / "file" / "no" / "x", "the file")
    with pytest.raises(WriteError, match="File name too long"):
        check_new(place / ("x" * 300), "the file")
    assert content_of(place) == {"file": b""}


def test_the_current_folder_and_those_around_it_are_never_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "inner").mkdir()
    monkeypatch.chdir(place)
    for path in ("/", ".", "..", place, "inner/.."):
        with pytest.raises(WriteError, match="it would replace the current folder"):
            check_new(path, "the model", force=True, folder=True)
    check_new("inner", "the model", force=True, folder=True)


def test_what_exists_is_replaced_only_by_force(place: Path) -> None:
    (place / "file").touch()
    (place / "empty").mkdir()
    check_new(place / "empty", "the model", folder=True)
    for path, folder in ((place / "file", False), (place, True)):
        with pytest.raises(WriteError, match=r"it exists already; .*--force"):
            check_new(path, "the output", folder=folder)
        check_new(path, "the output", force=True, folder=folder)
        with pytest.raises(WriteError, match=r"it is a f.*; choose another name"):
            check_new(path, "the output", force=True, folder=not folder)


def test_the_error_is_one_that_callers_knew(place: Path) -> None:
    for kind in (ConfigError, DataError):
        with pytest.raises(kind):
            put(place, "x")


def test_rights_and_links_stay(place: Path) -> None:
    real, link = place / "real", place / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    put(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    before = os.umask(0o022)
    try:
        put(place / "fresh", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((place / "fresh").stat().st_mode) == 0o644


def test_a_pipe_is_written_to_and_not_replaced(place: Path) -> None:
    pipe = place / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    put(pipe, "through")
    reader.join(10)
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_standard_output_is_written_to_as_a_pipe() -> None:
    code = "from paceline.files import *; write_files({Path('/dev/stdout'): b'through'}, 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"through", b"")


def test_names_as_long_as_they_may_be(place: Path) -> None:
    file = place / ("ü" * 127)
    put(file, "x")
    assert file.read_text() == "x"


def test_threads_that_write_the_same_file(place: Path) -> None:
    file = place / "file"
    texts = [letter * 100_000 for letter in "abcd"]
    threads = [threading.Thread(target=put, args=(file, t)) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_text() in texts
    assert len(list(place.iterdir())) == 1


def test_a_killed_writer_leaves_the_old_file(place: Path) -> None:
    file = place / "file"
    file.write_text("old")
    code = (
        "import os, signal, sys\nfrom paceline.files import atomic_write\n"
        "with atomic_write(sys.argv[1], 'it') as sink:\n"
        "    sink.write(b'new')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert done.returncode == -9
    assert file.read_text() == "old"


# -- records that come for hours -------------------------------------------------------------------


KEY = b"key"


def test_records_are_the_file_once_all_are_there(place: Path) -> None:
    file = place / "records.jsonl"
    with LongRecord(file, "the records", "key") as record:
        record.add("one")
        assert not file.exists()
        record.add("zwö")
    assert content_of(place) == {"records.jsonl": "one\nzwö\n".encode()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_records_are_gone_on_with(place: Path, error: type[BaseException]) -> None:
    with pytest.raises(error) as caught, LongRecord(place / "r", "the records", "key"):
        raise error
    assert content_of(place) == {} and "records until" not in str(caught.value)
    with pytest.raises(error) as caught, LongRecord(place / "r", "the records", "key") as record:
        record.add("one")
        raise error
    assert content_of(place) == {"r.partial": b"one\n", "r.partial.key": KEY}
    if error is KeyboardInterrupt:
        assert "1 records until then" in str(caught.value)
        assert "run the same command again" in str(caught.value)
    with (place / "r.partial").open("ab") as file:  # killed in the middle of a line
        file.write(b"tw")
    with LongRecord(place / "r", "the records", "key") as record:
        assert record.lines == 1
        assert list(record.kept()) == ["one\n"]
        record.add("two")
    assert content_of(place) == {"r": b"one\ntwo\n"}


def test_records_never_replace_a_file(place: Path) -> None:
    (place / "r").write_text("mine")
    os.mkfifo(place / "pipe")
    for file in (place / "r", place / "pipe"):
        with pytest.raises(WriteError, match="exists already") as refused:
            LongRecord(file, "the records", "key").__enter__()
        assert "--force" not in str(refused.value)  # no command with records has it
    (place / "pipe").unlink()
    assert content_of(place) == {"r": b"mine"}


def test_records_make_their_folder_and_keep_their_key_on_a_full_disk(place: Path) -> None:
    file = place / "new" / "r"
    for _ in range(2):
        with pytest.raises(MemoryError), LongRecord(file, "the records", "key") as record:
            record.add("one")
            raise MemoryError
        with small_files(0), pytest.raises(WriteError), LongRecord(file, "the records", "key") as r:
            r.add("two")
    assert content_of(file.parent) == {"r.partial": b"one\none\n", "r.partial.key": KEY}


def test_records_of_another_command_are_not_gone_on_with(place: Path) -> None:
    with pytest.raises(MemoryError), LongRecord(place / "r", "the records", "key") as record:
        record.add("one")
        raise MemoryError
    before = content_of(place)
    with (
        pytest.raises(ConfigError, match="other options"),
        LongRecord(place / "r", "the records", "other"),
    ):
        pass
    assert content_of(place) == before


def test_records_until_the_disk_was_full_are_kept(place: Path) -> None:
    file = place / "r"
    with (
        small_files(1000),
        pytest.raises(WriteError) as caught,
        LongRecord(file, "the records", "key") as record,
    ):
        for _ in range(20):
            record.add("x" * 99)
    written = (b"x" * 99 + b"\n") * 10
    assert content_of(place)["r.partial"][:1000] == written
    with LongRecord(file, "the records", "key") as record:
        assert record.lines == 10
    assert content_of(place) == {"r": written}
    assert f"the 10 records until then are in {file}.partial" in str(caught.value)


# -- nothing is written in another way -------------------------------------------------------------

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"
# Into a folder that ``atomic_folder`` puts in its place, or never over anything.
FREE = {
    ("train/draft.py", "save_pretrained"),
    ("train/data.py", "open"),  # an entry of the archive in the file that is given
    ("pull/run.py", "write_text"),
    ("pull/run.py", "save_pretrained"),
    ("pull/run.py", "open"),  # the output of pip, in a folder that goes away
    ("lab/quantize.py", "write_text"),
    ("lab/quantize.py", "save_pretrained"),
    ("lab/quantize.py", "save_file"),
    ("lab/profiling/steady.py", "export_chrome_trace"),
    ("model/backends/native/copies.py", "save_file"),  # to the file that is given
}
WRITERS = {"write_text", "write_bytes", "save_file", "save_pretrained", "export_chrome_trace"}


def writing(path: Path) -> Iterator[str]:
    """Calls in a source file that write files by themselves."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [item.value for item in node.args if isinstance(item, ast.Constant)]
        opens = name == "open" and any(set(str(mode)) & set("wax") for mode in modes)
        if name in WRITERS or opens:
            yield name


def test_files_are_written_by_one_module() -> None:
    calls = {
        (str(p.relative_to(SOURCE)), call) for p in SOURCE.rglob("*.py") for call in writing(p)
    }
    assert not {call for call in calls - FREE if call[0] != "files/__init__.py"}
