"""scripts/random_model.py: a model of a published size whose speed can be measured without its files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import models
from structkv_bench.model_spec import ModelSpec
from structkv_bench.shape import ModelShape
from tests.tiny import tokenizer

SHAPE = ModelShape(3, 4, 2, 16, 48, 80, 300, max_positions=4096, itemsize=2)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
    return importlib.import_module("random_model")


def test_it_loads_like_any_model_and_has_the_size_that_was_asked_for(script: Any, tmp_path: Path) -> None:
    script.write(SHAPE, "bfloat16", tokenizer(), tmp_path / "random")
    model = models.load(ModelSpec("random", str(tmp_path / "random"), dtype="bfloat16"))
    assert model.shape == SHAPE
    assert model.weight_bytes == SHAPE.weight_bytes


def test_it_is_the_same_model_each_time(script: Any, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "other")]
    for folder in files:
        script.write(SHAPE, "bfloat16", tokenizer(), folder)
    assert models.file_hash(files[0]) == models.file_hash(files[1])


def test_it_needs_a_model_whose_size_is_known(
    script: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["random_model.py", "smollm2_135m", str(tmp_path / "random")])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "smollm2_135m: its size is not written down" in capsys.readouterr().err
