"""How long to draft: fixed, or the length that maximises expected tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.core.batch import Commit
from paceline.core.sequence import Sequence as Request
from paceline.draft.prices import Candidate, Prices, choose
from paceline.draft.steptime import StepTime
from paceline.draft.worth import Acceptance, Profile, levels_tried


class Controller(Protocol):
    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        """Draft length (tree levels) wished for each sequence; 0 is plain decoding."""
        ...

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        """See a step's outcome, its wall time, and the part of it that drafting took (if known)."""
        ...

    def forget(self, seq_id: int) -> None: ...


class FixedLength:
    """The same draft length for all sequences, always."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        return [self._length] * len(seqs)

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass


@dataclass(frozen=True)
class Decision:
    """What the controller decided for a step, and what it expects of it.

    ``lengths`` by sequence id. ``seconds`` and ``tokens`` of the step, all sequences together;
    ``plain_seconds`` of a step without drafts, which yields a token a sequence. ``reason`` is
    "drafting pays", "plain pays" or "probe" (drafting although it does not seem to pay, to see).
    """

    lengths: dict[int, int]
    seconds: float
    tokens: float
    plain_seconds: float
    reason: str

    def __str__(self) -> str:
        batch = len(self.lengths)
        mean = sum(self.lengths.values()) / max(1, batch)
        return (
            f"{self.reason}: {batch} sequences, draft length {mean:.1f}, "
            f"{self.tokens / self.seconds:.0f} tokens/s expected, "
            f"{batch / self.plain_seconds:.0f} without drafts"
        )


class _Purse:
    """Seconds that may be spent on trying drafts that do not seem to pay: a share of all."""

    SHARE = 0.005

    def __init__(self) -> None:
        self.seconds = 0.0

    def earn(self, seconds: float) -> None:
        """A step without drafts took so long. No more than a few probes' worth is kept."""
        self.seconds = min(self.seconds + self.SHARE * seconds, 2 * seconds)


@dataclass
class _Settled:
    """A decision that holds for some steps, as long as the batch stays the same."""

    ids: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    wishes: list[int] = field(default_factory=list)
    until: int = 0  # the step from which it is made anew
    hold: int = 1  # steps from when it was made
    drafts: bool = False
    drafting: list[tuple[str, float]] = field(default_factory=list)  # by drafter, as measured
    probe: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    given: bool = False  # some requests have a length of their own: such steps are no measure


class _Seen(NamedTuple):
    """What a step that drafted came to."""

    held: _Settled
    commits: Sequence[Commit]
    seconds: float
    drafting: float | None


class AdaptiveLength:
    """Per sequence and drafter, from observed acceptance and the costs of steps on this machine.

    Maximises expected tokens of a step / (drafting + rest of the step), for a batch the geometric
    mean over its sequences, so that no request pays for another's speed. The length depends on the
    past only, never on the tokens being drafted, so it cannot bias the output. Costs are
    start-up's, corrected by every step (``StepTime``). A drafter must also earn the reading of
    what it has not seen of a sequence. Where nothing is drafted, half a per cent of the time goes
    into probes; what a sequence showed long ago fades until it is tried again.

    ``profiles`` by the names that requests use; those that name none have the ``default``.
    Drafters in ``bounds`` decide for themselves and get their longest length. A request's own
    ``draft_length`` stands.
    """

    HOLD = 4  # steps at most for which drafts of the same batch keep their lengths
    HOLD_PLAIN = 16  # where nothing is drafted, so that nothing is learnt
    FADE = 0.85  # weight kept of what a sequence showed, every HOLD_PLAIN steps without a draft
    HORIZON = 256  # tokens at most over which reading a prompt is written off

    def __init__(
        self,
        steps: StepTime,
        profiles: Mapping[str, Profile],
        bounds: Mapping[str, int] | None = None,
        default: str = "",
    ) -> None:
        self._steps = steps
        self._prices = Prices(steps, profiles)
        self._profiles = self._prices.profiles
        self._bounds = dict(bounds or {})
        self._default = default or next(iter(profiles))
        depth = max((profile.longest for profile in self._profiles.values()), default=0)
        self._acceptance = Acceptance(depth)
        self._purse = _Purse()
        self._read: dict[int, int] = {}  # tokens of a sequence when it was last drafted for
        self._step = 0
        self._settled = _Settled()
        self._seen: list[_Seen] = []

    # -- deciding ----------------------------------------------------------------------------

    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        self._step += 1
        self._prices.tick()
        ids = [seq.seq_id for seq in seqs]
        held = self._settled
        if self._step >= held.until or ids != held.ids:
            self._learn_all()
            held = self._settled = self._settle(ids, seqs)
        return held.wishes

    def _settle(self, ids: list[int], seqs: Sequence[Request]) -> _Settled:
        batch = len(seqs)
        names = [seq.params.drafter or self._default for seq in seqs]
        given = [seq.params.draft_length for seq in seqs]
        wishes = [
            self._bounds.get(name, 0) if length is None else length
            for name, length in zip(names, given, strict=True)
        ]
        own = [
            place
            for place, name in enumerate(names)
            if name in self._profiles and given[place] is None
        ]
        # A new batch, or new drafts, are looked at again soon: 1, 2, 4 steps later.
        before = self._settled
        same = before.drafts and ids == before.ids
        hold = min(2 * before.hold, self.HOLD) if same else 1
        found = _Settled(ids, names, wishes, self._step + hold, hold, any(wishes))
        found.given = any(length is not None for length in given)
        if not own:
            return found
        requests, known = [seqs[place] for place in own], [names[place] for place in own]
        candidates = [self._candidate(s, name) for s, name in zip(requests, known, strict=True)]
        chosen = choose(self._prices, batch, candidates)
        if self._steps.wants_plain:
            chosen, found.until = [0] * len(chosen), self._step + 1
        elif not any(chosen):
            found.until = self._step + self.HOLD_PLAIN
            for seq, name in zip(requests, known, strict=True):
                self._acceptance.of(seq.seq_id, name).fade(self.FADE)
            if self._purse.seconds > 0:
                found.probe = self._probe(batch, requests, candidates, chosen)
                found.until -= found.probe * (self.HOLD_PLAIN - 1)
        for place, length in zip(own, chosen, strict=True):
            wishes[place] = length
        for name in set(known) if any(chosen) else ():
            lengths = [n for own, n in zip(known, chosen, strict=True) if own == name]
            if any(lengths):
                found.drafting.append((name, self._prices.passes(name, lengths)))
        found.candidates, found.drafts = candidates, any(wishes)
        return found

    def _candidate(self, seq: Request, name: str) -> Candidate:
        gains = self._acceptance.of(seq.seq_id, name).expected_tokens()
        if seq.room < len(gains):  # what comes after the last token is no gain
            gains = [min(gain, max(seq.room, 1)) for gain in gains]
        unread = self._unread(seq)
        if unread <= 8 or self._profiles[name].free:
            return Candidate(name, gains)
        room = min(max(seq.room, 1), self.HORIZON)
        return Candidate(name, gains, unread * self._prices.reading(name) / room)

    # -- trying what does not seem to pay ----------------------------------------------------

    def _probe(
        self,
        batch: int,
        seqs: Sequence[Request],
        candidates: Sequence[Candidate],
        chosen: list[int],
    ) -> bool:
        """Draft for one sequence all the same if that is paid for and could change anything."""
        prices = self._prices
        plain = prices.steps.rest(batch, 0)
        for name in dict.fromkeys(own.name for own in candidates):
            table = prices.table(name, batch)
            if max((1 + n) / table[n] for n in range(1, len(table))) * table[0] <= 1.02:
                continue  # even a draft that is always right would not pay
            places = [place for place, own in enumerate(candidates) if own.name == name]
            place = min(places, key=lambda p: self._unread(seqs[p]))
            gains, seq = candidates[place].gains, seqs[place]
            length = max(range(1, len(table)), key=lambda n: gains[n] / table[n])
            length = min(length, seq.room - 1)
            if length < 1:
                continue
            lengths = [length if p == place else 0 for p in range(len(candidates))]
            cost = prices.seconds(batch, [own.name for own in candidates], lengths) - plain
            if not self._profiles[name].free:
                cost += self._unread(seq) * prices.reading(name)
            cost -= (gains[length] - 1) * plain / batch
            if cost <= self._purse.seconds:
                self._purse.seconds -= max(0.0, cost)
                chosen[place] = length
                return True
        return False

    def _unread(self, seq: Request) -> int:
        """Tokens that a drafter would have to read first, beyond the newest."""
        return len(seq.tokens) - self._read.get(seq.seq_id, 0) - 1

    # -- learning ----------------------------------------------------------------------------

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        held = self._settled
        if not held.drafts:
            self._observe_plain(commits, seconds)
            return
        self._seen.append(_Seen(held, commits, seconds, drafting))
        if len(held.candidates) < len(held.ids):  # who decides by itself learns with every step
            self._learn_all()

    def _learn_all(self) -> None:
        """Learn from the steps since the last decision, all at once.

        Between two forwards this code is not in the processor's caches any more: 48 microseconds
        a step measured one by one, 9 where the step before was looked at just before.
        """
        seen, self._seen = self._seen, []
        for step in seen:
            self._learn_step(step)

    def _learn_step(self, step: _Seen) -> None:
        held, commits = step.held, step.commits
        wished = dict(zip(held.ids, zip(held.names, held.wishes, strict=True), strict=True))
        nodes = unread = 0
        measure, even = not held.given, True  # a step that prefills is no measure, either
        for commit in commits:
            measure = measure and commit.fed == 1 and bool(commit.tokens)
            even = even and commit.drafted == commits[0].drafted
            if not commit.drafted:
                continue  # no proposal: nothing was tried, and nothing was paid
            nodes += commit.drafted
            name, length = wished[commit.seq_id]
            if name in self._profiles:
                unread += self._learn(commit, name, length)
        if unread > 4 * len(commits):
            measure = False
            self._learn_reading(step, unread, nodes / len(commits))
        for name, passes in held.drafting:
            self._steps.begin(name, passes)
        seconds = step.seconds if measure else None
        self._steps.end(len(commits), nodes, seconds, step.drafting, even)

    def _observe_plain(self, commits: Sequence[Commit], seconds: float) -> None:
        """Nothing was to be drafted. Such steps must cost next to nothing, as plain ones do."""
        self._purse.earn(seconds)
        due = self._step % 4 == 0 or self._steps.wants_plain
        if due and all(commit.fed == 1 for commit in commits):
            self._steps.end(len(commits), 0, seconds)

    def _learn(self, commit: Commit, name: str, length: int) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        profile = self._profiles[name]
        length = min(length, profile.longest)
        self._prices.fill[name].record(commit.drafted, profile.nodes[length])
        reached = levels_tried(commit, length)
        self._acceptance.record(commit.seq_id, name, reached, len(commit.path))
        end = commit.position + commit.fed
        unread = end - 1 - self._read.get(commit.seq_id, 0)
        self._read[commit.seq_id] = end + len(commit.path)
        return 0 if profile.free else max(0, unread)

    def _learn_reading(self, step: _Seen, rows: int, nodes: float) -> None:
        """A drafter has read ``rows`` tokens besides drafting."""
        if step.drafting is not None and len(step.held.drafting) == 1:
            ((name, passes),) = step.held.drafting
            passes = self._steps.drafting(len(step.held.ids), nodes, passes, name)
            self._prices.learn_reading(name, step.drafting - passes, rows)

    def forget(self, seq_id: int) -> None:
        self._learn_all()
        self._acceptance.forget(seq_id)
        self._read.pop(seq_id, None)

    # -- explaining --------------------------------------------------------------------------

    def snapshot(self) -> Decision | None:
        """The last decision and why; None before the first, or if drafters decide themselves."""
        held = self._settled
        if not held.candidates or len(held.candidates) < len(held.ids):
            return None
        batch = len(held.ids)
        pairs = zip(held.candidates, held.wishes, strict=True)
        pays = "drafting pays" if held.drafts else "plain pays"
        return Decision(
            lengths=dict(zip(held.ids, held.wishes, strict=True)),
            seconds=self._prices.seconds(batch, held.names, held.wishes),
            tokens=sum(own.gains[length] for own, length in pairs),
            plain_seconds=self._steps.rest(batch, 0),
            reason="probe" if held.probe else pays,
        )
