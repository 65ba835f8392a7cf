"""Datastores: building, lookups compared with a plain search, drafts, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, ConfigError, DataError, PacelineError, SamplingParams
from paceline.core.batch import Slice
from paceline.core.sequence import SequenceState
from paceline.draft.datastore import DEPTH, MATCH, Datastore, DatastoreDrafter, Store
from paceline.draft.datastore import write_datastore as write
from paceline.drafters import parse_draft
from paceline.errors import VocabularyMismatchError
from paceline.model.tensorfile import as_bytes, read_table
from paceline.model.tokenizer import load_tokenizer
from support.damages import damages
from support.every_drafter import WEIGHTS

VOCAB = 50


def vocabulary(size: int = VOCAB, shift: int = 0) -> Any:
    """A tokenizer with only the methods that a datastore calls."""

    class Words:
        def __len__(self) -> int:
            return size

        def get_vocab(self) -> dict[str, int]:
            return {f"w{number}": (number + shift) % size for number in range(size)}

    return Words()


def store_of(
    folder: Path, texts: Sequence[Sequence[int]], least: int = 2, size: int = VOCAB
) -> Store:
    file = folder / "texts.datastore"
    write(file, [np.array(text) for text in texts], vocabulary(size), least)
    return Store(file, size)


def guess(store: Store, text: list[int], length: int = 8, **options: Any) -> tuple[Any, ...]:
    spec = Datastore(str(store.path), **options)
    seq = SequenceState(0, text, len(text), SamplingParams())
    drafter = DatastoreDrafter("cpu", spec, store)
    return drafter.propose_one(cast(Slice, SimpleNamespace(seq=seq, draft_length=length)))


def searched(
    texts: Sequence[Sequence[int]], text: Sequence[int], least: int
) -> tuple[list[tuple[int, ...]], int]:
    """The continuations of the longest match, by a plain search of all texts."""
    whole = [tuple(each) for each in texts]
    grams = [each[i : i + MATCH + 1] for each in whole for i in range(len(each) - MATCH)]
    for length in range(min(DEPTH, len(text)), MATCH - 1, -1):
        end = tuple(text[-length:])
        behind = [
            each[i : i + 4]
            for each in whole
            for i in range(length, len(each))
            if each[i - length : i] == end and grams.count(each[i - MATCH : i + 1]) >= least
        ]
        if behind:
            return sorted(behind), length
    return [], 0


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 3),
    st.sampled_from([3, 70_000]),
)
@settings(max_examples=60, deadline=None)
def test_the_longest_matches_are_found(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[list[int]],
    text: list[int],
    least: int,
    size: int,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    try:
        store = store_of(folder, texts, least, size)
    except DataError:
        assert searched(texts, text, least) == ([], 0)
        return
    wanted, length = searched(texts, text, least)
    positions, match = store.find(text, MATCH)
    end = (1 << 8 * store.width) - 1
    rows = [tuple(row) for row in store.continuations(positions, 4)] if match else []
    found = sorted(row[: row.index(end)] if end in row else row for row in rows)
    assert match == length and found == wanted


def test_a_draft_is_the_likeliest_continuation(tmp_path: Path) -> None:
    context = [1, 2, 3, 4, 5]
    store = store_of(tmp_path, [[*context, 6, 7, 8]] * 3 + [[*context, 9, 7, 8]] * 2)
    assert guess(store, [30, *context])[0] == [6, 7, 8]
    assert guess(store, context, 2)[0] == [6, 7]
    assert guess(store, context, min_prob=0.7)[0] == []
    assert guess(store, [*context, 9])[0] == [7, 8]


def test_short_and_rare_matches_are_not_used(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3, 4, 5, 6, 7]] * 2 + [[11, 12, 13, 14, 15, 16]])
    assert guess(store, [0, 2, 3, 4, 5])[0] == []
    assert guess(store, [11, 12, 13, 14, 15])[0] == [], "it stands there once"
    assert guess(store, [1, 2, 3, 4, 5], min=6)[0] == []
    assert guess(store, [1, 2, 3, 4, 5, 6], min=6)[0] == [7]
    assert guess(store, [])[0] == [] == guess(store, [5])[0]


def test_ids_of_other_vocabularies_are_neither_drafted_nor_looked_up(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3, 4, 5, 6, VOCAB + 7, 8]] * 2)
    assert guess(store, [1, 2, 3, 4, 5])[0] == [6], "a target has no logits for the next"
    assert guess(store, [1 << 17, 1, 2, 3, 4, 5])[0] == [6]
    assert guess(store, [1, 2, 1 << 17, 4, 5])[0] == []


def test_nothing_is_found_across_texts(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3], [4, 5, 6, 7]] * 3 + [[20, 21, 22, 23, 24, 25]] * 2)
    assert guess(store, [1, 2, 3, 4, 5])[0] == []


def test_texts_that_never_repeat_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run of 6 tokens occurs 2 times"):
        store_of(tmp_path, [list(range(VOCAB))])
    assert not list(tmp_path.iterdir())


# -- the file --------------------------------------------------------------------------------------


def test_any_damage_is_refused_in_one_line(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3, 4, 5, 6, 7]] * 2)
    whole = store.path.read_bytes()
    for number, content in enumerate(damages(whole, 1, 20, 200)):
        file = tmp_path / f"{number}.datastore"
        file.write_bytes(content)
        try:
            Store(file, VOCAB)
        except (DataError, VocabularyMismatchError) as error:
            assert str(file) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\x89PNG\r\n\x1a\n" * 9, as_bytes({})],
    ids=["empty", "json", "png", "safetensors"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(DataError, match="datastore"):
        Store(file, VOCAB)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="cannot read the datastore"):
            Store(file, VOCAB)


def test_a_shipped_head_is_no_datastore() -> None:
    from paceline.model.names import resolve

    with pytest.raises(DataError, match="not a datastore"):
        Store(Path(resolve("paceline/tiny-eagle3")) / "model.safetensors", 1 << 20)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3, 4, 5, 6, 7]] * 2)
    store.check_tokenizer(vocabulary())
    with pytest.raises(VocabularyMismatchError, match="another tokenizer"):
        store.check_tokenizer(vocabulary(shift=1))
    with pytest.raises(VocabularyMismatchError, match="50 tokens, but the target knows 49"):
        Store(store.path, VOCAB - 1)
    with pytest.raises(VocabularyMismatchError):
        LLM("paceline/tiny", f"datastore:{store.path}", dtype="float32")


def test_it_is_mapped_and_replaced_as_a_whole(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3, 4, 5, 6, 7]] * 2)
    assert not store.ids.flags.owndata and not store.order.flags.owndata
    assert set(read_table(store.path)) == {"about", "tokens", "order"}
    store_of(tmp_path, [[1, 2, 3, 4, 5, 9, 7]] * 2)
    assert guess(store, [1, 2, 3, 4, 5])[0] == [6, 7], "the mapped file stays what it was"


@pytest.mark.parametrize(
    "options", ["min=4", "min=17", "min_prob=0", "min_prob=nan", "least=2", "min=x"]
)
def test_senseless_options_are_refused(options: str) -> None:
    with pytest.raises(ConfigError, match="draft 'datastore'"):
        parse_draft(f"datastore:file,{options}")
    with pytest.raises(ConfigError, match="needs a file of `paceline datastore build`"):
        parse_draft("datastore")


# -- in the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["datastore:{datastore}", "hybrid:suffix+ngram+datastore:{datastore}"]
)
def test_answers_that_were_stored_are_fast(tmp_path: Path, spec: str) -> None:
    plain = LLM("paceline/tiny", draft="none", dtype="float32")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    (wanted,) = plain.generate("The dog", params)
    file = tmp_path / "answers.datastore"
    ids = np.array(plain.tokenizer.encode("The dog") + list(wanted.token_ids))
    write(file, [ids], load_tokenizer("paceline/tiny"), 1)
    llm = plain.with_draft(spec.format(datastore=file), draft_length=8)
    (found,) = llm.generate("The dog", params)
    assert found.token_ids == wanted.token_ids
    assert found.stats.mean_accepted_length > 3


def test_doctor_says_what_it_holds(tmp_path: Path) -> None:
    from paceline.lab.doctor import examine

    lines = [item.text for item in examine("paceline/tiny", f"datastore:{WEIGHTS['datastore']}")]
    assert any("contexts" in line for line in lines)
    with pytest.raises(PacelineError):
        LLM("paceline/tiny", f"datastore:{tmp_path / 'none'}", dtype="float32")
