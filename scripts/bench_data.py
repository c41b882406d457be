"""How fast RULER's tight fit is, beside a bisection that counts the whole text at each probe.

    make bench

The tasks that need no download, 100 samples each at 4,096 tokens, CPU seconds of one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from structkv_bench import models
from structkv_bench.config import compose
from structkv_bench.provenance import provenance
from structkv_bench.tasks.ruler import Ruler, fit

SAMPLES, LENGTH = 100, 4096
OUT = Path("results/smollm2_135m/bench_data.json")


def bisected(draw: Callable[[int], Any], room: Any, line: Any) -> Any:
    """In place of fit._filled: the largest draft that fits, by bisection alone, in upstream's bracket."""
    fits, too_long, best = line.least - 1, 3 * line.size(room.length), None
    while too_long - fits > 1:
        size = (fits + too_long) // 2
        draft = draw(size)
        if room.spare(draft) < 0:
            too_long = size
        else:
            fits, best = size, draft
    return best


def seconds(ruler: Any, prompts: Any) -> dict[str, float]:
    """CPU seconds per subtask."""
    found = {}
    for subtask in ruler.subtasks():
        started = time.process_time()
        ruler.build(subtask, LENGTH, prompts)
        found[subtask] = round(time.process_time() - started, 2)
    return found


def main() -> None:
    """Measure, print and store."""
    whole = Ruler(lengths=[LENGTH], samples=SAMPLES, fit="tight")
    subset = [name for name in whole.subtasks() if name not in whole.unavailable() and name[:2] != "qa"]
    ruler = Ruler(lengths=[LENGTH], samples=SAMPLES, subset=subset, fit="tight")
    prompts = models.inspect(compose(["method=full"])[0].model).prompts
    tight = seconds(ruler, prompts)
    fit._filled = bisected
    naive = seconds(ruler, prompts)
    ratio = round(sum(naive.values()) / sum(tight.values()), 1)
    measured = {"tight": tight, "whole text at each probe": naive, "times as fast": ratio}
    session = {key: value for key, value in provenance("cpu").items() if key != "host"}
    text = json.dumps(measured | {"provenance": session}, indent=2)
    print(text)
    OUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
