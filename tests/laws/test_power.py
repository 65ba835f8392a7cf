"""A rule that accepts whatever is drafted is lossy, and the distribution check sees it."""

import pytest
import torch
from harness import (
    SamplingParams,
    Setting,
    distance,
    distribution_table,
    joint_distribution,
    plain_distribution,
    point_tree,
    sampled_chain,
    sampled_tree,
    strings,
)

from paceline.core.tree import TokenTree
from paceline.verify.verifier import Verifier
from support.spans import judged

PLAIN = SamplingParams(temperature=1.0)


class Credulous(Verifier):
    """Accepts the first branch of every tree."""

    def _path(self, span, tokens, choices, accepted):
        path, parents = [], span.tree.parents
        while (last := path[-1] if path else -1) in parents:
            path.append(parents.index(last))
        return tuple(path)


def credulous_distribution(setting, drafter, depth):
    """Emissions of one step: the paths are certain, the last token follows the target's
    distribution."""

    def step(context):
        vocab = setting.vocab
        emitted = torch.zeros(len(strings(vocab, depth + 1)), dtype=torch.float64)
        table = distribution_table(setting.target, setting, context, depth)
        paths = strings(vocab, depth)
        for drafts in drafter(distribution_table(setting.draft, setting, context, depth)):
            for index, weight in enumerate(drafts.weights.tolist()):
                ids = drafts.row_strings[index]
                logits = setting.target([(*context, *paths[i]) for i in ids.tolist()])
                q = None if drafts.q is None else drafts.q[index]
                tree = TokenTree(drafts.tokens[index], drafts.parents, drafts.draw, q)
                check = judged(setting.request(context), 0, tree)
                (verdict,) = Credulous()(logits, [check])
                end = verdict.path[-1] + 1 if verdict.path else 0
                string = int(ids[end])
                for token in range(vocab):
                    emitted[1 + vocab * string + token] += weight * float(table[string, token])
        return emitted

    return step


@pytest.mark.parametrize("drafter", [sampled_chain(2), sampled_tree((2, 1)), point_tree((2, 1))])
def test_the_law_check_catches_it(drafter):
    setting = Setting.random(3, PLAIN)
    distribution = joint_distribution(setting, credulous_distribution(setting, drafter, 2), 2)
    assert float(distribution.sum()) == pytest.approx(
        1.0, abs=1e-6
    )  # a distribution, but another one
    assert distance(distribution, plain_distribution(setting, 2)) > 0.02


def test_without_drafts_it_is_plain_decoding():
    setting = Setting.random(3, PLAIN)
    empty = point_tree(())
    distribution = joint_distribution(setting, credulous_distribution(setting, empty, 0), 2)
    assert distance(distribution, plain_distribution(setting, 2)) < 1e-6
