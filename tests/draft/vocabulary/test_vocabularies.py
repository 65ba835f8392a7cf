"""Drafts in another vocabulary: common tokens, and refusals."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_target import train_tokenizer
from paceline import VocabularyMismatchError
from paceline.core.params import SamplingParams
from paceline.draft.vocabulary import (
    Intersection,
    Match,
    SharedVocabulary,
    TokenTexts,
    shared_ids,
)
from paceline.llm import LLM
from support.cache_invariants import check_cache
from support.engine_models import (
    check_one_distribution,
    cramped,
    drawn_pairs,
    random_llama,
    write_pair,
)
from support.tiny_models import SENTENCES

TEXT = Path(__file__).with_name("sample.txt").read_text(encoding="utf-8")
PROMPTS: list[str | list[int]] = [
    "The quick brown fox jumps over",
    "What is 12 + 30? Früh, 你好",
    [5],
]


def shuffled(tokenizer: Any) -> Any:
    """The same tokenizer with other ids for its ordinary tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {item["content"] for item in state["added_tokens"]}
    words = [word for word in state["model"]["vocab"] if word not in special]
    ids = [state["model"]["vocab"][word] for word in words]
    state["model"]["vocab"].update(zip(reversed(words), ids, strict=True))
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **ends)


def word_tokenizer() -> Any:
    """Whole lower-case words and nothing else: text does not come back."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["[UNK]", "ein", "wort", "once"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def blank_tokenizer() -> Any:
    """SentencePiece style: spaces belong to words, bytes for what is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"OncepTh", "\u2581O"]
    backend = Tokenizer(
        models.BPE(
            {word: index for index, word in enumerate(words)},
            [("\u2581", "O")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def write_translation(folder: Path, target: str, tokenizer: Any) -> str:
    """The target itself with another tokenizer: rows of shared tokens moved, others random."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(target)
    model = random_llama(9, 2, 0.0, len(tokenizer))
    model.load_state_dict(
        {k: v for k, v in source.state_dict().items() if "embed" not in k and "lm_head" not in k},
        strict=False,
    )
    pairs = shared_ids(TokenTexts(AutoTokenizer.from_pretrained(target)), TokenTexts(tokenizer))
    ours, theirs = (torch.tensor(list(ids), dtype=torch.int64) for ids in (pairs, pairs.values()))
    with torch.no_grad():
        for part in ("get_input_embeddings", "get_output_embeddings"):
            getattr(model, part)().weight[theirs] = getattr(source, part)().weight[ours]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = Path(tmp_path_factory.mktemp("vocab"))
    target, _ = write_pair(root)
    near = shuffled(train_tokenizer(SENTENCES, 310))  # ten merges fewer, and other ids
    return {
        "target": target,
        "near": write_translation(root / "near", target, near),
        "far": write_translation(root / "far", target, train_tokenizer([TEXT], 600)),
        "words": write_translation(root / "words", target, word_tokenizer()),
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str, str]) -> LLM:
    return LLM(folders["target"], draft="none", dtype="float32")


REQUESTS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=20, temperature=0.8, seed=4, top_p=0.95, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=20, temperature=0.9, seed=5, repetition_penalty=1.3, logit_bias={9: 2.0}
    ),
}
SPECS = {
    "intersection": ("model:{near}", "token-level intersection"),
    "intersection, tree": ("tree:{near},branching=3x2", "token-level intersection"),
    "intersection, dynamic": ("tree:{near},nodes=8,width=3", "token-level intersection"),
    "intersection, little shared": ("model:{far}", "token-level intersection"),
}


def tokens_of(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[str, list[list[int]]]:
    return {name: tokens_of(plain, params) for name, params in REQUESTS.items()}


@pytest.mark.broad
@pytest.mark.parametrize("length", [3, "auto"])
@pytest.mark.parametrize("name", list(SPECS))
def test_same_tokens_as_plain_decoding(
    folders: dict[str, str],
    plain: LLM,
    expected: dict[str, list[list[int]]],
    name: str,
    length: int | str,
) -> None:
    spec, description = SPECS[name]
    spec = spec.format(**folders)
    llm = plain.with_draft(spec, draft_length=length, max_batch_size=2)
    assert llm.draft_vocabulary is not None and description in llm.draft_vocabulary
    accepted = 0
    for request, params in REQUESTS.items():
        got = llm.generate(PROMPTS, params)
        assert [c.token_ids for c in got] == expected[request], request
        accepted += sum(c.stats.accepted_tokens for c in got)
    # The adaptive length may find that drafting does not pay here.
    assert accepted > 0 or "little" in name or length == "auto"
    for cache in (llm.engine.cache, llm.engine.drafter.cache):
        check_cache(cache)
        assert cache.pool.available == cache.num_blocks
    llm.close()


def test_preemption_and_small_chunks_change_nothing(folders: dict[str, str], plain: LLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    expected = [c.token_ids for c in plain.generate(PROMPTS, params)]
    tight = cramped(folders["target"], f"model:{folders['near']}", blocks=8)
    assert [c.token_ids for c in tight.generate(PROMPTS, params)] == expected
    assert tight.engine.scheduler.preemptions > 0


def test_unseeded_intersection_follows_the_distribution(folders: dict[str, str]) -> None:
    """First two tokens of many runs, plain and drafted: a two-sample chi-square."""
    drafted = drawn_pairs(folders["target"], f"tree:{folders['near']},branching=2x1")
    check_one_distribution(drawn_pairs(folders["target"], None), drafted)


# -- the pieces -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> dict[str, TokenTexts]:
    return {
        "ours": TokenTexts(train_tokenizer(SENTENCES, 320)),
        "near": TokenTexts(shuffled(train_tokenizer(SENTENCES, 310))),
        "far": TokenTexts(train_tokenizer([TEXT], 600)),
        "blank": TokenTexts(blank_tokenizer()),
        "words": TokenTexts(word_tokenizer()),
    }


def intersection(ours: TokenTexts, theirs: TokenTexts) -> Intersection:
    widths = len(ours.tokenizer), len(theirs.tokenizer) + 3  # padded logits
    match = Match(ours, theirs, shared_ids(ours, theirs))
    return Intersection(match, widths, torch.device("cpu"))


def test_shared_ids_stand_for_the_same_bytes(texts: dict[str, TokenTexts]) -> None:
    ours, near = texts["ours"], texts["near"]
    pairs = shared_ids(ours, near)
    assert len(pairs) == len(near.tokenizer) == 310
    assert all(ours.bytes_of([a]) == near.bytes_of([b]) for a, b in pairs.items())
    assert sum(a != b for a, b in pairs.items()) > 290


def test_a_spare_byte_gives_way_to_a_token(texts: dict[str, TokenTexts]) -> None:
    blank = texts["blank"]
    ids = blank.tokenizer.get_vocab()
    assert blank.ids[b"O"] == ids["O"] and blank.ids[b" "] == ids["\u2581"]
    assert blank.ids[b"z"] == ids["<0x7A>"] and blank.ids[b" O"] == ids["\u2581O"]


def test_logits_of_the_intersection(texts: dict[str, TokenTexts]) -> None:
    ours, near = texts["ours"], texts["near"]
    vocabulary, pairs = intersection(ours, near), shared_ids(ours, near)
    logits = torch.randn(4, len(near.tokenizer) + 3)
    moved = vocabulary.logits(logits)
    assert moved.shape == (4, len(ours.tokenizer))
    for token in range(len(ours.tokenizer)):
        expected = logits[:, pairs[token]] if token in pairs else torch.full((4,), -torch.inf)
        assert torch.equal(moved[:, token], expected)
    q = torch.softmax(moved, -1)
    assert torch.allclose(q.sum(-1), torch.ones(4)) and bool((q[:, 310:] == 0).all())


def test_a_dropped_intersection_is_freed_at_once(texts: dict[str, TokenTexts]) -> None:
    gc.disable()
    try:
        vocabulary = intersection(texts["ours"], texts["near"])
        assert vocabulary.context([315, 315])
        dropped = weakref.ref(vocabulary)
        del vocabulary
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["near", "far", "blank", "words"])
def test_every_token_has_a_spelling(texts: dict[str, TokenTexts], name: str) -> None:
    """Also a single byte of a character: context and nodes agree, and the bytes are the same."""
    ours, theirs = texts["ours"], texts[name]
    vocabulary = intersection(ours, theirs)
    for token in range(len(ours.tokenizer)):
        spelling = vocabulary.context([token])
        assert spelling
        if token in shared_ids(ours, theirs):
            assert vocabulary.nodes(torch.tensor([token])).tolist() == spelling
        elif name != "words":
            assert theirs.bytes_of(spelling) == ours.bytes_of([token])


def test_a_shared_vocabulary_is_left_alone() -> None:
    same = SharedVocabulary(5, 8)
    assert same.context([1, 4]) == [1, 4]
    assert same.logits(torch.zeros(2, 8)).shape == (2, 5)


# -- refusals -------------------------------------------------------------------------------------


def test_a_vocabulary_without_a_common_token_is_refused(folders: dict[str, str]) -> None:
    with pytest.raises(VocabularyMismatchError, match="have no token in common") as caught:
        LLM(folders["target"], folders["words"], dtype="float32")
    message = str(caught.value)
    assert "same family" in message
    assert "\n" not in message


def test_how_a_vocabulary_is_translated_can_be_read(folders: dict[str, str]) -> None:
    def vocabulary(spec: str) -> str | None:
        return LLM(folders["target"], spec.format(**folders), dtype="float32").draft_vocabulary

    assert vocabulary("model:{target}") is None
    assert vocabulary("hybrid:ngram+model:{near}") == vocabulary("model:{near}") is not None
