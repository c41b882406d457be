"""Setups -> cells and groups.

Rules protected here:
- A cell's key changes with everything that changes a prediction, and with nothing else.
- Cells with the same model and the same prompts stand in one group: one prefill serves them.
"""

import copy
import json
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from structkv_bench.config import compose
from structkv_bench.plan import EXTENT, Cell, plan

JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.lists(st.integers(), max_size=3),
)


def cells(*overrides: str) -> list[Cell]:
    return [cell for group in plan(compose(list(overrides))) for cell in group.cells]


CELLS = cells("method=full,streaming_llm,snapkv,h2o,structkv", "task=niah,ruler", "task.lengths=[64]")
FIELDS = sorted(
    {(part, f.name) for c in CELLS for part in ("model", "method", "task") for f in fields(getattr(c, part))}
)


def changed(settings, name, value):
    """A copy of a frozen dataclass with one field changed, valid or not."""
    other = copy.copy(settings)
    object.__setattr__(other, name, value)
    return other


@pytest.mark.parametrize(("part", "name"), FIELDS)
@given(data=st.data())
def test_the_key_changes_with_every_field_that_changes_a_prediction(part, name, data):
    value = data.draw(JSON_VALUES)
    cell = next(c for c in CELLS if hasattr(getattr(c, part), name))
    settings = getattr(cell, part)
    assume(json.dumps(value) != json.dumps(getattr(settings, name)))
    other = replace(cell, **{part: changed(settings, name, value)})
    extent = (part == "task" and name in EXTENT) or (part == "model" and name == "name")
    assert (other.key == cell.key) == extent


def test_the_key_changes_with_subtask_length_class_and_protocol(monkeypatch):
    cell = CELLS[0]
    others = [replace(cell, subtask="other"), replace(cell, length=65), CELLS[1]]
    assert len({cell.key, *(other.key for other in others)}) == 4
    before = cell.key
    monkeypatch.setattr("structkv_bench.plan.PROTOCOL", "next")
    assert replace(cell).key != before


def test_what_a_choice_is_called_is_no_part_of_the_key_but_of_the_folder():
    other = replace(CELLS[0], method_name="alias")
    assert other.key == CELLS[0].key
    assert other.folder != CELLS[0].folder


def test_the_same_overrides_give_the_same_key_in_any_order():
    one, other = cells("method=snapkv", "method.window=4"), cells("method.window=4", "method=snapkv")
    assert [c.key for c in one] == [c.key for c in other]


def test_the_config_is_plain_json():
    for cell in CELLS:
        assert json.loads(json.dumps(cell.config)) == cell.config
        assert cell.config["method"]["_target_"].endswith(type(cell.method).__name__)


def test_a_folder_says_what_it_holds_in_characters_safe_for_any_disk():
    (cell,) = cells(
        "method=snapkv", "method.kv_ratio=0.2", "model=custom", "model.path=Org/Name", "task.lengths=[64]"
    )
    assert cell.folder == f"Org-Name.snapkv-kv0.2.{cell.subtask}.64.{cell.key}"
    (cell,) = cells("method=snapkv", "method.budget=512", "task.lengths=[64]")
    assert cell.folder == f"smollm2_135m.snapkv-b512.{cell.subtask}.64.{cell.key}"
    long = replace(cell, model=replace(cell.model, name="x" * 300))
    assert len(long.folder) < 255


def test_cells_of_the_same_prompts_stand_in_one_group():
    overrides = ["method=full,snapkv,h2o", "method.kv_ratio=0.1,0.2", "task=ruler", "task.subset=[vt,cwe]"]
    groups = plan(compose([*overrides, "task.lengths=[4096,8192]"]))
    assert [(g.subtask, g.length) for g in groups] == [
        ("vt", 4096),
        ("vt", 8192),
        ("cwe", 4096),
        ("cwe", 8192),
    ]
    for group in groups:
        assert [c.method_name for c in group.cells] == ["full", "snapkv", "snapkv", "h2o", "h2o"]
        assert {(c.model, c.subtask, c.length) for c in group.cells} == {
            (group.model, group.subtask, group.length)
        }


def test_other_prompts_are_another_group():
    assert len(plan(compose(["method=full", "task.seed=1,2", "task.lengths=[64]"]))) == 2


def test_of_a_cell_asked_for_twice_the_larger_run_is_planned():
    (group,) = plan(compose(["method=full,snapkv", "task.samples=3,7,5", "task.lengths=[64]"]))
    assert [c.task.samples for c in group.cells] == [7, 7]


def test_cells_that_want_another_number_of_samples_are_another_group():
    setups = compose(["method=full", "task.samples=3"]) + compose(["method=snapkv", "task.samples=7"])
    assert [(g.task.samples, [c.method_name for c in g.cells]) for g in plan(setups)] == [
        *((3, ["full"]), (3, ["full"]), (7, ["snapkv"]), (7, ["snapkv"]))
    ]
