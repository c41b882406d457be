"""Tiny random models of the families we drive, with a byte tokenizer: real classes, no download."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from structkv_bench.engine.batch import Batch
from structkv_bench.engine.decode import decode
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled, prefill
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.selfcheck import checked
from structkv_bench.shape import ModelShape

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES, vocab_size=259),
    "mistral": MistralConfig(**SIZES, vocab_size=259, sliding_window=24),
    "qwen2": Qwen2Config(**SIZES, vocab_size=259),
    "qwen3": Qwen3Config(**SIZES, vocab_size=259),
}


@dataclass
class Tiny:
    """A model in our engine, and the stock module with the same weights."""

    model: Model
    stock: Any

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 259, (tokens,), generator=generator).tolist()

    def prefill(self, ids: list[int], *methods: Method) -> list[Prefilled]:
        rows = prefill(self.model, ids, [method.compressor(len(ids), 4) for method in methods])
        for row in rows:
            assert row.error is None, row.error
        return rows

    def generate(self, ids: list[int], *methods: Method, new: int = 8) -> list[list[int]]:
        return [row.ids for row in decode(self.model, self.prefill(ids, *methods), new)]

    def next_logits(self, row: Prefilled, token: int) -> torch.Tensor:
        """fp32 logits after one more token on the row's cache, which is used up."""
        with torch.inference_mode():
            return Batch(self.model, [row], room=1).forward(torch.tensor([[token]]))[0]


def tokenizer(template: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens; ids 0 to 2 are <bos>, <eos> and <turn>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<bos>", "<eos>", "<turn>", *alphabet])}
    bytes_ = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    if bos:
        from tokenizers.processors import TemplateProcessing

        bytes_.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bytes_, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=["<turn>"]
    )
    fast.chat_template = template
    return fast


def tiny(family: str = "llama", seed: int = 0, layers: int = 4) -> Tiny:
    """A random model whose attention is far from uniform."""
    config = copy.deepcopy(FAMILIES[family])
    config.num_hidden_layers = layers
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:1] * layers
    torch.manual_seed(seed)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in stock.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3 if "q_proj" in name or "k_proj" in name else 0.15)
    own = copy.deepcopy(stock)
    own.set_attn_implementation("sdpa")
    shape = ModelShape.of(config, "float32", None)
    return Tiny(checked(own, TokenizerPrompts(tokenizer()), shape), stock)


def save_tiny(folder: Path, layers: int = 4) -> Path:
    """A tiny Llama on disk, as a user's local model folder."""
    tiny(layers=layers).stock.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
