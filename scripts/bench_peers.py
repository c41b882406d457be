"""How long a table's rows take here, and in NVIDIA's kvpress on the same machine.

    make bench-peers

The same model, prompts, methods and budgets, 32 tokens a row; ours, then theirs, on each prompt in turn.
kvpress needs an older transformers, so it has an environment of its own and answers through a pipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from bench_setup import Scale, loaded, method, over, spread, texts

from structkv_bench import models
from structkv_bench.bench.timing import timed
from structkv_bench.config import compose
from structkv_bench.paths import write_whole
from structkv_bench.provenance import provenance

OUT = Path("results/smollm2_135m/bench_peers.json")
PEER = Path(__file__).with_name("peer_kvpress.py")
METHODS = ("streaming_llm", "snapkv", "pyramidkv", "adakv", "h2o")
CELLS = {"full": method("full")} | {
    f"{name} {ratio}": method(name, kv_ratio=ratio) for name in METHODS for ratio in (0.1, 0.2)
}


class Peer:
    """A process that times the same prompts."""

    def __init__(self, python: str, folder: Path) -> None:
        command = [python, str(PEER), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def seconds(self, ids: list[int], new: int) -> dict[str, float]:
        """Of each cell on one prompt."""
        assert self._process.stdin is not None
        print(json.dumps({"ids": ids, "new": new}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{PEER.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measured(scale: Scale, python: str, tokens: int) -> dict[str, Any]:
    """Seconds of each cell alone, here and there, and of all cells as a table needs them."""
    spec = compose([*scale.overrides, "method=full"])[0].model
    peer, model = Peer(python, models.fetch(spec)), loaded(scale)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for ids in texts(model, scale, tokens, scale.repeats + 1):
        alone = {name: timed(model, [one], ids, scale.new_tokens).seconds for name, one in CELLS.items()}
        group = timed(model, list(CELLS.values()), ids, scale.new_tokens).seconds
        ours.append(alone | {"group": group})
        theirs.append(peer.seconds(ids, scale.new_tokens))
    ours, theirs = ours[1:], theirs[1:]  # the first warms up
    groups, sums = [one["group"] for one in ours], [sum(one.values()) for one in theirs]
    return {
        "definition": f"seconds from token ids to the last of {scale.new_tokens} tokens. kvpress runs cells "
        "one by one and is fed the last 8 tokens of the prompt after compression; its adakv masks entries "
        "and keeps them, its h2o needs eager attention",
        "peer": peer.about,
        "prompt_tokens": tokens,
        "repeats": scale.repeats,
        "cells": len(CELLS),
        "our_group_s": spread(groups),
        "their_cells_s": spread(sums),
        "times_as_fast": over(sums, groups),
        "each": {
            name: {
                "ours_s": spread(one[name] for one in ours),
                "theirs_s": spread(one[name] for one in theirs),
                "times_as_fast": over([one[name] for one in theirs], [one[name] for one in ours]),
            }
            for name in CELLS
        },
    }


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has kvpress")
    parser.add_argument("--repeats", type=int, default=2, help="of each figure, after one to warm up")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    session = {key: value for key, value in provenance().items() if key != "host"}
    found = measured(Scale(options.repeats), options.python, options.tokens)
    text = json.dumps(found | {"provenance": session}, indent=2)
    print(text)
    write_whole(options.out, text + "\n")


if __name__ == "__main__":
    main()
