"""The forward in torch: any model of transformers, by its own modules."""
