"""KV layer parallelism (KVPP) for MLA models on stock vLLM."""

__version__ = "0.1.0"
