"""The entry point that vLLM calls in every process, before it builds a configuration; possibly more than once."""


def register() -> None:
    """Attach to the platform's configuration hook. Does nothing else until `enable_kvpp` is true.

    vLLM swallows an exception raised while this module is imported, so imports are inside; one raised here stops the
    process, as it should: with KVPP silently absent, the flag would silently do nothing.

    Raises:
        KVPPSeamError: the installed vLLM has no configuration hook that we know.
    """
    from vllm_kvpp.vllm_seam.symbols import PLATFORM_HOOK, check_seam

    check_seam((PLATFORM_HOOK,), remedy="uninstall vllm-kvpp")
    from vllm.platforms import current_platform

    from vllm_kvpp.vllm_seam.platform_hook import wrap_platform_hook

    wrap_platform_hook(type(current_platform))
