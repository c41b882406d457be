"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): early layers hold more, late ones less.

    b = C - w,  min = b // beta,  max = 2 b - min          C a layer's mean budget, w the window inside it
    layer l holds max - l (max - min) // (L - 1) + w   where max stops at the N - w there are: min = 2 b - max

The last layer's step is rounded down, so that in all a bit more than L C is held; the rows tell it.
"""

from __future__ import annotations

READINGS = ("pyramidkv", "pyramidkv_adakv", "pyramidkv_kvpress")
"""The authors' code (KVCache-Factory); as AdaKV's repository reads it; as kvpress does."""


def layer_budgets(
    reading: str, entries: float, window: int, tokens: int, layers: int, beta: int = 20
) -> list[int]:
    """Entries of each layer per head, window included.

    Args:
        reading: one of READINGS. AdaKV's has no exception for short prompts (and its own code, which
            this does not follow, takes the first prompt's sizes for all later ones). kvpress's takes the
            window for a part of the sloping budget, in fractions that are rounded at the end.
        entries: C, the mean over the layers; kvpress's is not rounded.
        window: w
        tokens: N
        layers: L
        beta: how steep.
    """
    if tokens <= entries:
        return [tokens] * layers
    if reading == "pyramidkv_kvpress":
        return _in_fractions(entries, window, tokens, layers, beta)
    before = int(entries) - window
    if reading == "pyramidkv" and tokens < 2 * before:
        return [int(entries)] * layers
    least = before // beta
    most = min(2 * before - least, tokens - window)
    step = (most - (2 * before - most)) // max(layers - 1, 1)
    return [most - layer * step + window for layer in range(layers)]


def _in_fractions(entries: float, window: int, tokens: int, layers: int, beta: int) -> list[int]:
    most = min(2 * entries - entries / beta, tokens - window)
    least = 2 * entries - most
    if not tokens >= most >= least >= window:
        return [round(entries)] * layers
    return [round(most - layer * (most - least) / max(layers - 1, 1)) for layer in range(layers)]
