"""An OpenAI-compatible server over the batched engine."""
