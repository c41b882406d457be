"""Rows on disk.

Rules protected here:
- A row is on disk, whole, when `append` returns; a run killed in the middle of a line goes on to the
  bytes that an undisturbed run writes.
- A full or read-only disk is one clear error, and loses nothing that was written before.
- A damaged line is skipped and counted, never taken for a row.
"""

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.locks import is_held
from structkv_bench.plan import plan
from structkv_bench.store import CellStore, Store, lock_place, read_about, read_cells

CELL = plan(compose(["method=snapkv", "task.lengths=[64]"]))[0].cells[0]


def row(number: int) -> dict[str, object]:
    return {
        "sample": f"{number:04d}",
        "status": "ok",
        "prediction": f"ünïcode \u2028 {number}\n",
        "score": 0.5,
    }


@pytest.fixture
def cell(tmp_path) -> CellStore:
    cell = Store(tmp_path).cell(CELL)
    cell.begin({"started": "now"})
    return cell


@pytest.fixture
def file(cell) -> Path:
    return cell.path / "rows.jsonl"


def test_rows_come_back_as_they_were_and_the_last_of_a_sample_wins(cell):
    rows = [row(0), row(1), row(0) | {"score": 1.0}]
    for one in rows:
        cell.append(one)
    assert cell.rows() == {"0000": rows[2], "0001": rows[1]}


def test_nothing_run_yet_is_no_rows(tmp_path):
    assert Store(tmp_path).cell(CELL).rows() == {}


def test_equal_rows_are_equal_bytes_whatever_the_order_of_their_fields(cell, file):
    cell.append(row(0))
    cell.append(dict(reversed(row(0).items())))
    first, second = file.read_bytes().splitlines()
    assert first == second


@given(text=st.text(st.characters()))
def test_any_text_survives_even_half_a_surrogate_pair(text):
    with tempfile.TemporaryDirectory() as folder:
        cell = Store(folder).cell(CELL)
        cell.begin({})
        cell.append(row(0) | {"prediction": text})
        assert cell.rows()["0000"]["prediction"] == text


def test_a_number_that_json_lacks_is_refused_before_anything_is_written(cell, file):
    with pytest.raises(ValueError, match="JSON"):
        cell.append(row(0) | {"score": float("nan")})
    assert not file.exists()


def test_one_line_is_one_write_that_is_synced(cell, monkeypatch):
    calls = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("sync") or sync(fd))
    cell.append(row(0))
    assert calls == ["write", "sync"]


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_last_line_is_skipped_and_cut_off_by_the_next_append(cell, file, cut):
    cell.append(row(0))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:cut])
    assert cell.rows() == {"0000": row(0)}
    assert next(read_cells(cell.path.parent))[2] == 1
    cell.append(row(1))
    assert file.read_bytes().startswith(whole)
    assert cell.rows() == {"0000": row(0), "0001": row(1)}
    assert next(read_cells(cell.path.parent))[2] == 0


def test_a_torn_only_line_leaves_an_empty_file_to_go_on_from(cell, file):
    file.write_bytes(b'{"sample": "00')
    assert cell.rows() == {}
    cell.append(row(0))
    assert cell.rows() == {"0000": row(0)}


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b"{}", b'{"sample": []}', b"\xff\xfe", b""])
def test_a_damaged_line_in_the_middle_costs_only_itself(cell, file, line):
    cell.append(row(0))
    file.write_bytes(line + b"\n" + file.read_bytes() + line + b"\n")
    cell.append(row(1))
    assert cell.rows() == {"0000": row(0), "0001": row(1)}
    assert next(read_cells(cell.path.parent))[2] == 2


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from tests.test_store import CELL, row
from structkv_bench.store import Store
cell, write = Store(sys.argv[1]).cell(CELL), os.write
def half(fd, data):
    write(fd, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
cell.append(row(0))
cell.append(row(1))
os.write = half
cell.append(row(2))
"""


def test_a_run_killed_in_the_middle_of_a_write_goes_on_to_the_same_bytes(cell, file, tmp_path):
    root = str(Path(__file__).parents[1])
    died = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), root], check=False)
    assert died.returncode == -signal.SIGKILL
    assert not file.read_bytes().endswith(b"\n")
    for number in range(5):
        if f"{number:04d}" not in cell.rows():
            cell.append(row(number))
    undisturbed = Store(tmp_path / "other").cell(CELL)
    undisturbed.begin({})
    for number in range(5):
        undisturbed.append(row(number))
    assert file.read_bytes() == (undisturbed.path / "rows.jsonl").read_bytes()


@pytest.fixture
def full_disk(file):
    """No file may grow beyond a line and a half: the kernel takes half of the second line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size * 3 // 2, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_within_a_line_loses_no_row_before_it(cell, file, full_disk):
    cell.append(row(0))
    whole = file.read_bytes()
    full_disk()
    for _ in range(2):
        with pytest.raises(UserError, match="the same command goes on") as error:
            cell.append(row(1))
        assert str(cell.path) in str(error.value)
        assert file.read_bytes() == whole


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_any_failed_write_is_one_clear_error_and_takes_nothing_away(cell, file, monkeypatch, call, number):
    cell.append(row(0))
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        with pytest.raises(UserError, match=os.strerror(number)):
            cell.append(row(1))
    assert file.read_bytes() == whole
    cell.append(row(1))
    assert len(cell.rows()) == 2


def test_a_usable_results_folder_is_made_and_left_empty(tmp_path):
    Store(tmp_path / "a" / "b").check_writable()
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_place_of_the_results_folder_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"results_dir=.*can't be written to"):
        Store(tmp_path / place).check_writable()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_results_folder_is_refused(tmp_path, monkeypatch, number):
    monkeypatch.setattr(tempfile, "TemporaryFile", failing(number))
    with pytest.raises(UserError, match=os.strerror(number)):
        Store(tmp_path).check_writable()


def test_a_results_folder_that_cannot_even_be_made_is_refused():
    with pytest.raises(UserError, match="can't be written to"):
        Store("/proc/no/such/place").check_writable()


def test_cell_json_holds_what_ran_and_every_session(cell):
    cell.begin({"started": "later"})
    ((about, rows, torn),) = read_cells(cell.path.parent)
    assert about == {
        "key": CELL.key,
        "names": {"model": "smollm2_135m", "method": "snapkv", "task": "niah", "protocol": "official"},
        "config": CELL.config,
        "sessions": [{"started": "now"}, {"started": "later"}],
    }
    assert (rows, torn) == ([], 0)


def test_a_crash_while_cell_json_is_written_leaves_the_old_one(cell, monkeypatch):
    old = (cell.path / "cell.json").read_bytes()
    monkeypatch.setattr(os, "replace", failing(errno.ENOSPC))
    with pytest.raises(UserError, match="can't write results"):
        cell.begin({"started": "later"})
    assert (cell.path / "cell.json").read_bytes() == old
    assert [path.name for path in cell.path.iterdir()] == ["cell.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_cell_json_is_one_clear_error(cell, content):
    (cell.path / "cell.json").write_bytes(content)
    for touch in (lambda: list(read_cells(cell.path.parent)), lambda: cell.begin({})):
        with pytest.raises(UserError, match=r"cell\.json: damaged; delete it"):
            touch()


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_no_results_says_which_command_makes_them(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="structkv-bench run"):
        list(read_cells(tmp_path / folder))


def shard(tmp_path, name) -> CellStore:
    store = Store(tmp_path, name).cell(CELL)
    store.begin({"started": name})
    return store


def test_shards_write_files_of_their_own_that_readers_merge(tmp_path):
    cells = [shard(tmp_path, "ab.0000"), shard(tmp_path, "ab.0001"), Store(tmp_path).cell(CELL)]
    cells[2].begin({"started": "whole"})
    for number, one in enumerate(cells):
        one.append(row(number))
    assert {file.name for file in cells[0].path.iterdir()} == {
        *("cell.json", "cell.ab.0000.json", "cell.ab.0001.json"),
        *("rows.jsonl", "rows.ab.0000.jsonl", "rows.ab.0001.jsonl"),
    }
    assert list(cells[0].rows().values()) == [row(0), row(1), row(2)]
    about = read_about(cells[0].path / "cell.json")
    assert [session["started"] for session in about["sessions"]] == ["whole", "ab.0000", "ab.0001"]
    assert about["config"] == CELL.config


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_sample_in_two_files_the_row_that_worked_counts(tmp_path, order):
    files = [shard(tmp_path, f"ab.{number:04d}") for number in order]
    files[0].append(row(7))
    files[1].append(row(7) | {"status": "failed"})
    assert files[0].rows() == {"0007": row(7)}


def test_of_two_rows_that_worked_the_one_in_the_later_file_counts(tmp_path):
    for score in (0.1, 0.2):
        shard(tmp_path, f"ab.000{score * 10:.0f}").append(row(7) | {"score": score})
    assert Store(tmp_path).cell(CELL).rows()["0007"]["score"] == 0.2


def test_a_torn_line_of_a_shard_is_cut_off_by_that_shard_alone(tmp_path):
    one, two = shard(tmp_path, "ab.0000"), shard(tmp_path, "ab.0001")
    one.append(row(0))
    file = one.path / "rows.ab.0000.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"sam')
    two.append(row(1))
    assert file.read_bytes() == whole + b'{"sam'
    one.append(row(2))
    assert file.read_bytes().startswith(whole)
    assert sorted(one.rows()) == ["0000", "0001", "0002"]


def test_other_weights_are_refused_whichever_file_tells_of_the_first(tmp_path):
    shard(tmp_path, "ab.0000").begin({"model": {"weights": "a"}})
    for store in (Store(tmp_path), Store(tmp_path, "ab.0001")):
        store.cell(CELL).check({"weights": "a"})
        with pytest.raises(UserError, match="another model"):
            store.cell(CELL).check({"weights": "b"})
    (tmp_path / CELL.folder / "cell.json").unlink()
    Store(tmp_path).cell(CELL).append(row(0))
    with pytest.raises(UserError, match="another model"):
        Store(tmp_path).cell(CELL).check({"weights": "b"})


def test_shards_share_a_cell_and_keep_whole_runs_out(tmp_path):
    Store(tmp_path).check_writable()
    code = (
        "import sys; from structkv_bench.store import Store; from tests.test_store import CELL; "
        "held = Store(sys.argv[1], sys.argv[2]).locked([CELL]); held.__enter__(); "
        "print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "ab.0000"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as holder:
        assert holder.stdout.readline() == b"held\n"
        with Store(tmp_path, "ab.0001").locked([CELL]):
            pass
        assert is_held(tmp_path / ".lock", lock_place(CELL.key))
        with pytest.raises(UserError, match="another run is adding rows"), Store(tmp_path).locked([CELL]):
            pass
        holder.communicate(b"\n")
    assert not is_held(tmp_path / ".lock", lock_place(CELL.key))
