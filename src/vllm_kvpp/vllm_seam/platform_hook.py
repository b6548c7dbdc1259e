"""Where KVPP is switched on: behind the platform's own configuration hook, in every process that builds one."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from vllm.config import VllmConfig

from vllm_kvpp.config import read_settings
from vllm_kvpp.deployment import find_refusals
from vllm_kvpp.errors import KVPPConfigError

_MARK = "_kvpp_is_wrapped"


def wrap_platform_hook(platform_class: Any) -> None:
    """Run `enable_if_asked` after the platform's `check_and_update_config`. Wrapping twice has no effect.

    Touches: `Platform.check_and_update_config`. Because: see `symbols.py`. Checked by: `check_seam`.
    """
    original = platform_class.check_and_update_config.__func__
    if is_wrapped(platform_class):
        return

    @wraps(original)
    def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        original(cls, vllm_config)
        enable_if_asked(vllm_config)

    setattr(check_and_update_config, _MARK, True)
    platform_class.check_and_update_config = classmethod(check_and_update_config)


def is_wrapped(platform_class: Any) -> bool:
    """Whether KVPP is attached to the hook of this platform."""
    return bool(getattr(platform_class.check_and_update_config, _MARK, False))


def enable_if_asked(vllm_config: VllmConfig) -> None:
    """Validate the deployment and put our worker in front of the platform's, if `enable_kvpp` is true.

    Raises:
        KVPPConfigError: with every reason why KVPP cannot run.
        KVPPSeamError: the installed vLLM has changed.
    """
    if not isinstance(vllm_config.additional_config, Mapping) or vllm_config.model_config is None:
        return
    if not read_settings(vllm_config.additional_config).is_enabled:
        return
    _enable(vllm_config)


def _enable(vllm_config: VllmConfig) -> None:
    # Imported here: with KVPP off, a process loads nothing beyond this module (R-CFG-5).
    from vllm_kvpp.vllm_seam.deployment import describe_deployment
    from vllm_kvpp.vllm_seam.log import logger
    from vllm_kvpp.vllm_seam.symbols import PROVEN_VERSIONS, check_seam, installed_version, seam_of
    from vllm_kvpp.vllm_seam.worker_class import is_kvpp_worker, name_kvpp_worker

    parallel = vllm_config.parallel_config
    if is_kvpp_worker(parallel.worker_cls):
        # A copy of a configuration that has been through here, such as a drafter's.
        return
    # A vLLM without the property fails the check, which names it.
    check_seam(seam_of(uses_model_runner_v2=getattr(vllm_config, "use_v2_model_runner", False)))
    deployment = describe_deployment(vllm_config)
    if deployment.group_size == 1:
        logger.warning_once(
            "enable_kvpp has no effect: the KVPP group has 1 rank (tensor_parallel_size * "
            "prefill_context_parallel_size). Set tensor_parallel_size to 2 or more to use it."
        )
        return
    if refusals := find_refusals(deployment):
        raise KVPPConfigError(refusals)
    if deployment.prefill_context_parallel_size > 1:
        logger.warning_once(
            "KVPP with prefill context parallelism has been checked against vLLM's source only: nobody has run it. "
            "Compare answers with enable_kvpp false before you rely on it."
        )
    if installed_version() not in PROVEN_VERSIONS:
        logger.warning_once(
            "KVPP is proven with vLLM %s; %s has every symbol it needs, but has not been tested.",
            ", ".join(PROVEN_VERSIONS),
            installed_version(),
        )
    parallel.worker_cls = name_kvpp_worker(parallel.worker_cls)
    logger.info_once("KVPP is on: group size %d.", deployment.group_size)
