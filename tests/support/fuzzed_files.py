"""Every kind of file that is read: an intact one, and what reads it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline import LLM, SamplingParams
from paceline.build import EngineOptions
from paceline.draft.datastore import Store, write_datastore
from paceline.draft.foreign import foreign_of
from paceline.draft.heads.block_head import load_block
from paceline.draft.heads.eagle_head import load_eagle
from paceline.draft.heads.medusa_head import load_medusa
from paceline.draft.heads.mtp import load_mtp
from paceline.draft.spec import TargetShape
from paceline.draft.vocabulary import match_vocabularies
from paceline.drafters import parse_draft
from paceline.errors import ConfigError
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.replay import replay
from paceline.model.backends.base import trial_logits
from paceline.model.copies import _COPIES, quantised_copy
from paceline.model.gguf import read_gguf
from paceline.model.loading import read_config
from paceline.model.lora import read_adapter
from paceline.model.target import CausalModel
from paceline.model.tokenizer import load_tokenizer
from paceline.request.receipt import _hash, read_receipts
from paceline.server.config import configure, to_toml
from paceline.server.security import Keys
from paceline.settings.tuned import TunedSettings
from paceline.train.acceptance import load_held_out_texts
from paceline.train.configs import DraftConfig
from paceline.train.data import Windows, encode_stream
from paceline.train.reading import FeatureCache, TargetOutputs
from support.made_adapters import write_adapter
from support.made_gguf import write_gguf
from support.medusa_models import write_medusa
from support.mtp_models import write_mtp
from support.random_heads import write_block, write_eagle
from support.tiny_models import SENTENCES, write_tiny_model
from support.written_kinds import tuned_settings

VOCAB = 50


class Made(NamedTuple):
    """Files to damage, and what reads them."""

    files: list[Path]
    read: Callable[[], Any]


def gguf_header(root: Path) -> Made:
    pytest.importorskip("gguf")
    write_gguf(root / "model.gguf", "llama")
    return Made([root / "model.gguf"], lambda: read_gguf(root / "model.gguf"))


def gguf_model(root: Path) -> Made:
    pytest.importorskip("gguf")
    write_gguf(root / "model.gguf", "llama", quantisation="Q8_0")
    read = partial(CausalModel.load, str(root / "model.gguf"), "float32")
    return Made([root / "model.gguf"], read)


def checkpoint(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    files = [folder / name for name in ("model.safetensors", "config.json")]
    return Made(files, lambda: CausalModel.load(str(folder), "float32"))


def shards(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    half = len(tensors) // 2
    places = {key: names[number >= half] for number, key in enumerate(tensors)}
    for name in names:
        part = {key: tensors[key] for key, place in places.items() if place == name}
        save_file(part, folder / name, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    files = [index, folder / names[0]]
    return Made(files, lambda: CausalModel.load(str(folder), "float32"))


def model_folder(root: Path) -> Made:
    """All that is read beside the weights when an engine starts and chats."""
    folder = write_tiny_model(root / "model", layers=1)
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "top_p": 0.9, "eos_token_id": [1, 2], "top_k": 20})
    )
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    files = [folder / name for name in (*names, "chat_template.jinja")]

    def read() -> None:
        options: dict[str, Any] = {"dtype": "float32", "max_batch_size": 1, "max_model_len": 64}
        llm = LLM(str(folder), "none", backend="reference", kv_cache_memory="4M", **options)
        prompt = llm.render_chat([{"role": "user", "content": "Hi"}])
        llm.generate([prompt[:20]], SamplingParams(max_tokens=2))
        llm.generate(["Once"])
        llm.close()

    return Made([file for file in files if file.is_file()], read)


def tokenizer(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return Made(files, lambda: load_tokenizer(str(folder)))


def vocabularies(root: Path) -> Made:
    """The tokenizer of a draft model, matched with the target's."""
    folder = write_tiny_model(root / "draft", layers=1, sentences=SENTENCES[1:])
    target = load_tokenizer("paceline/tiny")

    def read() -> None:
        theirs = load_tokenizer(str(folder))
        ours = SimpleNamespace(name="target", vocab_size=len(target))
        match = match_vocabularies(
            ours, SimpleNamespace(name="draft", vocab_size=320), target, theirs
        )
        assert match is None or match.draft.encode_longest(b"Once upon") is not None

    return Made([folder / "tokenizer.json"], read)


def heads(root: Path, write: Callable[[str], str], load: Callable[[str, Any], Any]) -> Made:
    target = write_tiny_model(root / "model", layers=8)
    folder = Path(write(str(target)))
    shape = TargetShape(32, 320, 8)
    return Made(sorted(folder.iterdir()), lambda: load(str(folder), shape))


def eagle(root: Path) -> Made:
    return heads(root, lambda target: write_eagle(root, target, 3), load_eagle)


def medusa(root: Path) -> Made:
    return heads(root, lambda target: write_medusa(root / "m", target, steps=1), load_medusa)


def public_medusa(root: Path) -> Made:
    """As the authors of Medusa publish them, without checksums."""
    made = medusa(root)
    file = next(file for file in made.files if file.suffix == ".safetensors")
    from safetensors.torch import load_file

    torch.save(load_file(file), file.with_suffix(".pt"))
    file.unlink()
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"}
    (file.parent / "config.json").write_text(json.dumps(config))
    return Made([file.with_suffix(".pt"), file.parent / "config.json"], made.read)


def block(root: Path) -> Made:
    load = partial(load_block, kind="dspark")
    return heads(root, lambda target: write_block(root, target, "dspark"), load)


def dflash(root: Path) -> Made:
    load = partial(load_block, kind="dflash")
    return heads(root, lambda target: write_block(root, target, "dflash"), load)


def mtp(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    target = CausalModel.load(str(folder), "float32", backend="reference")
    made = Path(write_mtp(root / "mtp", read_config(str(folder), str(folder))))
    return Made(sorted(made.iterdir()), lambda: load_mtp(str(made), target))


def adapter(root: Path) -> Made:
    target = write_tiny_model(root / "model", layers=1)
    folder = Path(write_adapter(root / "adapter", str(target)))
    model = CausalModel.load(str(target), "float32", backend="reference")
    return Made(sorted(folder.iterdir()), lambda: read_adapter("a", str(folder), model))


def datastore(root: Path) -> Made:
    words = {f"w{number}": number for number in range(VOCAB)}
    kind = type("Words", (), {"get_vocab": lambda _: words, "__len__": lambda _: VOCAB})
    file = root / "texts.datastore"
    write_datastore(file, [np.array([1, 2, 3, 4, 5, 6, 7, 8])] * 2, kind())  # type: ignore[arg-type]

    def read() -> Any:
        store = Store(file, VOCAB)
        if positions := store.find([*range(9)], 5)[0]:
            store.continuations(positions, 3)
        return store.ids.tolist(), store.order.tolist(), store.about

    return Made([file], read)


def tuned(root: Path) -> Made:
    tuned_settings(root, 2)

    def read() -> None:
        made = TunedSettings.read(root / "p.toml")
        EngineOptions(**made.settings(True))
        parse_draft(made.draft.spec)

    return Made([root / "p.toml"], read)


def server_settings(root: Path) -> Made:
    file = root / "server.toml"
    flags = {"draft": ("ngram:min=2", "suffix"), "deadline": 2.5, "kv_cache_memory": "1G"}
    given = configure(flags, None)
    file.write_text(to_toml(given), encoding="utf-8")

    def read() -> None:
        settings = configure({}, file)
        to_toml(settings)
        for draft in settings.drafts:
            parse_draft(draft)

    return Made([file], read)


def api_keys(root: Path) -> Made:
    (root / "keys").write_text("# ours\nsk-one\nsk-two\n", encoding="utf-8")
    return Made([root / "keys"], lambda: Keys.load(str(root / "keys")))


def foreign_settings(root: Path) -> Made:
    """The speculative configuration of another engine."""
    vllm = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    file = root / "vllm.json"
    file.write_text(json.dumps(vllm), encoding="utf-8")

    def read() -> None:
        made = foreign_of(f"@{file}")
        assert made is not None
        parse_draft(made.spec)

    return Made([file], read)


def receipt(root: Path) -> Made:
    file, llm = root / "receipt.json", LLM("paceline/tiny", "none", max_batch_size=1)
    params = SamplingParams(max_tokens=4, receipt=True, seed=1, temperature=0.5)
    file.write_text(json.dumps([llm.generate(["Once"], params)[0].receipt]), encoding="utf-8")

    def read() -> None:
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
            (content,) = json.loads(file.read_bytes())  # one that somebody wrote, with a valid seal
            content.pop("seal")
            content |= {f"{name}_sha256": _hash(content[name]) for name in ("prompt", "tokens")}
            file.write_text(json.dumps([{**content, "seal": _hash(content)}]), encoding="utf-8")
        for record in read_receipts(file):
            replay(llm, record)

    return Made([file], read)


_RECORDS = (
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]},
    {"turns": ["Hi", "And then?"], "category": "writing", "question_id": 1},
    {"text": "User: Hi\n\nAssistant: Yes.", "license": "MIT", "source": "a"},
    {"ids": [1, 2, 3, 4, 5], "prompt": 2, "job": 0, "turn": 1, "task": "a"},
)


def training_data(root: Path) -> Made:
    texts, packed = root / "data.jsonl", root / "data.jsonl.gz"
    texts.write_text("\n".join(map(json.dumps, _RECORDS)), encoding="utf-8")
    packed.write_bytes(gzip.compress(texts.read_bytes()))
    words = load_tokenizer("paceline/tiny")
    return Made(
        [texts, packed], lambda: [len(encode_stream(f, words).ids) for f in (texts, packed)]
    )


def prompts(root: Path) -> Made:
    lines, plain = root / "prompts.jsonl", root / "prompts.txt"
    lines.write_text("\n".join(map(json.dumps, (_RECORDS[0], *_RECORDS[2:4]))), encoding="utf-8")
    plain.write_text("Once\n---\nThere was", encoding="utf-8")
    return Made([lines, plain], lambda: [load_prompts(file) for file in (lines, plain)])


def features(root: Path) -> Made:
    """A target's features, kept for a training: damaged ones are computed again."""

    def run_target(ids: torch.Tensor, loss_mask: torch.Tensor, _: object) -> TargetOutputs:
        final = torch.arange(12.0).reshape(1, 3, 4)
        return TargetOutputs(ids, loss_mask, final, final, None)

    kept = FeatureCache(root / "f", run_target, torch.device("cpu"), 4)
    ids = torch.full((1, 3), 7)
    windows = Windows(ids, ids > 0, (3,))

    def read() -> None:
        assert kept.get(windows).final.shape == (1, 3, 4)

    read()
    return Made(list((root / "f").rglob("*.safetensors")), read)


def kept_copy(root: Path) -> Made:
    """A model's form in 4 bits, kept for the next start: a damaged one is made again, or costs
    speed alone."""
    folder = write_tiny_model(root / "model", layers=1)
    try:
        model = CausalModel.load(str(folder), "float32", backend="native")
    except ConfigError as error:
        pytest.skip(str(error))

    def read() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_CACHE", str(root / "cache"))
            trial_logits(quantised_copy(model, "int4"))
            del _COPIES[model]

    read()
    files = list((root / "cache").rglob("*.safetensors"))
    assert files
    return Made(files, read)


def held_out(root: Path) -> Made:
    """The texts that a training is measured on: damaged ones are made again."""
    target: Any = SimpleNamespace(device=torch.device("cpu"))
    config = DraftConfig(data=("x",), held_out=2, held_out_tokens=9)
    file = root / "held_out.json"

    def read() -> list[str]:
        texts = load_held_out_texts(target, None, [], config, file)  # type: ignore[arg-type]
        return [text.source + str(text.token_ids[text.prompt :]) for text in texts]

    read()  # writes the file, without texts
    text = {"source": "a", "prompt": 2, "token_ids": [1, 2, 3]}
    content = json.dumps(json.loads(file.read_text()) | {"texts": [text] * 2})
    file.write_text(content)
    return Made([file], read)


READERS = (gguf_header, gguf_model, checkpoint, shards, model_folder, tokenizer, vocabularies)
READERS += (eagle, medusa, public_medusa, block, dflash, mtp, adapter, datastore)
READERS += (tuned, server_settings, api_keys, foreign_settings, receipt, training_data, prompts)
READERS += (features, held_out, kept_copy)
