"""Findings on chats: templates, end tokens, and rows of the vocabulary that were never trained."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.tools.doctor.severity import NOTE, WARNING, Kind

CHAT_KINDS: Mapping[str, Kind] = {
    "chat-template-refuses": Kind(
        "tokenizer",
        (WARNING,),
        "Chats fail with this message; plain prompts work.",
        "Put the model's own chat_template.jinja beside the weights.",
    ),
    "chat-template-foreign": Kind(
        "tokenizer",
        (WARNING,),
        "The model reads the marks of a turn as odd letters, which it never learnt: answers are "
        "poor and may not end.",
        "Put the chat_template.jinja and the tokenizer.json of one and the same model beside the "
        "weights; a base model has no template: use plain prompts.",
    ),
    "chat-template-untrained": Kind(
        "tokenizer",
        (WARNING,),
        "The model was not tuned on chats of this form, as with a base model that brings the "
        "tokenizer of its instruction-tuned sibling: answers are poor and may not end.",
        "Use the instruction-tuned model, or plain prompts.",
    ),
    "chat-template-no-prompt": Kind(
        "tokenizer",
        (WARNING,),
        "Nothing tells the model that it is its turn: it writes the opening itself, as part of "
        "the answer, or goes on as the user.",
        "End the template with {% if add_generation_prompt %}, what opens an answer, {% endif %}.",
    ),
    "turn-end-ignored": Kind(
        "tokenizer",
        (WARNING,),
        "Answers do not stop where the model ends its turn: it goes on talking to itself up to "
        "max_tokens.",
        "Add the token to eos_token_id in generation_config.json, or give it as stop_token_ids.",
    ),
    "end-tokens-differ": Kind(
        "tokenizer",
        (WARNING, NOTE),
        "Generation ends here at the ids of generation_config.json (without it config.json) and "
        "at the tokenizer's; software that follows one file ends elsewhere, so lengths differ.",
        "Give all three the same end tokens; a list in generation_config.json may hold more.",
    ),
    "end-token-ordinary": Kind(
        "tokenizer",
        (WARNING,),
        "Where the model writes this in the middle of a text, the answer is cut off; an id "
        "without a token never comes.",
        "Correct eos_token_id in generation_config.json or config.json.",
    ),
    "vocabulary-padded": Kind(
        "tokenizer",
        (NOTE, WARNING),
        "No text has these tokens, and only rows that both models have are drafted. They are "
        "part of the model's distribution, as with transformers: nothing masks them, a grammar "
        "excepted. Rows that training pushed away never come; untrained ones can be drawn, and "
        "have no text.",
        "Nothing to do if they were trained; else cut the head, in transformers: "
        "model.resize_token_embeddings(len(tokenizer)).",
    ),
    "tied-head-differs": Kind(
        "tokenizer",
        (WARNING,),
        "The file's own head is used, as transformers 5 does; software that obeys config.json "
        "would use the embedding, and say something else.",
        'Write "tie_word_embeddings": false into config.json, or copy the weights again.',
    ),
    "tied-head-repeated": Kind(
        "tokenizer",
        (NOTE,),
        "The same numbers lie twice in the file, and without tying twice in memory as well.",
        'Write "tie_word_embeddings": true into config.json and save the model again.',
    ),
}
