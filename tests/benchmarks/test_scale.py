"""The simulation of machines that are not here: its costs, its chances, and who is served."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import scale
from scale_costs import Rows
from scale_replica import Replica, Request, Traffic

H100 = scale.machine("h100", "8b")


def run(length: int | str, rate: float, count: int = 12, **more: Any) -> Any:
    requests = [Request(0.0, 64, 200, rate) for _ in range(count)]
    return Replica(H100, length, batch=4, **more).run(requests, clients=4)


def test_a_forward_takes_its_bytes_and_then_its_arithmetic() -> None:
    seconds = [H100.forward([Rows(1, 64)] * count) for count in (1, 64, 512, 1024)]
    read = H100.target.bytes / (H100.chip.bandwidth * H100.reading)
    assert 15e9 < H100.target.bytes < 15.1e9 and read < seconds[0] < 1.1 * read
    assert seconds[1] < 1.1 * seconds[0]  # reading the weights hides 64 rows
    # By then it is the products, and what attention reads besides.
    each = 2 * H100.target.bytes / 2 / (H100.chip.flops * H100.arithmetic)
    assert seconds[3] - seconds[2] == pytest.approx(512 * each, rel=0.2)


def test_several_chips_share_the_reading_and_pay_for_sums() -> None:
    whole = scale.machine("h100", "70b")
    alone = whole.target.bytes / (whole.chip.bandwidth * whole.reading)
    assert alone / 8 < whole.forward([Rows(1, 64)]) < alone / 4
    assert whole.cached_tokens > 1_000_000


def test_plain_decoding_takes_its_forwards() -> None:
    found = run(0, 0.0, count=4)
    step = H100.forward([Rows(1, 164)] * 4) + H100.host([Rows(1, 164)] * 4)
    assert found.token_gap == pytest.approx(step, rel=0.02)
    assert (found.tokens, found.tokens_a_step, found.preemptions) == (800, 1.0, 0)


def test_drafts_bring_what_their_chances_say() -> None:
    found = run(3, 0.7)
    assert found.tokens_a_step == pytest.approx(1 + 0.7 + 0.49 + 0.343, rel=0.05)
    assert run(3, 0.7).rate > 1.5 * run(0, 0.7).rate


def test_the_engine_s_own_choice_is_never_slow() -> None:
    plain = run(0, 0.0).rate
    assert run("auto", 0.02).rate > 0.95 * plain > run(8, 0.02).rate
    assert run("auto", 0.85).rate > 1.8 * plain


def test_a_small_cache_preempts_and_everybody_is_answered() -> None:
    found = run(0, 0.0, cached_tokens=600)
    assert found.preemptions > 0 and found.tokens == 12 * 200


def test_traffic_has_the_means_that_were_asked_for() -> None:
    for burst in (1.0, 4.0):
        requests = Traffic(burst=burst).requests(4000, 10.0, seed=3)
        assert requests[-1].moment == pytest.approx(400, rel=0.1)
        gaps = [b.moment - a.moment for a, b in pairwise(requests)]
        mean = sum(gaps) / len(gaps)
        spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
        assert spread == pytest.approx(burst, rel=0.2)
        assert sum(r.rate for r in requests) / 4000 == pytest.approx(0.7, rel=0.02)


def test_the_command(
    start: Callable[..., tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "FEWEST", 3)
    some = ("--chips", "h200", "--models", "8b", "--loads", "2", "--seconds", "1", "--clients", "2")
    code, out, figures = start(scale, *some)
    assert code == 0 and "8B on 1 x H200" in out and "always full" in out
    assert {cell["way"] for cell in figures["cells"]} == set(scale.WAYS)
    by = {(c["arrivals"], c["way"]): c["figures"] for c in figures["cells"]}
    assert by["Poisson", "auto"]["token_gap"] < by["Poisson", "plain"]["token_gap"]
    assert by["closed", "auto"]["rate"] > by["closed", "plain"]["rate"]


def test_capacity(start: Callable[..., tuple[Any, str, Any]]) -> None:
    """The formula is what the simulation comes to, where batches are always full."""
    code, out, figures = start(scale, "--capacity", "--chips", "h100", "--models", "8b")
    assert code == 0 and "a replica" in out
    simulated = scale.full(H100, 0, 0.7, 8).rate
    assert figures["h100 8b 8 0"] == pytest.approx(simulated, rel=0.15)
    assert figures["h100 8b 8 3"] > 1.5 * figures["h100 8b 8 0"]
