"""The drafters' benchmark: its arithmetic, fresh states, and tiny runs of the whole script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drafters
from drafter_figures import as_report, figures, of_best, ratios, rows_of
from inflate import Sizes
from paceline.core.params import SamplingParams
from paceline.lab.report.render import write
from paceline.llm import LLM
from prompts import ALL_SUITES, SHIPPED, available_suites
from rows import Weights, skip_option, specs_of, weights_of
from support.engine_models import write_pair
from support.random_heads import write_eagle
from waves import WaveEngine, texts_of, together

Start = Callable[..., tuple[Any, str, Any]]

ISSUE = (
    "draft,draft_tree,ngram,suffix,lookahead,recycling,early_exit,quantized,layer_skip,medusa,"
    "eagle,eagle2,eagle3,hybrid,auto"
)


def wave(sets: str, seconds: dict[str, float], name: str = "first") -> dict[str, Any]:
    """Ten tokens by every engine, in these numbers of seconds."""
    counts = {"tokens": 10, "steps": 5, "drafted": 8, "accepted": 4, "drafting": 2, "same": 1}
    by = {one: {**counts, "seconds": took} for one, took in seconds.items()}
    return {"pass": name, "sets": sets.split(","), "by": by}


def record(*waves: dict[str, Any], cell: str = "b1/greedy", **settings: Any) -> dict[str, Any]:
    usual = {"pair": "tiny", "weights": "pulled", "form": "bf16", "native": "auto", "tokens": 10}
    about = {"processor": "a processor", "threads": 1, "torch": "2", "transformers": "5"}
    return {"cell": cell, "settings": usual | settings, "machine": about, "waves": [*waves]}


def test_a_pass_is_all_its_tokens_by_all_its_seconds_and_its_worst_set() -> None:
    waves = [
        wave("qa", {"plain": 1.0, "ngram": 0.5}),
        wave("qa", {"plain": 1.0, "ngram": 0.5}),
        wave("rag", {"plain": 2.0, "ngram": 4.0}),
    ]
    own = figures(waves, "ngram")
    assert own["ratio"] == 4 / 5 and own["median"] == 2.0
    assert (own["worst"], own["worst_set"]) == (0.5, "rag")
    assert own["tokens_a_step"] == 2.0 and own["acceptance"] == 0.5
    assert own["tokens_per_second"] == 6.0 and own["same_text"] == 1.0


def test_batches_are_distinguished_by_number() -> None:
    waves = [
        wave("qa,rag", {"plain": 1.0, "ngram": 1.0}),
        wave("qa,rag", {"plain": 1.0, "ngram": 2.0}),
    ]
    assert figures(waves, "ngram")["worst_set"] == "batch 2"


def test_the_best_length_is_found_in_all_and_in_every_set() -> None:
    waves = [
        wave("qa", {"plain": 1.0, "eagle3": 0.5, "eagle3@0": 1.0, "eagle3@4": 0.4}),
        wave("rag", {"plain": 1.0, "eagle3": 1.25, "eagle3@0": 1.0, "eagle3@4": 2.0}),
    ]
    found = of_best(waves, "eagle3")
    assert found is not None
    assert found["best"] == "plain" and found["ratio"] == pytest.approx(2 / 1.75)
    assert found["sets"]["qa"] == {"best": "eagle3@4", "ratio": pytest.approx(0.8)}
    assert (found["worst"], found["worst_set"]) == (pytest.approx(0.8), "qa")
    assert of_best([wave("qa", {"plain": 1.0, "ngram": 1.0})], "ngram") is None


def test_rounds_give_medians_and_targets_separate_tables() -> None:
    took = (2.0, 1.0, 0.5)
    records = [record(wave("qa", {"plain": 1.0, "ngram": seconds})) for seconds in took]
    records += [record(wave("qa", {"plain": 1.0, "ngram": 0.1}), weights="perturbed")]
    assert ratios(records) == {
        "tiny, bf16": {"b1/greedy": {"first": {"plain": 1.0, "ngram": 1.0}}},
        "tiny, perturbed, bf16": {"b1/greedy": {"first": {"plain": 1.0, "ngram": 10.0}}},
    }
    assert [(row["engine"], row["rounds"]) for row in rows_of(records)][1] == ("ngram", 3)


def test_the_report_lists_cells_slower_than_plain_decoding(tmp_path: Path) -> None:
    slow = {"plain": 1.0, "ngram": 1.25, "eagle3": 0.5, "eagle3@0": 1.0, "eagle3@2": 0.4}
    waves = [wave("qa", slow), wave("rag", slow, "again")]
    write(as_report([record(*waves)]), tmp_path / "table.md")
    text = (tmp_path / "table.md").read_text()
    assert "Below 0.98 of plain decoding: b1/greedy, first: ngram 0.800; b1/greedy, again" in text
    assert "2.00 (2.00)" in text and "eagle3@2" in text and "0.800 qa" in text
    assert "The same requests again" in text and "a processor, 1 threads" in text


def test_every_drafter_of_the_issue_has_a_row() -> None:
    specs = specs_of(Weights("t", "d", "m", "e", "e3"))
    assert all(specs[name] for name in ISSUE.split(","))
    without = {name for name, spec in specs_of(Weights("t")).items() if not spec}
    heads = {"medusa", "mtp", "eagle", "eagle2", "eagle3", "dflash", "dspark"}
    assert without == {"draft", "draft_tree", "datastore", "hybrid", *heads}
    found = specs_of(Weights("t", "d", skip=skip_option(3, 7)))
    assert found["layer_skip"] == "layer_skip:skip=2x3"
    assert found["hybrid"] == "hybrid:suffix+ngram+model:d"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("drafters")))


def line(target: str, *more: str) -> list[str]:
    sizes = ["--prompts", "2", "--later", "0", "--again", "2", "--tokens", "8", "--wait", "0"]
    few = ["--form", "float32", "--modes", "greedy", "--sets", "arith,chat"]
    return ["--pair", target, "--prompts-dir", target, *few, *sizes, *more]


def test_the_script_can_be_continued(
    pair: tuple[str, str], tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    file, table = tmp_path / "cells.jsonl", tmp_path / "table.md"
    more = ["--drafters", "ngram,useless", "--spec", "mine=ngram:min=2", "--fixed", "0,2"]
    more += ["--json", str(file), "--batches", "1,2", "--report", str(table)]
    code, out, found = start(drafters, *line(pair[0], *more, "--cells", "b2/*"))
    assert (code == 0 and "nothing" in out) or "Below 0.98" in out
    ((target, cells),) = found.items()
    assert list(cells) == ["b2/greedy"] and set(cells["b2/greedy"]) == {"first", "again"}
    names = {f"{one}{n}" for one in ("ngram", "useless", "mine") for n in ("", "@0", "@2")}
    assert set(cells["b2/greedy"]["first"]) == {"plain", *names}
    assert "adaptive / best" in table.read_text()
    held = file.read_text()
    waves, about = (json.loads(held)[key] for key in ("waves", "machine"))
    assert about["device"] == "cpu" and about["threads"] >= 1 and about["processor"]
    assert all(own["tokens"] == 16 and own["same"] == 2 for own in waves[0]["by"].values())
    assert waves[0]["by"]["ngram@0"]["drafted"] == 0

    code, _, found = start(drafters, *line(pair[0], *more))
    assert code == 0 and list(found[target]) == ["b2/greedy", "b1/greedy"]
    assert file.read_text().startswith(held) and file.read_text().count("\n") == 2
    file.write_text(file.read_text() + '{"cell": "cut o')
    code, _, found = start(drafters, *line(pair[0], *more, "--seconds", "0"))
    assert code == 0 and file.read_text().count("\n") == 2  # nothing was left to do


def test_batches_at_temperature_1_write_the_same_texts(
    pair: tuple[str, str], tmp_path: Path, start: Start
) -> None:
    file, table = tmp_path / "cells.jsonl", tmp_path / "table.md"
    more = ["--spec", f"draft=model:{pair[1]}", "--drafters", "ngram", "--batches", "1,2"]
    more += ["--json", str(file), "--report", str(table)]
    arguments = line(pair[0], *more, "--modes", "greedy,sampled,seeded", "--fixed", "2")
    keys = [cell.key for cell in drafters.Bench(drafters.parse(arguments), tmp_path).cells()]
    assert keys == ["b1/greedy", "b1/sampled", "b1/seeded", "b2/greedy", "b2/seeded"]
    code, _, found = start(drafters, *line(pair[0], *more, "--modes", "sampled", "--fixed", "2"))
    assert code == 0
    assert [[*cells] for cells in found.values()] == [["b1/sampled", "b2/seeded"]]
    _, batch = map(json.loads, file.read_text().splitlines())
    for wave in batch["waves"]:
        drafted = wave["by"]["draft@2"]["drafted"]
        assert drafted > 0 and all(own["same"] == 2 for own in wave["by"].values())
    assert "compare the same texts" in table.read_text()


def test_no_cell_begins_after_the_time_limit(
    pair: tuple[str, str], tmp_path: Path, start: Start
) -> None:
    file = tmp_path / "cells.jsonl"
    more = ["--drafters", "ngram", "--json", str(file), "--seconds", "0"]
    assert start(drafters, *line(pair[0], *more)) == (0, "{}\n", {})
    assert not file.exists()


def test_ctrl_c_keeps_the_cells_that_ended(
    pair: tuple[str, str], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, calls = drafters.together, []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > 6:  # the warm-up and four prompts of the first cell, a warm-up
            raise KeyboardInterrupt
        return inner(*given)

    monkeypatch.setattr(drafters, "together", interrupted)
    arguments = line(pair[0], "--drafters", "ngram", "--batches", "1,2")
    code, _, found = start(drafters, *arguments)
    assert code == 130
    assert [list(cells) for cells in found.values()] == [["b1/greedy"]]


def test_later_prompts_are_others_and_the_same_come_again(pair: tuple[str, str]) -> None:
    args = drafters.parse(line(pair[0], "--later", "3", "--prompts", "3", "--batches", "2"))
    bench = drafters.Bench(args, Path("nowhere"))
    bench.base = LLM(pair[0], draft="none", dtype="float32")
    passes = bench.prompts(drafters.Cell(2, "greedy"))
    first, later, again = (passes[name] for name in ("first", "later", "again"))
    assert len(first) == len(later) == 4 and again == first[:2]
    assert [prompt.set for prompt in first] == ["arith", "chat"] * 2
    texts = [tuple(prompt.ids) for prompt in first + later]
    assert len({*texts}) == len(texts)


def test_every_cell_starts_without_any_history(pair: tuple[str, str]) -> None:
    """What an LLM learns must not reach the next one through shared weights or a module."""
    args = drafters.parse(line(pair[0], "--drafters", "suffix,recycling", "--fixed", "4"))
    bench = drafters.Bench(args, Path("nowhere"))
    bench.base, bench.ends = LLM(pair[0], draft="none", dtype="float32"), frozenset()
    cell = drafters.Cell(2, "greedy")
    prompts = [prompt.ids for prompt in bench.prompts(cell)["first"][:2]]
    params = [cell.params(n, 12) for n in range(2)]
    first = [one for one in bench.engines(cell) if one.name.endswith("@4")]
    drafted = [
        (run.counts.drafted, run.counts.accepted) for run in together(first, prompts, params)
    ]
    anew = [one for one in bench.engines(cell) if one.name.endswith("@4")]
    for old, new in zip(first, anew, strict=True):
        assert old.llm.engine.drafter is not new.llm.engine.drafter
        assert old.llm.engine.controller is not new.llm.engine.controller
    again = together(anew, prompts, params)
    assert [(run.counts.drafted, run.counts.accepted) for run in again] == drafted


def test_seeded_texts_do_not_depend_on_the_drafter(pair: tuple[str, str]) -> None:
    cell = drafters.Cell(2, "seeded")
    llm = LLM(pair[0], draft="none", dtype="float32")
    both = [
        WaveEngine("plain", llm),
        WaveEngine("draft", llm.with_draft(f"model:{pair[1]}", draft_length=2)),
    ]
    plain, fast = together(both, [[3, 4, 5], [6, 7]], [cell.params(n, 9) for n in (5, 6)])
    counts = drafters._counts(fast, plain)
    assert counts["same"] == 2 and counts["drafted"] > 0
    counts = drafters._counts(plain, plain)
    assert counts["tokens"] == 18 and counts["steps"] == 18 and counts["drafting"] == 0


def test_answers_end_at_the_engines_end_tokens(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], draft="none", dtype="float32", prefix_sharing=False)
    prompts, params = [[3, 4, 5], [6, 7]], [SamplingParams(max_tokens=12, ignore_eos=True)] * 2
    (whole,) = together([WaveEngine("a", llm)], prompts, params)
    stop = texts_of(whole)[0][5]
    (ended,) = together([WaveEngine("a", llm, frozenset([stop]))], prompts, params)
    expected = [text.index(stop) + 1 if stop in text else 12 for text in texts_of(whole)]
    assert [len(text) for text in texts_of(ended)] == expected
    assert ended.tokens == sum(expected) < 24


def test_the_inflated_pair_is_written_if_missing(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    sizes = {name: Sizes(128, 5, 112) for name in ("target", "draft")}
    monkeypatch.setattr(drafters.inflate, "PRESETS", sizes)
    head = write_eagle(tmp_path, pair[0], 3)
    named = ["--target", pair[0], "--draft", pair[1], "--eagle3", head, "--medusa", "none"]
    named += ["--eagle", "none"]
    weights = weights_of(drafters.parse(["--pair", "inflated", *named]))
    assert weights.medusa is None and str(weights.skip).startswith(":skip=")
    assert weights.target != pair[0] and weights.draft != pair[1] and weights.eagle3 != head


def test_missing_sets_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec_bench.jsonl").write_text("{}")
    assert available_suites(tmp_path, ["gsm8k", "qa", "rag"]) == ["qa", "rag"]
    assert f"left out gsm8k: not in {tmp_path}\n" in capsys.readouterr().err
    assert available_suites(tmp_path, ["gsm8k"]) == [*SHIPPED]
    assert "using the shipped prompts of stories" in capsys.readouterr().err


def test_bad_arguments_are_refused(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for bad in (["--modes", "loud"], ["--batches", "0"], ["--fixed", "-1"], ["--spec", "ngram"]):
        with pytest.raises(SystemExit):
            drafters.parse(bad)
    assert "no mode loud; there are greedy, sampled, seeded" in capsys.readouterr().err
    args = drafters.parse(["--pair", pair[0], "--drafters", "fast"])
    with pytest.raises(SystemExit, match="no drafter 'fast'; there are ngram"):
        drafters.chosen_specs(args, Weights(pair[0]))
    assert drafters.parse([]).prompts == 24 and drafters.parse(["--quick"]).prompts == 10
    assert drafters.parse([]).sets == [*ALL_SUITES]
    rows = drafters.chosen_specs(drafters.parse(["--quick"]), Weights(pair[0]))
    assert "eagle3" not in rows
    assert "left out eagle3: its weights are missing" in capsys.readouterr().err
