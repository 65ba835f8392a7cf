"""Suffix decoding: what enters the global tree, what it drafts, and its file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, depths_of
from paceline.draft.spec import LoadContext
from paceline.draft.suffix import Suffix, SuffixDrafter
from paceline.drafters import prepare_one
from paceline.errors import (
    ConfigError,
)
from paceline.llm import LLM
from support.tiny_models import TinyPair

VOCAB = 50
OUT = ModelOutput(torch.empty(0, VOCAB))


def request(prompt: list[int], seq_id: int = 0) -> SequenceState:
    seq = SequenceState(seq_id, list(prompt), len(prompt), SamplingParams(max_tokens=99))
    seq.cached = len(prompt) - 1
    return seq


def propose(drafter: SuffixDrafter, seq: SequenceState, length: int = 8) -> TokenTree:
    return drafter.propose(Plan((Slice(seq, seq.num_pending, length),)))[0]


def run(
    drafter: SuffixDrafter, prompt: list[int], output: list[int], reason: str | None = "length"
) -> None:
    """A request that decodes ``output`` and ends; without a reason it is cancelled."""
    seq = request(prompt)
    propose(drafter, seq)
    for number, token in enumerate(output, 1):
        seq.tokens.append(token)
        last = number == len(output)
        drafter.observe([Commit(0, (token,), finish_reason=reason if last else None)], OUT)
    drafter.forget(0)


def test_a_repeated_request_is_drafted_from_its_first_token_on() -> None:
    drafter = SuffixDrafter("cpu")
    run(drafter, [1, 2, 3], [4, 5, 6, 7])
    tree = propose(drafter, request([1, 2, 3]))
    assert tree.tokens.tolist() == [4, 5, 6, 7]
    assert tree.parents == (-1, 0, 1, 2)


def test_the_own_text_is_matched_too() -> None:
    drafter = SuffixDrafter("cpu", Suffix(max_tokens=0))
    assert propose(drafter, request([1, 2, 3, 4, 1, 2])).tokens.tolist() == [3, 4, 1, 2, 3, 4]
    assert len(drafter.memory()) == 0


def test_the_draft_grows_with_the_match() -> None:
    drafter = SuffixDrafter("cpu", Suffix(factor=2.0, offset=0.0))
    run(drafter, [1], list(range(2, 20)))
    seqs = [request([*range(40, 44), *range(9 - m, 9)], m) for m in (1, 2, 3)]
    offers = drafter.lookup([Slice(seq, seq.num_pending, 8) for seq in seqs])
    assert [(len(o.tokens), o.match_length) for o in offers if o] == [(2, 1), (4, 2), (6, 3)]


def test_cancelled_requests_and_switched_off_trees_keep_nothing() -> None:
    drafter = SuffixDrafter("cpu")
    run(drafter, [1, 2, 3], [4, 5], reason=None)
    assert len(drafter.memory()) == 0
    off = SuffixDrafter("cpu", Suffix(max_tokens=0))
    run(off, [1, 2, 3], [4, 5])
    assert len(off.memory()) == 0
    assert len(propose(off, request([1, 2, 3]))) == 0


def test_a_preempted_request_enters_once() -> None:
    drafter = SuffixDrafter("cpu")
    seq = request([1, 2, 3])
    propose(drafter, seq)
    seq.tokens += [4, 5]
    drafter.observe([Commit(0, (4, 5))], OUT)
    drafter.forget(0)
    seq.cached = 0
    drafter.propose(Plan((Slice(seq, 2),)))  # prefilled again, in chunks
    seq.cached = 4
    propose(drafter, seq)
    seq.tokens.append(6)
    drafter.observe([Commit(0, (6,), finish_reason="stop")], OUT)
    assert len(drafter.memory()) == 6


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_oldest_outputs_give_way(outputs: list[list[int]]) -> None:
    drafter = SuffixDrafter("cpu", Suffix(max_tokens=40))
    for output in outputs:
        run(drafter, [7], output)
        assert len(drafter.memory()) <= 40
    kept = 0
    for output in reversed(outputs):  # as many of the latest as fit
        if kept + len(output) + 1 > 40:
            break
        kept += len(output) + 1
    assert len(drafter.memory()) == kept


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=40),
    st.integers(1, 9),
    st.sampled_from([None, 1, 6, 40]),
    st.sampled_from([0.05, 0.1, 0.3, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_trees_keep_to_their_bounds(
    text: list[int], length: int, nodes: int | None, min_prob: float
) -> None:
    options = Suffix(nodes=nodes, min_prob=min_prob, offset=30.0)
    drafter = SuffixDrafter("cpu", options)
    run(drafter, [9], text)
    tree = propose(drafter, request(text[:-1]), length)
    assert len(tree) <= drafter.max_nodes(length)
    assert max(depths_of(tree.parents), default=0) <= length
    assert drafter.max_nodes(0) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_depth": 0},
        {"factor": -1.0},
        {"factor": float("nan")},
        {"factor": 0.5, "offset": 0.0},
        {"offset": float("inf")},
        {"min_prob": 0.0},
        {"min_prob": 1.5},
        {"min_prob": float("nan")},
        {"nodes": 0},
        {"max_tokens": -1},
    ],
)
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="draft 'suffix': "):
        Suffix(**options)


# -- in the engine ---------------------------------------------------------------------------------


def test_a_repeated_request_is_fast(tiny_pair: TinyPair) -> None:
    params = SamplingParams(max_tokens=45, temperature=1.0, seed=3, ignore_eos=True)
    llm = LLM(tiny_pair.target, "suffix", dtype="float32", draft_length=8)
    first, again = (llm.generate("The dog", params)[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.stats.mean_accepted_length < 3, "random text: else nothing would be shown"
    assert again.stats.mean_accepted_length > 7, "of at most 9"


def prepared(spec: str) -> SuffixDrafter:
    """The drafter of a spec, for a minimal fake target."""
    target = SimpleNamespace(device=torch.device("cpu"), vocab_size=VOCAB)
    loading = LoadContext(cast(Any, target), cast(Any, None), "float32")
    drafter = prepare_one(spec, loading).build(cast(Any, None))
    assert isinstance(drafter, SuffixDrafter)
    return drafter


def test_specs_say_the_options() -> None:
    spec = "suffix:max_depth=9,factor=2.5,offset=1,min_prob=0.2,nodes=7,max_tokens=99"
    assert prepared(spec).options == Suffix(
        max_depth=9, factor=2.5, offset=1.0, min_prob=0.2, nodes=7, max_tokens=99
    )
    assert prepared("suffix:global=off").options == Suffix(shared=False)
    assert prepared("suffix").options == Suffix()
