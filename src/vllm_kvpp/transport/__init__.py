"""Bytes between the ranks of one group. Knows no layers and no vLLM."""
