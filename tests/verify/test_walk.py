"""The three walks over one small tree."""

from paceline.core.tree import chain_parents
from paceline.verify.verifier import walk_first_accepted, walk_last_accepted, walk_matching

#        root
#       0    1
#      2 3   4
#      5
PARENTS = (-1, -1, 0, 0, 1, 2)


def test_first_accepted_child_wins_and_ends_its_siblings_chances():
    assert walk_first_accepted(PARENTS, [1, 1, 0, 1, 1, 1]) == (0, 3)
    assert walk_first_accepted(PARENTS, [0, 1, 1, 1, 0, 1]) == (1,)
    assert walk_first_accepted(PARENTS, [1, 0, 1, 0, 0, 1]) == (0, 2, 5)
    assert walk_first_accepted(PARENTS, [0, 0, 1, 1, 1, 1]) == ()
    assert walk_first_accepted((), []) == ()


def test_last_accepted_passes_over_failures():
    chain = chain_parents(4)
    assert walk_last_accepted(chain, [0, 0, 1, 0]) == (0, 1, 2)
    assert walk_last_accepted(chain, [1, 0, 0, 0]) == (0,)
    assert walk_last_accepted(chain, [0, 0, 0, 1]) == (0, 1, 2, 3)
    assert walk_last_accepted(chain, [0, 0, 0, 0]) == ()
    assert walk_last_accepted((), []) == ()


def test_matching_follows_each_rows_choice():
    tokens = [7, 8, 5, 6, 5, 9]
    assert walk_matching(PARENTS, tokens, [7, 5, 0, 9, 0, 0, 1]) == (0, 2, 5)
    assert walk_matching(PARENTS, tokens, [8, 5, 5, 0, 0, 0, 0]) == (1, 4)
    assert walk_matching(PARENTS, tokens, [7, 8, 5, 0, 0, 0, 0]) == (0,)
    assert walk_matching(PARENTS, tokens, [5, 7, 5, 0, 0, 0, 0]) == ()


def test_matching_takes_the_first_of_equal_siblings():
    assert walk_matching((-1, -1), [3, 3], [3, 0, 0]) == (0,)
