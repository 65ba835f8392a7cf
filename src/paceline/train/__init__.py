"""Training of tokenizers, small language models and their drafts."""
