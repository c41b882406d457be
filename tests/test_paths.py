"""Where files are written: whole or not at all, and refused before the work whose result they are to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from structkv_bench.cli import main
from structkv_bench.errors import UserError
from structkv_bench.paths import check_writable, write_whole


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with what can be in the way."""
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to("not/there/yet")
    return tmp_path


@pytest.mark.parametrize("write", [check_writable, lambda file: write_whole(file, "text")])
@pytest.mark.parametrize("name", ["", "file/below", "circle", "/dev/null", "n" * 250, "n" * 300])
def test_what_can_not_be_written_is_one_line(places: Path, name: str, write: Callable[[Path], None]) -> None:
    with pytest.raises(UserError) as refused:
        write(places / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["new", "file", "not/there", "link"])
def test_what_can_be_written_is_as_it_was_until_it_is(places: Path, name: str) -> None:
    before = sorted(places.rglob("*"))
    check_writable(places / name)
    assert sorted(places.rglob("*")) == before
    write_whole(places / name, "text")
    assert (places / name).read_text() == "text"


def test_a_bench_whose_file_could_not_be_written_does_not_begin(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from structkv_bench.bench import measure

    monkeypatch.setattr(measure, "bench", None)
    assert main(["bench", "method=full", "length=2048", "--out", str(places / "file" / "below")]) == 2
    assert "can't be written (Not a directory)" in capsys.readouterr().err
