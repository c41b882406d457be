"""LongBench's files: folder, zip or hub, and errors that name file and line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from structkv_bench.errors import UserError
from structkv_bench.tasks.longbench import LongBench
from tests.tasks.longbench_rows import Words, build, lay, row


def test_folder_and_zip_have_the_same_rows(tmp_path: Path) -> None:
    """Files may lie in the folder or the zip, or in its folder data/; sources() has the sha256 of each."""
    lines = "".join(json.dumps(row(_id=str(i), context="a\u2028b")) + "\n" for i in range(3))
    (tmp_path / "deep" / "data").mkdir(parents=True)
    (tmp_path / "deep" / "data" / "qasper.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "qasper.jsonl").write_text(lines, encoding="utf-8")
    for name, member in (("flat.zip", "qasper.jsonl"), ("data.zip", "data/qasper.jsonl")):
        with ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, lines)
    places = [tmp_path, tmp_path / "deep", tmp_path / "flat.zip", tmp_path / "data.zip"]
    first, *others = [build(place, "qasper") for place in places]
    assert all(other == first for other in others)
    digests = [
        LongBench(lengths=[9], samples=1, subset=["qasper"], source=str(place)).sources("qasper")
        for place in places
    ]
    assert list(digests[0]) == [str(tmp_path / "qasper.jsonl")]
    assert list(digests[3]) == [str(tmp_path / "data.zip" / "data" / "qasper.jsonl")]
    assert len({sha for digest in digests for sha in digest.values()}) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), "{"], "line 2: not JSON"),
        ([row(), "3"], "line 2: must be a JSON object, not int"),
        (["\ufeff{}"], "line 1: not JSON"),
        (["", " "], "the file is empty"),
        *(
            ([row(), {k: v for k, v in row().items() if k != name}], f"line 2: no field {name}")
            for name in ("input", "context", "answers", "length")
        ),
        ([row(answers="me")], "line 1: answers must be a list of texts, not str"),
        ([row(answers={"a": 1})], "line 1: answers must be a list of texts, not dict"),
        ([row(answers=[1])], "line 1: answers must be a list of texts"),
        ([row(answers=[])], "line 1: answers is empty"),
        ([row(context=None)], "line 1: context must be text, not NoneType"),
        ([row(length="2")], "line 1: length must be a whole number, not str"),
        ([row(length=True)], "line 1: length must be a whole number, not bool"),
        (['{"input": "", "context": "\\ud800", "answers": ["a"], "length": 1}'], "half a surrogate pair"),
        ([row(_id="a"), row(_id="b"), "", row(_id="a")], "line 4: id 'a' is also that of"),
        ([row(_id=3)], "line 1: _id must be text, not int"),
    ],
)
def test_bad_rows(rows: list[Any], message: str, tmp_path: Path) -> None:
    """A file that is not sound is one line that names file and line; no sample is built of it."""
    with pytest.raises(UserError) as error:
        build(lay(tmp_path, "qasper", *rows), "qasper", samples=1)
    assert message in str(error.value)
    assert str(tmp_path / "qasper.jsonl") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "answer"), [("trec", "me"), ("passage_retrieval_en", "3")])
def test_rows_that_can_not_be_scored(name: str, answer: str, tmp_path: Path) -> None:
    """What would end the official scorer in a traceback is refused before anything runs."""
    with pytest.raises(UserError, match=r"line 1: (all_classes must list|answer '3' names no paragraph)"):
        build(lay(tmp_path, name, row(answers=[answer], all_classes=[])), name)


def test_mixed_encodings(tmp_path: Path) -> None:
    """A line in another encoding is named."""
    good, bad = json.dumps(row()).encode(), '{"input": "café"}'.encode("latin-1")
    (tmp_path / "qasper.jsonl").write_bytes(good + b"\n" + bad + b"\n")
    with pytest.raises(UserError, match=r"qasper\.jsonl: line 2: not UTF-8 text"):
        build(tmp_path, "qasper")


def test_bad_zips(tmp_path: Path) -> None:
    """No zip at all, a damaged one, one without the task, and no file are each one clear line."""
    whole = tmp_path / "whole.zip"
    with ZipFile(whole, "w") as archive:
        archive.writestr("data/trec.jsonl", json.dumps(row()) * 50)
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(whole.read_bytes().replace(b"One. Two.", b"One! Two!"))
    cut = tmp_path / "cut.zip"
    cut.write_bytes(whole.read_bytes()[:200])
    for path, task, message in (
        (damaged, "trec", "not a zip that can be read .*CRC"),
        (cut, "trec", "not a zip that can be read"),
        (whole, "qasper", r"no qasper\.jsonl in the zip"),
        (tmp_path, "qasper", r"no qasper\.jsonl in "),
        (tmp_path / "none.zip", "qasper", "can't be read .*No such file"),
    ):
        with pytest.raises(UserError, match=message) as error:
            build(path, task)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("revision", [None, "0" * 40])
def test_without_network_and_cache(
    revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error within a second names data set, revision and the command that fetches it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    settings = {} if revision is None else {"revision": revision}
    task = LongBench(lengths=[9], samples=1, **settings)
    for attempt in (lambda: task.build("qasper", 9, Words()), lambda: task.sources("qasper")):
        started = time.perf_counter()
        with pytest.raises(UserError) as error:
            attempt()
        assert time.perf_counter() - started < 1
        more = f" task.revision={revision}" if revision else ""
        for part in ("THUDM/LongBench", task.revision, f"structkv-bench fetch task=longbench{more}"):
            assert part in str(error.value)


def test_a_revision_that_does_not_exist() -> None:
    """Fetching it, here without a network, is one line with its name."""
    with pytest.raises(UserError, match=r"THUDM/LongBench \(?.*nosuch") as error:
        LongBench(lengths=[9], samples=1, revision="nosuch").fetch()
    assert "\n" not in str(error.value)


def test_what_was_fetched_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's zip, once in the cache, needs no network; its sha256 stands under its place on the hub."""
    revision = LongBench(lengths=[9], samples=1).revision
    folder = tmp_path / "datasets--THUDM--LongBench" / "snapshots" / revision
    folder.mkdir(parents=True)
    with ZipFile(folder / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(row(_id="x")) + "\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    task = LongBench(lengths=[900], samples=1, subset=["qasper"])
    assert [sample.id for sample in task.build("qasper", 900, Words())] == ["x"]
    assert list(task.sources("qasper")) == [f"THUDM/LongBench@{revision}/data.zip/data/qasper.jsonl"]


def test_what_is_not_there_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """missing: skip runs the rest; an uncached hub has nothing; damage and a wrong path are no absence."""
    (tmp_path / "qasper.jsonl").write_text("{}")
    some = LongBench(lengths=[9], samples=1, subset=["qasper", "trec"], source=str(tmp_path))
    assert list(some.unavailable()) == ["trec"]
    with ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("data/trec.jsonl", "{}")
    assert list(replace(some, source=str(tmp_path / "some.zip")).unavailable()) == ["qasper"]
    (tmp_path / "bad.zip").write_text("no zip")
    for wrong in ("bad.zip", "nowhere"):
        with pytest.raises(UserError, match=wrong):
            replace(some, source=str(tmp_path / wrong)).unavailable()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    reasons = replace(some, source=None).unavailable()
    assert list(reasons) == ["qasper", "trec"]
    assert "structkv-bench fetch task=longbench" in reasons["trec"]
