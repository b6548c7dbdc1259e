"""Conversations of many turns, as coding agents have them: each turn repeats all that was said and adds to it."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from servers import REQUEST_TIMEOUT_SECONDS, VOCAB_SIZE

from vllm_kvpp.demo.client import MODEL_NAME

# The first ids of the recall model's tokenizer are special tokens.
FIRST_WORD_ID = 4


@dataclass(frozen=True)
class Sessions:
    """How many conversations there are and how they grow, in tokens.

    All are held at once: each sends its next turn as soon as it has its answer.
    """

    num_sessions: int
    num_turns: int
    first_prompt_tokens: int
    turn_prompt_tokens: int
    output_tokens: int

    @property
    def final_tokens(self) -> int:
        """Tokens of one conversation at its end."""
        added = (self.num_turns - 1) * self.turn_prompt_tokens + self.num_turns * self.output_tokens
        return self.first_prompt_tokens + added

    @property
    def total_tokens(self) -> int:
        """Tokens of all conversations at their end: what the KV cache has to hold to compute none of them twice."""
        return self.num_sessions * self.final_tokens


@dataclass(frozen=True)
class Turn:
    """One request of one conversation; `end_seconds` after the first request of all."""

    prompt_tokens: int
    output_tokens: int
    end_seconds: float


@dataclass(frozen=True)
class Served:
    """What was served, and how long it took."""

    seconds: float
    turns: tuple[Turn, ...]

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens, cached ones included, and output tokens a second."""
        return sum(turn.prompt_tokens + turn.output_tokens for turn in self.turns) / self.seconds


class Conversation:
    """One session's token ids, as they grow; equal seeds say equal things."""

    def __init__(self, sessions: Sessions, *, seed: str) -> None:
        self._sessions = sessions
        self._random = random.Random(seed)
        self._token_ids: list[int] = []

    async def take_turn(self, http: httpx.AsyncClient) -> tuple[int, int]:
        """Add to the prompt, ask, and keep the answer.

        Returns:
            The tokens of the prompt, and of the answer.
        """
        is_first = not self._token_ids
        num_new = self._sessions.first_prompt_tokens if is_first else self._sessions.turn_prompt_tokens
        self._token_ids += [self._random.randrange(FIRST_WORD_ID, VOCAB_SIZE) for _ in range(num_new)]
        request = {
            "model": MODEL_NAME,
            "prompt": self._token_ids,
            "max_tokens": self._sessions.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = await http.post("/v1/completions", json=request)
        answer = response.raise_for_status().json()["choices"][0]["token_ids"]
        num_prompt = len(self._token_ids)
        self._token_ids += answer
        return num_prompt, len(answer)


def _ignore_turn(_num_done: int) -> None:
    """Nobody listens."""


def serve_sessions(url: str, sessions: Sessions, *, seed: int, on_turn: Callable[[int], None] = _ignore_turn) -> Served:
    """Hold all conversations with a server, to their end; `on_turn` hears how many turns are done."""
    return asyncio.run(_serve_sessions(url, sessions, seed, on_turn))


async def _serve_sessions(url: str, sessions: Sessions, seed: int, on_turn: Callable[[int], None]) -> Served:
    turns: list[Turn] = []
    started = time.monotonic()

    async def hold(conversation: Conversation) -> None:
        for _ in range(sessions.num_turns):
            num_prompt, num_output = await conversation.take_turn(http)
            turns.append(Turn(num_prompt, num_output, end_seconds=time.monotonic() - started))
            on_turn(len(turns))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False, limits=limits) as http:
        conversations = [Conversation(sessions, seed=f"{seed} {index}") for index in range(sessions.num_sessions)]
        await asyncio.gather(*map(hold, conversations))
    return Served(seconds=time.monotonic() - started, turns=tuple(turns))
