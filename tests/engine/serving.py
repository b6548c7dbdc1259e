"""Drive an engine step by step, so that arrivals, chunks and aborts fall into the same steps in every run."""

from typing import Any

from vllm import LLM, SamplingParams


class SteppedServing:
    """Requests that arrive and are aborted at given steps, and what the scheduler made of them.

    Needs `VLLM_ENABLE_V1_MULTIPROCESSING=0`, with which the scheduler lives in this process.
    """

    def __init__(self, llm: LLM, action: dict[str, Any]) -> None:
        self._engine = llm.llm_engine
        self._requests = {f"{action['name']}-{index}": request for index, request in enumerate(action["requests"])}
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._chunk_size = action.get("chunk_size")
        self._schedule: list[dict[str, int]] = []
        self._num_preemptions = 0
        self._answers: dict[str, dict[str, Any]] = {}

    def run(self) -> dict[str, Any]:
        """Run to the end of all requests."""
        original, usual_chunk_size = self._scheduler.schedule, self._scheduler.max_num_scheduled_tokens
        self._scheduler.schedule = self._record(original)
        self._scheduler.max_num_scheduled_tokens = self._chunk_size or usual_chunk_size
        try:
            self._run_steps()
        finally:
            self._scheduler.schedule = original
            self._scheduler.max_num_scheduled_tokens = usual_chunk_size
        return {
            "answers": [self._answers.get(request_id) for request_id in self._requests],
            "schedule": self._schedule,
            "num_preemptions": self._num_preemptions,
        }

    def _record(self, schedule: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            # vLLM appends a random part to each id.
            scheduled = output.num_scheduled_tokens.items()
            self._schedule.append({request_id.rpartition("-")[0]: count for request_id, count in scheduled})
            self._num_preemptions += len(output.preempted_req_ids or ())
            return output

        return recorded

    def _run_steps(self) -> None:
        step = 0
        while self._is_any_left(step):
            for request_id, request in self._requests.items():
                if request.get("arrives", 0) == step:
                    self._add(request_id, request)
                if request.get("aborts") == step:
                    self._engine.abort_request([request_id])
            for output in self._engine.step():
                self._answers[output.request_id] = describe_answer(output)
            step += 1

    def _is_any_left(self, step: int) -> bool:
        is_any_to_come = any(request.get("arrives", 0) >= step for request in self._requests.values())
        return is_any_to_come or self._engine.has_unfinished_requests()

    def _add(self, request_id: str, request: dict[str, Any]) -> None:
        params = make_sampling_params(request["max_tokens"])
        self._engine.add_request(request_id, {"prompt_token_ids": request["prompt"]}, params)


def make_sampling_params(max_tokens: int) -> SamplingParams:
    """Greedy, with the logprobs that runs are compared by."""
    return SamplingParams(temperature=0, logprobs=4, ignore_eos=True, max_tokens=max_tokens, detokenize=False)


def describe_answer(output: Any) -> dict[str, Any]:
    """Token ids, logprobs and prefix hits of one request; `float.hex` keeps every bit."""
    completion = output.outputs[0]
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [
            {str(token): entry.logprob.hex() for token, entry in position.items()} for position in completion.logprobs
        ],
        "num_cached_tokens": output.num_cached_tokens,
    }
