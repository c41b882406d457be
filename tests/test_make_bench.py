"""The scripts of `make bench` and `make bench-peers`, on a tiny model: what they say. No time is judged."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find one another."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("ten_cells", {"group_over_full (at most 1.6)", "times_as_fast_as_one_by_one (at least 5)"}),
        ("structkv_prefill", {"4096", "8000"}),
        ("stock", {"whole_over_stock (at most 1.02)", "decode_over_stock (at most 1)"}),
        ("decode_batch", {"times_as_many (at least 5)"}),
        ("h2o", {"time_over_full (at most 1.8)", "peak_over_full (at most 1.2)"}),
    ],
)
def test_each_part_of_make_bench_runs_alone(
    model_folder: Path, essays: Path, part: str, figures: set[str]
) -> None:
    engine = importlib.import_module("bench_engine")
    tiny_one = ("model=custom", f"model.path={model_folder}", f"task.essays={essays}")
    scale = engine.Scale(repeats=2, divisor=16, overrides=tiny_one, new_tokens=3)
    section = engine.PARTS[part](scale)
    assert section["definition"]
    assert figures <= set(section)
    for figure in figures - {"4096", "8000", "peak_over_full (at most 1.2)"}:
        assert 0 < section[figure]["q1"] <= section[figure]["median"] <= section[figure]["q3"]
    assert json.loads(json.dumps(section, allow_nan=False)) == section


def test_what_misses_its_bound_is_said() -> None:
    """bench_table.py: every key that names a bound is a line, wherever it stands in a section."""
    spread = {"median": 1.5, "q1": 1.0, "q3": 2.0}
    section = {
        "fast (at most 1.6)": spread,
        "slow (at least 2)": spread,
        "4096": {"exact (under 1.5)": 1.5},
        "run (share under 5)": {"share": 4.9, "seconds": 3},
        "no bound": spread,
        "repeats": 3,
    }
    found = importlib.import_module("bench_table").table({"runs": [], "part": section})
    assert found.splitlines()[2:] == [
        "| part | fast | at most 1.6 | 1.5 | 1.0 to 2.0 | 3 |  |",
        "| part | slow | at least 2 | 1.5 | 1.0 to 2.0 | 3 | missed |",
        "| part, 4096 | exact | under 1.5 | 1.5 |  | 1 | missed |",
        "| part | run: share | under 5 | 4.9 |  | 1 |  |",
    ]
    with pytest.raises(ValueError, match="names a bound in no form"):
        importlib.import_module("bench_table").table({"part": {"slow (under 5 seconds)": 1, "repeats": 3}})


PEER = """
import json, sys
print(json.dumps({"kvpress": "0"}), flush=True)
for line in sys.stdin:
    assert json.loads(line)["new"] == 3
    print(json.dumps({name: 2.0 for name in sys.argv[1:]}), flush=True)
"""


def test_a_peer_is_timed_on_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, essays: Path, tmp_path: Path
) -> None:
    """bench_peers.py, beside a process that says of every cell that it took 2 seconds."""
    peers = importlib.import_module("bench_peers")
    scale = importlib.import_module("bench_setup").Scale(
        2, 1, ("model=custom", f"model.path={model_folder}", f"task.essays={essays}"), 3
    )
    (tmp_path / "peer.py").write_text(PEER.replace("sys.argv[1:]", repr(list(peers.CELLS))))
    monkeypatch.setattr(peers, "PEER", tmp_path / "peer.py")
    monkeypatch.setattr(peers, "timed", lambda *_: SimpleNamespace(seconds=4.0))
    found = peers.measured(scale, sys.executable, 600)
    assert found["their_cells_s"] == {"median": 22.0, "q1": 22.0, "q3": 22.0}
    assert found["times_as_fast"] == {"median": 5.5, "q1": 5.5, "q3": 5.5}
    assert found["each"].keys() == peers.CELLS.keys()
    (tmp_path / "peer.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"peer\.py ended with exit code 3"):
        peers.measured(scale, sys.executable, 600)


def test_every_second_of_a_run_belongs_to_a_phase(model_folder: Path, essays: Path, tmp_path: Path) -> None:
    """bench_overhead.py: phases add up, and none is missing that a run has."""
    script = str(ROOT / "scripts" / "bench_overhead.py")
    chosen = ["model=custom", f"model.path={model_folder}", "method=full", "task=niah", "task.lengths=[600]"]
    asked = [*chosen, f"task.essays={essays}", "task.samples=1", f"results_dir={tmp_path / 'results'}"]
    started = time.time()
    environment = os.environ | {"BENCH_STARTED": str(started)}
    done = subprocess.run(
        [sys.executable, script, *asked], capture_output=True, text=True, check=True, env=environment
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["whole"].keys() == {
        "python", "rest", "imports", "settings", "prompts", "tokenizer", "weights", "self-check",
        "provenance", "prefill", "decode", "scoring", "writing", "table",
    }  # fmt: skip
    assert sum(told["to_first_prefill"].values()) < sum(told["whole"].values()) < time.time() - started
    assert all(seconds >= 0 for seconds in told["whole"].values())
