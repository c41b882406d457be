"""`structkv-bench run`, and how long it was busy with other things than the model. See bench.py.

The time that the process was started at stands in BENCH_STARTED (seconds, time.time). The last line on
stdout is JSON: seconds until the first prefill, within prefill and decode, and in all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

BEGAN = float(os.environ.get("BENCH_STARTED", time.time()))


def main() -> int:
    """Run what the arguments say."""
    from structkv_bench import batches, cli

    spent: dict[str, float] = {}
    first: list[float] = []

    def watched(name: str) -> Callable[..., Any]:
        inner = getattr(batches, name)

        def call(*arguments: Any, **more: Any) -> Any:
            started = time.time()
            first.append(started)
            try:
                return inner(*arguments, **more)
            finally:
                spent[name] = spent.get(name, 0.0) + time.time() - started

        return call

    for name in ("prefill", "ask", "decode_batch"):
        setattr(batches, name, watched(name))
    code = cli.main(["run", *sys.argv[1:]])
    told = {"to_first_prefill_s": first[0] - BEGAN if first else None, "in_model_s": sum(spent.values())}
    print(json.dumps(told | {"whole_s": time.time() - BEGAN}))
    return code


if __name__ == "__main__":
    sys.exit(main())
