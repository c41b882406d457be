"""What a method learns once per model: measured on prompts of our own, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from structkv_bench.paths import cache_folder, write_whole

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

PROMPTS = 5
PROMPT_TOKENS = 1500
_WHO = ("Anna", "Bruno", "Chen", "Dalia", "Edwin", "Farah", "Goran", "Hana", "Ivo", "Jun")
_DID = ("bought", "repaired", "painted", "lost", "found", "borrowed", "sold", "described", "measured")
_WHAT = ("ladders", "clocks", "maps", "kettles", "lanterns", "boats", "violins", "chairs", "letters")
_WHERE = ("harbour", "library", "station", "market", "workshop", "garden", "museum", "bakery")


def calibration_prompts(model: Model) -> list[list[int]]:
    """Prompts in no benchmark: a list of small events, and a question about one of them."""
    prompts = []
    for seed in range(PROMPTS):
        rng, events, tokens = random.Random(seed), [], 0
        while tokens < PROMPT_TOKENS:
            event = (
                f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.randint(2, 9999)} {rng.choice(_WHAT)} "
                f"at the {rng.choice(_WHERE)}."
            )
            events.append(event)
            tokens += len(model.prompts.encode(event))
        asked = rng.choice(events)
        question = f"Which sentence of the list begins with: {' '.join(asked.split()[:2])}"
        prompts.append(model.prompts.render("\n".join([*events, question]), ""))
    return prompts


def once_per_model(model: Model, what: str, prompts: list[list[int]], measure: Callable[[], int]) -> int:
    """The value of `measure()`, remembered for these weights, prompts and description of it."""
    key = hashlib.sha256(f"{model.fingerprint} {what} {prompts}".encode()).hexdigest()[:16]
    file = cache_folder() / "calibration" / f"{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: measured again
        return int(json.loads(file.read_text())["value"])
    value = measure()
    write_whole(file, json.dumps({"model": model.fingerprint, "what": what, "value": value}))
    return value
