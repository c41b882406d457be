"""The front door.

Rules protected here:
- `--help` and `list` import no torch (`make bench` shows that they take under half a second).
- A mistake is exit code 2 and one line on stderr, never a traceback; nothing is written.
- `run` ends with the table of its own cells, and with 1 if a sample failed; Ctrl-C ends it with 130.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import structkv_bench
from structkv_bench.cli import main
from structkv_bench.errors import UserError
from structkv_bench.plan import plan
from structkv_bench.store import Store
from tests.tiny import save_tiny

START = "import sys; from structkv_bench.cli import main; code = main(); {}; sys.exit(code)"
LIGHT = START.format("print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)")
QUICK = [["--help"], ["run", "--help"], ["--version"], [], *(["list", what] for what in ("methods", "tasks"))]
QUICK += [["list", "models"], ["list", "experiments"]]


def command(*arguments: str, code: str = START.format("pass"), cwd: Path | None = None):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def runner(monkeypatch):
    """A runner that answers every cell with one row, without a model."""
    row = {
        "status": "ok",
        "score": 1.0,
        "kv_bytes": 1,
        "kv_bytes_full": 4,
        "prefill_pct": 100.0,
        "pivot": None,
    }
    row |= {"prefill_s": 1.0, "decode_s": 0.5}
    fake = types.ModuleType("structkv_bench.runner")

    def run(setups):
        for group in plan(setups):
            for cell in group.cells:
                store = Store(setups[0].results_dir).cell(cell)
                store.begin({})
                store.append({"sample": "0", **row})
        return 0

    fake.run = run
    monkeypatch.setitem(sys.modules, "structkv_bench.runner", fake)
    monkeypatch.setattr(structkv_bench, "runner", fake, raising=False)
    return fake


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_looking_around_imports_no_torch(arguments):
    done = command(*arguments, code=LIGHT)
    assert done.returncode == 0
    assert done.stderr == "False False\n"
    assert done.stdout


def test_results_imports_no_torch(tmp_path, runner):
    main(["run", "method=full", f"results_dir={tmp_path}"])
    assert command("results", "--results", str(tmp_path), code=LIGHT).stderr == "False False\n"


def test_list_gives_each_name_with_its_description(capsys):
    assert main(["list", "methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == sorted(names)
    assert {"full", "h2o", "snapkv", "streaming_llm", "structkv"} <= set(names)
    assert all(len(line.split()) > 2 for line in lines)
    assert main(["list", "experiments"]) == 0
    described = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert described["quickstart"].startswith("StructKV and four baselines")


def test_a_broken_experiment_file_is_one_line_of_list(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("description: [")
    monkeypatch.setattr("structkv_bench.catalog.conf_dir", lambda: tmp_path)
    assert main(["list", "experiments"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


MISTAKES = [
    ["run", "modle=x"],
    ["run", "method=snapk"],
    ["run", "method=snapkv", "method.kernal=3"],
    ["run", "method=snapkv", "method.window=abc"],
    ["run", "method.kv_ratio=2"],
    ["run", "method=full,"],
    ["run", "word"],
    ["run", "a\nb=3"],
    ["run", "experiment=nothing"],
    ["run", "method._target_=not.There"],
    ["run", "--fast"],
    ["show", "task=rulr"],
    ["fetch", "model=gpt"],
    ["list"],
    ["list", "everything"],
    ["list", "methods", "tasks"],
    ["results", "--format", "xml"],
    ["results", "--results", "/no/such/folder"],
    ["results", "extra"],
    ["walk"],
    ["--nothing"],
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_exit_code_2_and_one_line(arguments, capsys, runner):
    runner.run = lambda setups: pytest.fail("a mistake must not run")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_the_installed_command_tells_a_mistake_the_same_way(tmp_path):
    script = Path(sys.executable).with_name("structkv-bench")
    done = subprocess.run(
        [script, "run", "method=snapk"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: method=snapk: unknown;")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_commands_work_from_any_folder(tmp_path):
    for folder in (tmp_path, Path("/")):
        assert command("list", "models", cwd=folder).stdout.count("\n") >= 6
    done = command("run", "method.window=abc", cwd=tmp_path)
    assert "expected int" in done.stderr


def test_run_prints_the_table_of_its_own_cells(tmp_path, runner, capsys):
    here = f"results_dir={tmp_path}"
    assert main(["run", "method=h2o", "task.lengths=[64]", here]) == 0
    capsys.readouterr()
    assert main(["run", "method=snapkv,full", "method.kv_ratio=0.1,0.2", "task.lengths=[64]", here]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["snapkv", "snapkv", "full"]


def test_run_without_overrides_runs_the_defaults(tmp_path, runner, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == 0
    assert "structkv" in capsys.readouterr().out
    assert all(path.name.startswith("smollm2_135m.structkv-kv0.1") for path in Path("results/runs").iterdir())


@pytest.mark.parametrize("format", ["table", "csv", "json", "markdown"])
def test_results_prints_every_format(tmp_path, runner, capsys, format):
    main(["run", "method=full", "task.lengths=[64]", f"results_dir={tmp_path}"])
    capsys.readouterr()
    assert main(["results", "--results", str(tmp_path), "--format", format]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "kv_bytes_pct" in out
    assert "smollm2_135m" in out
    if format == "json":
        assert json.loads(out)[0]["score"] == 100.0


def test_failed_samples_are_exit_code_1_and_a_footnote(tmp_path, runner, capsys):
    answer = runner.run

    def run(setups):
        answer(setups)
        for group in plan(setups):
            Store(tmp_path).cell(group.cells[0]).append({"sample": "1", "status": "failed"})
        return 1

    runner.run = run
    assert main(["run", "method=full", "task.lengths=[64]", f"results_dir={tmp_path}"]) == 1
    out, err = capsys.readouterr()
    assert "full" in out
    assert err.startswith("1 failed")


def test_ctrl_c_says_how_to_go_on(runner, capsys):
    def run(setups):
        raise KeyboardInterrupt

    runner.run = run
    assert main(["run"]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on where this stopped\n"


def test_what_the_run_refuses_is_one_line_too(runner, capsys):
    def run(setups):
        raise UserError("results_dir=/full: can't be written to")

    runner.run = run
    assert main(["run"]) == 2
    assert capsys.readouterr().err == "error: results_dir=/full: can't be written to\n"


def test_fetch_takes_each_model_once(monkeypatch, capsys):
    fake = types.ModuleType("structkv_bench.models")
    fake.fetch = lambda spec: f"/cache/{spec.name}"
    monkeypatch.setitem(sys.modules, "structkv_bench.models", fake)
    monkeypatch.setattr(structkv_bench, "models", fake, raising=False)
    assert main(["fetch", "model=qwen2_5_7b,smollm2_135m", "method=full,snapkv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "qwen2_5_7b: /cache/qwen2_5_7b",
        "smollm2_135m: /cache/smollm2_135m",
    ]


def test_a_narrow_terminal_gets_a_narrow_table(tmp_path, runner, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["run", "method=streaming_llm,full", f"results_dir={tmp_path}"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_show_prints_its_pages(monkeypatch, capsys):
    fake = types.ModuleType("structkv_bench.show")
    fake.show = lambda setups, *rest: f"a page for {setups[0].method_name}, {', '.join(map(str, rest))}"
    monkeypatch.setitem(sys.modules, "structkv_bench.show", fake)
    assert main(["show", "method=snapkv", "--sample", "3", "--answer", "so"]) == 0
    assert capsys.readouterr().out == "a page for snapkv, 3, so, here\n"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.path=package://no.such/x.gguf"], "pip install"),
        (["model=custom", "model.path=~nosuchuser/x"], "~nosuchuser/x"),
        (["results_dir=~nosuchuser/x"], "~nosuchuser/x"),
    ],
)
def test_paths_that_lead_nowhere_are_one_line(overrides, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "task.haystack=noise", *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert main(["fetch", "model=custom", f"model.path={gguf}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_score_prints_official_scores_and_what_is_short(tmp_path, capsys):
    rows = [{"pred": "a cat", "answers": ["cat"], "all_classes": None, "length": 9}] * 2
    (tmp_path / "qasper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["score", "longbench", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"qasper": 100.0}
    assert "2 rows, the task has 200" in printed.err
    (tmp_path / "qasper.jsonl").write_text("{")
    assert main(["score", "longbench", str(tmp_path)]) == 2
    assert "qasper.jsonl: line 1" in capsys.readouterr().err


def test_score_imports_no_torch(tmp_path):
    done = command("score", "longbench", str(tmp_path), code=LIGHT)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "False False")


def test_data_writes_the_official_layout_without_a_model(tmp_path, capsys):
    out = tmp_path / "deep" / "vt.jsonl"
    given = ["data", "ruler", "--task", "vt", "--length", "2048", "--samples", "2", "--out", str(out)]
    assert main(given) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert all(row["length"] <= 2048 for row in rows)
    for wrong in (["--task", "vtt"], ["--length", "90"], ["--fit", "loose"], ["--samples", "0"]):
        assert main([*given, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_subtasks_without_their_texts_are_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    some = ["run", "method=full", "task=ruler", "task.subset=[qa_1,niah_single_1]", "task.samples=1"]
    some += ["model=custom", f"model.path={save_tiny(tmp_path / 'model')}", "task.lengths=1500"]
    some += [f"results_dir={tmp_path / 'results'}"]
    assert main([*some, "task.missing=error"]) == 2
    assert "structkv-bench fetch task=ruler" in capsys.readouterr().err
    assert main(some) == 0
    printed = capsys.readouterr()
    assert "left out: qa_1: " in printed.err
    assert "niah_single_1" in printed.out


def test_data_never_takes_the_place_of_what_is_no_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    given = ["data", "ruler", "--task", "vt", "--length", "2048", "--samples", "1", "--out"]
    for place in (tmp_path / "pipe", tmp_path, ""):
        assert main([*given, str(place)]) == 2
        assert "give a file's name" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    assert main([*given, str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() != "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]
