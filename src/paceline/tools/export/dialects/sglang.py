"""SGLang 0.5.23: flags; trees by steps, top-k and tokens; heads in their authors' layout, whose
layers are counted by outputs and stand under ``eagle_config``."""

from __future__ import annotations

from paceline.draft.heads.eagle import Eagle
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.tools.export.heads import eagle_of, write_eagle
from paceline.tools.export.speculation import (
    Approximation,
    Exported,
    ExportedDraft,
    usual_approximations,
)

VERSION = "sglang 0.5.23"


def to_sglang(it: ExportedDraft) -> Exported:
    """Raises ConfigError for drafts that it has nothing like."""
    notes = usual_approximations(it, trees=True, rules=("token", "block"))
    draft, head, tree = it.draft, None, it.tree
    flags: dict[str, str] = {}
    if isinstance(draft, (Eagle, DraftModel)):
        algorithm = "STANDALONE"
        model = it.draft_path
        if isinstance(draft, Eagle):
            algorithm = "EAGLE3" if draft.version == 3 else "EAGLE"
            if it.out is not None:
                head = model = str((it.out / "head").resolve())
                own = eagle_of(draft, it.target)
                write_eagle(own, it.out / "head", it.target, "eagle", outputs=True)
        flags["speculative-algorithm"] = algorithm
        flags["speculative-draft-model-path"] = model
        flags["speculative-num-steps"] = str(tree.levels)
        flags["speculative-eagle-topk"] = str(tree.width)
        flags["speculative-num-draft-tokens"] = str(tree.nodes + 1)  # with the root
        if (isinstance(draft, DraftModel) and draft.branching) or _is_static(draft):
            notes.append(_grown(tree.nodes))
    elif isinstance(draft, NGram):
        flags["speculative-algorithm"] = "NGRAM"
        flags["speculative-num-draft-tokens"] = str(tree.nodes + 1)
        flags["speculative-ngram-max-trie-depth"] = str(max(draft.max + it.length, 2))
        notes.append(_trie(draft))
    else:
        raise it.refuse("SGLang", "export eagle, eagle3, a draft model or ngram")
    if not tree.branches and "NGRAM" not in flags.values():
        # Without it sampled drafts are taken by the target's own draw: lossless, accepted less.
        switch = "block-verification" if it.rule == "block" else "rejection-sampling"
        flags[f"speculative-use-{switch}"] = ""
    command = ["python", "-m", "sglang.launch_server", "--model-path", it.path]
    command += ["--max-running-requests", str(it.batch)]
    for name, value in flags.items():
        command += [f"--{name}", *([value] if value else [])]
    config = {name.replace("-", "_"): value or True for name, value in flags.items()}
    return Exported(
        "sglang", VERSION, tuple(command), config, approximations=tuple(notes), head=head
    )


def _is_static(draft: object) -> bool:
    return isinstance(draft, Eagle) and bool(draft.branching)


def _grown(nodes: int) -> Approximation:
    return Approximation(
        "a static tree",
        f"the {nodes} likeliest of a tree grown at every step",
        "mostly as many tokens a step or more; bench nodes=N here for the same",
    )


def _trie(draft: NGram) -> Approximation:
    return Approximation(
        f"matches of {draft.min} to {draft.max} tokens in the request",
        "a trie over all requests",
        "drafts depend on what other requests said; acceptance is another one",
    )
