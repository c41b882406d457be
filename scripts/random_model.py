"""A model of the size of one on the hub, with random weights: to measure time and memory without its files.

python scripts/random_model.py llama3_1_8b FOLDER
structkv-bench bench model=custom model.path=FOLDER model.dtype=bfloat16 method=full,snapkv length=8192,131072

Its layers are Llama's, its tokenizer is SmolLM2's. What it says is noise, and so is the layer that a method
finds by looking at attention: name that one (method.pivot=13), and read no scores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from structkv_bench import models
from structkv_bench.config import compose
from structkv_bench.cost.published import published
from structkv_bench.shape import ModelShape


def write(shape: ModelShape, dtype: str, tokenizer: Any, folder: Path) -> None:
    """Write a model folder: random weights of this shape, and this tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Write what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a config of conf/model/ for a model on the hub")
    parser.add_argument("folder", type=Path, help="where to")
    options = parser.parse_args()
    spec = compose([f"model={options.model}", "method=full"])[0].model
    shape = published(spec)
    if shape is None:
        parser.error(f"{options.model}: its size is not written down in cost/published.py")
    if options.folder.exists():
        parser.error(f"{options.folder}: is there already")
    embedded = compose(["model=smollm2_135m", "method=full"])[0].model
    write(shape, spec.dtype, models.inspect(embedded).prompts.tokenizer, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
