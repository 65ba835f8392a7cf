"""A head exported in SGLang's layout drafts as before if its feature layers are renumbered."""

from __future__ import annotations

from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.lab.export import export

PROMPTS = ["Once upon a time", "The little dog", "Tom and Lily went to"]


def tokens_per_step(llm: LLM, draft: str) -> float:
    beside = llm.with_draft(draft, draft_length=4)
    completions = beside.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    return sum(len(completion.token_ids) for completion in completions) / sum(
        e.stats.target_steps for e in completions
    )


def test_layers_are_converted_in_both_directions(tmp_path: Path) -> None:
    llm = LLM("paceline/tiny", draft="none", dtype="float32", draft_length=0)
    head = "eagle3:paceline/tiny-eagle3,nodes=0"
    export("sglang", "paceline/tiny", head, draft_length=4, out=tmp_path)
    ours = tokens_per_step(llm, head)
    unconverted = f"eagle3:{tmp_path / 'head'},nodes=0"  # output numbers read as inputs
    assert tokens_per_step(llm, f"{unconverted},feature_layers=2x6x11") == ours
    assert tokens_per_step(llm, unconverted) < ours
