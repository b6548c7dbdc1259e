"""The vLLM symbols that only `vllm-kvpp doctor` touches: one that is missing stops the doctor, and no server."""

from vllm_kvpp.vllm_seam.symbols import SeamSymbol, describe_table

ITS_OWN_CLI = "Never: it is how vLLM reads a command line."

DOCTOR_SYMBOLS: tuple[SeamSymbol, ...] = (
    SeamSymbol(
        path="vllm.plugins:load_general_plugins",
        because="Loads plugins as a server does, so that it shows whether KVPP's is loaded.",
        removable_when="Never: it is how vLLM loads plugins.",
    ),
    SeamSymbol(
        path="vllm.platforms:current_platform.device_type",
        because="Names the platform.",
        removable_when="Never: it describes the platform.",
    ),
    SeamSymbol(
        path="vllm.utils.argparse_utils:FlexibleArgumentParser",
        because="Reads a command line as `vllm serve` does.",
        removable_when=ITS_OWN_CLI,
    ),
    SeamSymbol(
        path="vllm.entrypoints.cli.serve:ServeSubcommand.subparser_init",
        because="Knows every option of `vllm serve`.",
        removable_when=ITS_OWN_CLI,
        parameters=("subparsers",),
    ),
    SeamSymbol(
        path="vllm.entrypoints.cli.serve:ServeSubcommand.validate",
        because="The checks that `vllm serve` makes before anything else.",
        removable_when=ITS_OWN_CLI,
        parameters=("args",),
    ),
    SeamSymbol(
        path="vllm.entrypoints.cli.serve:ServeSubcommand.cmd",
        because="Takes the model from the positional argument where there is one, as the doctor does.",
        removable_when=ITS_OWN_CLI,
        source_order=("args.model = args.model_tag",),
    ),
    SeamSymbol(
        path="vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args",
        because="Makes engine arguments of parsed ones.",
        removable_when=ITS_OWN_CLI,
        parameters=("args",),
    ),
    SeamSymbol(
        path="vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config",
        because="Builds the configuration, and with it runs the hook that validates KVPP.",
        removable_when=ITS_OWN_CLI,
        parameters=("usage_context", "headless"),
    ),
    SeamSymbol(
        path="vllm.usage.usage_lib:UsageContext.OPENAI_API_SERVER",
        because="Some defaults of the configuration depend on who builds it.",
        removable_when=ITS_OWN_CLI,
    ),
    SeamSymbol(
        path="vllm.config:set_current_vllm_config",
        because="The choice of an attention backend asks for the current configuration.",
        removable_when="The choice takes the configuration as an argument.",
    ),
    SeamSymbol(
        path="vllm.v1.attention.selector:get_attn_backend",
        because="Names the attention backend that a model's layers get.",
        removable_when="The configuration names it.",
        parameters=("head_size", "dtype", "kv_cache_dtype", "use_mla", "use_sparse"),
    ),
    SeamSymbol(
        path="vllm.v1.attention.backend:AttentionBackend.get_impl_cls",
        because="Has the class that may declare to attend all heads at once.",
        removable_when="Backends say by themselves whether they take the head count from the query.",
    ),
    SeamSymbol(
        path="vllm.config:ModelConfig.get_head_size",
        because="What the choice of an attention backend depends on.",
        removable_when="The configuration names the backend.",
    ),
)


def describe_doctor_table() -> str:
    """The second table of `docs/vllm-seam.md`, as Markdown."""
    return describe_table(DOCTOR_SYMBOLS)
