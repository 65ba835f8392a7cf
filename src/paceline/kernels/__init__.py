"""The compiled kernels: built on first use, loaded once, called through ctypes."""
