"""Run one `vllm.LLM` as told by a JSON file, and write what it answered to another. Usage: llm_script.py IN OUT."""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def _generate(llm: LLM, action: dict[str, Any]) -> list[dict[str, Any]]:
    prompts = action["prompts"]
    params = [
        SamplingParams(temperature=0, logprobs=4, ignore_eos=True, max_tokens=length, detokenize=False)
        for length in action["lengths"]
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [
        {
            "token_ids": list(output.outputs[0].token_ids),
            # float.hex keeps every bit.
            "logprobs": [
                {str(token): entry.logprob.hex() for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


def _run(llm: LLM, action: dict[str, Any]) -> Any:
    if action["kind"] == "generate":
        return _generate(llm, action)
    return llm.collective_rpc(action["method"], args=tuple(action.get("args", ())))


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**task["engine"])
    cache = llm.llm_engine.vllm_config.cache_config
    result = {
        "num_gpu_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "worker_cls": llm.llm_engine.vllm_config.parallel_config.worker_cls,
        "actions": [_run(llm, action) for action in task["actions"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
