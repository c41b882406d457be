"""Sizes of the models that conf/model/ names on the hub, for estimates where their own config is not here.

As the config.json of each repository has them, written down where no hub could be reached; a test holds
them to the parameter counts of the model cards. A run never reads them: it takes what the model says.
"""

from __future__ import annotations

from structkv_bench.model_spec import ModelSpec
from structkv_bench.shape import BYTES, ModelShape

_SIZES = {
    "meta-llama/Llama-3.1-8B-Instruct": (32, 32, 8, 128, 4096, 14336, 128256, 131072),
    "mistralai/Ministral-8B-Instruct-2410": (36, 32, 8, 128, 4096, 12288, 131072, 32768),
    "Qwen/Qwen2.5-7B-Instruct": (28, 28, 4, 128, 3584, 18944, 152064, 32768),
    "Qwen/Qwen2.5-14B-Instruct": (48, 40, 8, 128, 5120, 13824, 152064, 32768),
    "Qwen/Qwen2.5-32B-Instruct": (64, 40, 8, 128, 5120, 27648, 152064, 32768),
}
"""Layers, heads, KV heads, head size, hidden and intermediate size, vocabulary, positions; none is tied."""


def published(spec: ModelSpec) -> ModelShape | None:
    """The shape of a model by its hub id; None: it is not one of these."""
    if spec.path not in _SIZES:
        return None
    layers, heads, kv_heads, head_dim, hidden, intermediate, vocabulary, positions = _SIZES[spec.path]
    return ModelShape(
        layers,
        heads,
        kv_heads,
        head_dim,
        hidden,
        intermediate,
        vocabulary,
        max_positions=spec.max_positions or positions,
        itemsize=BYTES[spec.dtype],
    )
