"""`vllm-kvpp explain`: what the KV cache lines of a vLLM start-up log mean, and what KVPP would change."""
