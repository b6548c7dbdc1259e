"""A vLLM plugin for tests: the attention backend of the CPU has a name that KVPP does not know."""

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend


def register() -> None:
    CPUMLABackend.get_name = staticmethod(lambda: "SOME_MLA")
