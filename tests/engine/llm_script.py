"""Run one `vllm.LLM` as told by a JSON file, and write what it answered to another. Usage: llm_script.py IN OUT."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from serving import SteppedServing, describe_answer, make_sampling_params
from vllm import LLM


def _generate(llm: LLM, action: dict[str, Any]) -> list[dict[str, Any]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in action["prompts"]]
    params = [make_sampling_params(length) for length in action["lengths"]]
    return [describe_answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def _read_metrics(llm: LLM) -> dict[str, Any]:
    return {metric.name: getattr(metric, "value", getattr(metric, "values", None)) for metric in llm.get_metrics()}


def _run(llm: LLM, action: dict[str, Any]) -> Any:
    if action["kind"] == "generate":
        return _generate(llm, action)
    if action["kind"] == "serve":
        return SteppedServing(llm, action).run()
    if action["kind"] == "metrics":
        return _read_metrics(llm)
    if action["kind"] == "forget prefixes":
        return llm.reset_prefix_cache()
    return llm.collective_rpc(action["method"], args=tuple(action.get("args", ())))


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**task["engine"])
    config = llm.llm_engine.vllm_config
    result = {
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "worker_cls": config.parallel_config.worker_cls,
        "actions": [_run(llm, action) for action in task["actions"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    # Not by the usual way out, on which vLLM waits some seconds for each worker.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
