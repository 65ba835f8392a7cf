"""SGLang 0.5.23: flags; trees by steps, top-k and tokens; heads in their authors' layout, whose
layers are counted by outputs and stand under ``eagle_config``."""

from __future__ import annotations

from paceline.draft.heads.eagle import Eagle
from paceline.draft.model import DraftModel
from paceline.draft.ngram import NGram
from paceline.lab.export.heads import placed_head
from paceline.lab.export.speculation import (
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
        algorithm, model = "STANDALONE", it.draft_path
        if isinstance(draft, Eagle):
            algorithm = "EAGLE3" if draft.version == 3 else "EAGLE"
            model, head = placed_head(it, draft, "eagle", outputs=True)
        flags["speculative-algorithm"] = algorithm
        flags["speculative-draft-model-path"] = model
        flags["speculative-num-steps"] = str(tree.levels)
        flags["speculative-eagle-topk"] = str(tree.width)
        flags["speculative-num-draft-tokens"] = str(tree.nodes + 1)  # with the root
        if draft.branching:
            instead = f"the {tree.nodes} likeliest of a tree grown at every step"
            cost = "mostly as many tokens a step or more; bench nodes=N here for the same"
            notes.append(Approximation("a static tree", instead, cost))
    elif isinstance(draft, NGram):
        flags["speculative-algorithm"] = "NGRAM"
        flags["speculative-num-draft-tokens"] = str(tree.nodes + 1)
        flags["speculative-ngram-max-trie-depth"] = str(max(draft.max + it.length, 2))
        what = f"matches of {draft.min} to {draft.max} tokens in the request"
        cost = "drafts depend on what other requests said; acceptance is another one"
        notes.append(Approximation(what, "a trie over all requests", cost))
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
