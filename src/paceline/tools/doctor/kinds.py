"""All kinds of findings, with their consequences and cures; docs/doctor.md repeats them."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.tools.doctor.chat_kinds import CHAT_KINDS
from paceline.tools.doctor.severity import ERROR as ERROR
from paceline.tools.doctor.severity import NOTE as NOTE
from paceline.tools.doctor.severity import OK as OK
from paceline.tools.doctor.severity import WARNING as WARNING
from paceline.tools.doctor.severity import Kind as Kind
from paceline.tools.doctor.severity import Severity as Severity

KINDS: Mapping[str, Kind] = {
    # -- files and weights
    "weights-absent": Kind(
        "weights",
        (ERROR,),
        "Nothing can be loaded.",
        "Finish the download, or give the folder that holds the *.safetensors files.",
    ),
    "shards-absent": Kind(
        "weights",
        (ERROR,),
        "Loading fails, after the shards that are there have been read.",
        "Download or copy the files that are named.",
    ),
    "weights-damaged": Kind(
        "weights",
        (ERROR,),
        "Loading fails; of files above 1 GB with checksums, wrong numbers are found only here.",
        "Download or copy the file again; most often a transfer was cut off.",
    ),
    "tensors-missing": Kind(
        "weights",
        (ERROR,),
        "Loading is refused: the missing weights would be random numbers.",
        "Use the config.json and the weights of the same model.",
    ),
    "tensors-misshapen": Kind(
        "weights",
        (ERROR,),
        "Loading is refused.",
        "Use the config.json and the weights of the same model.",
    ),
    "weights-not-finite": Kind(
        "weights",
        (ERROR,),
        "Logits become NaN, and the text is garbage.",
        "Copy the weights again; if they stay so, training or conversion went wrong.",
    ),
    "weights-untrained": Kind(
        "weights",
        (WARNING,),
        "The weights look untrained: a draft of them is never accepted, a target says nothing.",
        "Give the folder of the trained checkpoint; save it after training, not before.",
    ),
    "weights-pickled": Kind(
        "weights",
        (NOTE,),
        "A pickled file cannot be looked into without reading it, so tensors were not checked.",
        "Save the model as safetensors.",
    ),
    "weights-remote": Kind(
        "weights",
        (NOTE,),
        "Only the small files were fetched; the weights follow on the first load.",
        "Download the model first if the machine will be offline.",
    ),
    "tensors-extra": Kind(
        "weights",
        (NOTE,),
        "They are ignored; many of them mean that the config is another model's.",
        "If the text is poor, compare config.json with the model's own.",
    ),
    "weights-complete": Kind("weights", (OK,)),
    # -- architecture
    "architecture-refused": Kind(
        "architecture",
        (ERROR,),
        "The model is refused before its weights are read.",
        "Use a decoder-only model whose layers are all attention layers.",
    ),
    "remote-code": Kind(
        "architecture",
        (ERROR, NOTE),
        "Code out of a model's folder is never run; only transformers' own is.",
        "Use a model that the installed transformers knows, or a newer transformers.",
    ),
    "quantised": Kind(
        "architecture",
        (WARNING,),
        "Weights are unpacked for every product, so checking 8 tokens may cost more than one, and "
        "the library that unpacks them must be installed. Tensors were not checked.",
        "Compare with --run; the unquantised checkpoint often speculates better.",
    ),
    "architecture-supported": Kind("architecture", (OK,)),
    "gguf-dequantised": Kind(
        "weights",
        (NOTE,),
        "Loading takes longer and memory holds the unpacked numbers. The text is that of the "
        "quantised model.",
        "Nothing to do; the unquantised checkpoint, where it can be had, answers a little better.",
    ),
    "gguf-tokenizer-unsure": Kind(
        "tokenizer",
        (WARNING,),
        "Prompts may be cut into other tokens than in training, mostly at digits and spaces.",
        "Take the model's folder with its tokenizer.json, where it can be had.",
    ),
    "gguf-rope-factors": Kind(
        "architecture",
        (WARNING,),
        "The file holds factors that stretch rotary positions (Llama 3.1 and later), which "
        "transformers leaves out of GGUF files: long prompts are read less well.",
        "Take the model's folder with its config.json, or keep prompts below 8,192 tokens.",
    ),
    # -- tokenizers
    "tokenizer-absent": Kind(
        "tokenizer",
        (ERROR, NOTE),
        "A target without one cannot read text; a draft without one is taken to share the "
        "target's.",
        "Put tokenizer.json beside the weights.",
    ),
    "vocabulary-refused": Kind(
        "tokenizer",
        (ERROR,),
        "The pair is refused.",
        "Use a draft of the target's own family.",
    ),
    "vocabulary-overflows": Kind(
        "tokenizer",
        (ERROR,),
        "A text with such a token reaches behind the embedding, and the forward fails.",
        "Use the tokenizer that the model was trained with, or resize the embedding.",
    ),
    "vocabulary-differs": Kind(
        "tokenizer",
        (WARNING,),
        "Output stays exact, but the draft speaks through a translation: tokens that only one "
        "side knows cost acceptance, and re-reading text costs time.",
        "Use a draft of the target's own family, or measure this one with --run.",
    ),
    "segmentation-differs": Kind(
        "tokenizer",
        (WARNING,),
        "The ids mean the same, but the draft was trained on text cut up in another way, so it "
        "guesses worse.",
        "Give the draft the tokenizer it was trained with, or train it with the target's.",
    ),
    "special-tokens-differ": Kind(
        "tokenizer",
        (WARNING, NOTE),
        "The draft begins or ends texts with other tokens: guesses near the edges are rejected. "
        "Another padding token alone changes nothing.",
        "Use a draft tuned in the target's format.",
    ),
    "chat-template-differs": Kind(
        "tokenizer",
        (WARNING,),
        "Chats are rendered with the target's template, which the draft may never have seen: "
        "acceptance in chats falls.",
        "Use a draft tuned with the target's template; plain prompts are not affected.",
    ),
    "chat-template-absent": Kind(
        "tokenizer",
        (NOTE,),
        "Chats are refused; plain prompts work.",
        "Use the instruction-tuned model, or put its chat_template.jinja beside the weights.",
    ),
    **CHAT_KINDS,
    "vocabulary-same": Kind("tokenizer", (OK,)),
    # -- context
    "draft-context-short": Kind(
        "context",
        (WARNING,),
        "Behind that length nothing is drafted: decoding goes on at plain speed.",
        "Use a draft with the target's context, or ngram or suffix, for long texts.",
    ),
    "head-context-short": Kind(
        "context",
        (NOTE,),
        "The head still drafts behind the length it was trained for, but guesses worse there.",
        "For long texts use a head trained on them, or ngram or suffix beside it (hybrid).",
    ),
    "draft-window": Kind(
        "context",
        (NOTE,),
        "The draft cannot copy what lies further back, as in summaries and edits.",
        "Join it with ngram: --draft hybrid:ngram+model:PATH.",
    ),
    "rope-scaling-differs": Kind(
        "context",
        (NOTE,),
        "In long contexts the two see distances differently, and acceptance may fall.",
        "Compare acceptance on long prompts with --run before relying on it.",
    ),
    "context-covered": Kind("context", (OK,)),
    # -- heads
    "head-refused": Kind(
        "head",
        (ERROR,),
        "The head cannot be used with this target.",
        "Use a head that was trained for this target.",
    ),
    "draft-of-another-kind": Kind(
        "head",
        (ERROR,),
        "Loading fails.",
        "Name the kind of the draft before its path.",
    ),
    "head-layers-shifted": Kind(
        "head",
        (WARNING,),
        "The ids look counted by layer outputs (SGLang, TensorRT-LLM), one off from inputs: the "
        "head then reads the wrong hidden states, and acceptance about halves without an error.",
        "Give the inputs in the draft spec: eagle3:PATH,layers=AxBxC, and compare with --run.",
    ),
    "head-layers-assumed": Kind(
        "head",
        (NOTE,),
        "The head's config names no layers of the target; an early, a middle and a late one are "
        "taken, as in the paper.",
        "If acceptance is poor, give them: eagle3:PATH,layers=AxBxC.",
    ),
    "head-vocabulary-reduced": Kind(
        "head",
        (NOTE,),
        "Tokens outside the draft vocabulary are never drafted: right for English, dear for "
        "other languages and code with rare names.",
        "Nothing to do unless your text is of another kind than the head's training data.",
    ),
    "head-base-differs": Kind(
        "head",
        (NOTE,),
        "The head was trained for a model of another name; if it is another model, little is "
        "accepted.",
        "Make sure that both names mean the same weights.",
    ),
    "medusa-accuracy-unknown": Kind(
        "head",
        (NOTE,),
        "The tree of candidates is a general one, not fitted to these heads.",
        "Train with `paceline train medusa`, which stores the accuracies, or give tree=.",
    ),
    "head-fits": Kind("head", (OK,)),
    # -- the draft's size
    "draft-none": Kind(
        "draft",
        (NOTE,),
        "The target decodes plainly.",
        "Try --draft ngram: it takes no weights and no training.",
    ),
    "draft-too-large": Kind(
        "draft",
        (WARNING, NOTE),
        "Drafting takes much of the time that verification saves; 10 to 20 times smaller is the "
        "rule of the field.",
        "Use a smaller draft, a head (eagle3, medusa), or ngram.",
    ),
    "draft-deep": Kind(
        "draft",
        (WARNING, NOTE),
        "Layers run one after another, for every drafted token: latency follows the number of "
        "layers more than the number of parameters.",
        "Prefer a shallow, wide draft, or a head of one layer.",
    ),
    "draft-own-layers": Kind(
        "draft",
        (NOTE,),
        "No weights to load, but a draft pass costs that share of a target step.",
        "Worth it only if acceptance is high: measure with --run.",
    ),
    "draft-free": Kind("draft", (OK,)),
    "draft-small": Kind("draft", (OK,)),
    # -- the machine
    "memory-short": Kind(
        "machine",
        (ERROR,),
        "Loading runs out of memory.",
        "Use a smaller dtype, a smaller model, or a machine with more memory.",
    ),
    "cache-short": Kind(
        "machine",
        (WARNING, ERROR),
        "The cache does not hold one sequence of full context: long requests are refused.",
        "Free memory or raise --kv-cache-memory.",
    ),
    "verify-float32": Kind(
        "machine",
        (WARNING,),
        "On a processor a float32 forward over 8 rows costs two to three times one over 1, so "
        "checking a draft is not nearly free.",
        "Use bfloat16 on a processor with bf16 instructions (AVX-512 BF16, AMX), or a GPU.",
    ),
    "bfloat16-emulated": Kind(
        "machine",
        (WARNING,),
        "The device has no bf16 instructions: every product is emulated and slow.",
        "Use --dtype float32 (on an old GPU float16), or a processor with AVX-512 BF16 or AMX.",
    ),
    "float16-on-cpu": Kind(
        "machine",
        (WARNING,),
        "Processors hardly multiply float16: products are converted and slow.",
        "Use --dtype bfloat16 where the processor has it, else float32.",
    ),
    "cache-partial": Kind(
        "machine",
        (NOTE,),
        "Not all sequences of a full batch can be of full length: the youngest then waits and is "
        "read again.",
        "Raise --kv-cache-memory, or lower --max-batch-size.",
    ),
    "gpu-absent": Kind(
        "machine",
        (NOTE,),
        "Every step reads all weights from main memory.",
        "Nothing to do for small models; plain decoding cannot beat bandwidth over weight bytes.",
    ),
    "memory-fits": Kind("machine", (OK,)),
    "dtype-suits": Kind("machine", (OK,)),
    # -- measured by --run
    "not-worth-it": Kind(
        "measured",
        (WARNING,),
        "Decoding with this draft is slower than without.",
        "Use another draft, or none; --draft-length auto falls back to plain decoding by itself.",
    ),
    "acceptance-low": Kind(
        "measured",
        (WARNING,),
        "Below 0.4 a draft is hardly worth its time, however cheap it is.",
        "Use a draft trained on the target's own text, or ngram where output copies input.",
    ),
    "draft-dear": Kind(
        "measured",
        (WARNING,),
        "A draft pass costs more than a third of a target step, which caps the speedup.",
        "Use a shallower draft, or a head.",
    ),
    "verify-dear": Kind(
        "measured",
        (WARNING,),
        "Checking drafted tokens is not nearly free here, so only short drafts pay.",
        "See the findings on dtype; on a processor use bf16, and fewer sequences at once.",
    ),
    "barely-worth-it": Kind(
        "measured",
        (NOTE,),
        "Speculation gains little here.",
        "Try another draft; paceline tune compares those at hand.",
    ),
    "measurement-unsure": Kind(
        "measured",
        (NOTE,),
        "The steps alone promise another speedup than the runs show: the machine was busy, or ten "
        "seconds were too short.",
        "Repeat --run on an idle machine, or measure at length with paceline bench.",
    ),
    "worth-it": Kind("measured", (OK,)),
}
