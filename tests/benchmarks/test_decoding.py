"""The decoding benchmark: its arithmetic, its fairness, and one tiny run of the whole script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import decoding
from decoding import ADAPTIVE, ASSISTED, FIXED, THEIRS, figures
from paceline.lab.bench.engines import Paceline
from paceline.lab.bench.figures import rows
from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.prompts import evenly
from paceline.lab.bench.runner import EVERYTHING
from paceline.lab.bench.runs import BenchJob, Heat, HeatRecord
from prompts import ALL_SUITES, SHIPPED, encode, load_suites, read_texts
from support.made_outcomes import outcome

Start = Callable[..., tuple[Any, str, Any]]


def heat(turn: int, suite: str, together: int = 1, **seconds: float) -> Heat:
    """Four tokens each; ``fixed`` with drafts."""
    names = {
        "theirs": THEIRS,
        "assisted": ASSISTED,
        "plain": PLAIN,
        "fixed": FIXED,
        "adaptive": ADAPTIVE,
    }
    drafts = {"fixed": {"drafted": 4, "accepted": 3}}
    runs = {names[n]: outcome(s, **drafts.get(n, {})) for n, s in seconds.items()}
    return Heat(BenchJob(suite, together, 0.0, 0, ()), turn, runs)


def test_figures_are_ratios_of_medians() -> None:
    heats = [
        heat(turn, "arith", theirs=s, assisted=s * 0.75, plain=s / 2, fixed=s / 4)
        for turn, s in enumerate((1.0, 9.0, 2.0))  # the median is 2
    ]
    heats.append(heat(0, EVERYTHING, 8, plain=3.0, adaptive=2.0))
    result = figures(rows(HeatRecord(heats), {PLAIN, THEIRS}))
    assert result["plain_vs_transformers"] == 2.0
    assert result["speculative_vs_plain"] == {"arith": 2.0}
    assert result["speculative_vs_assisted"] == {"arith": 3.0}
    assert result["batch8_adaptive_vs_plain"] == 1.5
    assert result["tokens_per_second"]["arith"][THEIRS] == 2.0
    assert result["drafts"]["arith"][FIXED] == {"acceptance": 0.75, "mean_accepted_length": 2.0}


def test_figures_of_an_interrupted_run() -> None:
    result = figures(rows(HeatRecord([heat(0, "arith", theirs=1.0, plain=0.5)]), {PLAIN, THEIRS}))
    assert result["plain_vs_transformers"] == 2.0
    assert result["speculative_vs_plain"] == {"arith": None}
    assert result["batch8_adaptive_vs_plain"] is None
    assert figures([])["plain_vs_transformers"] is None


def tiny(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**(sizes | heads | {"max_position_embeddings": 512} | changes))
    return LlamaForCausalLM(config).eval()


def test_prompts(tmp_path: Path) -> None:
    assert set(SHIPPED) == set(ALL_SUITES)
    assert {form for form, _ in read_texts(tmp_path, "arith")} == {"chat"}
    record = {"id": "x", "format": "completion", "turns": ["first", "second"]}
    (tmp_path / "arith.jsonl").write_text(json.dumps(record) + "\n")
    assert read_texts(tmp_path, "arith") == [("completion", "first")]
    assert evenly(list(range(10)), 3) == [0, 3, 6]
    assert evenly(list(range(3)), None) == evenly(list(range(3)), 9) == [0, 1, 2]


def byte_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = "U:{{ messages[0]['content'] }}A:"
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.decode(encode(tokenizer, "chat", "hi")) == "U:hiA:"
    assert tokenizer.decode(encode(tokenizer, "completion", "hi")) == "hi"
    texts = ("What is 345 + 278?", "What is 345 + 278 + 4567?")
    lines = [json.dumps({"format": "chat", "turns": [text]}) for text in texts]
    (tmp_path / "arith.jsonl").write_text("\n".join(lines) + "\n")
    suites = load_suites(tmp_path, ["arith"], tokenizer, 0, limit=25)
    assert [len(ids) for ids in suites["arith"]] == [22]  # the other is longer


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    for name, layers in (("target", 2), ("draft", 1)):
        folder = tmp_path / name
        tiny(num_hidden_layers=layers).to(torch.bfloat16).save_pretrained(folder)
        byte_tokenizer(folder)
    return str(tmp_path / "target"), str(tmp_path / "draft")


def arguments(pair: tuple[str, str], *more: str) -> list[str]:
    target, draft = pair
    sizes = ["--per-suite", "1", "--rounds", "1", "--max-tokens", "12", "--dtype", "float32"]
    return ["--target", target, "--draft", draft, "--prompts-dir", target, *sizes, *more]


def test_the_whole_script(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    pytest.importorskip("paceline.llm")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    small = {name: decoding.inflate.Sizes(48, 3, 80) for name in ("target", "draft")}
    monkeypatch.setattr(decoding.inflate, "PRESETS", small)
    file = tmp_path / "figures.json"
    more = ("--suites", "arith,chat", "--lookup", "--rules", "--json", str(file))
    code, _, result = start(decoding, *arguments(pair, *more))
    assert code == 0
    assert json.loads(file.read_text()) == result
    for name in ("tiny", "inflated"):
        figure = result[name]
        assert figure["plain_vs_transformers"] > 0
        for key in ("speculative_vs_plain", "adaptive_vs_plain", "speculative_vs_assisted"):
            assert set(figure[key]) == {"arith", "chat"}
            assert all(ratio > 0 for ratio in figure[key].values())
        assert figure["batch8_adaptive_vs_plain"] > 0
        assert sum(figure["step_shares"].values()) == pytest.approx(1, abs=0.001)
        assert set(figure["sampled_tokens_per_second"]) == {
            PLAIN,
            *(f"rule {rule}" for rule in decoding.RULES),
        }
        assert set(figure["tokens_per_second"][EVERYTHING]) == {PLAIN, ADAPTIVE}
        assert figure["texts"][THEIRS] == {"identical": 2}
        assert set(figure["texts"][FIXED]) == {"identical"}
    assert result["machine"]["torch"] == torch.__version__


def test_ctrl_c_prints_what_was_measured(
    pair: tuple[str, str], start: Start, interrupt: Callable[[type, int], None]
) -> None:
    pytest.importorskip("paceline.llm")
    interrupt(Paceline, 7)
    code, _, result = start(decoding, *arguments(pair, "--pairs", "tiny", "--no-rules"))
    assert code == 130
    assert result["tiny"]["plain_vs_transformers"] > 0
    assert result["tiny"]["batch8_adaptive_vs_plain"] is None


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["--pairs", "big"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            decoding.parse(bad)
    assert "there are tiny and inflated" in capsys.readouterr().err
