"""Cache marks: fixed weights that make the answers depend on the cache of every layer.

A trained model leaves most layers spare: their cache can be lost and the answers stay right, so it says nothing about
the transfer of those layers. Here each layer also reads a mark from its cache. Hidden entry `mark(l)` starts at -1 in
the embedding of every token. Each latent row that layer `l` caches holds a constant in latent entry `l`, every head
passes it on as its last value, and the average over the heads adds 1 to `mark(l)`: attention weights sum to one, so
what a token attends to makes no difference. Rows that are zero, or that another layer wrote, hold no mark, the sum
stays below zero, and the output layer turns that into the word `NOWHERE`.

Only what `impose_marks` sets is fixed; all other weights are trained around it.
"""

import math

import torch
from model import Attention, RecallModel, RecallShape
from torch import nn
from vocabulary import TOKEN_ID

from vllm_kvpp.demo.recall_task import NOWHERE

CONSTANT = 2.0
"""Last hidden entry of every token; no layer writes there."""

LATENT_GAIN = 512.0
"""Makes the mark by far the largest latent entry, so that the norm of the latent turns it into sqrt(kv_lora_rank)."""

ALARM = 256.0
"""Logit of `NOWHERE` for each unit of missing mark, before the final norm."""


def initialise_latent_norms(model: RecallModel) -> None:
    """Scale the latent entries that are no marks back to the size they would have without one."""
    scale = LATENT_GAIN * CONSTANT / math.sqrt(model.shape.kv_lora_rank)
    for layer in model.model.layers:
        nn.init.constant_(layer.self_attn.kv_a_layernorm.weight, scale)


@torch.no_grad()
def impose_marks(model: RecallModel) -> None:
    """Set the fixed weights in place; to be called after every change of the weights."""
    shape, marks = model.shape, mark_entries(model.shape)
    constant = shape.hidden_size - 1
    model.model.embed_tokens.weight[:, constant] = CONSTANT
    model.model.embed_tokens.weight[:, marks] = -1.0
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.weight[constant] = 1.0
        layer.mlp.down_proj.weight[marks.start :] = 0.0
        _impose_on_attention(layer.self_attn, index, marks)
    model.model.norm.weight[marks] = 1.0
    model.lm_head.weight[:, marks] = 0.0
    model.lm_head.weight[TOKEN_ID[NOWHERE], marks] = -ALARM


def mark_entries(shape: RecallShape) -> slice:
    """Return the hidden entries of the marks, one a layer, which lie before the constant."""
    return slice(shape.hidden_size - 1 - shape.num_layers, shape.hidden_size - 1)


def _impose_on_attention(attention: Attention, layer: int, marks: slice) -> None:
    shape = attention.shape
    down, up, out = attention.kv_a_proj_with_mqa.weight, attention.kv_b_proj.weight, attention.o_proj.weight
    down[: shape.num_layers] = 0.0
    down[layer, shape.hidden_size - 1] = LATENT_GAIN
    attention.kv_a_layernorm.weight[: shape.num_layers] = 1.0
    last_value = slice(shape.qk_nope_head_dim + shape.v_head_dim - 1, None, shape.qk_nope_head_dim + shape.v_head_dim)
    up[:, : shape.num_layers] = 0.0
    up[last_value] = 0.0
    up[last_value, layer] = 1.0 / math.sqrt(shape.kv_lora_rank)
    last_output = slice(shape.v_head_dim - 1, None, shape.v_head_dim)
    out[:, last_output] = 0.0
    out[marks.start :] = 0.0
    out[marks.start + layer, last_output] = 1.0 / shape.num_heads
