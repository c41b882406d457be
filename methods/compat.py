"""Deviations of public harnesses under a name, so that a paper's odd number can be reproduced and explained.

`method.compat`: `none`, or `fastkv` for the baselines as dongwonjo/FastKV runs them. Its StreamingLLM, SnapKV
and H2O repeat K and V for each query head and store all copies, so that a ratio of 0.1 takes 0.1 times the
group size of the bytes; its H2O moreover lets all queries but the last few see future keys.
"""

from __future__ import annotations

from structkv_bench.engine.method import check_choice

FASTKV = "fastkv"
COMPAT = ("none", FASTKV)


def is_fastkv(compat: str) -> bool:
    """Whether `compat` asks for FastKV's harness.

    Raises:
        UserError: there is no such choice.
    """
    check_choice("compat", compat, COMPAT)
    return compat == FASTKV
