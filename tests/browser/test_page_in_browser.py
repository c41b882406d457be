"""The report in a real browser.

Rules protected here:
- At a phone's width nothing but a table's own box scrolls sideways, and its methods stay in sight.
- A click on a head sorts each group for itself, numbers as numbers, what has none last.
- The page asks for nothing, runs nothing that came out of a row, and has no error.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from structkv_bench.plan import Cell
from structkv_bench.report.page import page
from structkv_bench.report.printed import Wish
from tests.browser.chromium import Chromium, chromium
from tests.pages import FIG8, TABLE2, failed, lay, row

pytestmark = pytest.mark.xdist_group("browser")  # one worker, one browser

PHONE, DESK = 390, 1280
TABLE = "#experiment-1 figure.table"
ORDER = f"[...document.querySelectorAll('{TABLE} tbody tr')].map(row => row.cells[0].innerText)"
HOSTILE = "</script><img src=x onerror=\"document.title='overrun'\"><script>document.title='overrun'</script>"
LONG = "method=full,snapkv,structkv,streaming_llm,h2o"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with the paper's numbers, groups, gaps and long labels; a figure; failures that mean harm."""
    folder = tmp_path_factory.mktemp("page")

    def make(cell: Cell, sample: int) -> dict[str, Any] | None:
        if cell.method_name == "snapkv" and cell.length == 16384:
            return None if sample else failed(cell, sample, f"{HOSTILE * 20}\n{'x' * 500}")
        return row(cell, sample)

    lay(folder, "table2", (LONG, *TABLE2[1:]), make)
    lay(folder, "table2", ("method=structkv", "method.window=16", "method.kernel=31", *TABLE2[1:]))
    lay(folder, "fig8", FIG8)
    (folder / "report.html").write_text(page([folder], Wish(compare=True)), encoding="utf-8")
    return folder / "report.html"


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_its_window_and_shows_its_tables(browser: Chromium, file: Path, width: int, scheme: str):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.ask("Emulation.setEmulatedMedia", features=[feature])
    browser.open(file, width)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelector('img').naturalWidth") > 300
    tables = browser.run("[...document.querySelectorAll('.scroll')].filter(t => t.checkVisibility()).length")
    assert tables >= 4  # two tables, a figure, the hashes
    browser.run(f"document.querySelector('{TABLE}').scrollIntoView()")
    seen = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
    assert seen.shape[1] == width
    ground = seen[0, -1]
    assert (ground.mean() < 0.5) == (scheme == "dark")
    assert 0.02 < (np.abs(seen - ground).max(axis=2) > 0.25).mean() < 0.5  # text on its ground
    assert not browser.requests
    assert not browser.complaints


def test_a_wide_table_scrolls_in_its_box_and_its_methods_stay(browser: Chromium, file: Path):
    browser.open(file, PHONE)
    left = f"[...document.querySelectorAll('{TABLE} th[scope=row]')].map(h => h.getBoundingClientRect().left)"
    before = browser.run(left)
    browser.run(f"document.querySelector('{TABLE} .scroll').scrollLeft = 10000")
    assert browser.run(f"document.querySelector('{TABLE} .scroll').scrollLeft") > 50
    assert browser.run(left) == before
    last = f"document.querySelector('{TABLE} thead th:last-child').getBoundingClientRect().right"
    assert browser.run(last) <= PHONE
    widest = f"Math.max(...[...document.querySelectorAll('{TABLE} th[scope=row]')].map(h => h.offsetWidth))"
    assert browser.run(widest) <= 0.45 * PHONE


def test_a_click_sorts_within_groups_and_the_third_restores(browser: Chromium, file: Path):
    browser.open(file, DESK)
    head = f"{TABLE} thead th:last-child"
    state = f"document.querySelector('{head}').getAttribute('aria-sort')"
    before = browser.run(ORDER)
    paper = ["paper", "ours less paper"]
    aware = ["structkv", *paper, "structkv kernel=31 window=16"]
    assert before[:4] == ["full cache", "full", *paper]
    assert before[5:] == ["snapkv", *paper, "streaming_llm", *paper, "h2o", *paper, before[14], *aware]
    browser.click(f"{head} button")
    assert browser.run(state) == "ascending"
    risen = browser.run(ORDER)
    assert risen[:5] == before[:5]
    # snapkv has no average; equal ones stay as they were
    assert risen[5:] == ["streaming_llm", *paper, "h2o", *paper, "snapkv", *paper, before[14], *aware]
    browser.click(f"{head} button")
    assert browser.run(state) == "descending"
    assert browser.run(ORDER)[5:14] == ["h2o", *paper, "streaming_llm", *paper, "snapkv", *paper]
    browser.click(f"{head} button")
    assert browser.run(state) is None
    assert browser.run(ORDER) == before


def test_names_sort_as_text_and_one_column_at_a_time(browser: Chromium, file: Path):
    browser.open(file, DESK)
    browser.click(f"{TABLE} thead th:last-child button")
    browser.click(f"{TABLE} thead th:first-child button")
    assert browser.run(f"document.querySelectorAll('{TABLE} [aria-sort]').length") == 1
    methods = [name for name in browser.run(ORDER)[5:14] if "paper" not in name]
    assert methods == ["h2o", "snapkv", "streaming_llm"]


def test_the_keyboard_sorts_too(browser: Chromium, file: Path):
    browser.open(file, DESK)
    browser.run(f"document.querySelector('{TABLE} thead button').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.ask(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            text="\r",
            windowsVirtualKeyCode=13,
        )
    assert browser.run(f"document.querySelector('{TABLE} thead th').getAttribute('aria-sort')") == "ascending"


def test_a_hostile_row_stays_text(browser: Chromium, file: Path):
    browser.open(file, DESK)
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert "overrun" in browser.run("document.querySelector('#failures pre').innerText")
    assert browser.run("document.title").startswith("structkv-bench report")
    assert browser.run("document.images.length") == 1
    browser.open(file, PHONE)
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= PHONE
    assert not browser.complaints


def test_text_stands_out_from_its_ground(browser: Chromium, file: Path):
    """WCAG AA: a contrast of 4.5 for every kind of text, in both schemes."""
    script = """
    (() => {
      const channels = text => text.match(/[\\d.]+/g).map(Number);
      const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const ground = node => {
        for (; node; node = node.parentElement) {
          const found = channels(getComputedStyle(node).backgroundColor);
          if (found.length < 4 || found[3] > 0) return found;
        }
      };
      return [...document.querySelectorAll("body *")]
        .filter(node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()))
        .map(node => {
          const [a, b] = [channels(getComputedStyle(node).color), ground(node)].map(light);
          return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.tagName + "." + node.className];
        })
        .filter(([contrast]) => contrast < 4.5);
    })()
    """
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.ask("Emulation.setEmulatedMedia", features=[feature])
        browser.open(file, DESK)
        assert browser.run(script) == []


def test_it_prints_whole_tables(browser: Chromium, file: Path):
    """On paper nothing can be scrolled: each table is as wide as it needs and fits a landscape page."""
    browser.open(file, 1030)
    browser.ask("Emulation.setEmulatedMedia", media="print")
    wide = "[...document.querySelectorAll('table')].filter(t => t.offsetWidth > 1030).length"
    hidden = "getComputedStyle(document.querySelector('.scroll')).overflowX"
    assert (browser.run(wide), browser.run(hidden)) == (0, "visible")
    browser.ask("Emulation.setEmulatedMedia", media="")
