"""Reading corpora: formats, licences, and bad files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from embedded_target import chat_text, train_tokenizer
from paceline import DataError
from paceline.train.configs import DraftConfig, PromptSelection
from paceline.train.data import encode_stream, load_token_stream
from paceline.train.prompts import load_prompts
from paceline.train.records import Records, Source
from support.heard_stages import heard

TOKENIZER = train_tokenizer(["one two three four"], 262)
RECORDS = [
    {"text": "one", "license": "MIT"},
    {"text": "two", "license": "CC-BY-SA-4.0"},
    {"text": "three", "license": "CC0-1.0"},
    {"text": "", "license": "MIT"},
    {"text": "four"},
]


def write(path: Path, lines: list[str]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.fixture(params=["data.jsonl", "data.jsonl.gz"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / request.param, [json.dumps(record) for record in RECORDS])


def test_licences_are_left_out(corpus: Path) -> None:
    usual = PromptSelection().exclude_licenses
    assert usual == DraftConfig(data=("x",)).exclude_licenses == ("CC-BY-SA",)
    guide = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
    assert f"`license` contains `{usual[0]}` are left out" in guide.read_text(encoding="utf-8")
    texts = [record["text"] for record in Records(corpus, usual)]
    assert texts == ["one", "three", "four"]
    assert len(list(Records(corpus))) == len(list(Records(corpus, ("",)))) == 4


def test_excluded_records_are_not_encoded(corpus: Path) -> None:
    tokenizer = TOKENIZER
    text = tokenizer.decode(encode_stream(corpus, tokenizer, ("CC-BY-SA",), "all").ids)
    assert text == "<|endoftext|>one<|endoftext|>three<|endoftext|>four"


def test_a_file_with_nothing_left_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "licensed.jsonl", [json.dumps(record) for record in RECORDS[:3]])
    with pytest.raises(DataError, match="no usable records except those under MIT, CC"):
        encode_stream(file, TOKENIZER, ("MIT", "CC"), "all")


@pytest.mark.parametrize("line", ["{", "[1, 2]", '{"body": "x"}', "3", "null", '{"text": 3}'])
def test_bad_lines_are_named_and_left_out(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "bad.jsonl", [json.dumps(RECORDS[0]), line, json.dumps(RECORDS[2])])
    with heard() as told:
        stream = encode_stream(path, TOKENIZER, (), "all").ids
    assert TOKENIZER.decode(stream) == "<|endoftext|>one<|endoftext|>three"
    (said,) = told.lines
    assert "bad.jsonl: 1 line left out, 2 used (line 2: " in said


def test_python_users_get_a_log_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "bad.jsonl", [json.dumps(RECORDS[0]), "{"])
    encode_stream(path, TOKENIZER, (), "all")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "1 line left out, 1 used" in record.message


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", ["{"] * 9 + [json.dumps(RECORDS[0])])
    with heard() as told:
        encode_stream(path, TOKENIZER, (), "all")
    (said,) = told.lines
    assert "9 lines left out, 1 used (line 1: it is not JSON; line 2: " in said
    assert said.endswith("line 3: it is not JSON; and 6 more)")


def test_a_file_of_bad_lines_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", ["{", "3"])
    with pytest.raises(DataError, match=r"no usable records: line 1: it is not JSON; line 2: "):
        encode_stream(path, TOKENIZER, (), "all")


def test_a_file_that_is_no_gzip(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.gz"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="cannot read"):
        list(Records(path))


def test_a_gzip_that_was_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.jsonl.gz", [json.dumps({"text": str(n) * 50}) for n in range(999)])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cannot read"):
        list(Records(path))


def test_a_file_that_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n')
    assert [record["text"] for record in Records(path)] == ["one"]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="line 1: it is not UTF-8 text"):
        encode_stream(path, TOKENIZER, (), "all")


def test_source_specs(corpus: Path) -> None:
    assert Source.parse(str(corpus)) == Source(corpus, 1.0)
    assert Source.parse(f"{corpus}=2.5") == Source(corpus, 2.5)
    assert Source.parse(str(corpus)).name == "data"
    folder = corpus.parent / "lr=1"
    folder.mkdir()
    moved = corpus.rename(folder / corpus.name)
    assert Source.parse(str(moved)) == Source(moved, 1.0)
    assert Source.parse(f"{moved}=2") == Source(moved, 2.0)
    corpus = moved
    for spec in (f"{corpus}=x", f"{corpus}=0", f"{corpus}=-1", f"{corpus}=nan", "missing.jsonl"):
        with pytest.raises(DataError):
            Source.parse(spec)


def test_plain_documents_are_left_alone() -> None:
    assert (
        chat_text({"text": "A story.\n\nUser: is a word here."})
        == "A story.\n\nUser: is a word here."
    )


def test_conversations_are_rendered_in_turns() -> None:
    assert (
        chat_text({"text": "User: hi\n\nAssistant: yo"})
        == "<|user|>hi<|end|><|assistant|>yo<|end|>"
    )


def foreign_tokenizer() -> PreTrainedTokenizerFast:
    """Another model's: no end-of-text token, turns written by its own template."""
    tokenizer = train_tokenizer(["hello world [Q] [A] </s>"], 300)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            tokenizer.backend_tokenizer.to_str().replace("<|user|>", "<s>")
        ),
        bos_token="<s>",
    )
    plain.chat_template = (
        "<s>{% for message in messages %}{% if loop.first and message['role'] == 'assistant' %}"
        "{{ raise_exception('the user must begin') }}{% endif %}"
        "[{{ message['role'][0] | upper }}]{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    return plain


def test_conversations_are_written_in_the_models_own_format(tmp_path: Path) -> None:
    tokenizer = foreign_tokenizer()
    file = tmp_path / "chat.jsonl"
    texts = ["User: hello\n\nAssistant: world", "hello", "Assistant: hello"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = tokenizer.decode(encode_stream(file, tokenizer, (), "all").ids.tolist())
    assert stream == "<s>[U]hello[A]world<s>hello<s>Assistant: hello"


def test_foreign_conversations_are_opened_up_to_an_answer(tmp_path: Path) -> None:
    tokenizer = foreign_tokenizer()
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"text": "User: hello\n\nAssistant: world"}) + "\n")
    (opening,) = load_prompts([Source(file, 1.0)], tokenizer, PromptSelection(num_prompts=1))
    assert tokenizer.decode(opening.token_ids) == "<s>[U]hello[A]"


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "x"])
def test_a_weight_is_a_positive_number(corpus: Path, weight: str) -> None:
    with pytest.raises(DataError, match=r"weight must be above 0|is not a number; use"):
        Source.parse(f"{corpus}={weight}")


def test_a_changed_file_is_tokenised_again(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ['{"text": "one"}'])
    for text in ("one", "one", "two"):
        file.write_text(json.dumps({"text": text}))
        stream = load_token_stream(tmp_path / "tokens", Source(file, 1.0), TOKENIZER, (), "all")
        assert TOKENIZER.decode(stream.ids) == f"<|endoftext|>{text}"
