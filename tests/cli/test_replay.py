"""Receipts of the API, the command and the server, and what ``paceline replay`` says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, ConfigError, Grammar, SamplingParams
from paceline.kernels.compile import are_kernels_here
from support.command_lines import paceline

TINY = "paceline/tiny"
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, n=2, receipt=True)


@pytest.fixture(scope="module")
def receipts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of greedy and sampled answers, decoded in one batch with drafts."""
    grammar = Grammar("regex", "[a-z ]{4,12}")
    greedy = SamplingParams(max_tokens=24, receipt=True, stop=("zq",), logit_bias={5: -3.0})
    formed = SamplingParams(max_tokens=24, receipt=True, grammar=grammar)
    with LLM(TINY, "ngram") as llm:
        completions = llm.generate(["Once upon a time"] * 3, [greedy, SAMPLED, formed])
        assert llm.generate("Once")[0].receipt is None
    path = tmp_path_factory.mktemp("receipts") / "receipts.json"
    path.write_text(json.dumps([completion.receipt for completion in completions]))
    return path


def changed(receipts: Path, to: Path, seal: bool = True, **fields: Any) -> Path:
    """The first receipt with other fields, sealed again if ``seal``."""
    from paceline.request.receipt import _hash

    receipt = {**json.loads(receipts.read_text())[0], **fields}
    if seal:
        receipt |= {f"{name}_sha256": _hash(receipt[name]) for name in ("prompt", "tokens")}
        rest = {key: value for key, value in receipt.items() if key != "seal"}
        receipt["seal"] = _hash(rest)
    to.write_text(json.dumps(receipt))
    return to


_WRONG: list[dict[str, Any]] = [  # sealed, but not what a receipt has
    {"tokens": [[1]]},
    {"prompt": [2**40]},
    {"tokens": "abc"},
    {"backend": {}},
    {"settings": []},
    {"sampling": {"logit_bias": 5}},
    {"sampling": {"temperature": "hot"}},
    {"sampling": {"grammar": 7}},
    {"sampling": {"top_q": 1}},
    {"model": None},
]


def test_the_same_text_bit_for_bit(receipts: Path) -> None:
    result = paceline("replay", str(receipts), "--model", TINY)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("same text, bit for bit") == 4  # two of them samples of one prompt
    result = paceline("replay", str(receipts), "--json")
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert [outcome["same"] for outcome in outcomes] == [True] * 4
    assert all(outcome["text"] for outcome in outcomes)


@pytest.mark.skipif(not are_kernels_here(), reason="the receipt is of the native kernels")
def test_one_of_before_a_parameter_was_renamed() -> None:
    """``include_stop`` is ``include_stop_str_in_output`` now; the answer ends at a stop string."""
    path = Path(__file__).with_name("receipt_of_before.json")
    assert json.loads(path.read_text())["sampling"]["include_stop"] is True
    result = paceline("replay", str(path))
    assert result.exit_code == 0, result.output
    assert "same text, bit for bit (22 tokens)" in result.stdout


def test_an_answer_that_fills_the_context(tmp_path: Path) -> None:
    """Shorter than its ``min_tokens``."""
    params = SamplingParams(min_tokens=40, max_tokens=50, receipt=True)
    with LLM(TINY, "ngram", max_model_len=16) as llm:
        (answer,) = llm.generate([[5] * 10], params)
    assert answer.finish_reason == "length" and len(answer.token_ids) < 40
    (tmp_path / "receipt.json").write_text(json.dumps(answer.receipt))
    result = paceline("replay", str(tmp_path / "receipt.json"))
    assert result.exit_code == 0, result.output


def test_where_it_parts(receipts: Path, tmp_path: Path) -> None:
    tokens = json.loads(receipts.read_text())[0]["tokens"]
    other = [*tokens[:5], tokens[5] ^ 1, *tokens[6:]]
    path = changed(receipts, tmp_path / "other.json", tokens=other)
    result = paceline("replay", str(path))
    assert result.exit_code == 1
    assert f"parts at token 6 of {len(tokens)}" in result.stdout


def test_what_cannot_be_compared_is_one_line(receipts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    with LLM(TINY, None) as llm:
        shutil.copytree(Path(llm.target.checkpoint[0].path).parent, folder)
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | {"unheard_of": 1}))
    tokens = json.loads(receipts.read_text())[0]["tokens"]
    tampered = changed(receipts, tmp_path / "a.json", seal=False, tokens=tokens[:-1])
    less = changed(receipts, tmp_path / "b.json", seal=False)
    less.write_text(json.dumps({"paceline_receipt": 1}))
    settings = json.loads(receipts.read_text())[0]["settings"]
    elsewhere = changed(receipts, tmp_path / "c.json", settings=settings | {"device": "cuda"})
    (tmp_path / "none.json").write_text('{"choices": []}')
    for arguments, line in (
        ([str(tampered)], "was changed"),
        ([str(less)], "was changed"),
        *(
            ([str(changed(receipts, tmp_path / f"{n}.json", **wrong))], "that no receipt has")
            for n, wrong in enumerate(_WRONG)
        ),
        (
            [str(changed(receipts, tmp_path / "d.json", settings=settings | {"quantize": 5}))],
            "quantize",
        ),
        ([str(receipts), "--model", str(folder)], "other weights"),
        ([str(elsewhere)], "cuda"),
        ([str(tmp_path / "none.json")], "has no receipt"),
        ([str(tmp_path / "missing.json")], "cannot be read"),
    ):
        result = paceline("replay", *arguments)
        assert result.exit_code == 3, result.output
        assert line in result.stderr
        assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_what_no_receipt_can_record() -> None:
    with pytest.raises(ConfigError, match="logits_processors"):
        SamplingParams(receipt=True, lora="some")


def test_generate_writes_them(tmp_path: Path) -> None:
    result = paceline(
        "generate", "Once", "--model", TINY, "--max-tokens", "4", "--receipt", "--json"
    )
    path = tmp_path / "answer.json"
    path.write_text(result.stdout)
    assert paceline("replay", str(path)).exit_code == 0
