"""A `vllm serve` command line, taken through vLLM's own argument path up to the finished configuration.

KVPP's hook runs there as it does in a server, so it alone decides; no weight is loaded.
"""

import io
import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.selector import get_attn_backend

from vllm_kvpp.config import KVPPOptions, read_settings
from vllm_kvpp.errors import KVPPConfigError, KVPPError
from vllm_kvpp.vllm_seam.decode_backends import (
    DIFFERENT_TOKENS,
    NO_SHARED_MEMORY,
    NOT_ON_DEVICES,
    find_backend_obstacle,
    find_in_place_backend_obstacle,
    make_in_place_refusal,
    make_refusal,
)
from vllm_kvpp.vllm_seam.deployment import describe_deployment
from vllm_kvpp.vllm_seam.findings import Outcome, ServeCommand, Verdict, describe_error
from vllm_kvpp.vllm_seam.worker_class import is_kvpp_worker

KVPP_LOGGER = "vllm.kvpp"


class MalformedCommandError(Exception):
    """vLLM's parser refuses the command line; the message is its own."""


def judge_command(command: ServeCommand, *, is_attached: bool) -> Verdict:
    """Say what a server with this command line would do."""
    try:
        args = parse_command(command)
    except MalformedCommandError as error:
        return Verdict(outcome="malformed", reasons=(str(error),))
    with _collect_messages() as messages:
        try:
            ServeSubcommand().validate(args)
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
                usage_context=UsageContext.OPENAI_API_SERVER, headless=args.headless
            )
            return _describe(config, args.model, is_attached=is_attached, messages=tuple(messages))
        except KVPPConfigError as error:
            return Verdict(outcome="refused", reasons=error.reasons, model=args.model)
        except KVPPError as error:
            return Verdict(outcome="refused", reasons=(str(error),), model=args.model)
        except Exception as error:
            return Verdict(outcome="refused by vLLM", reasons=(describe_error(error),), model=args.model)


def parse_command(command: ServeCommand) -> Namespace:
    """Parse as `vllm serve` does; the modules that do the same take the same options.

    Raises:
        MalformedCommandError: the parser refuses.
    """
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            args = parser.parse_args(["serve", *command.arguments])
    except SystemExit as end:
        raise MalformedCommandError(_find_complaint(said.getvalue(), end.code)) from end
    except Exception as error:
        raise MalformedCommandError(describe_error(error)) from error
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _find_complaint(said: str, code: Any) -> str:
    if code == 0:
        return "it asks for vLLM's help or version and starts no server"
    return " ".join(said.rpartition("error: ")[2].split())


def choose_backend(
    head_size: int, dtype: str, kv_cache_dtype: str, *, use_mla: bool = True, use_sparse: bool = False
) -> Any:
    """Find the class of the attention backend of a model's layers, with the current configuration.

    Raises:
        Exception: vLLM has none here; the message says why.
    """
    return get_attn_backend(head_size, getattr(torch, dtype), kv_cache_dtype, use_mla=use_mla, use_sparse=use_sparse)


@dataclass(frozen=True)
class _Attention:
    """The name of the backend, or why there is none, and why decode could not attend at the owner, or in place."""

    backend: str
    decode_obstacle: str | None = None
    in_place_obstacle: str | None = None


def _describe(config: VllmConfig, model: str, *, is_attached: bool, messages: tuple[str, ...]) -> Verdict:
    settings = read_settings(config.additional_config if isinstance(config.additional_config, dict) else {})
    worker = config.parallel_config.worker_cls
    outcome: Outcome = "off"
    if is_kvpp_worker(worker):
        outcome = "on"
    elif settings.is_enabled:
        outcome = "no effect" if is_attached else "not loaded"
    deployment = describe_deployment(config)
    attention = _look_at_attention(config, settings.options, is_sparse=deployment.is_sparse)
    if outcome == "on":
        _check_decode(settings.options, attention)
    return Verdict(
        outcome=outcome,
        model=model,
        architecture=deployment.architecture,
        group_size=deployment.group_size,
        options=settings.options.model_dump(),
        worker=str(worker),
        attention_backend=attention.backend,
        decode_obstacle=attention.decode_obstacle,
        in_place_obstacle=attention.in_place_obstacle,
        messages=messages,
    )


def _check_decode(options: KVPPOptions, attention: _Attention) -> None:
    """Refuse as a start would."""
    if options.decode == "owner" and attention.decode_obstacle is not None:
        raise make_refusal(attention.decode_obstacle)
    if options.decode == "in_place" and attention.in_place_obstacle is not None:
        raise make_in_place_refusal(attention.in_place_obstacle)


def _look_at_attention(config: VllmConfig, options: KVPPOptions, *, is_sparse: bool) -> _Attention:
    model = config.model_config
    try:
        with set_current_vllm_config(config):
            backend = choose_backend(
                model.get_head_size(),
                str(model.dtype).removeprefix("torch."),
                config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                use_sparse=is_sparse,
            )
        return _Attention(
            str(backend.get_name()),
            _find_decode_obstacle(config, backend),
            _find_in_place_obstacle(config, options, backend),
        )
    except Exception as error:
        return _Attention(f"none ({describe_error(error)})")


def _find_decode_obstacle(config: VllmConfig, backend: Any) -> str | None:
    """As far as the backend says it; the layers, which only a start makes, may have obstacles of their own."""
    if config.parallel_config.prefill_context_parallel_size > 1:
        return DIFFERENT_TOKENS
    on_cpu = current_platform.device_type == "cpu"
    return find_backend_obstacle(backend, backend.get_impl_cls(), on_cpu=on_cpu)


def _find_in_place_obstacle(config: VllmConfig, options: KVPPOptions, backend: Any) -> str | None:
    """As far as it is known: whether ranks on CPUs can share memory, only a start finds out."""
    if current_platform.device_type != "cpu":
        return NOT_ON_DEVICES
    if options.transport == "broadcast":
        return f"{NO_SHARED_MEMORY}, as kvpp.transport is broadcast"
    if config.parallel_config.prefill_context_parallel_size > 1:
        return DIFFERENT_TOKENS
    return find_in_place_backend_obstacle(backend)


@contextmanager
def _collect_messages() -> Iterator[list[str]]:
    """What KVPP logs meanwhile."""
    messages: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    # A filter, not a handler: when vLLM configures its logging, it takes away the handlers of loggers below its own.
    logger = logging.getLogger(KVPP_LOGGER)
    logger.addFilter(note)
    try:
        yield messages
    finally:
        logger.removeFilter(note)
