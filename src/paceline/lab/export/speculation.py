"""What is taken to another engine, in no engine's words; heads in the others' layouts. The numbers
of a head's layers say whose input it reads here, in vLLM and in llama.cpp; in SGLang and
TensorRT-LLM they name the layer whose output that is, one less."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.stages import stage
from paceline.draft.heads.block_head import layouts_of, load_block, save_block
from paceline.draft.heads.checkpoint import WEIGHTS
from paceline.draft.heads.eagle_head import EagleHead, load_eagle, save_eagle
from paceline.draft.heads.medusa_head import load_medusa, save_medusa
from paceline.draft.spec import TargetShape
from paceline.drafters import DFlash, DraftModel, DraftSpec, DSpark, Eagle, Medusa, TreeSpec
from paceline.errors import ConfigError
from paceline.files import replace_in
from paceline.model.loading import read_config
from paceline.model.names import resolve

# What it costs to look up one candidate instead of several.
FEWER_MATCHES = "fewer tokens a step where a text was continued in several ways"
LAYERS = "eagle_aux_hidden_state_layer_ids"
_NODES = 8  # of the dynamic trees of a head whose number nobody has given


class Approximation(NamedTuple):
    """Something that the engine has no equivalent of: what stands in its place, and the cost."""

    what: str
    instead: str
    cost: str

    def line(self) -> str:
        return f"{self.what}: {self.instead}; {self.cost}"


@dataclass
class Export:
    """Speculative decoding as it was chosen or measured here, and what another engine is given.

    ``length``: levels of a draft, where the adaptive length ends if ``adaptive``. ``batch``:
    sequences decoded together. ``out``: where heads are written, None for nowhere. ``version``: of
    the engine whose names were checked. ``command`` starts it, ``steps`` are command lines before
    that; ``config``: the engine's; ``files``: texts by name; ``head``: the converted one's folder.
    """

    engine: str
    version: str
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
        """Levels and nodes of a draft's tree, and its most children or branches: 1 for chains."""
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
        """Where a file of this name will lie; the bare name if nothing is written."""
        return name if self.out is None else str((self.out / name).resolve())

    def in_one_pass(self) -> bool:
        """Whether the draft is a model or an EAGLE head that drafts all tokens in one pass."""
        if isinstance(self.draft, Eagle):
            return eagle_of(self.draft, self.target).config.mask_token is not None
        if not isinstance(self.draft, DraftModel):
            return False
        config = read_config(self.draft.path, resolve(self.draft.path))
        return self.draft.mask_of(config) is not None

    @property
    def command_line(self) -> str:
        return shlex.join(self.command)

    def convert(self, name: str, command: list[str]) -> str:
        """Where the ``command`` writes what the engine loads; it becomes a step."""
        written = self.in_folder(name)
        self.steps.append(shlex.join([*command, written]))
        return written

    def approximate(self, what: str, instead: str, cost: str) -> None:
        self.approximations.append(Approximation(what, instead, cost))

    def refuse(self, instead: str) -> ConfigError:
        return ConfigError(f"{self.engine} has no equivalent of --draft {self.draft}; {instead}")

    def write_eagle(self, draft: Eagle, layout: str, outputs: bool = False) -> str:
        """The folder of a converted EAGLE head, or of the head itself if nothing is written.
        ``layout`` as of ``save_eagle``; ``outputs``: layers as of SGLang."""
        if self.engine != "vllm" and self.in_one_pass():
            raise self.refuse("of heads that draft in one pass (P-EAGLE) vLLM alone runs any")

        def save(folder: Path) -> None:
            head = eagle_of(draft, self.target)
            save_eagle(head, folder, layout, *self._verifier())
            if outputs and head.config.version == 3:
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                inputs = config.pop(LAYERS)
                config["eagle_config"] = {LAYERS: outputs_of(inputs), "use_aux_hidden_state": True}
                text = json.dumps(config, indent=2) + "\n"
                replace_in(folder, {"config.json": text.encode()}, "the config of the head")

        return self._write_head(save)

    def write_block(self, draft: DFlash | DSpark, *layouts: str) -> tuple[str, int]:
        """The folder of a block drafter in the first of ``layouts`` that can hold it, as
        ``write_eagle``, and the most tokens that it drafts. Raises ConfigError for a head that the
        engine cannot run."""
        head = load_block(draft.path, shape_of(self.target)[0], draft.kind, draft.feature_layers)
        config, fits = head.config, [n for n in layouts if n in layouts_of(head.config)]
        problems = {
            "a draft vocabulary": not fits,
            "a row at the anchor that drafts": draft.kind == "dflash" and config.from_anchor,
            "no bias by the token before": draft.kind == "dspark" and not config.markov_rank,
            "a gated bias": self.engine == "vllm" and config.markov_type == "gated",
        }
        for problem, there in problems.items():
            if there:
                what = f"the head {draft.path} has {problem}, with which {self.engine} does not run"
                raise ConfigError(
                    f"{what} {draft.kind}; train one without, or export another draft"
                )
        folder = self._write_head(lambda to: save_block(head, to, fits[0], *self._verifier()))
        return folder, config.drafts

    def write_medusa(self, draft: Medusa) -> tuple[str, int]:
        """The folder that vLLM reads Medusa heads from, as ``write_eagle``, and their number.
        Raises ConfigError for heads that share the target's vocabulary layer."""
        heads = load_medusa(draft.path, shape_of(self.target)[0])
        if heads.config.shared_head:
            what = f"the Medusa heads {draft.path} share the target's vocabulary layer"
            cure = "train heads with layers of their own"
            raise ConfigError(f"{what}, which vLLM wants in their own file; {cure}")
        # The public layout, in the file that vLLM looks for.
        folder = self._write_head(lambda to: save_medusa(heads, to, file=WEIGHTS))
        return folder, heads.config.heads

    def _verifier(self) -> tuple[str, tuple[str, ...]]:
        """The target's folder and classes, for layouts that name it."""
        return str(Path(resolve(self.target))), shape_of(self.target)[1]

    def _write_head(self, save: Callable[[Path], object]) -> str:
        """The folder that ``save`` writes the head to; the draft's if nothing is written."""
        if self.out is None:
            return self.draft_path
        folder = self.out / "head"
        with stage(f"writing {folder}"):
            save(folder)
        self.head = self.in_folder("head")
        return self.head

    def record(self) -> dict[str, Any]:
        names = ("engine", "command", "steps", "config", "files", "head")
        approximations = [approximation._asdict() for approximation in self.approximations]
        more = {"approximations": approximations, "checked_against": self.version}
        return {name: getattr(self, name) for name in names} | more


def _absolute(name: str) -> str:
    """The absolute folder of a built-in or local model; a hub name as it is."""
    path = resolve(name)
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.exists() else path


def note_usual(export: Export, trees: bool, rules: tuple[str, ...], parallel: bool) -> None:
    """What most engines lack: adaptive length, trees, other rules, drafts of one pass."""
    _, nodes, width = export.tree()
    if export.adaptive:
        cost = "it also drafts where nothing is accepted: measure at your load"
        export.approximate("adaptive draft length", f"{export.length} tokens at every step", cost)
    if width > 1 and not trees:
        cost = "fewer tokens a step than was measured with trees; bench a chain here first"
        export.approximate(f"trees of {nodes} nodes", f"chains of {export.length}", cost)
    if not parallel and export.in_one_pass():
        cost = "a pass of the draft model for each token"
        export.approximate("a draft of one pass", "token by token", cost)
    if export.rule not in ("auto", *rules):
        cost = "at most as many tokens a step when sampling; greedy text is the same"
        if export.rule == "coupled":
            cost = "sampled text with a seed depends on drafts and batch; greedy is the same"
        export.approximate(f"rule {export.rule!r}", f"rule {rules[0]!r}", cost)
    if isinstance(export.draft, DraftModel) and export.draft.vocab == "string":
        what = "a draft with another tokenizer, by text"
        export.approximate(what, "token ids", "the engine may refuse it")


def outputs_of(inputs: Sequence[int]) -> list[int]:
    """The layers whose outputs are the inputs of these. Raises ConfigError for layer 0, whose
    input is the embedding and no layer's output."""
    if min(inputs) < 1:
        raise ConfigError(
            "the head reads the target's embedding (layer 0), which engines that count outputs "
            "cannot name; train one that reads layers from 1 on"
        )
    return [number - 1 for number in inputs]


def shape_of(target: str) -> tuple[TargetShape, tuple[str, ...]]:
    """Sizes of a model that need not be loaded, and its classes. Raises ModelLoadError."""
    whole = read_config(target, resolve(target))
    config = whole.get_text_config(decoder=True)
    sizes = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers)
    return sizes, tuple(whole.architectures or ("LlamaForCausalLM",))


def eagle_of(spec: Eagle, target: str) -> EagleHead:
    """The head of a spec, reading the layers that the spec or its config says."""
    sizes, _ = shape_of(target)
    return load_eagle(spec.path, sizes, spec.version, spec.feature_layers, target_head=lambda x: x)
