"""``paceline doctor --for``: what another engine will do with a draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.draft.foreign import foreign_draft
from paceline.lab.doctor.examination import look_ahead
from paceline.lab.doctor.findings import Finding
from paceline.lab.export import export

HEAD = "eagle3:paceline/tiny-eagle3"


def of(engine: str, noticed: dict[str, Any]) -> list[Finding]:
    taken = foreign_draft(noticed)
    return look_ahead(engine, "paceline/tiny", taken.spec, taken)


def codes(noticed: list[Finding]) -> list[str]:
    return [item.code for item in noticed]


def test_a_config_of_vllm_s_own(tmp_path: Path) -> None:
    made = export("vllm", "paceline/tiny", f"{HEAD},nodes=0", draft_length=4, out=tmp_path)
    noticed = of("vllm", dict(made.config))
    assert set(codes(noticed)) == {"engine-does"}
    assert "inputs of layers [2, 6, 11]" in noticed[-1].text
    greedy = of("vllm", {**made.config, "draft_sample_method": "greedy"})
    assert "engine-approximates" in codes(greedy)


def test_a_head_for_sglang_is_one_off_in_vllm(tmp_path: Path) -> None:
    made = export("sglang", "paceline/tiny", f"{HEAD},nodes=0", draft_length=4, out=tmp_path)
    assert "engine-layers-shifted" not in codes(of("sglang", dict(made.config)))
    wrong = {"method": "eagle3", "model": made.head, "num_speculative_tokens": 4}
    (shifted,) = [f for f in of("vllm", wrong) if f.code == "engine-layers-shifted"]
    assert "[1, 5, 10]" in shifted.text


def test_a_head_for_vllm_is_not_seen_by_sglang(tmp_path: Path) -> None:
    export("llama.cpp", "paceline/tiny", HEAD, draft_length=4, out=tmp_path)
    given = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(tmp_path / "head"),
        "speculative_num_steps": 4,
        "speculative_num_draft_tokens": 5,
    }
    assert "engine-layers-shifted" in codes(of("sglang", given))


def test_a_draft_of_ours() -> None:
    noticed = look_ahead("vllm", "paceline/tiny", HEAD, None, draft_length=None)
    assert codes(noticed) == ["engine-approximates", "engine-approximates", "engine-does"]
    (refused,) = look_ahead("sglang", "paceline/tiny", "suffix", None)
    assert (refused.code, refused.severity.value) == ("engine-refuses", "error")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(tmp_path: Path, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.main import app

    file = tmp_path / "vllm.json"
    file.write_text(json.dumps({"method": "ngram", "num_speculative_tokens": 3}))
    words = ["doctor", "--model", "paceline/tiny", "--draft", f"@{file}", "--for", "vllm"]
    with pytest.raises(SystemExit) as end:
        app([*words, *(["--json"] if as_json else [])])
    assert end.value.code == 0
    assert "exactly 5 tokens" in " ".join(capsys.readouterr().out.split())
