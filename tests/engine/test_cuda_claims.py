"""Whole engine steps on devices that claim to be CUDA's: no mixture of devices, the texts of the
host, one wait, and one copy each way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from claimed_cuda import Claimed, Devices, MixedDevicesError, claimed_devices
from every_drafter import SPECS
from paceline import LLM, Grammar, SamplingParams
from paceline.core.transfer import Arrival

PROMPTS = ["Once upon a time there was a", "one two one two one two", "def add(a, b):\n    return"]
LENGTH: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
GREEDY = [SamplingParams(**LENGTH)] * 3
MIXED = [
    SamplingParams(temperature=0.9, seed=3, logprobs=2, **LENGTH),
    SamplingParams(presence_penalty=0.7, repetition_penalty=1.2, logit_bias={5: 2.0}, **LENGTH),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=4, prompt_logprobs=1, **LENGTH),
]
HOW: dict[str, Any] = {"dtype": "float32", "backend": "reference", "seed": 1, "max_batch_size": 2}
VERIFY = "verifier._verdicts"
# Waits on top of the one, as each drafter's page says, and for numbers that have arrived by then:
# events that a grammar's paths, a look-up on the device and the clock ask for.
SAID = {"grow.grow", "translated.propose", "selfspec._scores"}
# And a table of hashes, sent to a device once in the process.
ARRIVED = {"transfer.values", "clock._settle", "noise._id_hashes"}
ON_CPU_ONLY = {"quantized"}  # rounds a model's weights when it is loaded
ON_A_DRAFT_DEVICE = ["model", "tree", "tree, best first"]


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
        steps.append((Counter(devices.waits), devices.to_device, devices.to_host))
        return made

    engine.step = watched  # type: ignore[method-assign]
    return steps


def texts(llm: LLM, params: Any) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
@pytest.mark.parametrize("name", sorted(SPECS.keys() - ON_CPU_ONLY))
def test_every_drafter_on_a_device(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is on cuda:1, and the current device is cuda:0."""
    params = GREEDY if kind == "greedy" else MIXED
    wanted = texts(LLM("paceline/tiny", draft=SPECS[name], draft_length=3, **HOW), params)
    with claimed_devices(monkeypatch) as devices:
        llm = LLM("paceline/tiny", draft=SPECS[name], draft_length=3, device="cuda:1", **HOW)
        llm.generate("A dog", SamplingParams(max_tokens=4))  # what is moved once, at first use
        devices.events.clear()
        steps = counted(llm, devices)
        assert texts(llm, params) == wanted
        recorded = {event.device for event in devices.events if event.device is not None}
        assert recorded == {torch.device("cuda:1")}
        assert devices.between == 0
    for waits, _, _ in steps:
        assert waits.pop(VERIFY, 0) <= 1
        assert waits.keys() <= SAID | ARRIVED | {"prompts.prompt_logprobs"}, waits
        assert all(waits[name] <= 1 for name in SAID), waits


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
@pytest.mark.parametrize("name", ON_A_DRAFT_DEVICE)
def test_a_draft_on_another_device(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed batches, too: some requests are not drafted for, and get an empty tree."""
    params = list(GREEDY if kind == "greedy" else MIXED)
    params[1] = SamplingParams(**{**vars(params[1]), "draft_length": 0})
    wanted = texts(LLM("paceline/tiny", draft=SPECS[name], draft_length=3, **HOW), params)
    with claimed_devices(monkeypatch):
        places = {"device": "cuda:0", "draft_device": "cuda:1"}
        llm = LLM("paceline/tiny", draft=SPECS[name], draft_length=3, **places, **HOW)
        assert texts(llm, params) == wanted


def test_a_plain_step_is_one_copy_each_way(devices: Devices) -> None:
    llm = LLM("paceline/tiny", device="cuda:0", **HOW)
    steps = counted(llm, devices)
    texts(llm, GREEDY)
    for waits, up, down in steps:
        assert waits.keys() <= {VERIFY, "clock._settle"} and waits[VERIFY] == 1, waits
        assert (up, down) == (1, 1)


@pytest.mark.parametrize("name", ["ngram", "suffix", "recycling"])
def test_a_hybrid_that_follows_its_look_ups_waits_once(name: str, devices: Devices) -> None:
    """Their tokens are the host's already, or arrive while the forward runs."""
    llm = LLM("paceline/tiny", draft=f"hybrid:{name}", device="cuda:0", **HOW)
    steps = counted(llm, devices)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    done = llm.generate([PROMPTS[1] * 4], long)
    assert done[0].stats.target_steps > 3
    for waits, _, _ in steps:
        assert waits.keys() <= {VERIFY} | ARRIVED and waits[VERIFY] <= 1, waits
        assert name == "recycling" or not waits["transfer.values"], "the host knows its look-ups"


def test_a_grammar_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "(one two ){2,9}three")
    params = [SamplingParams(grammar=grammar, max_tokens=12), *GREEDY[1:]]
    wanted = texts(LLM("paceline/tiny", draft="ngram", draft_length=3, **HOW), params)
    with claimed_devices(monkeypatch) as devices:
        llm = LLM("paceline/tiny", draft="ngram", draft_length=3, device="cuda:1", **HOW)
        devices.events.clear()
        assert texts(llm, params) == wanted
        recorded = {event.device for event in devices.events if event.device is not None}
        assert recorded == {torch.device("cuda:1")}


def test_preempted_and_shared_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {**HOW, "draft": "paceline/tiny-draft", "draft_length": 3, "max_batch_size": 3}
    prompts, params = [PROMPTS[0] * 6] * 3, SamplingParams(max_tokens=40, ignore_eos=True)
    llm = LLM("paceline/tiny", kv_cache_memory=3 << 20, **how)
    wanted = [one.token_ids for one in llm.generate(prompts, params)]
    with claimed_devices(monkeypatch):
        llm = LLM("paceline/tiny", kv_cache_memory=3 << 20, device="cuda:1", **how)
        assert [one.token_ids for one in llm.generate(prompts, params)] == wanted
        assert llm.engine.scheduler.preemptions or llm.engine.cache.shares


# -- the harness itself ----------------------------------------------------------------------------


def test_what_cuda_would_refuse_is_refused(devices: Devices) -> None:
    first, second = torch.ones(2, device="cuda:0"), torch.ones(2).to("cuda:1")
    assert isinstance(first, Claimed) and str(second.device) == "cuda:1"
    for wrong in (lambda: first + second, lambda: first + torch.ones(2), lambda: second[first > 0]):
        with pytest.raises(MixedDevicesError):
            wrong()
    assert (first + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_events_belong_to_the_device_of_the_copy(devices: Devices) -> None:
    assert Arrival(torch.arange(3).to("cuda:1")).values() == [0, 1, 2]
    assert [event.device for event in devices.events] == [torch.device("cuda:1")]
