"""The logger of the seam."""

from vllm.logger import init_logger

# Below `vllm`, because vLLM gives handlers and levels to that tree only.
logger = init_logger("vllm.kvpp")
