"""Trained heads in the layouts of other engines, with the layers counted as each of them does.

Here, in vLLM and in llama.cpp a head's layer numbers say whose INPUT it reads; SGLang and
TensorRT-LLM name the layer whose OUTPUT that is, one less. One off halves acceptance, and nothing
reports it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.core.stages import stage
from paceline.draft.heads.eagle_format import WEIGHTS, load_eagle, save_eagle
from paceline.draft.heads.eagle_head import EagleHead
from paceline.draft.heads.medusa_head import load_medusa, save_medusa
from paceline.draft.spec import TargetShape
from paceline.drafters import Eagle, Medusa
from paceline.errors import ConfigError
from paceline.files import replace_in
from paceline.lab.export.speculation import Export
from paceline.model.loading import read_config
from paceline.model.names import resolve

LAYERS = "eagle_aux_hidden_state_layer_ids"


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
    return load_eagle(spec.path, sizes, spec.version, spec.layers, target_head=lambda x: x)


def write_eagle_head(export: Export, draft: Eagle, layout: str, outputs: bool = False) -> str:
    """The folder that the engine reads an EAGLE head from: a converted one, or where the head lies
    if nothing is written. ``layout`` as of ``save_eagle``; ``outputs``: layers as SGLang counts and
    looks for them."""
    if export.out is None:
        return export.draft_path
    head, (_, classes) = eagle_of(draft, export.target), shape_of(export.target)
    folder = export.out / "head"
    with stage(f"writing {folder}"):
        save_eagle(head, folder, layout, str(Path(resolve(export.target))), classes)
        if outputs and head.config.version == 3:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            inputs = config.pop(LAYERS)
            config["eagle_config"] = {LAYERS: outputs_of(inputs), "use_aux_hidden_state": True}
            text = json.dumps(config, indent=2) + "\n"
            replace_in(folder, {"config.json": text.encode()}, "the config of the head")
    export.head = export.in_folder("head")
    return export.head


def write_medusa_heads(export: Export, draft: Medusa) -> tuple[str, int]:
    """The folder that vLLM reads Medusa heads from, as ``write_eagle_head``, and their number.
    Raises ConfigError for heads that share the target's vocabulary layer."""
    heads = load_medusa(draft.path, shape_of(export.target)[0])
    if heads.config.shared_head:
        raise ConfigError(
            f"the Medusa heads {draft.path} share the target's vocabulary layer, which vLLM wants "
            "in their own file; train heads with layers of their own"
        )
    if export.out is not None:
        folder = export.out / "head"
        with stage(f"writing {folder}"):  # the public layout, in the file that vLLM looks for
            save_medusa(heads, folder, file=WEIGHTS)
        export.head = export.in_folder("head")
    return export.head or export.draft_path, heads.config.heads
