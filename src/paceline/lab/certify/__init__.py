"""Is speculative decoding lossless here? Tests of the user's own model, drafter and parameters."""
