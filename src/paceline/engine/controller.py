"""How long to draft: fixed, or the length that maximises expected tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Protocol

from paceline.core.batch import Commit
from paceline.core.sequence import Sequence as Request
from paceline.draft.steptime import StepTime
from paceline.draft.worth import Acceptance, Profile, best, fairest, levels_tried


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


class _Fill:
    """Nodes that a drafter proposes, as a share of the most it might: n-grams are often short."""

    def __init__(self) -> None:
        self.share = 1.0

    def record(self, nodes: int, most: int) -> None:
        self.share += 0.05 * (min(1.0, nodes / most) - self.share)


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
    drafting: list[tuple[str, float]] = field(default_factory=list)  # by drafter, as measured
    drafts: bool = False
    probe: bool = False
    gains: list[list[float]] = field(default_factory=list)


class AdaptiveLength:
    """Per sequence and drafter, from observed acceptance and the costs of steps on this machine.

    Maximises expected tokens of a step / (drafting + rest of the step), for a batch the geometric
    mean over its sequences, so that no request pays for another's speed. The length depends on the
    past only, never on the tokens being drafted, so it cannot bias the output. Costs are
    start-up's, corrected by every step (``StepTime``). A drafter must also earn the reading of
    what it has not seen of a sequence. Where nothing is drafted, half a per cent of the time goes
    into probes; what a sequence showed long ago fades until it is tried again.

    ``profiles`` by the names that requests use; those that name none have the ``default``.
    Drafters in ``bounds`` decide for themselves and get their longest length.
    """

    HOLD = 4  # steps for which drafts of the same batch keep their lengths
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
        self._profiles = dict(profiles)
        self._bounds = dict(bounds or {})
        self._default = default or next(iter(profiles))
        depth = max((profile.longest for profile in self._profiles.values()), default=0)
        self._acceptance = Acceptance(depth)
        self._fill = {name: _Fill() for name in self._profiles}
        self._reading = {name: own.row_seconds for name, own in self._profiles.items()}
        self._purse = _Purse()
        self._read: dict[int, int] = {}  # tokens of a sequence when it was last drafted for
        self._tables: dict[tuple[str, int], tuple[int, list[float]]] = {}
        self._step = 0
        self._settled = _Settled()

    # -- deciding ----------------------------------------------------------------------------

    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        self._step += 1
        ids = [seq.seq_id for seq in seqs]
        held = self._settled
        if self._step >= held.until or ids != held.ids:
            held = self._settled = self._settle(ids, seqs)
        for name, seconds in held.drafting:
            self._steps.begin(name, seconds)
        return held.wishes

    def _settle(self, ids: list[int], seqs: Sequence[Request]) -> _Settled:
        batch = len(seqs)
        names = [seq.params.drafter or self._default for seq in seqs]
        wishes = [self._bounds.get(name, 0) for name in names]
        own = [place for place, name in enumerate(names) if name in self._profiles]
        found = _Settled(ids, names, wishes, self._step + self.HOLD, drafts=any(wishes))
        if not own:
            return found
        requests, known = [seqs[place] for place in own], [names[place] for place in own]
        gains = [self._gains(seq.seq_id, name) for seq, name in zip(requests, known, strict=True)]
        chosen = self._choose(batch, requests, known, gains)
        if not any(chosen):
            found.until = self._step + self.HOLD_PLAIN
            for seq, name in zip(requests, known, strict=True):
                self._acceptance.of(seq.seq_id, name).fade(self.FADE)
            if self._purse.seconds > 0:
                found.probe = self._probe(batch, requests, known, gains, chosen)
                found.until -= found.probe * (self.HOLD_PLAIN - 1)
        for place, length in zip(own, chosen, strict=True):
            wishes[place] = length
        for name in set(known) if any(chosen) else ():
            lengths = [n for own, n in zip(known, chosen, strict=True) if own == name]
            if any(lengths):
                found.drafting.append((name, self._drafting(name, lengths)))
        found.gains, found.drafts = gains, any(wishes)
        return found

    def _choose(
        self,
        batch: int,
        seqs: Sequence[Request],
        names: Sequence[str],
        gains: Sequence[Sequence[float]],
    ) -> list[int]:
        """Lengths with the best geometric mean of the sequences' speeds; alone, with the best."""
        options, seconds = [], []
        for seq, name, gain in zip(seqs, names, gains, strict=True):
            table = self._table(name, batch)
            options.append(gain[: len(table)])
            unread = self._unread(seq)
            if unread > 8:
                # Reading is written off over the tokens to come, so over room / gain steps.
                each = unread * self._reading[name] / min(max(seq.room, 1), self.HORIZON)
                table = [
                    table[0],
                    *(t + g * each for t, g in zip(table[1:], gain[1:], strict=False)),
                ]
            seconds.append(table)
        chosen = best(options, seconds)
        if batch > 1 and any(chosen):
            chosen = fairest(options, seconds, chosen)
            chosen = self._paid(batch, names, gains, chosen)
        return chosen

    def _gains(self, seq_id: int, name: str) -> list[float]:
        return self._acceptance.of(seq_id, name).expected_tokens()

    def _table(self, name: str, batch: int) -> list[float]:
        """A sequence's part of the step, by draft length, if all drafted alike."""
        since, table = self._tables.get((name, batch), (0, []))
        if not table or self._step - since >= self.HOLD_PLAIN:
            profile, fill = self._profiles[name], self._fill[name].share
            table = [
                self._steps.step(batch, nodes * fill, profile.drafting(length, batch), name) / batch
                for length, nodes in enumerate(profile.nodes)
            ]
            if len(self._tables) > 256:
                self._tables.clear()
            self._tables[name, batch] = (self._step, table)
        return table

    def _paid(
        self,
        batch: int,
        names: Sequence[str],
        gains: Sequence[Sequence[float]],
        chosen: list[int],
    ) -> list[int]:
        """Without the deepest levels, or without drafts, where the batch is faster so.

        A pass costs nearly as much for one sequence as for all: it must pay for those that are
        still drafting then.
        """
        score = self._score(batch, names, gains, chosen)
        shorter = chosen
        while any(shorter):
            deepest = max(shorter) - 1
            shorter = [min(length, deepest) for length in shorter]
            other = self._score(batch, names, gains, shorter)
            if other > score:
                chosen, score = shorter, other
            elif any(shorter):
                shorter = [0] * len(shorter)
                other = self._score(batch, names, gains, shorter)
                chosen = shorter if other > score else chosen
        return chosen

    def _score(
        self,
        batch: int,
        names: Sequence[str],
        gains: Sequence[Sequence[float]],
        chosen: Sequence[int],
    ) -> float:
        """Logarithm of the geometric mean of the sequences' speeds, times their number."""
        tokens = sum(log(gain[length]) for gain, length in zip(gains, chosen, strict=True))
        return tokens - len(chosen) * log(self._seconds(batch, names, chosen))

    def _seconds(self, batch: int, names: Sequence[str], chosen: Sequence[int]) -> float:
        nodes = drafting = 0.0
        for name in set(names):
            lengths = [length for own, length in zip(names, chosen, strict=True) if own == name]
            profile, fill = self._profiles[name], self._fill[name].share
            each = sum(profile.nodes[length] for length in lengths) * fill / batch
            nodes += each
            drafting += self._steps.drafting(batch, each, self._drafting(name, lengths), name)
        return self._steps.rest(batch, nodes) + drafting

    def _drafting(self, name: str, lengths: Sequence[int]) -> float:
        """Seconds of a drafter's passes: each over the sequences that are not done yet."""
        profile = self._profiles[name]
        if profile.free:
            return 0.0
        passes = [profile.passes[length] for length in lengths]
        return sum(
            profile.seconds(sum(count > number for count in passes))
            for number in range(max(passes))
        )

    # -- trying what does not seem to pay ----------------------------------------------------

    def _probe(
        self,
        batch: int,
        seqs: Sequence[Request],
        names: Sequence[str],
        gains: Sequence[Sequence[float]],
        chosen: list[int],
    ) -> bool:
        """Draft for one sequence all the same if that is paid for and could change anything."""
        plain = self._steps.rest(batch, 0)
        for name in dict.fromkeys(names):
            table = self._table(name, batch)
            if max((1 + n) / table[n] for n in range(1, len(table))) * table[0] <= 1.02:
                continue  # even a draft that is always right would not pay
            places = [place for place, own in enumerate(names) if own == name]
            place = min(places, key=lambda p: self._unread(seqs[p]))
            gain, seq = gains[place], seqs[place]
            length = max(range(1, len(table)), key=lambda n: gain[n] / table[n])
            length = min(length, seq.room - 1)
            if length < 1:
                continue
            nodes = self._profiles[name].nodes[length] / batch
            cost = self._steps.rest(batch, nodes) - plain
            cost += self._steps.drafting(batch, nodes, self._drafting(name, [length]), name)
            cost += self._unread(seq) * self._reading[name]
            cost -= (gain[length] - 1) * plain / batch
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
        wished = dict(zip(held.ids, zip(held.names, held.wishes, strict=True), strict=True))
        nodes = unread = 0
        measure = True  # a step that prefills is no measure
        for commit in commits:
            measure = measure and commit.fed == 1 and bool(commit.tokens)
            if not commit.drafted:
                continue  # no proposal: nothing was tried, and nothing was paid
            nodes += commit.drafted
            name, length = wished[commit.seq_id]
            if name in self._profiles:
                unread += self._learn(commit, name, length)
        if unread > 4 * len(commits):
            measure = False
            self._learn_reading(unread, nodes / len(commits), drafting)
        self._steps.end(len(commits), nodes, seconds if measure else None, drafting)

    def _observe_plain(self, commits: Sequence[Commit], seconds: float) -> None:
        """Nothing was to be drafted. Such steps must cost next to nothing, as plain ones do."""
        self._purse.earn(seconds)
        if self._step % 4 == 0 and all(commit.fed == 1 for commit in commits):
            self._steps.end(len(commits), 0, seconds)

    def _learn(self, commit: Commit, name: str, length: int) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        profile = self._profiles[name]
        self._fill[name].record(commit.drafted, profile.nodes[length])
        reached = levels_tried(commit, length)
        self._acceptance.record(commit.seq_id, name, reached, len(commit.path))
        end = commit.position + commit.fed
        unread = end - 1 - self._read.get(commit.seq_id, 0)
        self._read[commit.seq_id] = end + len(commit.path)
        return 0 if profile.free else max(0, unread)

    def _learn_reading(self, rows: int, nodes: float, drafting: float | None) -> None:
        """A drafter has read ``rows`` tokens besides drafting."""
        if drafting is None or len(self._settled.drafting) != 1:
            return
        ((name, seconds),) = self._settled.drafting
        batch = len(self._settled.ids)
        spent = drafting - self._steps.drafting(batch, nodes, seconds, name)
        before = self._reading[name]
        self._reading[name] = before + 0.2 * (min(max(spent / rows, 0.0), 4 * before) - before)

    def forget(self, seq_id: int) -> None:
        self._acceptance.forget(seq_id)
        self._read.pop(seq_id, None)

    # -- explaining --------------------------------------------------------------------------

    def snapshot(self) -> Decision | None:
        """The last decision and why; None before the first, or if drafters decide themselves."""
        held = self._settled
        if not held.gains or len(held.gains) < len(held.ids):
            return None
        batch, drafts = len(held.ids), any(held.wishes)
        pairs = zip(held.gains, held.wishes, strict=True)
        return Decision(
            lengths=dict(zip(held.ids, held.wishes, strict=True)),
            seconds=self._seconds(batch, held.names, held.wishes),
            tokens=sum(gain[length] for gain, length in pairs),
            plain_seconds=self._steps.rest(batch, 0),
            reason="probe" if held.probe else "drafting pays" if drafts else "plain pays",
        )
