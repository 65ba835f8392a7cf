"""Whole engine steps on devices that claim to be CUDA's: no mixture of devices, the texts of the
host, one wait, and one copy each way."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import LLM, Grammar, SamplingParams
from paceline.core.transfer import HostCopy
from paceline.model.target import CausalModel
from paceline.parallel import shared
from paceline.parallel.shared import Follower
from support.claimed_cuda import Claimed, Devices, MixedDevicesError, claimed_devices
from support.every_drafter import SPECS

pytestmark = pytest.mark.slow  # a Python call for each operator of torch
PROMPTS = ["Once upon a time there was a", "one two one two one two", "def add(a, b):\n    return"]
LENGTH: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
GREEDY = [SamplingParams(**LENGTH)] * 3
UNSEEDED = [SamplingParams(temperature=0.9, **LENGTH)] * 3
MIXED = [
    SamplingParams(temperature=0.9, seed=3, logprobs=2, **LENGTH),
    SamplingParams(presence_penalty=0.7, repetition_penalty=1.2, logit_bias={5: 2.0}, **LENGTH),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=4, prompt_logprobs=1, **LENGTH),
]
GRAMMAR = SamplingParams(grammar=Grammar("regex", "(one two ){2,9}three"), max_tokens=12)
KINDS = {
    **{"greedy": GREEDY, "unseeded": UNSEEDED, "mixed": MIXED},
    "grammar": [GRAMMAR, GREEDY[0], UNSEEDED[0]],
}
HOW: dict[str, Any] = {"dtype": "float32", "backend": "reference", "seed": 1, "max_batch_size": 2}
VERIFY = "verifier._verdicts"
# Waits on top of the one, as each drafter's page says, and for numbers that have arrived by then:
# events that a grammar's paths and a lookup on the device ask for.
SAID = {"grow.grow", "strings.propose", "block._grow_trees"}
# And a table of hashes, sent to a device once in the process.
ARRIVED = {"transfer.values", "noise.id_hashes"}
ON_CPU_ONLY = {"quantized"}  # rounds a model's weights when it is loaded
ON_A_DRAFT_DEVICE = ["model", "tree", "tree, dynamic"]

# Copies that a step of two requests at draft length 3 sends to the device, greedy or sampled
# without a seed, and that it fetches. None makes the host wait but for the verdict's.
# - A forward's numbers are one copy: of the target, and of a draft at each of its levels.
# - A lookup's tokens are one for each request.
# - Of a tree the branch that was accepted is moved in each cache, and learnt from.
# - Drafts that are judged by different rules are told apart: two lists of rows.
# - Dynamic growth decides on the host which node to expand, and fetches their scores once.
COPIES = {
    **{"none": (1, 1), "medusa": (3, 1), "ngram": (3, 1), "suffix": (3, 1), "lookahead": (4, 1)},
    **{"recycling": (5, 1), "hybrid": (6, 1), "model": (6, 1), "layer_skip": (6, 1)},
    **{"early_exit": (7, 1), "tree": (8, 1), "eagle": (7, 1), "tree, dynamic": (8, 2)},
    **{"layer_skip, dynamic": (7, 2), "eagle2": (8, 2), "eagle3": (8, 2)},
    **{"datastore": (2, 1), "mtp": (4, 1), "dflash": (6, 1), "dspark": (6, 2)},
    **{"model, one pass": (6, 1), "eagle3, one pass": (7, 2)},
    "auto": (10, 2),  # lookups beside an EAGLE-3 head
}
# Tables that stay on the device, sent once for each shape of tree in the process.
KEPT = {"grow.levels_of", "rules.layout_of", "rules.chain_grid"}
KEPT |= {"rules.<genexpr>", "medusa._picks"}
# A grammar's automaton is the host's: it must know each level that the device drafted before the
# next, and what was drafted before the target's rows are forbidden.
LEVELS = {"sampling.on_host": 2, "policy.extend": 2}
ROOM = 9  # blocks of 16 tokens for three requests that fill six each


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    with claimed_devices(monkeypatch) as found:
        yield found


def counted(llm: LLM, devices: Devices) -> list[tuple[Counter[str], int, int]]:
    """Waits, copies to a device and to the host of each step that follows."""
    engine, steps = llm.engine, list[tuple[Counter[str], int, int]]()
    step = engine.step

    def watched() -> Any:
        devices.reset()
        made = step()
        up = sum(count for name, count in devices.to_device.items() if name not in KEPT)
        steps.append((Counter(devices.waits), up, devices.to_host.total()))
        return made

    engine.step = watched  # type: ignore[method-assign]
    return steps


def texts(llm: LLM, params: Sequence[SamplingParams]) -> list[list[int]]:
    """Those that must be the same anywhere: of other requests a device draws other numbers."""
    done = llm.generate(PROMPTS, params)
    pairs = zip(done, params, strict=True)
    return [one.token_ids for one, own in pairs if own.greedy or own.seed is not None]


LOADED: dict[str, LLM] = {}


def loaded(name: str, device: str = "cpu", length: int | None = 3) -> LLM:
    """The tiny target on a device, loaded once, with a drafter."""
    if device not in LOADED:
        LOADED[device] = LLM("paceline/tiny", device=device, **HOW)
    spec = SPECS.get(name, name)
    return LOADED[device].with_draft(spec, draft_length=length, seed=1, max_batch_size=2)


@pytest.fixture(scope="module", autouse=True)
def let_go() -> Iterator[None]:
    yield
    LOADED.clear()


@pytest.mark.parametrize("name", sorted(SPECS.keys() - ON_CPU_ONLY))
def test_every_drafter_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is on cuda:1, and the current device is cuda:0."""
    host = loaded(name)
    wanted = {kind: texts(host, params) for kind, params in KINDS.items()}
    with claimed_devices(monkeypatch) as devices:
        llm = loaded(name, "cuda:1")
        llm.generate("A dog", SamplingParams(max_tokens=4))  # what is moved once, at first use
        devices.events.clear()
        steps = counted(llm, devices)
        for kind, params in KINDS.items():
            steps.clear()
            assert texts(llm, params) == wanted[kind]
            assert not devices.between
            if kind in ("greedy", "unseeded"):
                ups, downs = COPIES[name]
                assert all(up <= ups and down <= downs for _, up, down in steps)
            for waits, _, _ in steps:
                check_waits(waits, kind)
        recorded = {event.device for event in devices.events if event.device is not None}
        assert recorded == (set() if name == "none" else {torch.device("cuda:1")})


def check_waits(waits: Counter[str], kind: str) -> None:
    """At most the one, and those that are said."""
    others = waits.keys() - {VERIFY} - ARRIVED
    if kind == "grammar":
        others -= LEVELS.keys()
        assert all(waits[key] <= most for key, most in LEVELS.items()), waits
    assert waits[VERIFY] <= 1 and others <= SAID | {"logprobs.prompt_logprobs"}, waits
    assert all(waits[key] <= 1 for key in SAID), waits


@pytest.mark.parametrize("name", ON_A_DRAFT_DEVICE)
def test_a_draft_on_another_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed batches, too: some requests are not drafted for, and get an empty tree."""
    host = loaded(name)
    with claimed_devices(monkeypatch):
        places = {"device": "cuda:0", "draft_device": "cuda:1"}
        llm = LLM("paceline/tiny", draft=SPECS[name], draft_length=3, **places, **HOW)
        for params in KINDS.values():
            params = [params[0], replace(params[1], draft_length=0), params[2]]
            assert texts(llm, params) == texts(host, params)


def test_a_plain_step_is_one_copy_each_way(devices: Devices) -> None:
    llm = LLM("paceline/tiny", "none", device="cuda:0", **HOW)
    steps = counted(llm, devices)
    texts(llm, GREEDY)
    texts(llm, UNSEEDED)
    for waits, up, down in steps:
        assert waits.keys() <= {VERIFY} and waits[VERIFY] == 1, waits
        assert (up, down) == (1, 1)


@pytest.mark.parametrize("name", ["ngram", "recycling"])
def test_a_hybrid_that_follows_its_look_ups_waits_once(name: str, devices: Devices) -> None:
    """Their tokens are the host's already, or arrive while the forward runs."""
    llm = loaded(f"hybrid:{name}", "cuda:1", None)
    steps = counted(llm, devices)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    done = llm.generate([PROMPTS[1] * 4], long)
    assert done[0].stats.target_steps > 3
    for waits, _, _ in steps:
        assert waits.keys() <= {VERIFY} | ARRIVED and waits[VERIFY] <= 1, waits
        assert name == "recycling" or not waits["transfer.values"], "the host knows its lookups"


def test_preempted_and_shared_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that made room for others is read and drafted for again, behind shared blocks."""
    how = {**HOW, "draft": "paceline/tiny-draft", "draft_length": 3, "max_batch_size": 3}
    prompts, params = [PROMPTS[0] * 6] * 3, SamplingParams(max_tokens=40, ignore_eos=True)

    def run(**device: Any) -> tuple[list[list[int]], int]:
        llm = LLM("paceline/tiny", kv_cache_memory=3 << 20, **device, **how)
        llm.engine.cache.pool.allocate(llm.engine.cache.pool.available - ROOM, None)
        texts = [one.token_ids for one in llm.generate(prompts, params)]
        return texts, llm.engine.scheduler.preemptions

    wanted, preempted = run()
    assert preempted
    with claimed_devices(monkeypatch):
        assert run(device="cuda:1") == (wanted, preempted)


# -- tensor parallel -------------------------------------------------------------------------------


class ClaimedRanks:
    """Team and group of two ranks in one process: the second one is on cuda:1, with all weights.

    What it is told goes through pickle, as on its way to another process.
    """

    def __init__(self, size: int, device: torch.device, job: dict[str, object]) -> None:
        self.size, self.group, self.lost = size, self, None
        self._orders: list[Any] = []
        self._numbers: torch.Tensor | None = None
        self.follower: Follower | None = None
        self.told: Counter[str] = Counter()

    def loading(self) -> Any:
        return contextlib.nullcontext()

    together = loading

    def broadcast(self, method: str, *arguments: Any) -> None:
        self.told[method] += 1
        self._orders.append(pickle.loads(pickle.dumps((method, arguments))))
        if method != "forward" or not sum(arguments[1].sizes):
            self._follow()

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._numbers is None:  # rank 0 sends
            assert numbers.device == torch.device("cuda:0")
            self._numbers = numbers
            self._follow()
            return numbers
        assert numbers.device == torch.device("cuda:1")
        sent, self._numbers = self._numbers, None
        return numbers.copy_(sent)

    def _follow(self) -> None:
        assert self.follower is not None
        self._orders.append(("stop", ()))
        self.follower.run()

    def receive(self) -> Any:
        return self._orders.pop(0)

    def least_memory(self) -> int:
        return 1 << 30

    def leave(self) -> None:
        pass

    def on_failure(self, told: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ["ngram", "tree", "tree, dynamic", "eagle"])
def test_plans_of_tensor_parallel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is told plain data of the host, and what only rank 0's device knows follows
    from device to device: its keys and values are those of rank 0, and nobody waits for them."""
    made: list[ClaimedRanks] = []
    wanted = texts(loaded(name), MIXED)

    def ranks(*given: Any) -> ClaimedRanks:
        made.append(ClaimedRanks(*given))
        return made[0]

    def part(model: str, dtype: str, device: torch.device, size: int) -> CausalModel:
        other = CausalModel.load(model, dtype, "cuda:1", backend="reference")
        made[0].follower = Follower(other, made[0])  # type: ignore[arg-type]
        return CausalModel.load(model, dtype, str(device), backend="reference")

    monkeypatch.setattr(shared, "RankProcesses", ranks)
    monkeypatch.setattr(shared, "load_part", part)
    with claimed_devices(monkeypatch) as devices:
        how = {**HOW, "backend": "auto", "tensor_parallel": 2, "device": "cuda"}
        llm = LLM("paceline/tiny", draft=SPECS[name], draft_length=3, **how)
        llm.generate("A dog", SamplingParams(max_tokens=4))
        steps = counted(llm, devices)
        assert texts(llm, MIXED) == wanted
        (team,) = made
        (theirs,) = team.follower._caches.values()
        for layer in range(len(llm.target.cache_shapes)):
            for own, other in zip(llm.engine.cache.kv(layer), theirs.kv(layer), strict=True):
                assert str(own.device) == "cuda:0" and str(other.device) == "cuda:1"
                assert torch.equal(own.cpu(), other.cpu())
    assert team.told["forward"] >= len(steps)
    for waits, _, _ in steps:
        assert (
            waits[VERIFY] <= 1
            and waits.keys() <= {VERIFY, "logprobs.prompt_logprobs"} | SAID | ARRIVED
        )


# -- the harness itself ----------------------------------------------------------------------------


def test_what_cuda_would_refuse_is_refused(devices: Devices) -> None:
    first, second = torch.ones(2, device="cuda:0"), torch.ones(2).to("cuda:1")
    assert isinstance(first, Claimed) and str(second.device) == "cuda:1"
    for wrong in (lambda: first + second, lambda: first + torch.ones(2), lambda: second[first > 0]):
        with pytest.raises(MixedDevicesError):
            wrong()
    assert (first + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_events_belong_to_the_device_of_the_copy(devices: Devices) -> None:
    assert HostCopy(torch.arange(3).to("cuda:1")).values() == [0, 1, 2]
    assert [event.device for event in devices.events] == [torch.device("cuda:1")]
