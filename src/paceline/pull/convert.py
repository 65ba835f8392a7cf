"""A Llama GGUF file as a transformers folder with float32 weights, the same bits for everybody.

``transformers`` reads GGUF too, by code that changes from version to version. What everybody is to
have alike is made here of the ``gguf`` package's tables and plain numpy, and its hash is known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.stages import stage
from paceline.errors import ModelLoadError
from paceline.model.gguf import require_gguf

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight")
_CONTROL = 3  # the token type of <|im_start|> and its like


def convert_llama(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and weights of ``source`` into ``folder``.

    The embeddings are the language-model head as well (SmolLM2's are). Raises ModelLoadError.
    """
    require_gguf("to convert the model")
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    config = _config(reader)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", tokens)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _tokenizer(reader, config["max_position_embeddings"]).save_pretrained(folder)
    tensors = _dequantised(reader, config)
    with stage("writing the weights"):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ModelLoadError(f"the GGUF file has no {name}; pull again")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    def number(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    heads, hidden = number("attention.head_count"), number("embedding_length")
    # A float32 in the file: 1e-05, not 9.999999747378752e-06. To float32 tensors both are one.
    epsilon = float(str(np.float32(number("attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_theta": number("rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": number("vocab_size"),
    }


def _tokenizer(reader: GGUFReader, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE as SmolLM2's own: digits stand alone before spaces are joined to words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )

    def token(role: str) -> str:
        return str(tokens[_field(reader, f"tokenizer.ggml.{role}_token_id")])

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        unk_token=token("unknown"),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return tokenizer


def _dequantised(reader: GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its name in transformers."""
    from gguf import dequantize

    tensors: dict[str, np.ndarray] = {}
    with stage("dequantising", len(reader.tensors), "tensors") as progress:
        for tensor in reader.tensors:
            name = _renamed(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type)
            for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if name.endswith(f".{kind}_proj.weight"):
                    values = _halves(values, config[heads])
            tensors[name] = np.ascontiguousarray(values, dtype=np.float32)
            progress.advance()
    return tensors


def _renamed(name: str) -> str:
    match = _BLOCK.fullmatch(name)
    if match is not None and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    if name not in _OUTER:
        raise ModelLoadError(f"the GGUF file has a tensor {name}, which is not known; pull again")
    return _OUTER[name]


def _halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows from llama.cpp's order (rotated pairs side by side) to transformers' (in two halves)."""
    pairs = weights.reshape(heads, -1, 2, weights.shape[1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)
