"""The command line. Modules here import torch and transformers only inside functions."""
