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
from paceline.draft.heads.checkpoint import read_checkpoint, write_checkpoint
from paceline.draft.heads.eagle import Eagle
from paceline.draft.heads.eagle_format import WEIGHTS, load_eagle, save_eagle
from paceline.draft.heads.eagle_head import EagleHead
from paceline.draft.heads.medusa import Medusa
from paceline.draft.heads.medusa_format import WEIGHTS as PUBLIC
from paceline.draft.heads.medusa_format import load_medusa, save_medusa
from paceline.draft.heads.medusa_head import MedusaHeads
from paceline.draft.spec import TargetShape
from paceline.errors import ConfigError
from paceline.files import replace_in
from paceline.lab.export.speculation import ExportedDraft
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


def write_eagle(
    head: EagleHead, folder: Path, target: str, layout: str, outputs: bool = False
) -> None:
    """``layout`` as of ``save_eagle``; ``outputs``: layers as SGLang counts and looks for them."""
    _, classes = shape_of(target)
    with stage(f"writing {folder}"):
        save_eagle(head, folder, layout, str(Path(resolve(target))), classes)
        if outputs and head.config.version == 3:
            file = folder / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            inputs = config.pop(LAYERS)
            config["eagle_config"] = {
                LAYERS: outputs_of(inputs),
                "use_aux_hidden_state": True,
            }
            text = json.dumps(config, indent=2) + "\n"
            replace_in(folder, {file.name: text.encode()}, "the config of the head")


def placed_head(
    it: ExportedDraft, draft: Eagle, layout: str, outputs: bool = False
) -> tuple[str, str | None]:
    """The folder that the engine reads an EAGLE head from, and that of a head converted for it:
    None where nothing is written, and the head is named where it lies. The rest as of
    ``write_eagle``."""
    if it.out is None:
        return it.draft_path, None
    write_eagle(eagle_of(draft, it.target), it.out / "head", it.target, layout, outputs)
    return it.in_folder("head"), it.in_folder("head")


def medusa_of(spec: Medusa, target: str) -> MedusaHeads:
    """The heads of a spec. Raises ConfigError for those that vLLM cannot be given."""
    sizes, _ = shape_of(target)
    heads = load_medusa(spec.path, sizes)
    if heads.config.shared_head:
        raise ConfigError(
            f"the Medusa heads {spec.path} share the target's vocabulary layer, which vLLM wants "
            "in their own file; train heads with layers of their own"
        )
    return heads


def write_medusa(heads: MedusaHeads, folder: Path) -> None:
    """In the public layout, under the file name that vLLM looks for."""
    with stage(f"writing {folder}"):
        save_medusa(heads, folder)
        written = read_checkpoint(str(folder), (PUBLIC,), "Medusa heads")
        write_checkpoint(folder, WEIGHTS, written.tensors, written.config)
        (folder / PUBLIC).unlink()
