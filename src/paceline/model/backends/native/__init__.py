"""The forward on a processor, in kernels of our own: docs/native.md."""
