"""Penalties at the tokens that occurred are penalties over the whole vocabulary, bit for bit."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, apply_penalties
from paceline.core.sequence import SequenceState

VOCAB = 40
PARAMS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"repetition_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": 1.9},
    {},
]


def dense(scores, seqs, depths, paths):
    """The former way: counts of every token of the vocabulary."""
    rows = []
    for row, (seq, depth) in enumerate(zip(seqs, depths, strict=True)):
        width, p = scores.shape[1], seq.params
        output, prompt = torch.zeros(width), torch.zeros(width)
        drafted = [] if paths is None else paths[row, :depth].tolist()
        for token in [*seq.tokens[seq.prompt_length :], *drafted]:
            if token < width:
                output[token] += 1
        for token in seq.tokens[: seq.prompt_length]:
            if token < width:
                prompt[token] += 1
        own, factor = scores[row], torch.tensor(p.repetition_penalty)
        changed = torch.where(own > 0, own / factor, own * factor)
        own = torch.where(prompt + output > 0, changed, own)
        frequency, presence = torch.tensor(p.frequency_penalty), torch.tensor(p.presence_penalty)
        rows.append(own - frequency * output - presence * (output > 0))
    return torch.stack(rows)


tokens = st.lists(st.integers(0, VOCAB + 5), min_size=1, max_size=30)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(st.tuples(tokens, st.integers(0, 30), st.integers(0, 3)), min_size=1),
    depths=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    seed=st.integers(0, 1000),
    pathless=st.booleans(),
)
def test_sparse_is_dense(requests, depths, seed, pathless):
    generator = torch.Generator().manual_seed(seed)
    made = [
        SequenceState(n, list(own), min(prompt, len(own)), SamplingParams(**PARAMS[asked]))
        for n, (own, prompt, asked) in enumerate(requests)
    ]
    seqs = (made * 12)[:12]
    paths = None if pathless else torch.randint(5, (12, 4), generator=generator)
    depths = [0] * 12 if pathless else depths
    scores = torch.randn(12, VOCAB, generator=generator) * 3
    scores[0, ::3], scores[1, 1::4] = -torch.inf, 0.0
    rows = Rows(tuple(seqs), tuple(depths), paths)
    before = scores.clone()
    assert torch.equal(apply_penalties(scores, rows), dense(scores, seqs, depths, paths))
    assert torch.equal(scores, before)
    for seq in made:  # counts go on from step to step
        seq.tokens += [*seq.tokens[:2], 7]
    assert torch.equal(apply_penalties(scores, rows), dense(scores, seqs, depths, paths))


def test_tokens_taken_back_are_not_counted():
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    seq = SequenceState(0, [1, 2, 3, 4], 2, SamplingParams(frequency_penalty=1.0))
    apply_penalties(scores, Rows((seq,), (0,)))
    seq.tokens[3:] = [5]
    assert torch.equal(apply_penalties(scores, Rows((seq,), (0,))), dense(scores, [seq], [0], None))
    seq.prompt_length = 3
    assert torch.equal(apply_penalties(scores, Rows((seq,), (0,))), dense(scores, [seq], [0], None))


def test_a_further_step_reads_further_tokens_only():
    read: list[int] = []

    class Text(list):
        def __getitem__(self, index):
            tokens = super().__getitem__(index)
            read.append(len(tokens) if isinstance(index, slice) else 1)
            return tokens

    seq = SequenceState(3, Text([1, 2] * 50), 20, SamplingParams(frequency_penalty=1.0))
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for new in ([], [3, 4], [5]):
        seq.tokens += new
        read.clear()
        result = apply_penalties(scores, Rows((seq.view(),), (0,)))
        assert sum(read) == (len(new) or 100)
        assert torch.equal(result, dense(scores, [seq], [0], None))
    earlier = seq.view()
    seq.tokens += [7]
    for view in (seq.view(), earlier, seq.view()):
        result = apply_penalties(scores, Rows((view,), (0,)))
        assert torch.equal(result, dense(scores, [view], [0], None))


def test_views_of_other_tokens_are_counted_by_themselves() -> None:
    seq = SequenceState(0, [1, 2, 3], 1, SamplingParams(presence_penalty=1.0))
    scores = torch.zeros(1, VOCAB)
    apply_penalties(scores, Rows((seq.view(),), (0,)))
    shorter = replace(seq.view(), tokens=[1, 4])
    assert apply_penalties(scores, Rows((shorter,), (0,))).nonzero()[:, 1].tolist() == [4]
