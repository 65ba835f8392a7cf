"""The forward on a processor, in kernels of our own: docs/concepts/kernels.md."""
