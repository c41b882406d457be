"""Results to W&B, with the real SDK offline and with SDKs that fail.

Rules protected here:
- What W&B gets is what the results folder holds, each time under the same run id; read back from its file.
- Whatever W&B does (absent, raising, hanging, unreachable), the run's rows, table and exit code are the same:
  one warning. Only going online without a key is refused, before anything runs.
- Nobody who does not ask for W&B imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import tracking
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.task import Sample
from tests.tiny import tokenizer

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def nobodys_account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No key, no settings of whoever runs the tests."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
            patch.setenv(name, str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        yield


def overrides(model: Path, results: Path) -> list[str]:
    """Two methods at two lengths, so two groups, of two samples."""
    chosen = {
        "model": "custom", "model.path": str(model), "model.name": "tiny", "method": "full,snapkv",
        "method.kv_ratio": "0.2", "task": "niah", "task.haystack": "noise", "task.lengths": "[400,500]",
        "task.samples": "2", "task.max_new_tokens": "4", "results_dir": str(results),
    }  # fmt: skip
    return [f"{key}={value}" for key, value in chosen.items()]


def run(model: Path, results: Path, *options: str) -> int:
    return main(["run", *overrides(model, results), *options])


def records(file: Path) -> Iterator[Any]:
    """What the SDK wrote: LevelDB's log format, a header, then blocks of chunks (crc, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last of several
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


class Read:
    """A W&B run, read back."""

    def __init__(self, folder: Path) -> None:
        [file] = folder.glob("*.wandb")
        self.folder, self.config, self.summary, self.artifacts, self.logged = folder, {}, {}, [], set()
        for record in records(file):
            if record.HasField("run"):
                self.id, self.project = record.run.run_id, record.run.project
                self.name, self.job_type = record.run.display_name, record.run.job_type
            for item in record.config.update:
                self.config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            for item in record.summary.update:
                self.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            self.logged |= {item.key or item.nested_key[0] for item in record.history.item}
            if record.HasField("artifact"):
                self.artifacts.append(record.artifact)

    def table(self, name: str) -> list[dict[str, Any]]:
        [file] = self.folder.glob(f"files/media/table/{name}_*.json")
        content = json.loads(file.read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def read_back(results: Path) -> list[Read]:
    return [Read(folder) for folder in sorted(results.glob("wandb/offline-run-*"))]


def rows_of(results: Path) -> dict[str, dict[str, Any]]:
    """Rows by cell and sample, without what is measured."""
    rows = {}
    for file in results.glob("*/rows*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            measured = ("prefill_s", "decode_s", "prefill_parts_s")
            rows[f"{file.parent.name}/{row['sample']}"] = {
                key: value for key, value in row.items() if key not in measured
            }
    return rows


@pytest.fixture(scope="module")
def plain(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run without W&B leaves; it would fail if that were imported."""
    results = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        patch.setattr(tracking, "_child", None)
        assert run(model_folder, results) == 0
    return results


@pytest.fixture(scope="module")
def offline(model_folder: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same results, with a figure, told to W&B."""
    from matplotlib.pyplot import imsave

    results = Path(shutil.copytree(plain, tmp_path_factory.mktemp("offline") / "results"))
    (results / "figures").mkdir()
    imsave(results / "figures" / "fig1.png", [[0.0, 1.0]])
    assert run(model_folder, results, "--wandb", "offline") == 0
    return results


def test_offline_holds_what_the_results_hold(offline: Path) -> None:
    """A W&B run per group: config, scores, efficiency, samples with their prompts, figures, files."""
    runs = read_back(offline)
    assert sorted(one.name for one in runs) == ["tiny niah_noise 400", "tiny niah_noise 500"]
    for one in runs:
        length = int(one.name.split()[-1])
        assert (one.project, one.job_type) == ("structkv-bench", "run")
        assert one.config["length"] == length
        assert one.config["methods"].keys() == {"full", "snapkv 0.2"}
        assert one.config["methods"]["snapkv 0.2"]["window"] == 8
        assert one.summary["kv_bytes_pct/full"] == 100.0
        assert one.summary["n/snapkv 0.2"] == 2
        assert {"score/full", "prefill_s/full", "decode_s/snapkv 0.2"} <= one.summary.keys()
        assert {"cells", "samples", "fig1"} <= one.logged
        assert len(list(one.folder.glob("files/media/images/fig1_*.png"))) == 1
        assert [row["method"] for row in one.table("cells")] == ["full", "snapkv"]
        samples = one.table("samples")
        stored = {key: row for key, row in rows_of(offline).items() if f".{length}." in key}
        assert len(samples) == len(stored) == 4
        assert sorted(row["prediction"] for row in samples) == sorted(
            r["prediction"] for r in stored.values()
        )
        for row in samples:
            assert row["prompt"].startswith("This is a very long story book")
            assert json.loads(row["references"])
            assert row["score"] == 0
        [artifact] = [found for found in one.artifacts if found.type == "results"]
        files = {entry.path for entry in artifact.manifest.contents}
        assert {path.split("/")[1] for path in files} == {"cell.json", "rows.jsonl"}
        assert len(files) == 4
        assert all(Path(entry.local_path).is_file() for entry in artifact.manifest.contents)


def test_the_same_prompts_are_the_same_wandb_run(
    model_folder: Path, plain: Path, offline: Path, tmp_path: Path
) -> None:
    """Each try logs under the ids of the first; another results folder changes nothing about them."""
    again = Path(shutil.copytree(plain, tmp_path / "again"))
    assert run(model_folder, again, "--wandb", "offline") == 0
    first, second = ([one.id for one in read_back(folder)] for folder in (offline, again))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 2


FAKE = """
import os, pathlib, subprocess, sys, time
class errors:
    class UsageError(Exception): pass
    class AuthenticationError(Exception): pass
def login(**_): return True
def Settings(**_): pass
def Table(**_): pass
class Artifact:
    def __init__(self, *_, **__): pass
    def add_file(self, *_, **__): pass
class Run:
    id = "x"
    config = summary = {}
    def log(self, _): pass
    def log_artifact(self, _): pass
    def finish(self): ...
def init(**_): return Run()
"""
ABSENT = "raise ModuleNotFoundError(\"No module named 'wandb'\")"
REFUSES = FAKE + "\ndef init(**_): raise errors.UsageError('project is full\\nreally')\n"
BREAKS_LATE = FAKE + "\ndef finish(self): raise RuntimeError('upload')\nRun.finish = finish\n"
DIES = FAKE + "\ndef init(**_): os.abort()\n"
HANGS = (
    FAKE
    + """
def init(**_):
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
"""
)


@pytest.mark.parametrize(
    ("sdk", "says"),
    [
        (ABSENT, "ModuleNotFoundError: No module named 'wandb'"),
        (REFUSES, "UsageError: project is full really"),
        (BREAKS_LATE, "RuntimeError: upload"),
        (DIES, "-6"),
        (HANGS, "no answer in 5 s"),
    ],
    ids=["absent", "refuses", "breaks late", "dies", "hangs"],
)
def test_whatever_wandb_does_the_run_is_the_same(
    sdk: str, says: str, model_folder: Path, plain: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    """Same rows, same table, exit code 0, one warning; none of its processes is left behind."""
    (tmp_path / "sdk").mkdir()
    (tmp_path / "sdk" / "wandb.py").write_text(sdk)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "sdk"))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(tracking, "GIVE_UP_S", 5.0 if sdk is HANGS else 60.0)
    mode = "offline" if sdk is ABSENT else "online"
    results = tmp_path / "results"
    assert run(model_folder, results, "--wandb", mode) == 0
    printed = capsys.readouterr()
    assert "niah_noise" in printed.out
    warnings = [line for line in printed.err.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: W&B has not got all: {says}; the results folder is complete"]
    assert rows_of(results) == rows_of(plain)
    pids = tmp_path / "pids"
    assert all(_ended(int(pid)) for pid in (pids.read_text().split() if pids.exists() else ()))


def _ended(pid: int) -> bool:
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_online_without_a_key_is_refused_before_anything_runs(
    model_folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    """The real SDK says so: exit code 2, one line, no results."""
    assert run(model_folder, tmp_path / "results", "--wandb", "online") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: wandb online: UsageError: No API key configured")
    assert error.count("\n") == 1
    assert not (tmp_path / "results").exists()
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert run(model_folder, tmp_path / "results", "--wandb", "online") == 2


def test_an_unreachable_server_costs_its_time_out_once(
    model_folder: Path, plain: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    """The real SDK against a port where nobody listens."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(tracking, "CHECK_S", 1.0)
    monkeypatch.setattr(tracking, "INIT_S", 1.0)
    results = Path(shutil.copytree(plain, tmp_path / "results"))
    assert run(model_folder, results, "--wandb", "online") == 0
    assert capsys.readouterr().err.count("warning: W&B has not got all: CommError") == 1


def test_the_gates_verdict_is_logged(plain: Path, tmp_path: Path, capsys: Any) -> None:
    """Exit code and findings of a regression, beside the current results."""
    current = Path(shutil.copytree(plain, tmp_path / "current"))
    for file in current.glob("tiny.full.*/rows.jsonl"):
        file.write_text(file.read_text().replace('"kv_bytes": ', '"kv_bytes": 1'))
    given = ["regress", "--baseline", str(plain), "--current", str(current), "--wandb", "offline"]
    assert main(given) == 1
    assert "warning" not in capsys.readouterr().err
    [logged] = read_back(current)
    assert logged.job_type == "regress"
    assert (logged.summary["exit_code"], logged.summary["regressed"], logged.summary["cells"]) == (1, 2, 4)
    assert {row["check"] for row in logged.table("findings")} == {"memory"}


def test_a_group_without_results_is_left_out(model_folder: Path, plain: Path, tmp_path: Path) -> None:
    """As that of a subtask whose texts are not there: the others are logged."""
    results = Path(shutil.copytree(plain, tmp_path / "results"))
    for folder in results.glob("tiny.*.400.*"):
        shutil.rmtree(folder)
    setups = compose(overrides(model_folder, results))
    assert [one.config["length"] for one in tracking._of_groups(setups, tracking.Wandb.OFFLINE)] == [500]


def test_a_prompt_of_ids_is_shown_as_text() -> None:
    """Samples that are token ids have a head too, and a long one is cut."""
    prompts = TokenizerPrompts(tokenizer())
    for prompt in ("word " * 200, tuple(prompts.encode("word " * 200))):
        sample = Sample("0", prompt, (), 1)
        assert tracking._head(sample, prompts) == ("word " * 200)[: tracking.HEAD]
