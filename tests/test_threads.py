"""One LLM for many threads and coroutines: each gets the answers that it would get alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

from paceline import (
    LLM,
    AsyncLLM,
    Completion,
    EngineLostError,
    Grammar,
    PacelineError,
    PromptError,
    SamplingParams,
)
from support.cache_invariants import check_cache

THREADS = 32
TEXTS = ("Once upon a time", "def factorial(n):", "Nina has 36 pencils", "How do I copy a folder")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"grammar": Grammar("regex", "[a-z ]{8,40}")},
    {"n": 2, "temperature": 0.7, "seed": 9, "logprobs": 2},
    {"stop": ("a",), "min_tokens": 4},
)
Answer: TypeAlias = tuple[list[int], str, str]  # token ids, text, and why it ends
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


def asked(number: int) -> tuple[str, SamplingParams]:
    kind = KINDS[number % len(KINDS)]
    return f"{TEXTS[number % len(TEXTS)]} {number}", SamplingParams(
        max_tokens=6 + number % 12, **kind
    )


def answers(found: list[Completion]) -> list[Answer]:
    return [(list(one.token_ids), one.text, one.finish_reason) for one in found]


@pytest.fixture(scope="module", params=["none", "paceline/tiny-draft"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    made = LLM("paceline/tiny", request.param, dtype="float32", max_batch_size=8)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_left(llm: LLM) -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while (llm.engine.has_work or llm.owner.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not llm.engine.has_work and not llm.owner.requests and not llm.owner._waiters
    check_cache(llm.engine.cache)


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """All begin together."""
    ready = threading.Barrier(count)

    def one(number: int) -> Any:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[Answer]]:
    """What each number asks for gets when it is the only one."""
    return [answers(llm.generate(*asked(number))) for number in range(THREADS)]


def test_each_thread_gets_the_answer_that_it_gets_alone(
    llm: LLM, alone: list[list[Answer]]
) -> None:

    def streamed(number: int) -> list[Answer]:
        events = list(llm.stream(*asked(number)))
        done = sorted(
            (event.completion for event in events if event.completion is not None),
            key=lambda completion: completion.index,
        )
        assert "".join(e.text for e in events if e.index == 0) == done[0].text
        return answers(done)

    def work(number: int) -> Any:
        return streamed(number) if number % 3 == 0 else answers(llm.generate(*asked(number)))

    steps = llm.engine.steps
    assert in_threads(work) == alone
    together = llm.engine.steps - steps
    assert 2 * together < sum(len(one[0]) for own in alone for one in own), "not batched"


def test_coroutines_and_threads_share_the_steps(llm: LLM, alone: list[list[Answer]]) -> None:
    both = AsyncLLM.from_llm(llm)

    async def streamed(number: int) -> list[Answer]:
        done = [e.completion async for e in both.stream(*asked(number)) if e.completion is not None]
        return answers(sorted(done, key=lambda completion: completion.index))

    async def generated(number: int) -> list[Answer]:
        return answers(await both.generate(*asked(number)))

    async def all_of_them() -> list[Any]:
        turns = (streamed if n % 2 else generated for n in range(THREADS))
        return await asyncio.gather(*(turn(n) for n, turn in enumerate(turns)))

    with ThreadPoolExecutor(5) as pool:
        threads = [pool.submit(llm.generate, *asked(number)) for number in range(5)]
        found = asyncio.run(all_of_them())
        assert [answers(thread.result()) for thread in threads] == alone[:5]
    assert found == alone


def test_a_caller_alone_takes_the_steps_itself(llm: LLM) -> None:
    """No thread is begun for one, and that of several ends when nobody needs it."""
    deadline = time.monotonic() + 10
    while llm.owner._thread is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    llm.generate(*asked(0))
    list(llm.stream(*asked(0)))
    assert llm.owner._thread is None


def test_streams_may_be_dropped_at_any_moment(llm: LLM) -> None:
    """Closed, collected in a cycle, or left unread, while others decode."""
    expected = answers(llm.generate(*asked(0)))

    def work(number: int) -> Any:
        if number % 2:
            return answers(llm.generate(*asked(0)))
        stream = llm.stream(TEXTS[number % 4], LONG)
        for _ in range(number % 5):
            next(stream)
        if number % 4:
            stream.close()
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        return None

    found = in_threads(work)
    gc.collect()
    assert [one for one in found if one is not None] == [expected] * (THREADS // 2)


def test_wrong_arguments_hurt_their_own_caller(llm: LLM) -> None:
    expected = answers(llm.generate(*asked(0)))

    def work(number: int) -> Any:
        if number % 4:
            return answers(llm.generate(*asked(0)))
        with pytest.raises(PromptError):
            llm.generate("")
        return expected

    assert in_threads(work, 16) == [expected] * 16


def test_a_lost_engine_reaches_every_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Semaphore(0)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    def work(number: int) -> str:
        stream = llm.stream(TEXTS[number % 4], LONG)
        next(stream)
        started.release()
        with pytest.raises(EngineLostError, match="planted"):
            for event in stream:
                if event.completion is not None and event.completion.error:
                    raise EngineLostError(event.completion.error)
        return "told"

    def generated(number: int) -> str:
        started.release()
        with pytest.raises(EngineLostError, match="planted"):
            llm.generate(TEXTS[number], LONG)
        return "told"

    with ThreadPoolExecutor(8) as pool:
        told = [pool.submit(work, n) for n in range(4)]
        told += [pool.submit(generated, n) for n in range(4)]
        for _ in told:
            started.acquire()
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.target), "__call__", failing)
            assert [one.result(60) for one in told] == ["told"] * 8
    assert llm.generate(*asked(0))[0].error is None


@pytest.mark.parametrize("count", [1, 4])
def test_closing_ends_those_who_generate(
    llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = llm.with_draft(max_batch_size=4)
    begun, step = threading.Semaphore(0), own.engine.step

    def slow() -> Any:
        time.sleep(0.005)  # nobody is done before all have begun, however busy the machine is
        return step()

    monkeypatch.setattr(own.engine, "step", slow)

    def work(number: int) -> str:
        stream = own.stream(TEXTS[number % 4], LONG)
        next(stream)
        begun.release()
        with pytest.raises(PacelineError, match="has been closed") as told:
            if number % 2:
                own.generate(TEXTS[number % 4], [LONG])
            list(stream)
        return str(told.value)

    with ThreadPoolExecutor(count) as pool:
        told = [pool.submit(work, number) for number in range(count)]
        for _ in told:
            begun.acquire()
        own.close()
        own.close()
        lines = {one.result(60) for one in told}
    assert lines == {"this LLM has been closed; make another one"}
    assert own.owner._engine is None and not own.owner.requests


def test_closing_from_within_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler may: the engine is let go of behind the step, and nothing waits."""
    own = llm.with_draft()
    forward = own.engine.forward

    def closing(*args: Any) -> Any:
        own.close()
        return forward(*args)

    monkeypatch.setattr(own.engine, "forward", closing)
    with pytest.raises(PacelineError, match="has been closed"):
        own.generate(TEXTS[0], LONG)
    assert own.owner._engine is None


def test_a_call_from_within_a_step_is_refused(llm: LLM) -> None:
    """It would wait for itself, for ever; here in a thread and an LLM of its own, so that a failure
    ends."""
    own = llm.with_draft("none")

    def asking(_: list[int], logits: Any) -> Any:
        own.generate("a")
        return logits

    params = SamplingParams(max_tokens=2, logits_processors=(asking,))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(own.generate("a", params)), daemon=True)
    thread.start()
    thread.join(20)
    assert found and "within its own step" in found[0].error
    assert own.generate("a")[0].error is None
    own.close()


def test_a_request_that_the_engine_has_dropped_ends(llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], LONG)
    next(stream)
    for seq_id in list(llm.owner.requests):
        llm.engine.abort(seq_id)
    *_, last = stream
    assert last.completion is not None and last.completion.finish_reason == "error"


def test_an_interrupt_ends_the_call_that_it_hits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a caller are taken over by the engine's thread, others have their answers."""
    expected = answers(llm.generate(*asked(0)))
    forward, hit = llm.engine.forward, []

    def once(*args: Any) -> Any:
        if threading.current_thread().name == "hit" and not hit:
            hit.append(True)
            raise KeyboardInterrupt
        return forward(*args)

    ended: list[str] = []

    def interrupted() -> None:
        try:
            llm.generate(TEXTS[1], LONG)
        except KeyboardInterrupt:
            ended.append("interrupted")

    while llm.owner._thread is not None:
        time.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "forward", once)
        thread = threading.Thread(target=interrupted, name="hit")
        thread.start()
        found = answers(llm.generate(*asked(0)))
        thread.join(60)
    assert ended == ["interrupted"] and found == expected


def test_two_engines_in_two_threads(llm: LLM, alone: list[list[Answer]]) -> None:
    """With grammars and penalties, whose state the process holds by request."""
    other = LLM("paceline/tiny", draft="none", dtype="float32", max_batch_size=4)

    def work(number: int) -> Any:
        return answers((llm, other)[number % 2].generate(*asked(number)))

    assert in_threads(work, 16) == alone[:16]
    made = [one.prepare("x", SamplingParams())[0].seq.seq_id for one in (llm, other) * 4]
    assert len(set(made)) == 8
    other.close()


# -- AsyncLLM alone ------------------------------------------------------------------------------


def test_cancelling_a_coroutine_cancels_its_requests(llm: LLM) -> None:
    async def main() -> None:
        both = AsyncLLM.from_llm(llm)
        task = asyncio.create_task(both.generate(TEXTS[0], LONG))
        stream = both.stream(TEXTS[1], LONG)
        assert (await anext(stream)).token_ids
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(both.generate(TEXTS[0], LONG), 0.01)
        for _ in range(1000):  # they are dropped between two steps
            if llm.owner.requests:
                await asyncio.sleep(0.01)
        assert not llm.owner.requests

    asyncio.run(main())


def test_the_event_loop_goes_on(llm: LLM) -> None:
    async def main() -> int:
        ticks = 0
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        task = asyncio.create_task(AsyncLLM.from_llm(llm).generate(list(TEXTS), params))
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert len(task.result()) == 4
        return ticks

    assert asyncio.run(main()) > 10
