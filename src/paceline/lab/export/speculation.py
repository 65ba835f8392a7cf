"""What is to be taken to another engine, and what comes out for it, in no engine's words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.draft.heads.eagle import Eagle
from paceline.draft.heads.medusa import Medusa
from paceline.draft.model import DraftModel
from paceline.draft.spec import DraftSpec, TreeSpec
from paceline.draft.trees.shape import Shape
from paceline.errors import ConfigError
from paceline.model.names import resolve

# What it costs to look up one candidate instead of several.
FEWER_MATCHES = "fewer tokens a step where a text was continued in several ways"


@dataclass(frozen=True)
class Approximation:
    """Something that the engine has no equivalent of: what stands in its place, and the cost."""

    what: str
    instead: str
    cost: str

    def line(self) -> str:
        return f"{self.what}: {self.instead}; {self.cost}"


@dataclass(frozen=True)
class ExportedDraft:
    """Speculative decoding as it was chosen or measured here.

    ``target`` and ``draft`` as their user named them; ``length`` levels of a draft, ``adaptive``
    if that is where the adaptive length ends; ``nodes`` and ``width`` of its trees, 0 for chains.
    ``batch``: sequences decoded together. ``out`` is where heads are written, None for nowhere.
    """

    target: str
    draft: DraftSpec
    length: int
    adaptive: bool
    rule: str
    batch: int
    out: Path | None

    @property
    def path(self) -> str:
        """The target as another program finds it."""
        return place_of(self.target)

    @property
    def draft_path(self) -> str:
        return place_of(self.draft.argument() or "")

    @property
    def tree(self) -> Tree:
        return Tree.of(self.draft, self.length)

    def in_folder(self, name: str) -> str:
        """Where a file of this name will lie; the bare name if nothing is written."""
        return name if self.out is None else str((self.out / name).resolve())

    def refuse(self, engine: str, instead: str) -> ConfigError:
        return ConfigError(f"{engine} has no equivalent of --draft {self.draft}; {instead}")


@dataclass(frozen=True)
class Tree:
    """``nodes`` drafted tokens on ``levels`` levels, at most ``width`` children or branches."""

    levels: int
    nodes: int
    width: int

    @property
    def branches(self) -> bool:
        return self.width > 1

    @classmethod
    def of(cls, draft: DraftSpec, length: int) -> Tree:
        """The trees of a draft; those of a kind without a say in it are chains."""
        if isinstance(draft, TreeSpec) and draft.branching:
            shape = Shape.branching(draft.branching[:length])
            return cls(shape.depth, len(shape), max(draft.branching))
        nodes = draft.nodes if isinstance(draft, TreeSpec) else 0
        if isinstance(draft, Eagle) and draft.dynamic and nodes is None:
            nodes = 8  # what such heads draw where nothing is said
        if isinstance(draft, TreeSpec) and nodes:
            return cls(length, nodes, draft.width)
        if isinstance(draft, Medusa) and draft.tree != "chain":
            return cls(length, draft.nodes, 2)
        return cls(length, length, 1)


def place_of(name: str) -> str:
    """The absolute folder of a built-in or local model; a hub name as it is."""
    path = resolve(name)
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.exists() else path


@dataclass(frozen=True)
class Exported:
    """What another engine is given.

    ``command`` starts it; ``steps`` come before, each a command line. ``config`` is its own
    configuration, and ``files`` are texts by name. ``head``: the folder of a converted head.
    """

    engine: str
    version: str
    command: tuple[str, ...]
    config: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    approximations: tuple[Approximation, ...] = ()
    head: str | None = None

    @property
    def command_line(self) -> str:
        return shlex.join(self.command)

    def record(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "checked_against": self.version,
            "command": list(self.command),
            "steps": list(self.steps),
            "config": dict(self.config),
            "files": dict(self.files),
            "head": self.head,
            "approximations": [vars(approximation) for approximation in self.approximations],
        }


def usual_approximations(
    it: ExportedDraft, trees: bool = False, rules: tuple[str, ...] = ("token",)
) -> list[Approximation]:
    """What most engines lack: the adaptive length, trees, and rules but the usual one."""
    problems = []
    if it.adaptive:
        problems.append(
            Approximation(
                "adaptive draft length",
                f"{it.length} tokens at every step",
                "it also drafts where nothing is accepted: measure at your load",
            )
        )
    if it.tree.branches and not trees:
        problems.append(
            Approximation(
                f"trees of {it.tree.nodes} nodes",
                f"chains of {it.length}",
                "fewer tokens a step than was measured with trees; bench a chain here first",
            )
        )
    if it.rule not in ("auto", *rules):
        cost = "at most as many tokens a step when sampling; greedy text is the same"
        if it.rule == "coupled":
            cost = "sampled text with a seed depends on drafts and batch; greedy is the same"
        problems.append(Approximation(f"rule {it.rule!r}", f"rule {rules[0]!r}", cost))
    if isinstance(it.draft, DraftModel) and it.draft.vocab == "string":
        problems.append(
            Approximation(
                "a draft with another tokenizer, by text", "token ids", "the engine may refuse it"
            )
        )
    return problems
