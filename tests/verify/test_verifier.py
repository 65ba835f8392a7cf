"""The verifier on whole batches: every request as if it were alone, in one transfer."""

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, adjust_logits
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.errors import ConfigError
from paceline.verify import verifier as verifier_module
from paceline.verify.rules import Layout, block, layout_of, siblings
from paceline.verify.verifier import Verifier
from support.spans import judged

VOCAB = 16
BRANCHING = (-1, -1, 0, 0, 1)
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}


class Placed(Verifier):
    """A verifier that is told its uniforms."""

    placed: torch.Tensor

    def uniforms(self, count, device):
        assert self.placed.shape == (count,)
        return self.placed


def request(seq_id=0, **params):
    return SequenceState(seq_id, [1, 2, 3, 3], 2, SamplingParams(**params), frozenset({4}))


def tree(parents, draw, generator, width=VOCAB):
    n = len(parents)
    q = torch.softmax(torch.randn(n, width, generator=generator), -1)
    if draw is Draw.WITHOUT_REPLACEMENT:  # siblings share one distribution and differ
        groups = [parents.index(parent) for parent in parents]
        q = q[groups]
        tokens = torch.randperm(VOCAB, generator=generator)[:n]
    else:
        tokens = torch.randint(VOCAB, (n,), generator=generator)
    return TokenTree(tokens, tuple(parents), draw, None if draw is Draw.POINT else q)


def batch(generator, **extra):
    """Every kind of check, with logits under which much of it is accepted."""
    chain, wr, point = chain_parents(3), Draw.WITHOUT_REPLACEMENT, Draw.POINT
    kinds = [
        ({"temperature": 1.0}, chain, Draw.IID),
        ({}, BRANCHING, point),
        ({"temperature": 1.0, "seed": 5}, BRANCHING, point),
        ({"temperature": 0.8, "top_p": 0.9}, BRANCHING, wr),
        ({"temperature": 0.8, **PENALTIES}, chain_parents(2), Draw.IID),
        ({"temperature": 1.0}, (), point),
        ({"temperature": 1.0, "top_k": 5}, BRANCHING, point),
        ({"temperature": 1.0, "seed": 6, **PENALTIES}, chain, Draw.IID),
        ({**PENALTIES}, chain, point),
        ({"temperature": 1.0, "min_tokens": 4}, (-1, -1, -1), wr),
    ]
    checks, parts, row = [], [], 0
    for index, (params, parents, draw) in enumerate(kinds):
        check = judged(request(index, **params, **extra), row, tree(parents, draw, generator))
        logits = torch.randn(check.verify_rows, VOCAB, generator=generator)
        for node, parent in enumerate(parents):  # make the drafts likely
            logits[parent + 1, check.tree.tokens[node]] += 2.5
        checks.append(check)
        parts.append(logits)
        row += check.verify_rows
    return torch.cat(parts), checks


def as_walked(verdict, matched=True):
    """With the choices of the rows that the walk came through alone: others may be left out, and
    where nodes decide, those of all rows but the last."""
    rows = (0, *(node + 1 for node in verdict.path)) if matched else (len(verdict.path),)
    return replace(verdict, choices=tuple(verdict.choices[row] for row in rows))


@pytest.mark.parametrize("rule", verifier_module.RULES)
@pytest.mark.parametrize("seed", range(8))
def test_each_request_of_a_mixed_batch_as_if_alone(rule, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, checks = batch(generator)
    rows, nodes = logits.shape[0], sum(len(check.tree) for check in checks)
    uniforms = torch.rand(rows + nodes, dtype=torch.float64, generator=generator)
    verifier = Placed(rule)
    needs_nodes = rule != "coupled"
    verifier.placed = uniforms if needs_nodes else uniforms[:rows]
    together = verifier(logits, checks)
    node = rows
    for check, verdict in zip(checks, together, strict=True):
        own = slice(check.logit_row, check.logit_row + check.verify_rows)
        decides = verifier_module.rule_for(check, rule) != "match"
        deciding = uniforms[node : node + len(check.tree)] if decides else uniforms[:0]
        verifier.placed = torch.cat((uniforms[own], deciding))
        (alone,) = verifier(logits[own], [judged(check.seq, 0, check.tree)])
        assert as_walked(alone, not decides) == as_walked(verdict, not decides)
        node += len(check.tree)
    assert sum(len(verdict.path) for verdict in together) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_greedy_path_equals_the_general_one(dtype, monkeypatch):
    """With ties: the lowest id wins on either path, and on the one-hot distributions of a mixed
    batch."""
    generator = torch.Generator().manual_seed(0)
    checks, row = [], 0
    for index, parents in enumerate([BRANCHING, chain_parents(4), (), (-1,) * 6]):
        tokens = torch.randint(6, (len(parents),), generator=generator)
        checks.append(judged(request(index), row, TokenTree(tokens, parents)))
        row += checks[-1].verify_rows
    logits = torch.randint(0, 4, (row + 1, 6), generator=generator).to(dtype)
    fast = Verifier()(logits[:-1], checks)
    other = judged(request(9, temperature=1.0), row, TokenTree.empty())
    walked = list(map(as_walked, fast))
    assert list(map(as_walked, Verifier()(logits, [*checks, other])[:-1])) == walked
    monkeypatch.setattr(verifier_module, "needs_logits", lambda seqs: True)
    assert list(map(as_walked, Verifier()(logits[:-1], checks))) == walked
    whole = [replace(own, tree=replace(own.tree, wants_choices=True)) for own in checks]
    assert list(map(as_walked, Verifier()(logits[:-1], whole))) == walked
    assert any(verdict.path for verdict in fast)


def test_plain_decoding_is_the_argmax():
    logits = torch.tensor([[0.0, 2.0, 2.0]])
    (verdict,) = Verifier()(logits, [judged(request(), 0, TokenTree.empty())])
    assert (verdict.path, verdict.tokens, verdict.logprobs) == ((), (1,), None)


def test_rows_may_lie_anywhere_among_the_logits():
    generator = torch.Generator().manual_seed(3)
    logits, checks = batch(generator)
    seeded = [check for check in checks if check.seq.params.greedy or check.seq.params.seed]
    expected = Verifier()(logits, checks)
    picked = Verifier()(logits, seeded[::-1])
    by_id = {check.seq.seq_id: verdict for check, verdict in zip(checks, expected, strict=True)}
    assert list(map(as_walked, picked)) == [as_walked(by_id[c.seq.seq_id]) for c in seeded[::-1]]
    assert Verifier()(logits, []) == []


@pytest.mark.parametrize("target_width, draft_width", [(20, 16), (16, 20)])
@pytest.mark.parametrize("draw", [Draw.IID, Draw.WITHOUT_REPLACEMENT])
def test_vocabularies_padded_to_different_widths(target_width, draft_width, draw):
    """Ids that only one side pads to change nothing, and are never emitted by the target."""
    generator = torch.Generator().manual_seed(1)
    parents = chain_parents(3) if draw is Draw.IID else BRANCHING
    narrow = tree(parents, draw, generator)
    q = torch.nn.functional.pad(narrow.q, (0, draft_width - VOCAB))
    padded = TokenTree(narrow.tokens, narrow.parents, draw, q)
    logits = torch.randn(len(parents) + 1, VOCAB, generator=generator)
    wide = torch.nn.functional.pad(logits, (0, target_width - VOCAB), value=-torch.inf)
    seq = request(temperature=1.0)
    uniforms = torch.rand(2 * len(parents) + 1, dtype=torch.float64, generator=generator)
    verifier = Placed()
    verifier.placed = uniforms
    mixed = [judged(seq, 0, padded), judged(seq, len(parents) + 1, TokenTree.empty())]
    alone = verifier(logits, [judged(seq, 0, narrow)])
    assert verifier(wide, mixed[:1]) == alone
    rows = len(parents) + 1
    verifier.placed = torch.cat((uniforms[:rows], uniforms[:1], uniforms[rows:]))
    assert verifier(torch.cat((wide, wide[:1])), mixed)[:1] == alone


def test_drafted_id_beyond_the_targets_logits_is_refused():
    q = torch.zeros(1, 6)
    q[0, 5] = 1.0
    for draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.POINT):
        drafted = TokenTree(torch.tensor([5]), (-1,), draw, q)
        for params in ({"temperature": 1.0}, {}, {"temperature": 1.0, "seed": 1}):
            seq = request(**params, logprobs=1)
            (verdict,) = Verifier()(torch.zeros(2, 4), [judged(seq, 0, drafted)])
            assert verdict.path == () and verdict.tokens[0] < 4


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_along_the_accepted_path(count):
    generator = torch.Generator().manual_seed(7)
    logits, checks = batch(generator, logprobs=count)
    verdicts = Verifier("auto", generator)(logits, checks)
    assert any(len(verdict.path) > 1 for verdict in verdicts)
    expected = torch.log_softmax(adjust_logits(logits, Rows.of(checks)), dim=-1)
    for check, verdict in zip(checks, verdicts, strict=True):
        rows = [check.logit_row, *(check.logit_row + 1 + node for node in verdict.path)]
        assert len(verdict.logprobs) == len(verdict.tokens) == len(rows)
        for row, token, entry in zip(rows, verdict.tokens, verdict.logprobs, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
            best = expected[row].topk(count)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist())


def test_logprobs_only_for_those_who_ask():
    logits, checks = batch(torch.Generator().manual_seed(7))
    asking = [
        judged(request(i, temperature=1.0, seed=i + 1, logprobs=i), check.logit_row, check.tree)
        if i % 3 == 2
        else check
        for i, check in enumerate(checks)
    ]
    for i, verdict in enumerate(Verifier()(logits, asking)):
        assert (verdict.logprobs is not None) == (i % 3 == 2)
        if verdict.logprobs is not None:
            assert all(len(entry.top) == i for entry in verdict.logprobs)


def test_logprobs_do_not_change_what_is_decided():
    for seed in range(5):
        verdicts = []
        for extra in ({}, {"logprobs": 2}):
            logits, checks = batch(torch.Generator().manual_seed(seed), **extra)
            verifier = Verifier("auto", torch.Generator().manual_seed(seed))
            verdicts.append([(v.path, v.tokens) for v in verifier(logits, checks)])
        assert verdicts[0] == verdicts[1]


def test_one_transfer_a_step(monkeypatch):
    """Every value that reaches the host does so in one ``tolist``."""
    logits, checks = batch(torch.Generator().manual_seed(2), logprobs=1)
    calls = []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        calls.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    Verifier()(logits, checks)
    assert len(calls) == 1


def test_the_generator_alone_decides_unseeded_draws():
    logits, checks = batch(torch.Generator().manual_seed(2))
    first, again, other = (
        Verifier("auto", torch.Generator().manual_seed(seed))(logits, checks) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_unknown_rule():
    with pytest.raises(ConfigError, match="'blocks'; use one of auto, token, block, coupled"):
        Verifier("blocks")


def test_chances_are_probabilities_and_stop_distributions_are_distributions():
    """On a wide vocabulary in float32, with p close to q and far from it."""
    generator = torch.Generator().manual_seed(0)
    shapes = (chain_parents(4), chain_parents(1), chain_parents(6))
    nodes, rows = 11, 14
    for noise in (0.0, 1e-4, 1.0, 10.0):
        logits = torch.randn(rows, 5000, generator=generator) * 3
        parent_rows = [0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12]
        draft = logits[parent_rows] + noise * torch.randn(nodes, 5000, generator=generator)
        p, q = torch.softmax(logits, -1), torch.softmax(draft, -1)
        tokens = torch.multinomial(q, 1, generator=generator).squeeze(1)
        for distribution in (siblings, block):
            outcome = distribution(p, q, tokens, shapes)
            assert ((outcome.accept >= 0) & (outcome.accept <= 1)).all()
            assert (outcome.stop >= 0).all()
            assert torch.allclose(outcome.stop.sum(-1), torch.ones(rows), atol=1e-5)
            if noise == 0.0:
                assert (outcome.accept > 1 - 1e-5).all()


def test_what_is_kept_of_many_shapes_is_bounded():
    """Every step of a busy server has trees of new shapes."""
    number = len(layouts())
    for made in product(range(-1, 1), range(-1, 2), range(-1, 3), range(-1, 4), range(-1, 5)):
        layout_of(((-1, *made),), torch.device("cpu"))
    assert len(layouts()) - number <= 600
    layout_of.cache_clear()


def layouts():
    return [item for item in gc.get_objects() if isinstance(item, Layout)]


def test_uniforms_that_are_drawn_ahead_come_once_and_again_after_a_reseed():
    verifier, cpu = Verifier(generator=torch.Generator()), torch.device("cpu")
    runs = []
    for _ in range(2):
        verifier.reseed(5)
        taken = [verifier.uniforms(count, cpu) for count in (3,) * 40 + (1, 3, 1)]
        assert [len(numbers) for numbers in taken[-3:]] == [1, 3, 1]
        runs.append(torch.cat(taken))
    assert torch.equal(*runs)
    assert len(runs[0].unique()) == len(runs[0])
