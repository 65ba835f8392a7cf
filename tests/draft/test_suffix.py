"""Suffix decoding: what enters the global tree, what it drafts, and its file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, depths_of
from paceline.draft.spec import LoadContext
from paceline.draft.suffix import Suffix, SuffixDrafter
from paceline.drafters import prepare_one
from paceline.errors import (
    ConfigError,
    DataError,
    PacelineError,
    VocabularyMismatchError,
    WriteError,
)
from paceline.llm import LLM
from paceline.model.tensorfile import as_bytes
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
    drafter = SuffixDrafter("cpu", VOCAB)
    run(drafter, [1, 2, 3], [4, 5, 6, 7])
    tree = propose(drafter, request([1, 2, 3]))
    assert tree.tokens.tolist() == [4, 5, 6, 7]
    assert tree.parents == (-1, 0, 1, 2)


def test_the_own_text_is_matched_too() -> None:
    drafter = SuffixDrafter("cpu", VOCAB, Suffix(max_tokens=0))
    assert propose(drafter, request([1, 2, 3, 4, 1, 2])).tokens.tolist() == [3, 4, 1, 2, 3, 4]
    assert len(drafter.memory()) == 0


def test_the_draft_grows_with_the_match() -> None:
    drafter = SuffixDrafter("cpu", VOCAB, Suffix(factor=2.0, offset=0.0))
    run(drafter, [1], list(range(2, 20)))
    seqs = [request([*range(40, 44), *range(9 - m, 9)], m) for m in (1, 2, 3)]
    offers = drafter.lookup([Slice(seq, seq.num_pending, 8) for seq in seqs])
    assert [(len(o.tokens), o.match_length) for o in offers if o] == [(2, 1), (4, 2), (6, 3)]


def test_cancelled_requests_and_switched_off_trees_keep_nothing() -> None:
    drafter = SuffixDrafter("cpu", VOCAB)
    run(drafter, [1, 2, 3], [4, 5], reason=None)
    assert len(drafter.memory()) == 0
    off = SuffixDrafter("cpu", VOCAB, Suffix(max_tokens=0))
    run(off, [1, 2, 3], [4, 5])
    assert len(off.memory()) == 0
    assert len(propose(off, request([1, 2, 3]))) == 0


def test_a_preempted_request_enters_once() -> None:
    drafter = SuffixDrafter("cpu", VOCAB)
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
    drafter = SuffixDrafter("cpu", VOCAB, Suffix(max_tokens=40))
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
    drafter = SuffixDrafter("cpu", VOCAB, options)
    run(drafter, [9], text)
    tree = propose(drafter, request(text[:-1]), length)
    assert len(tree) <= drafter.max_nodes(length)
    assert max(depths_of(tree.parents), default=0) <= length
    assert drafter.max_nodes(0) == 0


# -- the file --------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    file = tmp_path / "seen.suffix"
    first = SuffixDrafter("cpu", VOCAB, Suffix(str(file)))
    run(first, [1, 2, 3], [4, 5, 6, 7])
    run(first, [9], [49, 0])
    assert first.save() == file
    again = SuffixDrafter("cpu", VOCAB, Suffix(str(file)))
    assert len(again.memory()) == len(first.memory()) == 10
    for prompt in ([1, 2, 3], [9], [5]):
        a, b = (propose(drafter, request(prompt)) for drafter in (first, again))
        assert a.tokens.tolist() == b.tokens.tolist() != []
    again.load(file)
    assert len(again.memory()) == 20, "load adds"
    small = SuffixDrafter("cpu", VOCAB, Suffix(str(file), max_tokens=5))
    assert len(small.memory()) == 3, "the newest text that fits"
    assert [path.name for path in tmp_path.iterdir()] == ["seen.suffix"]


def test_an_empty_tree_can_be_saved(tmp_path: Path) -> None:
    drafter = SuffixDrafter("cpu", VOCAB)
    drafter.save(tmp_path / "empty")
    drafter.load(tmp_path / "empty")
    assert len(drafter.memory()) == 0


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "seen.suffix"
    drafter = SuffixDrafter("cpu", VOCAB, Suffix(str(file)))
    drafter.save()
    before = file.read_bytes()
    run(drafter, [1], [2, 3])

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.files.os.replace", full)
    with pytest.raises(WriteError, match="No space left"):
        drafter.save()
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_saving_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere to save"):
        SuffixDrafter("cpu", VOCAB).save()
    with pytest.raises(WriteError, match="create the folder"):
        SuffixDrafter("cpu", VOCAB).save(tmp_path / "missing" / "file")


def saved(ids: list[int], vocab: int = VOCAB, **more: torch.Tensor) -> bytes:
    """A file as ``save`` writes it, of these texts."""
    tensors = {"suffix_texts": torch.tensor(ids, dtype=torch.int32)}
    return as_bytes(tensors | {"vocab_size": torch.tensor(vocab)} | more)[0]


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", DataError, "not a saved suffix tree"),
        (b"{}\n", DataError, "not a saved suffix tree"),
        (b"\x89PNG\r\n\x1a\n", DataError, "not a saved suffix tree"),
        (b"[" * 100_000 + b"\n", DataError, "not a saved suffix tree"),
        (b'{"format": "paceline-suffix", "version": 1}\n', DataError, "not a saved suffix tree"),
        (save({"weight": torch.zeros(2)}), DataError, "not a saved suffix tree"),
        (save({"suffix_texts": torch.zeros(2), "vocab_size": torch.zeros(1)}), DataError, "not a"),
        (saved([1, -1], 51), VocabularyMismatchError, "51 tokens, this one has 50"),
        (saved([1, -1])[:-1], DataError, "a damaged one: .* is cut"),
        (saved([1, 2]), DataError, "no such tokens"),
        (saved([51, -1]), DataError, "no such tokens"),
        (saved([-2, -1]), DataError, "no such tokens"),
        (saved([], suffix_texts=torch.tensor([1.0, -1.0])), DataError, "no such tokens"),
        (saved([], suffix_texts=torch.tensor(-1, dtype=torch.int32)), DataError, "no such tokens"),
        (saved([], suffix_texts=torch.zeros(2).bfloat16()), DataError, "no such tokens"),
        (saved([], vocab_size=torch.zeros(8).to(torch.float8_e4m3fn)), DataError, "no such tokens"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, content: bytes, error: type[PacelineError], words: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        SuffixDrafter("cpu", VOCAB, Suffix(str(file)))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        SuffixDrafter("cpu", VOCAB, Suffix(str(tmp_path)))


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


def test_a_file_without_a_global_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="switched off"):
        Suffix(str(tmp_path / "file"), max_tokens=0)


# -- in the engine ---------------------------------------------------------------------------------


def test_a_repeated_request_is_fast_and_the_file_keeps_it_so(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=45, temperature=1.0, seed=3, ignore_eos=True)
    spec = f"suffix:{tmp_path / 'seen.suffix'}"
    texts, lengths = [], []
    for rounds in (2, 1):
        llm = LLM(tiny_pair.target, spec, dtype="float32", draft_length=8)
        for _ in range(rounds):
            completion = llm.generate("The dog", params)[0]
            texts.append(completion.token_ids)
            lengths.append(completion.stats.mean_accepted_length)
        assert isinstance(llm.engine.drafter, SuffixDrafter)
        llm.engine.drafter.save()
    assert texts[0] == texts[1] == texts[2]
    assert lengths[0] < 3, "random text: else nothing would be shown"
    assert min(lengths[1:]) > 7, "of at most 9"


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
