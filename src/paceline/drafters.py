"""The registry of drafters, and what a drafter of your own imports.

A draft is given as a spec (``ngram:min=2``), as a record (``NGram(min=2)``) or as a drafter object.
Each kind of drafter has a record, a frozen dataclass of its options, in the drafter's file
(draft/spec.py). Other packages add kinds by the entry-point group ``paceline.drafters``, whose
entries name a record. A drafter is prepared before the cache is sized, because its weights and its
own cache take memory, and built afterwards.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from paceline.core.batch import Commit as Commit
from paceline.core.batch import ModelOutput as ModelOutput
from paceline.core.batch import Plan as Plan
from paceline.core.batch import Slice as Slice
from paceline.core.keywords import did_you_mean
from paceline.core.tree import Draw as Draw
from paceline.core.tree import TokenTree as TokenTree
from paceline.draft.auto import Auto as Auto
from paceline.draft.base import Drafter as Drafter
from paceline.draft.base import LookupDrafter as LookupDrafter
from paceline.draft.datastore import Datastore as Datastore
from paceline.draft.foreign import foreign_of
from paceline.draft.heads.block import DFlash as DFlash
from paceline.draft.heads.block import DSpark as DSpark
from paceline.draft.heads.eagle import Eagle as Eagle
from paceline.draft.heads.eagle import Eagle2 as Eagle2
from paceline.draft.heads.eagle import Eagle3 as Eagle3
from paceline.draft.heads.medusa import Medusa as Medusa
from paceline.draft.heads.mtp import Mtp as Mtp
from paceline.draft.hybrid import Hybrid as Hybrid
from paceline.draft.hybrid import Router, joined
from paceline.draft.lookahead import Lookahead as Lookahead
from paceline.draft.model import DraftModel as DraftModel
from paceline.draft.model import DraftTree as DraftTree
from paceline.draft.ngram import NGram as NGram
from paceline.draft.recycling import Recycling as Recycling
from paceline.draft.selfspec import EarlyExit as EarlyExit
from paceline.draft.selfspec import LayerSkip as LayerSkip
from paceline.draft.selfspec import QuantizedDraft as QuantizedDraft
from paceline.draft.spec import DraftContext as DraftContext
from paceline.draft.spec import DraftSpec as DraftSpec
from paceline.draft.spec import LoadContext as LoadContext
from paceline.draft.spec import NoDraft as NoDraft
from paceline.draft.spec import PreparedDraft as PreparedDraft
from paceline.draft.spec import TreeSpec as TreeSpec
from paceline.draft.spec import option as option
from paceline.draft.suffix import Suffix as Suffix
from paceline.errors import ConfigError
from paceline.model.names import is_path

RECORDS: tuple[type[DraftSpec], ...] = (
    *(NoDraft, NGram, Suffix, Datastore, Recycling, Lookahead, EarlyExit, LayerSkip),
    *(QuantizedDraft, DraftModel, DraftTree, Medusa, Mtp, Eagle, Eagle2, Eagle3, DFlash),
    *(DSpark, Hybrid, Auto),
)
GROUP = "paceline.drafters"
BLOCK_SIZE = 16
DraftLike = str | DraftSpec | Drafter


class Registry(UserDict[str, type[DraftSpec]]):
    """Records by kind. Those of other packages load on demand and replace no built-in kind."""

    def __init__(self, built_in: Iterable[type[DraftSpec]], others: Iterable[EntryPoint]) -> None:
        super().__init__({record.kind: record for record in built_in})
        self._others = {entry.name: entry for entry in others if entry.name not in self.data}
        self.data |= self._others  # type: ignore[arg-type]

    def __getitem__(self, kind: str) -> type[DraftSpec]:
        """Raises ConfigError if the record of another package cannot be imported."""
        if kind in self._others:
            self.data[kind] = _loaded(self._others.pop(kind))
        return self.data[kind]


def _loaded(entry: EntryPoint) -> type[DraftSpec]:
    where = f"drafter {entry.name!r} of {entry.dist.name if entry.dist else entry.value}"
    try:
        record = entry.load()
    except Exception as error:  # any error of the other package
        raise ConfigError(f"{where} cannot be loaded ({error}); repair or remove it") from error
    if not (isinstance(record, type) and issubclass(record, DraftSpec)):
        raise ConfigError(f"{where} is no DraftSpec but {record!r}; see docs/drafters/your_own.md")
    if record.kind != entry.name:
        raise ConfigError(f"{where} calls itself {record.kind!r}; give both the same name")
    return record


DRAFTERS = Registry(RECORDS, entry_points(group=GROUP))


def parse_draft(text: str | None) -> DraftSpec:
    """Parse a spec. Text that does not begin with a known kind is a model's path or hub name;
    ``@FILE`` or JSON is a speculative configuration of another engine. Raises ConfigError."""
    foreign = foreign_of(text)
    text = text if foreign is None else foreign.spec
    kind, _, rest = (text or NoDraft.kind).partition(":")
    if kind in DRAFTERS:
        return DRAFTERS[kind].read(rest, DRAFTERS)
    assert text is not None  # None is the kind "none"
    if "/" not in text and not is_path(text):
        advice = did_you_mean(kind.lower(), DRAFTERS, f"use one of {', '.join(DRAFTERS)}")
        if kind.partition("+")[0] in DRAFTERS:
            advice = f"several at once are hybrid:{text}"
        raise ConfigError(
            f"there is no drafter {kind!r:.80} and no model folder {text!r:.80}; {advice}"
        )
    return DraftModel(text)


def prepare_one(draft: DraftLike | None, loading: LoadContext) -> PreparedDraft:
    """Load what a drafter needs: its weights and files. Raises PacelineErrors."""
    if draft is None or isinstance(draft, str):
        draft = parse_draft(draft)
    if isinstance(draft, DraftSpec):
        prepared = draft.prepare(loading)
        return replace(prepared, names=(draft.kind,), drafts=prepared.drafts or (str(draft),))
    missing = [n for n in dir(Drafter) if not n.startswith("_") and not hasattr(draft, n)]
    if missing:
        raise ConfigError(
            f"draft {draft!r} is neither a spec nor a drafter: it lacks {', '.join(missing)}; "
            "see docs/drafters/your_own.md"
        )
    drafter = draft
    return PreparedDraft(lambda context: drafter, names=(drafter.name,), drafts=(drafter.name,))


def prepare_all(
    drafts: DraftLike | Sequence[DraftLike] | None, loading: LoadContext
) -> PreparedDraft:
    """Prepare one draft, or several among which requests choose by kind (draft/hybrid.py); the
    second draft of a kind is named KIND-2. Raises PacelineErrors."""
    if not isinstance(drafts, (list, tuple)):
        return prepare_one(drafts, loading)  # type: ignore[arg-type]
    if len(drafts) < 2:
        return prepare_one(drafts[0] if drafts else None, loading)
    parts = [prepare_one(draft, loading) for draft in drafts]
    kinds = [kind for part in parts for kind in part.names]
    numbers = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
    pairs = zip(kinds, numbers, strict=True)
    names = tuple(kind if number == 1 else f"{kind}-{number}" for kind, number in pairs)
    router = joined(parts, lambda made, device: Router(dict(zip(names, made, strict=True)), device))
    return replace(router, names=names, drafts=tuple(part.drafts[0] for part in parts))
