"""The coupled rule: a seed gives one text with any drafter, and the text is a fair sample."""

import pytest
import torch
from harness import Fake, SamplingParams, Setting, distribution_table, no_repeats, tree_parents

from paceline.core.draws import draft_candidates, draw_kind
from paceline.core.sampling import Rows
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.verify.verifier import Verifier
from support.spans import judged

VOCAB, LENGTH = 24, 30
TARGET = Fake(VOCAB, 0, scale=2.0)
DRAFT = Fake(VOCAB, 1, like=TARGET, scale=0.7)

PARAMS = {
    "seeded": {"temperature": 1.0, "seed": 7},
    "cool": {"temperature": 0.7, "seed": 8},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "seed": 9},
    "top_k and min_p": {"temperature": 1.0, "top_k": 6, "min_p": 0.05, "seed": 10},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "seed": 11,
    },
    "bias and min_tokens": {
        "temperature": 0.9,
        "logit_bias": {3: 2.0},
        "min_tokens": 9,
        "seed": 12,
    },
    "logits_processors": {"temperature": 0.9, "seed": 13, "logits_processors": [no_repeats]},
    "greedy": {},
    "greedy with penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "greedy with min_tokens": {"min_tokens": 12},
}


def request(**params):
    return SequenceState(0, [0, 1, 2], 3, SamplingParams(**params), frozenset({4, 5}))


def from_model(branching):
    """What a draft model does: level by level, all rows of a level at once."""
    parents = tree_parents(branching)

    def propose(seq):
        contexts, tokens, probs = [[]], [], []
        first = 0  # first row of the level
        for depth, width in enumerate(branching):
            level = contexts[first:]
            paths = torch.tensor(level, dtype=torch.int64).view(len(level), depth)
            rows = Rows((seq,) * len(level), (depth,) * len(level), paths)
            logits = DRAFT([(*seq.tokens, *path) for path in level])
            drafted = draft_candidates(logits, rows, width)
            first = len(contexts)
            for row, path in enumerate(level):
                for token in drafted.tokens[row].tolist():
                    contexts.append([*path, token])
                    tokens.append(token)
                    if drafted.q is not None:
                        probs.append(drafted.q[row])
        siblings = max(branching) > 1
        q = torch.stack(probs) if probs else None
        return TokenTree(torch.tensor(tokens), parents, draw_kind(seq, siblings), q)

    return propose


def noise_of(draw):
    """Random tokens with any ``Draw``."""
    generator = torch.Generator().manual_seed(3)

    def propose(seq):
        tokens = torch.randint(VOCAB, (3,), generator=generator)
        return TokenTree(tokens, chain_parents(3), draw, torch.full((3, VOCAB), 1 / VOCAB))

    return propose


DRAFTERS = {
    "chain": from_model((1, 1, 1, 1)),
    "tree": from_model((3, 2, 1)),
    "wide": from_model((8,)),
    **{f"noise, {draw.value}": noise_of(draw) for draw in Draw},
}


def logits_of(seq, tree):
    paths = [[]]
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return TARGET([(*seq.tokens, *path) for path in paths])


def decode(seqs, propose, length=LENGTH):
    """Decode a batch in step; returns the tokens of each and the accepted drafts per step."""
    verifier = Verifier("auto", torch.Generator().manual_seed(0))
    accepted = steps = 0
    while any(seq.generated < length for seq in seqs):
        trees = [propose(seq) for seq in seqs]
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + len(tree) + 1)
        logits = torch.cat([logits_of(seq, tree) for seq, tree in zip(seqs, trees, strict=True)])
        checks = [judged(s, at, t) for s, at, t in zip(seqs, starts, trees, strict=False)]
        for seq, verdict in zip(seqs, verifier(logits, checks), strict=True):
            seq.tokens += verdict.tokens
            accepted += len(verdict.path)
            steps += 1
    return [seq.tokens[3 : 3 + length] for seq in seqs], accepted / steps


def plain(seq):
    return TokenTree.empty()


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_same_text_with_any_draft(params, drafter):
    expected, _ = decode([request(**params)], plain)
    assert decode([request(**params)], drafter)[0] == expected


def test_same_text_in_any_batch():
    expected = [decode([request(**params)], plain)[0][0] for params in PARAMS.values()]
    batch = [request(**params) for params in PARAMS.values()]
    batch.append(request(temperature=1.0))  # one that draws with the engine's generator
    drafter = from_model((2, 1, 1))
    assert decode(batch, drafter)[0][:-1] == expected


def test_two_seeds_two_texts():
    texts = {
        tuple(decode([request(temperature=1.0, seed=seed)], plain)[0][0]) for seed in range(20)
    }
    assert len(texts) == 20


def test_coupled_drafts_are_accepted_often():
    """At least (1 - TV) / (1 + TV) of them, of which independent draws fall far short."""
    setting = Setting(TARGET, DRAFT, SamplingParams(temperature=1.0))
    chances, shared, hits = [], [], []
    for start in range(VOCAB):
        context = (0, 1, start)
        p, q = (distribution_table(m, setting, context, 0)[0] for m in (TARGET, DRAFT))
        tv = float((p - q).abs().sum() / 2)
        chances.append((1 - tv) / (1 + tv))
        shared.append(float((p * q).sum()))
        for seed in range(60):
            seq = SequenceState(0, [*context], 3, SamplingParams(temperature=1.0, seed=seed))
            tree = from_model((1,))(seq)
            (verdict,) = Verifier()(logits_of(seq, tree), [judged(seq, 0, tree)])
            hits.append(len(verdict.path))
    rate = sum(hits) / len(hits)
    assert rate > sum(chances) / len(chances) - 0.03
    assert rate > sum(shared) / len(shared) + 0.1


def chi_square(counts, distribution):
    expected = distribution.double() * counts.sum()
    keep = expected > 0
    assert not counts[~keep].any()
    return float(((counts - expected)[keep] ** 2 / expected[keep]).sum()), int(keep.sum()) - 1


def test_texts_over_seeds_follow_the_distribution():
    """Two tokens, jointly, over 6000 seeds: chi-square against the target's own distribution."""
    setting = Setting.random(3, SamplingParams(temperature=1.0), seed=4)
    first = distribution_table(setting.target, setting, (0, 1), 1)
    joint = (first[0][:, None] * first[1:4]).flatten()
    counts = torch.zeros(9)
    seqs = [
        SequenceState(0, [0, 1], 2, SamplingParams(temperature=1.0, seed=seed))
        for seed in range(6000)
    ]
    for _ in range(2):
        logits = setting.target([tuple(seq.tokens) for seq in seqs])
        checks = [judged(seq, row, TokenTree.empty()) for row, seq in enumerate(seqs)]
        for seq, verdict in zip(seqs, Verifier()(logits, checks), strict=True):
            seq.tokens += verdict.tokens
    for seq in seqs:
        counts[3 * seq.tokens[2] + seq.tokens[3]] += 1
    statistic, freedom = chi_square(counts, joint)
    assert freedom == 8 and statistic < 26.1  # p = 0.001


def test_unseeded_drafting_and_verifying_end_to_end():
    """Real drafts, real draws: first two tokens of 6000 requests, siblings without replacement."""
    setting = Setting.random(3, SamplingParams(temperature=1.0), seed=6)
    generator = torch.Generator().manual_seed(1)
    verifier = Verifier("auto", generator)
    count = 6000
    seqs = [SequenceState(0, [0, 1], 2, setting.params) for _ in range(count)]
    rows = Rows(tuple(seqs), (0,) * count)
    drafted = draft_candidates(setting.draft([(0, 1)] * count), rows, 2, generator)
    checks, logits = [], []
    for row, seq in enumerate(seqs):
        tree = TokenTree(
            drafted.tokens[row],
            (-1, -1),
            Draw.WITHOUT_REPLACEMENT,
            drafted.q[row].expand(2, 3),
        )
        checks.append(judged(seq, 3 * row, tree))
        contexts = [(0, 1), *((0, 1, token) for token in tree.tokens.tolist())]
        logits.append(setting.target(contexts))
    table = distribution_table(setting.target, setting, (0, 1), 1)
    pairs = torch.zeros(9)
    for verdict in verifier(torch.cat(logits), checks):
        if len(verdict.tokens) == 2:
            pairs[3 * verdict.tokens[0] + verdict.tokens[1]] += 1
        else:  # the second token is another step's: its distribution is the table's
            pairs[3 * verdict.tokens[0] : 3 * verdict.tokens[0] + 3] += table[1 + verdict.tokens[0]]
    statistic, _ = chi_square(pairs, (table[0][:, None] * table[1:4]).flatten())
    assert statistic < 26.1
    order = torch.zeros(9)
    for first, second in drafted.tokens.tolist():
        order[3 * first + second] += 1
    q = drafted.q[0]
    distribution = torch.stack([q[a] * q / (1 - q[a]) for a in range(3)])
    distribution.fill_diagonal_(0.0)
    statistic, freedom = chi_square(order, distribution.flatten())
    assert freedom == 5 and statistic < 20.5
