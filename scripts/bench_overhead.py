"""`structkv-bench run`, and where its time went. See bench.py.

The time that the process was started at stands in BENCH_STARTED (seconds, time.time). The last line on
stdout is JSON: seconds of each phase, until the first prefill and in all. A phase that begins within another
one stops its clock, so that the phases add up to the whole.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from typing import Any

IMPORTING: Any = sys.modules["_frozen_importlib"]
BEGAN = float(os.environ.get("BENCH_STARTED", time.time()))
WATCHED = {
    "config": {"compose": "settings"},
    "plan": {"plan": "settings"},
    "samples": {"prompts_of": "prompts"},
    "models": {"inspect": "tokenizer", "load": "weights", "checked": "self-check"},
    "provenance": {"provenance": "provenance"},
    "batches": {"prefill": "prefill", "ask": "decode", "decode_batch": "decode", "run_batch": "scoring"},
    "store": {"CellStore.begin": "writing", "CellStore.append": "writing"},
    "report.command": {"say_results": "table"},
}
"""Functions of a run, by their module, and the phase that each is."""


class Clock:
    """Seconds of each phase, and which of them is running."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.at_first_prefill: dict[str, float] = {}
        self._running = ["python"]
        self._since = BEGAN

    def turn(self, phase: str) -> None:
        """From now on it is this phase's time."""
        now = time.time()
        self.seconds[self._running[-1]] += now - self._since
        if phase == "prefill" and not self.at_first_prefill:
            self.at_first_prefill = dict(self.seconds)
        self._running.append(phase)
        self._since = now

    def back(self) -> None:
        """From now on it is again the time of the phase before."""
        now = time.time()
        self.seconds[self._running.pop()] += now - self._since
        self._since = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count calls of owner's function as this phase."""
        first, _, more = name.partition(".")
        inner = getattr(owner, first)
        if more:
            self.watch(inner, more, phase)
            return

        def call(*arguments: Any, **named: Any) -> Any:
            self.turn(phase)
            try:
                return inner(*arguments, **named)
            finally:
                self.back()

        setattr(owner, name, call)

    def watch_imports(self) -> None:
        """Count imports of what is not in memory yet, and watch each module of the run as soon as it is."""
        self.watch(IMPORTING, "_find_and_load", "imports")
        find = IMPORTING._find_and_load

        def call(name: str, *more: Any) -> Any:
            module = find(name, *more)
            for function, phase in WATCHED.get(name.partition("structkv_bench.")[2], {}).items():
                self.watch(sys.modules[name], function, phase)
            return module

        IMPORTING._find_and_load = call


def main() -> int:
    """Run what the arguments say."""
    clock = Clock()
    clock.turn("rest")
    clock.watch_imports()
    from structkv_bench import cli

    code = cli.main(["run", *sys.argv[1:]])
    clock.back()
    print(json.dumps({"to_first_prefill": clock.at_first_prefill, "whole": clock.seconds}))
    return code


if __name__ == "__main__":
    sys.exit(main())
