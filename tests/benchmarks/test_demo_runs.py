"""Many runs of the demo: what is read off its JSON."""

import json

from demo_runs import figures, spread


def test_figures_are_those_of_the_first_and_the_repeated_requests() -> None:
    once = {"plain_tokens_per_second": 50.04, "speedup": 2.0}
    assert figures(json.dumps(once)) == {"speedups": [2.0], "plain": [50.0]}
    twice = once | {"repeated": {"plain_tokens_per_second": 60.0, "speedup": 8.0}}
    assert figures(f"note\n{json.dumps(twice)}\n") == {
        "speedups": [2.0, 8.0],
        "plain": [50.0, 60.0],
    }


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == "1.00 to 3.00, median 2.00"
