"""Speculative decoding as it is exported to another engine, with heads converted to its layout.

Feature layers are numbered by the layers whose inputs a head reads here, in vLLM and in llama.cpp.
SGLang and TensorRT-LLM number them by the layers whose outputs these are, which is one less."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.stages import stage
from paceline.draft.heads.block_head import layouts_of, load_block, save_block
from paceline.draft.heads.eagle_head import EagleHead, load_eagle, save_eagle
from paceline.draft.heads.medusa_head import load_medusa, save_medusa
from paceline.draft.spec import TargetShape
from paceline.drafters import DFlash, DraftModel, DraftSpec, DSpark, Eagle, Medusa, TreeSpec
from paceline.errors import ConfigError
from paceline.files import atomic_folder, user_path, write_files
from paceline.model.loading import load_tokenizer, read_config
from paceline.model.names import resolve
from paceline.model.tokenizer import differences

# The cost of looking up one candidate instead of several.
FEWER_MATCHES = "fewer tokens per step where a text was continued in several ways"
LAYERS = "eagle_aux_hidden_state_layer_ids"
_NODES = 8  # of a dynamic tree whose number of nodes is not given


@dataclass(frozen=True)
class Dialect:
    """An engine: the version whose options were checked, and which of our features it has.
    ``vocabularies``: drafts with another vocabulary than the target's."""

    version: str
    fill: Callable[[Export], None]
    trees: bool = False
    vocabularies: bool = False
    parallel: bool = False
    rules: tuple[str, ...] = ("token",)


class Approximation(NamedTuple):
    """A feature without an equivalent in the engine: what is used instead, and the cost."""

    what: str
    instead: str
    cost: str

    def line(self) -> str:
        return f"{self.what}: {self.instead}; {self.cost}"


@dataclass
class Export:
    """Speculative decoding as chosen or measured here, and its equivalent for another engine.

    ``length``: draft depth; the maximum if the length is ``adaptive``. ``batch``: sequences decoded
    together. ``out``: folder for converted heads, None to write none. ``command`` starts the engine
    after the command lines ``steps``; ``config``: its configuration; ``files``: texts by name;
    ``head``: folder of a converted one."""

    engine: str
    dialect: Dialect
    target: str
    draft: DraftSpec
    length: int
    adaptive: bool
    rule: str
    batch: int
    out: Path | None
    command: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    head: str | None = None
    approximations: list[Approximation] = field(default_factory=list)

    @property
    def target_path(self) -> str:
        return _absolute(self.target)

    @property
    def draft_path(self) -> str:
        return _absolute(self.draft.argument() or "")

    def tree(self) -> tuple[int, int, int]:
        """Depth, nodes and width of the draft tree; a chain has width 1."""
        draft, length = self.draft, self.length
        if isinstance(draft, Medusa) and draft.tree != "chain":
            return length, draft.nodes, 2
        if isinstance(draft, TreeSpec):
            policy = draft.policy(_NODES if isinstance(draft, Eagle) and draft.dynamic else 0)
            if policy.nodes:
                return length, policy.nodes, policy.width
            shape = policy.shape.cut(length)
            return shape.depth, len(shape), max(shape.ranks) + 1
        return length, length, 1

    def in_folder(self, name: str) -> str:
        """The path at which a file is written; its bare name if nothing is written."""
        return name if self.out is None else str((self.out / name).resolve())

    def in_one_pass(self) -> bool:
        """Whether the draft is a model or an EAGLE head that drafts all tokens in one pass."""
        if isinstance(self.draft, Eagle):
            return eagle_of(self.draft, self.target).config.mask_token is not None
        if not isinstance(self.draft, DraftModel):
            return False
        config = read_config(self.draft.path, resolve(self.draft.path))
        return self.draft.mask_of(config) is not None

    def other_vocabulary(self) -> str:
        """In what a draft model's vocabulary differs from the target's; "" if in nothing."""
        if not isinstance(self.draft, DraftModel):
            return ""
        return differences(load_tokenizer(self.target), load_tokenizer(self.draft.path))

    @property
    def command_line(self) -> str:
        return shlex.join(self.command)

    def convert(self, name: str, command: list[str]) -> str:
        """Add a step that converts a model; ``command`` gets the returned output path appended."""
        written = self.in_folder(name)
        self.steps.append(shlex.join([*command, written]))
        return written

    def approximate(self, what: str, instead: str, cost: str) -> None:
        self.approximations.append(Approximation(what, instead, cost))

    def fill(self) -> None:
        """Raises ConfigError if the engine cannot run the draft."""
        if not self.dialect.vocabularies and (differing := self.other_vocabulary()):
            family = "export a draft of the target's family"
            raise self.refuse(f"it differs from the target in {differing}; {family}")
        self.dialect.fill(self)

    def refuse(self, instead: str) -> ConfigError:
        return ConfigError(f"{self.engine} has no equivalent of --draft {self.draft}; {instead}")

    def write_eagle(self, draft: Eagle, layout: str, outputs: bool = False) -> str:
        """The folder of the converted EAGLE head, or of the original if nothing is written.
        ``layout``: see ``save_eagle``; ``outputs``: number feature layers as SGLang does."""
        if self.engine != "vllm" and self.in_one_pass():
            raise self.refuse("only vLLM runs heads that draft in one pass (P-EAGLE)")

        def save(folder: Path) -> None:
            head = eagle_of(draft, self.target)
            renumbered = outputs and head.config.version == 3
            layers = outputs_of(head.config.feature_layers) if renumbered else []
            save_eagle(head, folder, layout, *self._verifier())
            if renumbered:
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                del config[LAYERS]
                config["eagle_config"] = {LAYERS: layers, "use_aux_hidden_state": True}
                text = json.dumps(config, indent=2) + "\n"
                write_files({folder / "config.json": text.encode()}, "the config of the head")

        return self._write_head(save)

    def write_block(self, draft: DFlash | DSpark, *layouts: str) -> str:
        """The folder (see ``write_eagle``) of a block drafter in the first of ``layouts`` that can
        represent it; a draft is at most a block. Raises ConfigError if the engine cannot run it."""
        head = load_block(draft.path, shape_of(self.target)[0], draft.kind, draft.feature_layers)
        config, fits = head.config, [n for n in layouts if n in layouts_of(head.config)]
        problems = {
            "a draft vocabulary": not fits,
            "an anchor row that drafts": draft.kind == "dflash" and config.from_anchor,
            "no bias for the previous token": draft.kind == "dspark" and not config.markov_rank,
            "a gated bias": self.engine == "vllm" and config.markov_type == "gated",
        }
        for problem, present in problems.items():
            if present:
                raise ConfigError(
                    f"{self.engine} cannot run the {draft.kind} head {draft.path}, which has "
                    f"{problem}; train a head that fits, or export another draft"
                )
        self.length = min(self.length, config.drafts)
        return self._write_head(lambda to: save_block(head, to, fits[0], *self._verifier()))

    def write_medusa(self, draft: Medusa) -> str:
        """The folder of Medusa heads in vLLM's layout, see ``write_eagle``. A draft is at most as
        long as there are heads. Raises ConfigError for heads that share the target's layer."""
        heads = load_medusa(draft.path, shape_of(self.target)[0])
        if heads.config.shared_head:
            raise ConfigError(
                f"the Medusa heads {draft.path} share the target's output layer, but vLLM needs "
                "one in their file; train them with --own-heads"
            )
        self.length = min(self.length, heads.config.heads)
        return self._write_head(lambda to: save_medusa(heads, to, layout="vllm"))

    def _verifier(self) -> tuple[str, tuple[str, ...]]:
        """The target's folder and model classes, for layouts that record them."""
        return str(Path(resolve(self.target))), shape_of(self.target)[1]

    def _write_head(self, save: Callable[[Path], object]) -> str:
        """The folder to which ``save`` writes the head; the draft's if nothing is written."""
        if self.out is None:
            return self.draft_path
        folder = self.out / "head"
        with stage(f"writing {folder}"), atomic_folder(folder, "the head") as new:
            save(new)
        self.head = self.in_folder("head")
        return self.head

    def record(self) -> dict[str, Any]:
        names = ("engine", "command", "steps", "config", "files", "head")
        approximations = [approximation._asdict() for approximation in self.approximations]
        more = {"approximations": approximations, "checked_against": self.dialect.version}
        return {name: getattr(self, name) for name in names} | more


def _absolute(name: str) -> str:
    """The absolute folder of a built-in or local model; hub names are returned unchanged."""
    path = resolve(name)
    folder = user_path(path)
    return str(folder.resolve()) if folder.exists() else path


def note_missing_features(export: Export) -> None:
    """Note features that engines lack: adaptive length, trees, other rules, one-pass drafts."""
    (_, nodes, width), dialect = export.tree(), export.dialect
    if export.adaptive:
        cost = "it also drafts where nothing is accepted, so measure it at your load"
        export.approximate("adaptive draft length", f"{export.length} tokens in every step", cost)
    if width > 1 and not dialect.trees:
        cost = "fewer tokens per step than measured with trees; first measure a chain here"
        export.approximate(f"trees of {nodes} nodes", f"chains of {export.length}", cost)
    if not dialect.parallel and export.in_one_pass():
        cost = "a forward of the draft model for each token"
        export.approximate("a draft in one pass", "token by token", cost)
    if export.rule not in ("auto", *dialect.rules):
        cost = "at most as many tokens per step when sampling; greedy text is the same"
        if export.rule == "coupled":
            cost = "seeded text depends on drafts and batch; greedy text is the same"
        export.approximate(f"rule {export.rule!r}", f"rule {dialect.rules[0]!r}", cost)


def outputs_of(inputs: Sequence[int]) -> list[int]:
    """The layers whose outputs these read. Raises ConfigError for 0, which reads the embedding."""
    if min(inputs) < 1:
        raise ConfigError(
            "the head reads the target's embedding (layer 0), which engines that number layers by "
            "their outputs cannot name; train one that reads only layers from 1 on"
        )
    return [number - 1 for number in inputs]


def shape_of(target: str) -> tuple[TargetShape, tuple[str, ...]]:
    """Sizes and classes of a model, from its config. Raises ModelLoadError."""
    whole = read_config(target, resolve(target))
    config = whole.get_text_config(decoder=True)
    sizes = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers)
    return sizes, tuple(whole.architectures or ("LlamaForCausalLM",))


def eagle_of(spec: Eagle, target: str) -> EagleHead:
    """The head of a spec, with the feature layers of the spec or of the head's config."""
    sizes, _ = shape_of(target)
    return load_eagle(spec.path, sizes, spec.version, spec.feature_layers, target_head=lambda x: x)
