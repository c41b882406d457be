"""A naive Llama forward, with any key hidden from any query, per layer and head: slow and obvious."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal(tokens: int) -> Tensor:
    """bool [tokens, tokens]: query t sees keys up to t."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@torch.no_grad()
def forward(stock: Any, ids: list[int], visible: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits [tokens, vocabulary] and attention [heads, tokens, tokens] per layer, in fp64.

    `visible` holds per layer a bool mask that broadcasts to [heads, tokens, tokens].
    """
    model, config = stock.model, stock.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden = model.embed_tokens(torch.tensor(ids))
    cos, sin = (part[0] for part in model.rotary_emb(hidden[None], torch.arange(len(ids))[None]))
    attentions = []
    for layer, mask in zip(model.layers, visible, strict=True):
        normed = layer.input_layernorm(hidden)
        q, k, v = (
            project(normed).view(len(ids), -1, dim).transpose(0, 1)
            for project in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = k.repeat_interleave(heads // kv_heads, 0), v.repeat_interleave(heads // kv_heads, 0)
        logits = (q.double() @ k.double().transpose(1, 2)) * dim**-0.5
        attention = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        mixed = (attention @ v.double()).float().transpose(0, 1).reshape(len(ids), -1)
        hidden = hidden + layer.self_attn.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        attentions.append(attention)
    return stock.lm_head(model.norm(hidden)), attentions


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
