"""``auto``: chooses the drafters that can pay for a target when the target is loaded.

These are lookups, heads or models on this machine that were trained for the target, and its 4-bit
copy if reading weights limits its steps. Which of them drafts in a step is up to the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.draft.datastore import Datastore
from paceline.draft.heads.block import BlockSpec, DFlash, DSpark
from paceline.draft.heads.checkpoint import SPECULATORS
from paceline.draft.heads.eagle import Eagle, Eagle2, Eagle3
from paceline.draft.heads.medusa import Medusa
from paceline.draft.heads.mtp import Mtp, mtp_weights
from paceline.draft.hybrid import Hybrid, HybridDrafter, joined
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.draft.selfspec import QuantizedDraft
from paceline.draft.spec import DraftSpec, LoadContext, PreparedDraft
from paceline.draft.suffix import Suffix
from paceline.errors import ModelLoadError, PacelineError
from paceline.files import user_path
from paceline.kernels.compile import are_kernels_here
from paceline.model.backends.base import REFERENCE
from paceline.model.loading import read_options
from paceline.model.names import MADE_FOR, has_assets, is_path, resolve
from paceline.model.precision import matrix_sizes, rounded_bytes, usual_bits
from paceline.model.target import CausalModel

# Kinds of drafters that are trained for one target, the best first.
Trained = DraftModel | Eagle | Medusa | BlockSpec
_TRAINED: tuple[type[Trained], ...] = (Eagle3, DSpark, DFlash, Eagle2, DraftModel, Medusa)
# Kinds of heads by ``speculators_model_type``.
_SPECULATORS: dict[str, type[Trained]] = {
    "eagle3": Eagle3,
    "peagle": Eagle3,
    "dflash": DFlash,
    "dspark": DSpark,
}
_MIN_BYTES = 64 << 20  # a target with fewer bytes of weights stays in a processor's caches
_MEMORY_PARTS = 2  # the 4-bit copy takes at most 1 / _MEMORY_PARTS of the free memory
# A draft model or a head with a larger share of the target's bytes costs what it saves (SmolLM2 in
# 4 bits: a head of 0.21 gave 0.93x of plain decoding, 1.05x without it).
_MAX_MODEL_SHARE, _MAX_HEAD_SHARE = 0.5, 0.2
_MIB = 1 << 20


@dataclass(frozen=True)
class Circumstances:
    """What the choice depends on. ``refused``: why the native kernels do not run the target's 4-bit
    copy ("" if they do). ``bits``: of most weights. ``mtp``: whether there is an MTP layer."""

    name: str
    refused: str
    bits: int
    weight_bytes: int
    copy_bytes: int
    free_bytes: int
    mtp: bool = False

    @classmethod
    def of(cls, target: CausalModel) -> Circumstances:
        refused, asked = target.backend_refusal or "", target.requested_backend
        if target.ranks is not None:
            refused = "its weights are shared by several processes"
        elif target.offload and target.device.type == "cpu" and asked != REFERENCE:
            # The kernels can run the 4-bit copy, not the offloaded target.
            refused = "" if are_kernels_here() else "which are not here"
        elif not target.backend.runs_quantised:
            refused = refused or "the native kernels do not run it"
        return cls(
            target.name,
            refused,
            usual_bits(target.hf),
            sum(matrix.bytes for matrix in matrix_sizes(target.hf)),
            rounded_bytes(target.hf, "int4", target.dtype.itemsize),
            target.free_memory(),
            any(mtp_weights(target.name, target.num_layers)),
        )


@dataclass(frozen=True)
class Composition:
    """The drafters ``taken`` and ``left_out``, each with the reason."""

    taken: tuple[tuple[DraftSpec, str], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def spec(self) -> DraftSpec:
        return Hybrid(*(member for member, _ in self.taken))

    def line(self) -> str:
        """One line for the user: what is loaded, and why the rest is not."""
        taken = ", ".join(f"{member} ({why})" for member, why in self.taken)
        absent = "; ".join(f"not {what}: {why}" for what, why in self.left_out)
        return f"draft auto: {taken}" + (f"; {absent}" if absent else "")

    def without(self, failed: dict[DraftSpec, str]) -> Composition:
        kept = tuple((member, why) for member, why in self.taken if member not in failed)
        gone = tuple((str(member), why) for member, why in failed.items())
        return Composition(kept, (*self.left_out, *gone))


@dataclass(frozen=True)
class Auto(DraftSpec):
    """A hybrid of all drafters that can pay for the target. ``compose`` chooses them,
    ``PreparedDraft.notes`` gives the reasons."""

    kind = "auto"
    page = "README.md"
    default_draft_length = Hybrid.default_draft_length
    learns_across_requests = True  # suffix is always among them
    examples = ("auto",)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        composed, members = _prepared(compose(Circumstances.of(loading.target)), loading)
        drafts, notes = (str(composed.spec),), (composed.line(),)
        return replace(joined(members, HybridDrafter), drafts=drafts, notes=notes)


def _prepared(
    composed: Composition, loading: LoadContext
) -> tuple[Composition, list[PreparedDraft]]:
    """Prepare the drafters that are taken; those that cannot be loaded are left out."""
    prepared: list[PreparedDraft] = []
    failed: dict[DraftSpec, str] = {}
    for member, _ in composed.taken:
        try:
            prepared.append(member.prepare(loading))
        except PacelineError as error:  # the user did not ask for this drafter
            failed[member] = str(error)
    return composed.without(failed), prepared


def compose(target: Circumstances) -> Composition:
    """Choose the drafters for a target, the cheapest first: among equals the first one drafts."""
    taken: list[tuple[DraftSpec, str]] = [(spec, "needs no model") for spec in (Suffix(), NGram())]
    if (store := _datastore(target.name)) is not None:
        taken.append((Datastore(str(store)), "beside the target"))
    if target.mtp:
        taken.append((Mtp(), "part of the checkpoint"))
    left_out: list[tuple[str, str]] = []
    self_draft, problem = QuantizedDraft(), _why_no_copy(target)
    made = made_for(target.name)
    if made is not None:
        draft, where = made
        share = _stored_bytes(draft.path) / target.weight_bytes if target.weight_bytes else 0.0
        if share > (_MAX_MODEL_SHARE if isinstance(draft, DraftModel) else _MAX_HEAD_SHARE):
            left_out.append((str(draft), f"it has {share:.0%} of the target's bytes"))
        elif not problem and target.bits > 8:
            left_out.append((str(draft), "the 4-bit copy is right more often"))
        else:
            taken.append((draft, where))
    if problem:
        left_out.append((str(self_draft), problem))
    else:
        taken.append((self_draft, f"takes {target.copy_bytes / _MIB:,.0f} MiB more"))
    return Composition(tuple(taken), tuple(left_out))


def _why_no_copy(target: Circumstances) -> str:
    """Why the target's 4-bit copy is not used; "" if it is."""
    if target.refused:
        return f"it takes the native kernels ({target.refused})"
    if target.bits < 8:
        return f"the target is held in {target.bits} bits"
    if target.weight_bytes < _MIN_BYTES:
        return f"the target's {target.weight_bytes / _MIB:,.0f} MiB fit the processor's caches"
    if target.copy_bytes * _MEMORY_PARTS > target.free_bytes:
        need, free = target.copy_bytes / _MIB, max(target.free_bytes, 0) / _MIB
        return f"it takes {need:,.0f} MiB of {free:,.0f} MiB that are free"
    return ""


# -- drafters that were trained for a target ------------------------------------------------------


def made_for(model: str) -> tuple[Trained, str] | None:
    """A drafter that was trained for ``model``, and where it is: shipped with the package, next to
    the checkpoint, or in the hub's cache. Downloads nothing."""
    for name, specs in MADE_FOR.items():
        if model in (name, _folder(name)):
            for kind, path in specs:
                if has_assets(path):
                    return next(r for r in _TRAINED if r.kind == kind)(path), "shipped for it"
    if (draft := next(_next_to_target(model), None)) is not None:
        return draft, "beside the target"
    for repository in sorted(_hub_cache().glob("models--*")):
        snapshot = _snapshot(repository)
        if snapshot is not None and (made := _trained_head(Path(snapshot), model)) is not None:
            return made, "in the hub's cache"
    return None


def _folder(model: str) -> str | None:
    """A model's folder on this machine."""
    try:
        path = resolve(model)
    except ModelLoadError:
        return None
    if is_path(path):
        return str(user_path(path))
    return _snapshot(_hub_cache() / f"models--{path.replace('/', '--')}")


def _next_to_target(model: str) -> Iterator[Trained]:
    """The drafters TARGET/eagle3 and TARGET-eagle3 (of all kinds); then those in folders inside and
    next to TARGET whose config names the target."""
    target_folder = _folder(model)
    if target_folder is None or not Path(target_folder).is_dir():
        return
    folder = Path(target_folder)
    for record in _TRAINED:
        for path in (folder / record.weights, folder.with_name(f"{folder.name}-{record.weights}")):
            if (path / "config.json").is_file():
                yield record(str(path))
    for path in (*folder.glob("*/config.json"), *folder.parent.glob("*/config.json")):
        if path.parent != folder and (made := _trained_head(path.parent, model)) is not None:
            yield made


def _datastore(model: str) -> Path | None:
    """The datastore TARGET/NAME.datastore, else TARGET.datastore."""
    if (target_folder := _folder(model)) is None:
        return None
    folder = Path(target_folder)
    beside = folder.with_name(f"{folder.name}.{Datastore.weights}")
    stores = (*sorted(folder.glob(f"*.{Datastore.weights}")), beside)
    return next((path for path in stores if path.is_file()), None)


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _snapshot(repository: Path) -> str | None:
    """The folder of a cached repository's current commit."""
    try:
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    snapshot = repository / "snapshots" / commit
    return str(snapshot) if snapshot.is_dir() else None


def _trained_head(folder: Path, model: str) -> Trained | None:
    """The head in a folder, if its config or model card says that it was made for ``model``."""
    try:
        config = read_options(folder / "config.json")
    except (ModelLoadError, OSError):
        return None
    if SPECULATORS in config:
        kind = _SPECULATORS.get(str(config[SPECULATORS]))
    else:
        description = f"{config.get('architectures')} {config.get('model_type')}".lower()
        heads = (kind for kind in _TRAINED if kind is not DraftModel)
        kind = next((kind for kind in heads if kind.weights in description), None)
    if kind is None or not any(_is_same(model, base) for base in _bases(folder, config)):
        return None
    return kind(str(folder))


def _bases(folder: Path, config: dict[str, Any]) -> list[str]:
    """The models that a head's config or card says it was made for."""
    from huggingface_hub import metadata_load

    named = [config.get("base_model_name_or_path")]
    with suppress(KeyError, TypeError):  # absent, or no nested objects
        named.append(config["speculators_config"]["verifier"]["name_or_path"])
    with suppress(Exception):  # no card, or whatever its YAML leads to
        bases = (metadata_load(folder / "README.md") or {}).get("base_model") or []
        named += [bases] if isinstance(bases, str) else bases
    return [base for base in named if isinstance(base, str)]


def _is_same(model: str, base: str) -> bool:
    """Compares hub names as a whole, and folders by their last part."""
    if is_path(model) or is_path(base):
        return base.rstrip("/").rpartition("/")[2] == model.rstrip("/").rpartition("/")[2]
    return base.lower() == model.lower()


def _stored_bytes(name: str) -> int:
    """Bytes of a draft's weights on this machine."""
    folder = _folder(name)
    files = [] if folder is None else Path(folder).glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
