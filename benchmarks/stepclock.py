"""Where the time of a speculative decoding step goes: the models' forwards, and everything else."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from reach import reachable

# Parts of a step by attribute of the engine; those that an engine lacks are left out.
PARTS = {
    "scheduler": ("plan",),
    "controller": ("observe", "lengths"),
    "drafter": ("propose", "observe"),
    "cache": ("batch_of", "move", "commit"),
}


class StepClock:
    """Adds up own time (without what is timed inside) by name.

    ``timer``: ``time.thread_time`` is not moved by other programs, but sees one thread only.
    """

    def __init__(self, timer: Callable[[], float] = time.perf_counter) -> None:
        self.timer = timer
        self.own: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed as `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self.timer()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = self.timer() - start
                self.own[name] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return timed


class Timed:
    """Stands for a callable object: its calls are timed, all else goes to the object."""

    def __init__(self, name: str, inner: Any, clock: StepClock) -> None:
        self.__dict__["_inner"] = inner
        self.__dict__["_timed"] = clock.wrap(name, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


def install(
    llm: Any, timer: Callable[[], float] = time.perf_counter
) -> tuple[StepClock, list[dict[str, float]]]:
    """Time every step of an LLM; the list gets one {part: own seconds} per engine step.

    For engines on a CPU: on a GPU calls return before the work is done. The LLM is changed for
    good, so give it one that no other figure is taken from.
    """
    from paceline.engine.engine import Engine
    from paceline.model.target import CausalModel

    clock, steps = StepClock(timer), []
    (engine,) = {id(e): e for _, _, e in reachable(llm, Engine)}.values()
    for owner, name, model in list(reachable(llm, CausalModel)):
        setattr(owner, name, Timed("forward", model, clock))
    for part, methods in PARTS.items():
        inner = getattr(engine, part, None)
        for method in methods:
            if inner is not None and callable(call := getattr(inner, method, None)):
                setattr(inner, method, clock.wrap(f"{part}.{method}", call))
    if callable(verifier := getattr(engine, "verifier", None)):
        engine.verifier = Timed("verifier", verifier, clock)
    step = clock.wrap("engine", engine.step)

    def recorded() -> Any:
        clock.own.clear()
        result = step()
        steps.append(dict(clock.own))
        return result

    engine.step = recorded
    return clock, steps


def shares(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median over steps of each part's share of its step."""
    names = {name for step in steps for name in step}
    totals = [sum(step.values()) for step in steps]
    return {
        name: statistics.median(s.get(name, 0.0) / t for s, t in zip(steps, totals, strict=True))
        for name in sorted(names)
    }


def overhead(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """`overhead_fraction` of decoding steps (prefill steps left out) and its parts."""
    from paceline import SamplingParams

    _, steps = install(llm)
    decoding: list[dict[str, float]] = []
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        steps.clear()
        llm.generate([prompt], params)
        # The first steps read the prompt and warm up; the last ones have no room to draft.
        decoding.extend(steps[2:-1])
    if not decoding:
        return {}
    parts = shares(decoding)
    return {
        "overhead_fraction": round(1.0 - parts.get("forward", 0.0), 4),
        "step_shares": {n: round(s, 4) for n, s in parts.items() if s >= 0.0005},
        "step_milliseconds": round(statistics.median(sum(s.values()) for s in decoding) * 1e3, 3),
    }
