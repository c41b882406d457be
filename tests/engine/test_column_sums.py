"""Column sums are those of the whole attention matrix, in torch's form and in that of the Triton kernels.

The kernels run in Triton's interpreter, which wants a process of its own (kernels.py); that they compile for
a GPU is held too, and needs none. Which form a GPU gets is decided by a race, whose rules are held with
kernels and a clock made up for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from structkv_bench.engine import column_sums
from structkv_bench.engine.attending import Attending
from structkv_bench.engine.column_sums import in_blocks
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.race import Race
from tests.engine.kernels import CASES, EXACT

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def whole_matrix(given: Attending, first: int, newest_weight: float) -> Tensor:
    """The sums from all of heads x tokens x tokens, in fp64."""
    copies = given.query.shape[0] // given.key.shape[0]
    keys = given.key.double().repeat_interleave(copies, 0)
    logits = (given.query.double() @ keys.transpose(1, 2)) * given.scaling
    distance = given.positions[:, None] - given.positions
    reach = given.sliding_window or int(given.positions[-1]) + 1
    attention = logits.masked_fill((distance < 0) | (distance >= reach), -torch.inf).softmax(-1)
    weights = torch.linspace(1.0, newest_weight, given.tokens - first, dtype=torch.float64)
    return (attention[:, first:] * weights[:, None]).sum(1).float()


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_queries_change_nothing(name: str) -> None:
    """Torch's form: GQA, gaps, a sliding window, weights and lengths that no block divides."""
    case = CASES[name]
    sums, expected = in_blocks(*case.arguments()), whole_matrix(*case.arguments())
    assert torch.allclose(sums, expected, rtol=case.rounding, atol=case.rounding)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the kernels give for each case, in Triton's interpreter."""
    file = tmp_path_factory.mktemp("kernels") / "sums.pt"
    _python("-m", "tests.engine.kernels", str(file), TRITON_INTERPRET="1")
    return torch.load(file)


def _python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_what_blocks_give(name: str, interpreted: dict[str, Tensor]) -> None:
    """The same sums but for the order of additions; half precision rounds products alike in both."""
    expected = in_blocks(*CASES[name].arguments())
    assert interpreted[name].dtype == torch.float32
    assert torch.allclose(interpreted[name], expected, rtol=EXACT, atol=EXACT)


@needs_triton
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """What the interpreter lets through, a compiler may refuse; here it is that of compute capability 8.0."""
    made = _python("-m", "tests.engine.kernels", TRITON_CACHE_DIR=str(tmp_path))
    assert made.split() == [
        "_log_sums",
        "fp32",
        "_key_sums",
        "fp32",
        "_log_sums",
        "bf16",
        "_key_sums",
        "bf16",
    ]


class _Clock:
    """A second for each call of torch's form, and `kernel_s` for each of the kernel."""

    def __init__(self, kernel_s: float, kernel: Callable[[Tensor], Tensor] | None = None) -> None:
        self.time, self.kernel_s, self.made = 0.0, kernel_s, kernel or (lambda given: given + 1)
        self.calls: list[str] = []

    def usual(self, given: Tensor) -> Tensor:
        self.calls.append("usual")
        self.time += 1
        return given + 1

    def kernel(self, given: Tensor) -> Tensor:
        self.calls.append("kernel")
        self.time += self.kernel_s
        return self.made(given)

    def race(self) -> Race:
        return Race(self.usual, self.kernel, clock=lambda _: self.time)


@pytest.mark.parametrize(("kernel_s", "winner"), [(0.5, "kernel"), (2.0, "usual")])
def test_the_faster_form_is_used(kernel_s: float, winner: str, capsys: Any) -> None:
    """Each size is raced once; the form that took less time has it from then on, and nothing is said."""
    clock = _Clock(kernel_s)
    race, given = clock.race(), torch.ones(3)
    assert torch.equal(race("short", given), given + 1)
    raced = list(clock.calls)
    assert torch.equal(race("short", given), given + 1)
    assert clock.calls == [*raced, winner]
    clock.calls.clear()
    race("long", given)
    assert clock.calls == raced
    assert capsys.readouterr().err == ""


def _raises(given: Tensor) -> Tensor:
    raise RuntimeError("out of\nshared memory")


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (_raises, "failed: RuntimeError: out of shared memory"),
        (lambda given: given * 2.1, "gives other numbers"),
        (lambda given: given * torch.nan, "gives other numbers"),
    ],
)
def test_a_kernel_that_fails_is_never_used_again(kernel: Any, told: str, capsys: Any) -> None:
    """Faster or not, at any size: torch's form answers, and stderr has one line."""
    clock = _Clock(0.0, kernel)
    race, given = clock.race(), torch.ones(3)
    for size in ("short", "short", "long"):
        assert torch.equal(race(size, given), given + 1)
    assert clock.calls.count("kernel") == 1
    assert (
        capsys.readouterr().err == f"warning: a Triton kernel {told}; torch's own form is used from here on\n"
    )


def test_a_kernel_may_fail_after_it_has_won(capsys: Any) -> None:
    """Other strides may ask for another compilation: that one failing is no failed row either."""
    clock = _Clock(0.0)
    race, given = clock.race(), torch.ones(3)
    race("short", given)
    clock.made = _raises
    for _ in range(2):
        assert torch.equal(race("short", given), given + 1)
    assert capsys.readouterr().err.count("warning") == 1


def test_without_triton_there_is_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not everyone has it: nothing fails, nothing is said, torch's form is what there is."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "structkv_bench.engine.column_sums_triton", raising=False)
    assert column_sums._race.__wrapped__() == Race(in_blocks, None)


@needs_triton
def test_with_triton_its_kernels_are_in_the_race() -> None:
    """That the name which is imported late is the right one."""
    kernel = column_sums._race.__wrapped__().kernel
    assert kernel is not None
    assert kernel.__name__ == "in_two_passes"


def test_the_sums_of_a_window_are_made_of_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product serves both, in either order; weights do not touch what the window keeps."""
    products = []
    probabilities = Attending.probabilities

    def counting(self: Attending, start: int, stop: int) -> Tensor:
        products.append((start, stop))
        return probabilities(self, start, stop)

    monkeypatch.setattr(Attending, "probabilities", counting)
    given = CASES["gqa3"].given()
    layer = LayerView(0, given.query, given.key, given.key, given.positions, given.tokens, given.scaling)
    sums, weighted, attention = layer.column_sums(8), layer.column_sums(8, 1.2), layer.window_attention(8)
    assert products == [(given.tokens - 8, given.tokens)]
    assert torch.allclose(sums, attention.sum(1))
    assert torch.allclose(weighted, whole_matrix(given, given.tokens - 8, 1.2), atol=1e-5)
