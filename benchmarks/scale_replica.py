"""A replica in simulated time: the real scheduler, cache and controller, forwards that take what a
cost model says, and acceptance by chance.

Nothing is decoded. A sequence's drafts are accepted token by token with a chance of its own, drawn
around a mean: texts differ. Time is the sum of the steps'; requests arrive meanwhile.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.control.adaptive import AdaptiveController
from paceline.control.controller import Controller, Decision, FixedLength
from paceline.control.cost import CostModel
from paceline.core.batch import Commit, Plan, Slice
from paceline.core.costs import CostCurve, DrafterCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.lab.bench.result import percentile
from paceline.model.paged.cache import PagedCache
from scale_costs import MOST_DRAFTED, Roofline, Rows, as_start_up_measures

BLOCK = 16


@dataclass
class Request:
    """When it comes, and of how many tokens; ``rate``: chance of each of its drafted tokens.
    ``first`` and ``last``: when tokens came, on the simulation's clock."""

    moment: float
    prompt: int
    output: int
    rate: float
    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Prompts and outputs of exponential lengths, cut; arrivals of a gamma process.

    ``burst`` 1 is Poisson; b has intervals of a coefficient of variation of sqrt(b).
    """

    prompt: int = 512
    output: int = 256
    acceptance: float = 0.7
    spread: float = 0.12
    burst: float = 1.0

    def requests(self, count: int, per_second: float, seed: int) -> list[Request]:
        dice, now, requests = random.Random(seed), 0.0, []
        mean, spread = self.acceptance, self.spread
        strength = mean * (1 - mean) / spread**2 - 1  # of the beta distribution
        for _ in range(count):
            now += dice.gammavariate(1 / self.burst, self.burst / per_second)
            prompt = min(4 * self.prompt, 16 + int(dice.expovariate(1 / self.prompt)))
            output = min(4 * self.output, 16 + int(dice.expovariate(1 / self.output)))
            rate = dice.betavariate(mean * strength, (1 - mean) * strength)
            requests.append(Request(now, prompt, output, rate))
        return requests


@dataclass
class Figures:
    """Of one run. ``rate``: tokens a second of work until the last request has come, in a
    closed loop from when half of its first requests are answered: neither a beginning in which
    all read their prompts nor a thin end counts. Latencies in
    seconds; ``token_gap``: of a request's tokens after its first."""

    rate: float
    tokens: int
    steps: int
    sequences: float
    drafting_steps: float
    first_token: float
    first_token_95: float
    token_gap: float
    request_95: float
    tokens_a_step: float
    preemptions: int


@dataclass
class Replica:
    """One engine. ``run`` it once over requests, in order of arrival. ``length``: of drafts,
    "auto" as the engine decides, 0 for none."""

    costs: Roofline
    length: int | str = "auto"
    batch: int = 64
    cached_tokens: int = 400_000
    longest: int = 8
    prefill_chunk: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        blocks, chunk = self.cached_tokens // BLOCK, self.prefill_chunk
        self.cache = PagedCache([], blocks, BLOCK, torch.float32, "cpu", share=False)
        config = SchedulerConfig(self.batch, max(2048, chunk), chunk, blocks * BLOCK)
        self.scheduler = Scheduler(config, self.cache)
        self.drafts = self.length != 0
        self.controller = self._controller()
        self.dice = random.Random(self.seed)
        self.now = 0.0
        self.served: dict[int, Request] = {}
        self._steps = self._sequences = self._drafting = self._decoded = 0
        self._gained = self._steady_tokens = self._decoding = self._finished = 0
        self._steady = 0.0

    def _controller(self) -> Controller:
        if isinstance(self.length, int):
            return FixedLength(self.length)
        lengths = tuple(range(self.longest + 1))
        passes = (1, max(2, self.batch))
        seconds = tuple(self.costs.draft_pass([Rows(1, 64)] * count) for count in passes)
        profile = DrafterCosts(lengths, lengths, CostCurve(passes, seconds), follows=True)
        known = as_start_up_measures(self.costs, self.batch, self.longest)
        return AdaptiveController(CostModel(known, {"draft": profile}))

    def run(self, requests: Iterable[Request], clients: int | None = None) -> Figures:
        """Until all are answered. ``clients`` send one request each and wait: a closed loop."""
        waiting = deque(requests)
        number = 0
        while waiting or self.scheduler.has_work:
            if clients is None and waiting and not self.scheduler.has_work:
                self.now = max(self.now, waiting[0].moment)
            while waiting and self._due(waiting[0], clients):
                self._send(number, waiting.popleft(), clients)
                number += 1
            before, gained = self.now, self._gained
            self._step()
            if waiting and self._finished > (clients or 0) // 2:
                self._steady += self.now - before
                self._steady_tokens += self._gained - gained
        return self._figures()

    def _due(self, request: Request, clients: int | None) -> bool:
        if clients is None:
            return request.moment <= self.now
        return len(self.scheduler.running) + len(self.scheduler.waiting) < clients

    def _send(self, number: int, request: Request, clients: int | None) -> None:
        params = SamplingParams(max_tokens=request.output)
        seq = SequenceState(number, [0] * request.prompt, request.prompt, params)
        request.moment = request.moment if clients is None else self.now
        self.served[number] = request
        self.scheduler.add(seq)

    def _choices(self, seqs: Sequence[SequenceState]) -> Sequence[Decision | int]:
        return self.controller.lengths(seqs) if self.drafts else [0] * len(seqs)

    def _step(self) -> None:
        plan = self.scheduler.plan(self._choices, lambda length: length)
        while self.scheduler.preempted:
            self.controller.forget(self.scheduler.preempted.pop())
        drafting, rest = self._seconds(plan)
        self.now += drafting + rest
        known = self.scheduler.by_id()
        commits = [self._commit(known[item.seq.seq_id], item) for item in plan.slices]
        if self.drafts:
            self.controller.observe(commits, drafting + rest, drafting)
        self._steps += 1
        self._sequences += len(commits)
        self._drafting += any(item.draft_length for item in plan.slices)
        for commit in commits:
            if commit.finish_reason is not None:
                self._finished += 1
                self.scheduler.remove(commit.seq_id)
                self.controller.forget(commit.seq_id)

    def _seconds(self, plan: Plan) -> tuple[float, float]:
        """Of the step: drafting, and all the rest."""
        lengths = [item.draft_length for item in plan.slices]
        work = [Rows(i.scheduled + i.draft_length, i.seq.cached) for i in plan.slices]
        drafting = sum(
            self.costs.draft_pass([Rows(1, 64) for length in lengths if length > level])
            for level in range(max(lengths, default=0))
        )
        read = [part for part in work if part.rows > MOST_DRAFTED]
        if self.drafts and read:  # the drafter reads prompts, too
            drafting += self.costs.draft_pass(read)
        return drafting, self.costs.forward(work) + self.costs.host(work)

    def _commit(self, seq: SequenceState, item: Slice) -> Commit:
        scheduled, length = item.scheduled, item.draft_length
        position = seq.cached
        if scheduled < seq.num_pending:
            seq.cached += scheduled
            self.cache.commit(seq.seq_id, seq.tokens, seq.cached)
            return Commit(seq.seq_id, (), scheduled=scheduled, position=position)
        served, kept = self.served[seq.seq_id], 0
        while kept < length and self.dice.random() < served.rate:
            kept += 1
        count = min(kept + 1, seq.remaining)
        kept = min(kept, count)
        seq.tokens += [0] * count
        seq.cached += scheduled + kept
        self.cache.commit(seq.seq_id, seq.tokens, seq.cached)
        served.first = served.first or self.now
        served.last = self.now
        self._gained += count
        self._decoded += scheduled == 1
        self._decoding += count if scheduled == 1 else 0
        return Commit(
            seq.seq_id,
            (0,) * count,
            tuple(range(kept)),
            drafted=length,
            levels=length,
            reached=min(kept + 1, length),
            scheduled=scheduled,
            position=position,
            finish_reason="length" if seq.remaining <= 0 else None,
        )

    def _figures(self) -> Figures:
        done = list(self.served.values())
        first = [one.first - one.moment for one in done]
        gaps = [(one.last - one.first) / max(1, one.output - 1) for one in done]
        return Figures(
            rate=self._steady_tokens / self._steady if self._steady else self._gained / self.now,
            tokens=sum(one.output for one in done),
            steps=self._steps,
            sequences=self._sequences / self._steps,
            drafting_steps=self._drafting / self._steps,
            first_token=sum(first) / len(first),
            first_token_95=percentile(first, 0.95) or 0.0,
            token_gap=sum(gaps) / len(gaps),
            request_95=percentile([one.last - one.moment for one in done], 0.95) or 0.0,
            tokens_a_step=self._decoding / max(1, self._decoded),
            preemptions=self.scheduler.preemptions,
        )
