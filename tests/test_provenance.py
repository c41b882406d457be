"""What made the rows of a run: recorded, and told in words.

Rules protected here:
- A cell.json tells of the code, uncommitted changes included, and of all that may change a number.
- A session's end is that of its last row, also of one that was killed, and never before its start.
- `provenance` says what cells share once; bad input is one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from structkv_bench import provenance as recorded
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.origin import read_run
from structkv_bench.plan import plan
from structkv_bench.provenance import of_model, provenance, source
from structkv_bench.report.origins import Ledger, hashes, origins
from structkv_bench.report.stored import load
from structkv_bench.store import Store, read_about
from tests.pages import SESSION, lay
from tests.runs import overrides
from tests.test_cli import LIGHT, command
from tests.tiny import save_tiny, tiny, tokenizer

CELL = plan(compose(["method=snapkv", "task.lengths=[64]"]))[0].cells[0]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of this project, as far as git can tell, with one commit."""
    root = tmp_path / "checkout"
    (root / "structkv_bench").mkdir(parents=True)
    (root / "structkv_bench" / "__init__.py").write_text("")
    (root / ".gitignore").write_text("ignored\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
    monkeypatch.setattr("structkv_bench.__file__", str(root / "structkv_bench" / "__init__.py"))
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def diff() -> str | None:
    found = source()
    assert found is not None
    assert found["dirty"] == (found["diff"] is not None)
    return found["diff"]


def test_provenance_is_plain_json_and_says_what_ran() -> None:
    about = provenance("cpu")
    assert json.loads(json.dumps(about, allow_nan=False)) == about
    assert about["versions"]["torch"]
    assert about["started"].endswith("+00:00")
    assert about["device"]
    assert about["cuda"] is None
    assert about["numerics"]["threads"] == torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        assert provenance("cpu")["numerics"] == about["numerics"] | {"deterministic_algorithms": True}
    finally:
        torch.use_deterministic_algorithms(False)


def test_on_a_gpu_the_driver_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_is_cuda", lambda device: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(recorded, "DRIVER", tmp_path / "version")
    assert recorded.cuda("cuda") == {"driver": None, "runtime": "12.8"}
    (tmp_path / "version").write_text("570.86.15\n")
    assert recorded.cuda("cuda:1") == {"driver": "570.86.15", "runtime": "12.8"}


def test_a_repository_around_an_installed_copy_is_not_taken_for_the_source(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = checkout / "site-packages" / "structkv_bench"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr("structkv_bench.__file__", str(package / "__init__.py"))
    assert source() is None


def test_the_diff_is_that_of_all_files_but_those_that_git_ignores(checkout: Path) -> None:
    (checkout / "ignored").write_text("1")
    assert diff() is None
    tracked, new = checkout / "structkv_bench" / "__init__.py", checkout / "new file"
    seen = {None}
    for change in (
        lambda: tracked.write_text("1"),
        lambda: new.write_text("1"),
        lambda: new.write_text("2"),
        lambda: new.rename(checkout / "ünd"),
        lambda: tracked.unlink(),
    ):
        change()
        assert diff() not in seen
        seen.add(diff())
    git(checkout, "config", "status.showUntrackedFiles", "no")
    git(checkout, "add", ".")
    assert diff() in seen  # the same files
    git(checkout, "reset", "-q", "--hard")
    (checkout / "ünd").unlink(missing_ok=True)
    assert diff() is None


def test_before_the_first_commit_every_file_is_a_change(tmp_path: Path, checkout: Path) -> None:
    git(checkout, "update-ref", "-d", "HEAD")
    assert source() == {"commit": None, "dirty": True, "diff": diff()}


def test_dtype_and_chat_template_of_the_model_that_was_loaded() -> None:
    model = tiny().model
    assert of_model(model) == {"dtype": "float32", "template": None}
    hashes = []
    for template in ("{{ messages[0].content }}", "{{ messages[0].content }}!"):
        model.prompts.tokenizer.chat_template = template
        hashes.append(of_model(model)["template"])
    assert len({None, *hashes}) == 3


def session(cell: Any) -> dict[str, Any]:
    found: dict[str, Any] = read_about(cell.path / "cell.json")["sessions"][-1]
    return found


def ran(tmp_path: Path, shard: str = "", rows: int = 1, started: str = "2020-01-01T00:00:00+00:00") -> Any:
    """A session that was killed, ten seconds after 1970."""
    cell = Store(tmp_path, shard).cell(CELL)
    cell.begin({"started": started})
    for number in range(rows):
        cell.append({"sample": str(number), "status": "ok"})
    return cell


def written_at(cell: Any, stamp: str) -> None:
    """Set the time of the last row."""
    when = time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S")) - time.timezone
    [file] = cell.path.glob("rows*.jsonl")
    os.utime(file, (when, when))


@pytest.mark.parametrize("shard", ["", "ab.0000"])
def test_a_session_ends_with_its_last_row(tmp_path: Path, shard: str) -> None:
    Store(tmp_path).check_writable()
    with Store(tmp_path, shard).locked([CELL]):
        cell = ran(tmp_path, shard)
        written_at(cell, "2020-01-01T00:00:05")
        assert "ended" not in session(cell)
    assert session(cell)["ended"] == "2020-01-01T00:00:05+00:00"


def test_the_end_of_a_session_that_was_killed_is_noted_by_the_next_one(tmp_path: Path) -> None:
    cell = ran(tmp_path)
    written_at(cell, "2020-01-01T00:00:05")
    cell.begin({"started": "2020-01-02T00:00:00+00:00"})
    first, second = read_about(cell.path / "cell.json")["sessions"]
    assert first["ended"] == "2020-01-01T00:00:05+00:00"
    assert "ended" not in second
    cell.end()  # it wrote no row
    assert "ended" not in session(cell)


def test_no_session_ends_before_it_began_though_the_clock_was_set_back(tmp_path: Path) -> None:
    cell = ran(tmp_path)
    written_at(cell, "2019-12-31T23:00:00")
    cell.end()
    assert "ended" not in session(cell)


def test_a_disk_that_is_full_at_the_end_of_a_session_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = ran(tmp_path)
    before = (cell.path / "cell.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        cell.end()
    assert (cell.path / "cell.json").read_bytes() == before
    cell.end()
    assert "ended" in session(cell)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("results")
    lay(place, "mine", ("method=full,snapkv", "method.kv_ratio=0.1,0.2", "task.lengths=[64,128]"))
    return place


def test_what_cells_share_is_said_once(results: Path, capsys: Any) -> None:
    assert main(["provenance", str(results)]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert told["cells"] == len(told["each cell"]) == 6
    assert told["config"]["task"]["_target_"] == "structkv_bench.tasks.niah.Niah"
    assert told["sessions"][1]["versions"] == SESSION["versions"]
    for cell in told["each cell"].values():
        assert cell.keys() == {"key", "names", "config"}
        assert cell["config"].keys() == {"length", "method"}
        assert cell["names"].keys() == {"method"}


def test_of_one_cell_all_is_said(results: Path, capsys: Any) -> None:
    folder = sorted(results.glob("*.snapkv*"))[0]
    assert main(["provenance", str(folder)]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    about = read_about(folder / "cell.json")
    assert (told["cell"], told["config"], told["names"]) == (folder.name, about["config"], about["names"])
    assert told["sessions"][1].keys() == SESSION.keys()


def test_sessions_say_what_they_share_once(tmp_path: Path, capsys: Any) -> None:
    lay(tmp_path, "mine", ("method=full", "task.lengths=[64]"))
    [file] = tmp_path.glob("*/cell.json")
    about = json.loads(file.read_text())
    about["sessions"] += [about["sessions"][0] | {"started": "later", "git": None, "ended": "at last"}]
    file.write_text(json.dumps(about))
    assert main(["provenance", str(tmp_path)]) == 0
    sessions = yaml.safe_load(capsys.readouterr().out)["sessions"]
    assert sessions["all"]["versions"] == SESSION["versions"]
    own = {"started": "later", "git": "not run from a checkout", "ended": "at last"}
    assert sessions[2] == own | {"sources": SESSION["sources"]}


def test_provenance_imports_no_torch(results: Path) -> None:
    assert command("provenance", str(results), code=LIGHT).stderr == "False False\n"


def test_the_report_tells_what_else_made_the_rows(tmp_path: Path) -> None:
    """Driver, numerics and the hash of changes as facts of a machine; the template's among the hashes."""
    more = {
        "git": {"commit": "a" * 40, "dirty": True, "diff": "b" * 16},
        "cuda": {"driver": "570.86.15", "runtime": "12.8"},
        "numerics": {"threads": 2, "cublas_workspace": None},
        "template": "c" * 16,
    }
    lay(tmp_path, "mine", ("method=full", "task.lengths=[64]"), session=SESSION | more)
    ledger = Ledger()
    ledger.add(load([tmp_path]).cells)
    [origin] = origins(ledger)
    facts = dict(origin.facts)
    assert facts["commit"] == f"{'a' * 40}, with changes that are not in it ({'b' * 16})"
    assert facts["CUDA"] == "driver 570.86.15, runtime 12.8"
    assert facts["numerics"] == "threads 2"
    assert ("smollm2_135m", "chat template", "c" * 16) in hashes(ledger)


KNOWN: dict[str, Any] = {
    "key": "", "sessions": [], "names": dict.fromkeys(("model", "method", "task", "protocol"), ""),
    "config": {"protocol": "", "subtask": "", "length": 64, "model": {}, "method": {"_target_": ""},
               "task": {"_target_": ""}},
}  # fmt: skip
EDITED: list[dict[str, Any]] = [
    {"key": {}},
    {"config": KNOWN["config"] | {"length": "64"}},
    {"sessions": [{"command": None}]},
    {"sessions": [{"git": "abc"}]},
    {"names": KNOWN["names"] | {"method": ["full"]}},
]
WRONG = {
    **{json.dumps(KNOWN | edit): "damaged; delete it" for edit in EDITED},
    "{": "damaged; delete it",
    '{"key": "", "names": {}, "config": {"model": {}}, "sessions": []}': "damaged; delete it",
    '{"key": "", "names": {}, "config": {"model": {}}, "sessions": [3]}': "damaged; delete it",
    '{"key": "", "names": {}, "config": {"model": {}}, "sessions": 3}': "damaged; delete it",
}


@pytest.mark.parametrize("content", WRONG)
@pytest.mark.parametrize("option", [[], ["--rerun"]])
def test_a_damaged_cell_json_is_one_line(
    tmp_path: Path, capsys: Any, content: str, option: list[str]
) -> None:
    (tmp_path / "cell.json").write_text(content)
    assert main(["provenance", str(tmp_path), *option]) == 2
    err = capsys.readouterr().err
    assert WRONG[content] in err
    assert err.count("\n") == 1


def test_what_is_no_run_is_one_line(results: Path, tmp_path: Path, capsys: Any) -> None:
    name = sorted(results.glob("*.full*"))[0].name
    for place, says in (
        (tmp_path / "nowhere", "give a results folder"),
        (tmp_path, "give a results folder"),
        (results / f"{name}0", f"did you mean {name}?"),
    ):
        assert main(["provenance", str(place)]) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1


def test_a_run_records_all_of_it_and_how_much_was_asked(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    tokenizer("{{ messages[0].content }}").save_pretrained(tmp_path / "model")
    asked = overrides(tmp_path / "model", tmp_path / "results", "method=full", "task.samples=2")
    assert main(asked) == 0
    [cell] = read_run(tmp_path / "results")
    [its] = cell.about["sessions"]
    assert cell.samples == 2
    assert its["started"] <= its["ended"]
    assert its["dtype"] == "float32"
    assert its["decode_batch"] == 1
    assert its["template"]
    assert its["numerics"].keys() >= {"threads", "deterministic_algorithms", "float32_matmul_precision"}
