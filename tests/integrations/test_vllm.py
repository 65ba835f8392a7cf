"""Our lookups as vLLM's proposers, called as vLLM 0.32 calls them."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.integrations.vllm import (
    HybridProposer,
    LookupProposer,
    NGramProposer,
    SuffixProposer,
    chain_of,
)
from paceline.model.names import resolve

PERIOD = [11, 12, 13, 14, 15, 16, 17, 18]
ALL = (NGramProposer, SuffixProposer, HybridProposer)


def config(length: int = 4, limit: int = 64) -> Any:
    model = SimpleNamespace(max_model_len=limit, get_vocab_size=lambda: 100)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=length), model_config=model
    )


class Batch:
    """Texts as vLLM keeps them: one row of an array each, and how many tokens there are."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts = [list(text) for text in texts]

    def ask(self, proposer: LookupProposer, *sampled: list[int]) -> list[list[int]]:
        ids = np.zeros((len(self.texts), 64), np.int32)
        for row, new in enumerate(sampled):
            self.texts[row] += new
            ids[row, : len(self.texts[row])] = self.texts[row]
        counts = np.array([len(text) for text in self.texts], np.int32)
        return proposer.propose([list(new) for new in sampled], counts, ids, slot_mappings=None)


@pytest.mark.parametrize("kind", ALL)
def test_text_that_repeats_is_drafted(kind: type[LookupProposer]) -> None:
    proposer, batch = kind(config()), Batch(PERIOD * 2 + [11, 12, 13])
    assert batch.ask(proposer, [14]) == [[15, 16, 17, 18]]
    assert batch.ask(proposer, [15, 16, 17, 18, 11]) == [[12, 13, 14, 15]]


@pytest.mark.parametrize("kind", ALL)
def test_rows_that_read_prompts_or_are_full_get_nothing(kind: type[LookupProposer]) -> None:
    proposer = kind(config(limit=20))
    batch = Batch(PERIOD * 2, PERIOD * 2 + [11, 12], PERIOD * 2 + [11, 12, 13])
    assert batch.ask(proposer, [], [13], [14]) == [[], [], []]


def test_near_the_end_drafts_are_short() -> None:
    proposer, batch = NGramProposer(config(limit=20)), Batch(PERIOD * 2)
    assert batch.ask(proposer, [11]) == [[12, 13]]


@pytest.mark.parametrize("kind", ALL)
def test_rows_change_places_and_are_told_apart(kind: type[LookupProposer]) -> None:
    proposer, other = kind(config()), [31, 32, 33, 34, 35]
    batch = Batch(PERIOD * 2 + [11, 12], other * 2 + [31])
    batch.ask(proposer, [13], [32])
    batch.texts.reverse()
    assert batch.ask(proposer, [33], [14]) == [[34, 35, 31, 32], [15, 16, 17, 18]]
    assert len(proposer._rows) == 2


def test_a_finished_answer_serves_the_next_request() -> None:
    proposer, batch = SuffixProposer(config()), Batch([1, 2, 3])
    batch.ask(proposer, [41])
    batch.ask(proposer, [42, 43, 44, 45])
    nobody = Batch([5, 6])
    nobody.ask(proposer, [7])  # the first has gone
    assert Batch([8, 41]).ask(proposer, [42]) == [[43, 44, 45]]


def test_the_hybrid_learns_whose_drafts_are_right() -> None:
    proposer = HybridProposer(config())

    def means() -> list[float]:
        return [mean for means in proposer._worth for mean in means]

    before, batch = means(), Batch(PERIOD * 2 + [11, 12])
    batch.ask(proposer, [13])
    batch.ask(proposer, [99])  # none of the draft
    pairs = zip(before, means(), strict=True)
    assert sum(later < earlier for earlier, later in pairs) == 1


def test_the_likeliest_path_of_a_tree() -> None:
    assert chain_of([1, 2, 3, 4], (-1, -1, 0, 2)) == [1, 3, 4]
    assert chain_of([], ()) == []


VLLM = Path(os.environ.get("PACELINE_TEST_VLLM", "absent"))


with_vllm = pytest.mark.skipif(
    not VLLM.is_file(), reason="PACELINE_TEST_VLLM names no python that has vLLM installed"
)


def in_vllm(code: str, **named: str) -> str:
    """What the python that has vLLM prints; ``named`` are in its environment."""
    source = Path(inspect.getfile(LookupProposer)).parents[2]
    there = os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"} | named
    done = subprocess.run([str(VLLM), "-c", code], capture_output=True, text=True, env=there)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@with_vllm
def test_vllm_itself_takes_the_class() -> None:
    """Its own loader imports and makes the proposer (with the python that has vLLM)."""
    code = (
        "from types import SimpleNamespace as N\n"
        "from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer\n"
        "spec = N(num_speculative_tokens=4, model='paceline.integrations.vllm.HybridProposer')\n"
        "model = N(max_model_len=64, get_vocab_size=lambda: 100)\n"
        "print(type(create_custom_proposer(N(speculative_config=spec, model_config=model))))\n"
    )
    assert "HybridProposer" in in_vllm(code)


# Three texts at once, of which two begin alike, so that rows come, go and draft from each other.
DECODE = """
import json, os
from vllm import LLM, SamplingParams
kind = os.environ["KIND"]
spec = {"method": "custom_class", "model": "paceline.integrations.vllm." + kind}
more = {"speculative_config": spec | {"num_speculative_tokens": 6}} if kind else {}
llm = LLM(model=os.environ["MODEL"], dtype="float32", max_model_len=256, enforce_eager=True,
          max_num_seqs=2, disable_log_stats=False, distributed_executor_backend="uni", **more)
prompts = ["One day Tom and the dog saw the dog and the cat. " * 2, "Once upon a time"]
params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
texts = [list(out.outputs[0].token_ids) for out in llm.generate([*prompts, prompts[0]], params)]
count = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
print("\\n" + json.dumps([texts, count]), flush=True)
os._exit(0)
"""


@with_vllm
def test_the_text_inside_vllm_is_that_of_its_plain_decoding() -> None:
    drafts = {}
    for kind in ("", *(kind.__name__ for kind in ALL)):
        told = in_vllm(
            DECODE,
            KIND=kind,
            MODEL=str(resolve("paceline/tiny")),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
        )
        drafts[kind] = json.loads(told.splitlines()[-1])
    plain, nothing = drafts.pop("")
    assert nothing == 0
    for kind, (texts, accepted) in drafts.items():
        assert texts == plain, kind
        assert accepted > 20, kind
