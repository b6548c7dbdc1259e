"""Take `vllm serve` command lines through vLLM's own argument path, up to the finished configuration; load nothing.

Usage: serve_arguments.py IN OUT, both JSON: a list of {"arguments": [...], "pretend_graphs": bool}, and for each what
came of it: {"error": type name or null, "message": text, "worker_cls": name or null}.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser


def _configure(arguments: list[str]) -> Any:
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *arguments])
    args.model = args.model_tag
    return vllm.AsyncEngineArgs.from_cli_args(args).create_engine_config()


def _try(case: dict[str, Any]) -> dict[str, Any]:
    # A CPU has no graphs, so vLLM drops a graph mode before anyone can look at it; a platform with graphs keeps it.
    has_graphs = bool(case.get("pretend_graphs"))
    try:
        with patch.object(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: has_graphs)):
            config = _configure(case["arguments"])
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "worker_cls": None}
    return {"error": None, "message": "", "worker_cls": config.parallel_config.worker_cls}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([_try(case) for case in cases]))


if __name__ == "__main__":
    main()
