"""`vllm-kvpp plan`: what KVPP would give and cost for a model on a machine. No torch, no vllm, nothing started."""
