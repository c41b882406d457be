"""The garbage collector rests while a command imports torch, and at no other time."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from types import ModuleType

import pytest

from structkv_bench.starting import uncollected


@pytest.fixture
def before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("before_torch")
def test_collector_rests_while_torch_is_imported_even_if_that_fails() -> None:
    was_on: list[bool] = []
    with suppress(ImportError), uncollected():
        was_on.append(gc.isenabled())
        raise ImportError
    assert (was_on, gc.isenabled()) == ([False], True)
    gc.unfreeze()


@pytest.mark.usefixtures("before_torch")
def test_what_was_imported_is_not_searched_afterwards() -> None:
    with uncollected():
        imported: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(imported)
    gc.unfreeze()


def test_what_a_run_leaves_behind_stays_the_collectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    before = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
