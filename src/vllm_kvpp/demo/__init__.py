"""A small model whose answers depend on its KV cache, and prompts for it."""
