"""Whole sparse models in transformers, with an indexer that reads its keys and queries as the cache keeps them."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa


class WholeModel:
    """One checkpoint, computed without a cache: every token in one forward, each layer over the whole sequence."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._indexers = [layer.self_attn.indexer for layer in self._model.model.layers if layer.self_attn.indexer]

    def round_keys_and_queries(self) -> "WholeModel":
        """Choose by float8 keys and queries; transformers leaves them as they are."""
        for indexer in self._indexers:
            indexer.forward = MethodType(_choose, indexer)
        return self

    def attend_to_everything(self) -> "WholeModel":
        """Choose all earlier tokens."""
        for indexer in self._indexers:
            indexer.index_topk = self._model.config.max_position_embeddings
        return self

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities where each token of the answer was sampled: `[len(answer), vocab_size]`."""
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.no_grad():
            logits = self._model(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
        return logits.double().log_softmax(dim=-1)


def _choose(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *unused: object,
    **options: object,
) -> torch.Tensor:
    num_tokens = hidden_states.shape[1]
    query = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
    query, key = _rotate(indexer, query, key, position_embeddings)
    query, key = _round(query[0]), _round(key[0, :, 0])
    weights = indexer.weights_proj(hidden_states)[0].double()
    chosen = torch.zeros(1, num_tokens, min(indexer.index_topk, num_tokens), dtype=torch.long)
    for token in range(num_tokens):
        products = (query[token] @ key[: token + 1].T).clamp(min=0)
        scores = (weights[token] @ products).tolist()
        best = sorted(range(token + 1), key=lambda earlier: (-scores[earlier], earlier))[: chosen.shape[-1]]
        # transformers wants a full row; it makes a set of it.
        chosen[0, token] = torch.tensor(best + best[:1] * (chosen.shape[-1] - len(best)))
    return chosen


def _rotate(indexer: Any, query: torch.Tensor, key: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    is_interleaved = isinstance(indexer, modeling_glm_moe_dsa.GlmMoeDsaIndexer)
    rotate = (
        modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave
        if is_interleaved
        else modeling_deepseek_v32.apply_rotary_pos_emb
    )
    width = indexer.qk_rope_head_dim
    turned = rotate(query[..., :width], key[..., :width], *angles, unsqueeze_dim=2)
    return torch.cat((turned[0], query[..., width:]), dim=-1), torch.cat((turned[1], key[..., width:]), dim=-1)


def _round(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = largest.apply_(lambda value: 2.0 ** math.ceil(math.log2(value / 448)))
    return (x / scale).to(torch.float8_e4m3fn).double() * scale.double()
