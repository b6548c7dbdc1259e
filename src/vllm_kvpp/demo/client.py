"""Questions to a vLLM server over HTTP, answers checked for shape."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from vllm_kvpp.demo.errors import DemoError

MODEL_NAME = "recall"
PROBE_SECONDS = 2.0
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\} 1(?:\.0)?$", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """One generation: its text, and for each token its id and log probability."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class CacheSize:
    """The KV cache as the engine sees it."""

    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.block_size


class ServerClient:
    """One server; every call takes at most `timeout_seconds`.

    Calls raise `httpx.HTTPError` when the server fails, and `DemoError` when it answers something unexpected.
    """

    def __init__(self, base_url: str, *, timeout_seconds: float) -> None:
        self._base_url = base_url
        self._timeout_seconds = timeout_seconds

    def is_ready(self) -> bool:
        """Whether the server is up and serves the demo's model."""
        try:
            with self._open(PROBE_SECONDS) as http:
                health, models = http.get("/health"), http.get("/v1/models")
        except httpx.HTTPError:
            return False
        return health.is_success and models.is_success and MODEL_NAME in models.text

    def ask(self, prompts: Sequence[str], *, num_tokens: int) -> tuple[Answer, ...]:
        """Ask all prompts at once, each in a request of its own; answers come in the order of the prompts."""
        return asyncio.run(self._ask_all(prompts, num_tokens))

    def call_workers(self, method: str, *, num_workers: int) -> tuple[Any, ...]:
        """Call `method` on every worker, by rank."""
        with self._open(self._timeout_seconds) as http:
            response = http.post("/collective_rpc", json={"method": method})
        results = _decode(response).get("results")
        if not isinstance(results, list) or len(results) != num_workers:
            raise DemoError(f"{method} should answer once for each of {num_workers} workers, but answered {results!r}.")
        return tuple(results)

    def read_cache_size(self) -> CacheSize:
        """Read the size of the KV cache from the server's metrics."""
        with self._open(self._timeout_seconds) as http:
            response = http.get("/metrics")
        return parse_cache_size(response.raise_for_status().text)

    def _open(self, timeout_seconds: float) -> httpx.Client:
        # trust_env: a proxy of the environment must not come between us and our own machine.
        return httpx.Client(base_url=self._base_url, timeout=timeout_seconds, trust_env=False)

    async def _ask_all(self, prompts: Sequence[str], num_tokens: int) -> tuple[Answer, ...]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._base_url, timeout=self._timeout_seconds, trust_env=False, limits=limits
        ) as http:
            requests = [
                http.post("/v1/completions", json=make_request(prompt, num_tokens=num_tokens)) for prompt in prompts
            ]
            responses = await asyncio.gather(*requests)
        return tuple(parse_answer(_decode(response), num_tokens=num_tokens) for response in responses)


def make_request(prompt: str, *, num_tokens: int) -> dict[str, Any]:
    """Write the body of a completion request: greedy, of fixed length, with token ids and log probabilities."""
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }


def parse_answer(body: dict[str, Any], *, num_tokens: int) -> Answer:
    """Read the one generation of a completion response.

    Raises:
        DemoError: it lacks a part, or has another length than was asked for.
    """
    try:
        (choice,) = body["choices"]
        answer = Answer(
            text=choice["text"],
            token_ids=tuple(int(token_id) for token_id in choice["token_ids"]),
            logprobs=tuple(float(logprob) for logprob in choice["logprobs"]["token_logprobs"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DemoError(f"The server's answer has an unexpected form ({error!r}): {str(body)[:500]}") from error
    if not len(answer.token_ids) == len(answer.logprobs) == num_tokens:
        raise DemoError(
            f"The server should generate {num_tokens} tokens, but sent {len(answer.token_ids)} token ids and "
            f"{len(answer.logprobs)} log probabilities."
        )
    return answer


def parse_cache_size(metrics: str) -> CacheSize:
    """Find the one `vllm:cache_config_info` line of a server with one engine.

    Raises:
        DemoError: there is none or more than one, or it lacks a number.
    """
    lines = [found.group("labels") for found in _CACHE_INFO.finditer(metrics)]
    if len(lines) != 1:
        raise DemoError(f"The server's metrics should have one vllm:cache_config_info line, but have {len(lines)}.")
    return CacheSize(num_blocks=_read_label(lines[0], "num_gpu_blocks"), block_size=_read_label(lines[0], "block_size"))


def _read_label(labels: str, name: str) -> int:
    found = re.search(rf'(?:^|,){name}="(\d+)"', labels)
    if found is None:
        raise DemoError(f"The server's vllm:cache_config_info has no number for {name}.")
    return int(found.group(1))


def _decode(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.request.url} answered {response.status_code}: {response.text[:500]}",
            request=response.request,
            response=response,
        )
    try:
        body = response.json()
    except ValueError as error:
        raise DemoError(f"{response.request.url} did not answer JSON: {response.text[:500]}") from error
    if not isinstance(body, dict):
        raise DemoError(f"{response.request.url} should answer an object, but answered {str(body)[:500]}")
    return body
