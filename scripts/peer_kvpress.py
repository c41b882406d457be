"""NVIDIA's kvpress on prompts that come in on stdin, in an environment of its own. See bench_peers.py.

Each line is JSON: the prompt's token ids, and how many tokens to generate. Each is answered by a line of
JSON: seconds of every press, from token ids to the last token, through kvpress's own pipeline.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    KVPressTextGenerationPipeline,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = 8
"""Tokens at the end that kvpress is fed after compression: it takes its first logits from them."""
RATIOS = (0.1, 0.2)
"""Of the entries that are kept."""
PRESSES: dict[str, Any] = {
    "streaming_llm": lambda cut: StreamingLLMPress(cut),
    "snapkv": lambda cut: SnapKVPress(cut),
    "pyramidkv": lambda cut: PyramidKVPress(cut),
    "adakv": lambda cut: AdaKVPress(SnapKVPress(cut)),
    "h2o": lambda cut: ObservedAttentionPress(cut),
}


def main() -> None:
    """Answer until stdin ends."""
    folder = sys.argv[1]
    usual, eager = _pipeline(folder, "sdpa"), _pipeline(folder, "eager")
    cells: dict[str, tuple[Any, Any]] = {"full": (usual, None)}
    for name, press in PRESSES.items():
        for ratio in RATIOS:  # h2o needs the attention matrix, which only the eager form returns
            cells[f"{name} {ratio}"] = (eager if name == "h2o" else usual, press(1 - ratio))
    about = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    print(json.dumps(about | {"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({name: _seconds(*cell, **asked) for name, cell in cells.items()}), flush=True)


def _pipeline(folder: str, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = [-1]  # no token ends an answer before
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return KVPressTextGenerationPipeline(model=model.eval(), tokenizer=tokenizer)


def _seconds(pipeline: Any, press: Any, ids: list[int], new: int) -> float:
    prompt = torch.tensor([ids])
    given = {"context_ids": prompt[:, :-QUESTION], "questions_ids": [prompt[:, -QUESTION:]]}
    started = time.perf_counter()
    with torch.inference_mode():
        pipeline._forward(given, max_new_tokens=new, press=press)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
