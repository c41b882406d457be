"""A shard has one process at a time, on one machine or on several, and its state tells whether that lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from structkv_bench.errors import UserError
from structkv_bench.launch import claim
from structkv_bench.launch.claim import State, claimed, is_live, read_state

HOLDER = """
import sys, time
from pathlib import Path
from structkv_bench.launch import claim
claim.BEAT = 0.05
with claim.claimed(Path(sys.argv[1]), "ab.0000"):
    print("held", flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "BEAT", 0.05)
    monkeypatch.setattr(claim, "LEASE", 0.4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shards" / "ab" / "0000.json"


def holder(file: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def state(file: Path) -> State:
    found = read_state(file)
    assert found is not None
    return found


def elsewhere(file: Path, **more: object) -> State:
    """The state of a process on another machine."""
    file.parent.mkdir(parents=True, exist_ok=True)
    found = State("ab.0000", host="other", machine="another-boot", pid=1, beat=3, **more)  # type: ignore[arg-type]
    file.write_text(json.dumps(found.__dict__))
    return found


def test_a_claim_says_who_has_it_and_what_came_of_it(file: Path) -> None:
    with claimed(file, "ab.0000") as mine:
        there = state(file)
        assert (there.state, there.pid, there.machine) == ("running", os.getpid(), claim.machine())
        mine.state.state, mine.state.done = "done", 5
    assert (state(file).state, state(file).done) == ("done", 5)
    assert not is_live(file, state(file))


def test_a_claim_is_refreshed_while_it_is_held(file: Path) -> None:
    with claimed(file, "ab.0000"):
        first = state(file).beat
        time.sleep(0.3)
        assert state(file).beat > first + 1
    last = state(file).beat
    time.sleep(0.15)
    assert state(file).beat == last


def test_on_one_machine_the_lock_tells_at_once_who_lives(file: Path) -> None:
    process = holder(file)
    assert is_live(file, state(file))
    with (
        pytest.raises(UserError, match=f"is being run by .*, process {process.pid}"),
        claimed(file, "ab.0000"),
    ):
        pass
    process.kill()
    process.wait()
    assert state(file).state == "running"
    assert not is_live(file, state(file))
    started = time.monotonic()
    with claimed(file, "ab.0000"):
        assert time.monotonic() - started < 0.3


def test_of_another_machine_a_state_that_stays_as_it_is_tells_that_its_process_is_gone(file: Path) -> None:
    there = elsewhere(file)
    assert is_live(file, there)
    started = time.monotonic()
    with claimed(file, "ab.0000"):
        assert time.monotonic() - started >= 0.4
        assert state(file).pid == os.getpid()


def test_of_another_machine_a_state_that_changes_is_alive_whatever_the_clocks_say(file: Path) -> None:
    elsewhere(file)
    code = (
        "import sys, json, os, time\nfile = sys.argv[1]\n"
        "for beat in range(4, 200):\n"
        "    content = json.load(open(file)) | {'beat': beat}\n"
        "    open(file + '.new', 'w').write(json.dumps(content)); os.replace(file + '.new', file)\n"
        "    os.utime(file, (0, 0)); time.sleep(0.05)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(file)]) as beating:
        time.sleep(0.3)
        with pytest.raises(UserError, match="is being run by other"), claimed(file, "ab.0000"):
            pass
        beating.kill()


@pytest.mark.parametrize("ended", ["done", "stopped", "requeued", "died"])
def test_what_another_machine_has_ended_is_free_at_once(file: Path, ended: str) -> None:
    elsewhere(file, state=ended)
    started = time.monotonic()
    with claimed(file, "ab.0000"):
        assert time.monotonic() - started < 0.3


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_jumped_makes_no_dead_process_live_for_ever(file: Path, hours: float) -> None:
    there = elsewhere(file)
    os.utime(file, (time.time() + 3600 * hours,) * 2)
    assert not is_live(file, there)


def test_a_process_whose_shard_was_taken_over_notices_and_leaves_the_state_alone(file: Path) -> None:
    with claimed(file, "ab.0000") as mine:
        other = elsewhere(file)
        time.sleep(0.2)
        assert mine.lost
    assert read_state(file) == other


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"unknown": 1}'])
def test_a_damaged_state_is_none(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert read_state(file) is None
    with claimed(file, "ab.0000"):
        assert state(file).state == "running"
