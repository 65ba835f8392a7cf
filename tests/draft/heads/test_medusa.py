"""The Medusa drafter: which rows and heads it looks at, its trees, its options."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.draft.heads.medusa import shapes_of
from paceline.draft.heads.medusa_head import load_medusa
from paceline.errors import ModelLoadError
from paceline.llm import LLM
from paceline.model.target import CausalModel
from support.engine_models import cramped, reference_logits
from support.medusa_models import write_medusa

PROMPTS: list[str | list[int]] = ["The quick brown fox jumps over", "What is 12 + 30?", [5]]


@pytest.fixture(scope="module")
def folders(pair_room: tuple[Path, dict[str, str]]) -> dict[str, str]:
    root, pair = pair_room
    return pair | {
        "own": write_medusa(root / "own", pair["target"], steps=5),
        "shared": write_medusa(root / "shared", pair["target"], layers=2, shared=True),
    }


def recorded(llm: LLM) -> list[tuple[list[int], torch.Tensor, tuple[int, ...]]]:
    """A list that collects (tokens, drafted tokens, parents) of every later proposal."""
    seen: list[tuple[list[int], torch.Tensor, tuple[int, ...]]] = []
    propose = llm.engine.drafter.propose

    def watched(plan):
        trees = propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            if len(tree):
                seen.append((list(item.seq.tokens), tree.tokens.clone(), tree.parents))
        return trees

    llm.engine.drafter.propose = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_drafts_are_the_heads_top_tokens_at_the_right_row(
    folders: dict[str, str], kind: str
) -> None:
    """Against transformers' own forward of the whole text: any shifted row or head would show."""
    spec = f"medusa:{folders[kind]},nodes=9"
    llm = LLM(folders["target"], spec, dtype="float32", device="cpu", draft_length=3)
    seen = recorded(llm)
    llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(seen) > 20
    model = CausalModel.load(folders["target"], dtype="float32", device="cpu", backend="reference")
    heads = load_medusa(folders[kind], model)
    final = {}
    model.hf.model.register_forward_hook(lambda *call: final.update(x=call[2][0][0]))
    for tokens, drafted, parents in seen[::5]:
        reference_logits(model, tokens[:-1])
        with torch.inference_mode():
            logits = heads(final["x"][-1:], model.head)[:, 0]
        depths: list[int] = []
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            rank = sum(other == parent for other in parents[:node])
            assert int(drafted[node]) == int(logits[depths[node]].argsort(descending=True)[rank])


def test_nothing_is_drafted_before_a_hidden_state_is_seen(folders: dict[str, str]) -> None:
    """In the first step, and for a sequence that starts after a shared prefix."""
    llm = LLM(folders["target"], f"medusa:{folders['shared']}", dtype="float32", draft_length=3)
    seen = recorded(llm)
    prompt = list(range(10, 50))
    for _ in range(2):
        seen.clear()
        llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
        assert seen and min(len(tokens) for tokens, _, _ in seen) == len(prompt) + 1
    assert not llm.engine.drafter._seen  # type: ignore[attr-defined]


def test_preempted_and_chunked_sequences_say_the_same(folders: dict[str, str]) -> None:
    spec, params = f"medusa:{folders['shared']}", SamplingParams(max_tokens=60, ignore_eos=True)
    plain = LLM(folders["target"], draft="none", dtype="float32").generate(PROMPTS, params)
    tight = cramped(folders["target"], spec, blocks=8, models=1, prefix_sharing=False)
    got = tight.generate(PROMPTS, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]
    assert sum(c.stats.accepted_tokens for c in got) > 0
    assert tight.engine.scheduler.preemptions > 0


@pytest.fixture(scope="module")
def plain(folders: dict[str, str]) -> LLM:
    return LLM(folders["target"], draft="none", dtype="float32", max_batch_size=300, seed=3)


def counted(llm: LLM) -> tuple[Counter[tuple[int, ...]], int]:
    """The second to fourth token of 800 answers, and how many of all were accepted drafts."""
    params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True, n=800)
    done = llm.generate("The quick brown fox", params)
    counts = Counter(tuple(t % 3 for t in c.token_ids[1:]) for c in done)
    return counts, sum(c.stats.accepted_tokens for c in done)


@pytest.fixture(scope="module")
def first(plain: LLM) -> Counter[tuple[int, ...]]:
    return counted(plain)[0]


@pytest.mark.parametrize("tree", ["auto", "chain"])
def test_unseeded_sampling_follows_the_distribution(
    folders: dict[str, str], plain: LLM, first: Counter[tuple[int, ...]], tree: str
) -> None:
    """Second to fourth token over many runs, plain and speculative: a two-sample chi-square.

    Token ids are counted by their remainder of 3: 27 cells. The engine's seeds are fixed.
    """
    spec = f"medusa:{folders['shared']},nodes=5,tree={tree}"
    drafted = plain.with_draft(spec, draft_length=2, max_batch_size=300, seed=3)
    second, accepted = counted(drafted)
    statistic = sum((first[t] - second[t]) ** 2 / (first[t] + second[t]) for t in first | second)
    assert accepted > 50
    assert statistic < 55.6  # 26 degrees of freedom, the 0.06 % point


def test_sampled_trees_carry_the_distribution_of_each_level(folders: dict[str, str]) -> None:
    llm = LLM(
        folders["target"], f"medusa:{folders['shared']},nodes=9", dtype="float32", draft_length=3
    )
    trees = []
    propose = llm.engine.drafter.propose
    llm.engine.drafter.propose = lambda plan: trees.append(propose(plan)) or trees[-1]  # type: ignore
    llm.generate(PROMPTS, SamplingParams(max_tokens=9, temperature=1.0, top_k=40, ignore_eos=True))
    found = [tree for step in trees for tree in step if len(tree)]
    assert found
    for tree in found:
        chances = tree.q.gather(1, tree.tokens.unsqueeze(1))
        assert (chances > 0).all()
        for node, depth in enumerate(tree.depths):  # heads do not know which node they follow
            first = tree.depths.index(depth)
            assert torch.equal(tree.q[node], tree.q[first])


# -- trees -----------------------------------------------------------------------------------


def test_the_best_tree_follows_the_accuracy() -> None:
    sure = shapes_of(3, 3, "auto", [[0.9, 0.05], [0.9, 0.05], [0.9, 0.05]])
    assert sure[3].parents == (-1, 0, 1)
    unsure = shapes_of(3, 3, "auto", [[0.3, 0.3, 0.3], [0.1], [0.1]])
    assert unsure[3].parents == (-1, -1, -1)
    assert [shape.depth for shape in sure] == [0, 1, 2, 3]


def test_length_and_budget_bound_a_tree() -> None:
    shapes = shapes_of(4, 12, "auto", ())
    assert [shape.depth for shape in shapes[:3]] == [0, 1, 2]
    assert all(len(shape) == 12 or shape.depth < 2 for shape in shapes)
    chain = shapes_of(4, 8, "chain", ())
    assert [len(shape) for shape in chain] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("spec", "message"),
    [("medusa:{target}", "a language model"), ("medusa:./nowhere", "does not exist")],
)
def test_bad_specs(folders: dict[str, str], spec: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        LLM(folders["target"], spec.format(**folders), dtype="float32")
