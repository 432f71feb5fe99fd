"""expertserve: serves Mixture-of-Experts GGUF models that are larger than memory."""

__version__ = "0.1.0"
