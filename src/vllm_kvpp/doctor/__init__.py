"""`vllm-kvpp doctor`: whether KVPP would run here, and with a given `vllm serve` command line."""
