"""The sizes of a model, and from them the bytes and the work of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """What a transformers config says of a Llama-like model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_positions: int
    itemsize: int
    """Bytes of one number in weights and cache."""
    tied: bool = False
    """Whether the output head is the embedding itself."""

    @classmethod
    def of(cls, config: Any, dtype: str, max_positions: int | None) -> ModelShape:
        """From a transformers config; `max_positions` overrides what it says."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            max_positions=max_positions or config.max_position_embeddings,
            itemsize=BYTES[dtype],
            tied=bool(getattr(config, "tie_word_embeddings", False)),
        )

    @property
    def projection_weights(self) -> int:
        """Numbers in one layer's projections to q, k, v and back."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Numbers in one layer's gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Numbers in the output head."""
        return self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; without biases, which are less than a thousandth."""
        norms = self.hidden * (2 * self.layers + 1)
        ends = self.head_weights * (1 if self.tied else 2)
        return (self.layers * (self.projection_weights + self.mlp_weights) + norms + ends) * self.itemsize

    def kv_bytes(self, entries_per_layer: Sequence[int]) -> int:
        """Bytes of K and V with so many entries per KV head in each layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize * sum(entries_per_layer)

    def prefill_flops(self, tokens_per_layer: Sequence[int]) -> int:
        """Multiplications and additions of a prompt whose layers process so many tokens each."""
        return sum(tokens * self._layer_weights * 2 + self._causal(tokens) for tokens in tokens_per_layer)

    def decode_flops(self, entries_per_layer: Sequence[int]) -> int:
        """The same for one decoded token over so many entries in each layer."""
        attention = sum(4 * self.heads * self.head_dim * entries for entries in entries_per_layer)
        return 2 * (self.layers * self._layer_weights + self.head_weights) + attention

    @property
    def _layer_weights(self) -> int:
        return self.projection_weights + self.mlp_weights

    def _causal(self, tokens: int) -> int:
        """Scores and weighted values of the lower triangle."""
        return 4 * self.heads * self.head_dim * tokens * (tokens + 1) // 2
