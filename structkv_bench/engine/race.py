"""A second form of a computation is used where it has shown itself to be the faster one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from structkv_bench.engine.clock import now
from structkv_bench.errors import kind_and_line

Form = Callable[..., Tensor]


@dataclass
class Race:
    """Two forms of one computation: torch's, and a kernel that may be faster, may be wrong and may not run.

    A kernel that raises or gives other numbers is never used again, and stderr is told so once.
    """

    usual: Form
    kernel: Form | None
    clock: Callable[[Tensor], float] = now
    _kernel_wins: dict[Hashable, bool] = field(default_factory=dict)

    def __call__(self, size: Hashable, *given: Any) -> Tensor:
        """What both forms give for `given`, by the one that was faster when this `size` first came."""
        if self.kernel is None:
            return self.usual(*given)
        if size not in self._kernel_wins:
            usual = self.usual(*given)
            self._kernel_wins[size] = self._wins(self.kernel, given, usual)
            return usual
        if self._kernel_wins[size]:
            try:
                return self.kernel(*given)
            except Exception as error:  # of a compiler and a driver: of any kind
                self._give_up(f"failed: {kind_and_line(error)}")
        return self.usual(*given)

    def _wins(self, kernel: Form, given: tuple[Any, ...], usual: Tensor) -> bool:
        """Whether the kernel gives what torch's form gave, in less time; its first call compiles it."""
        try:
            if not _agree(kernel(*given), usual):
                self._give_up("gives other numbers")
                return False
            of_kernel = self._seconds(kernel, given, usual)
        except Exception as error:
            self._give_up(f"failed: {kind_and_line(error)}")
            return False
        return of_kernel < self._seconds(self.usual, given, usual)

    def _seconds(self, form: Form, given: tuple[Any, ...], like: Tensor) -> float:
        started = self.clock(like)
        form(*given)
        return self.clock(like) - started

    def _give_up(self, why: str) -> None:
        self.kernel = None
        print(f"warning: a Triton kernel {why}; torch's own form is used from here on", file=sys.stderr)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether two results are one but for rounding, of products in bfloat16 too."""
    return torch.allclose(one, other, rtol=2e-2, atol=2e-2)
