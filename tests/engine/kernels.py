"""Inputs for column sums, and what Triton makes of them in a process of its own.

python -m tests.engine.kernels FILE             the kernels' sums of each case, with TRITON_INTERPRET=1
python -m tests.engine.kernels compile DTYPE    names of the kernels that compile for a GPU
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from structkv_bench.engine.attending import Attending

EXACT = 1e-5
"""What the order of additions may change."""


@dataclass(frozen=True)
class Case:
    """Tokens of one layer, and which of their queries count how much."""

    kv_heads: int = 2
    group: int = 1
    tokens: int = 130
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    gaps: bool = False
    sliding_window: int | None = None
    last: int | None = None
    newest_weight: float = 1.0
    whole: bool = False
    """Numbers whose products no dtype rounds: the interpreter cuts bits off where it makes a bfloat16."""
    rounding: float = 1e-4
    """What the dtype of the products may change in a sum."""

    def given(self) -> Attending:
        """Random queries and keys, the queries laid out as a projection lays them."""
        torch.manual_seed(0)
        heads = self.kv_heads * self.group
        query = torch.randn(self.tokens, heads, self.head_dim).transpose(0, 1) * 2
        key = torch.randn(self.kv_heads, self.tokens, self.head_dim)
        if self.whole:
            query, key = query.sign(), key.sign()
        positions = torch.arange(self.tokens)
        if self.gaps:
            positions = torch.randperm(2 * self.tokens)[: self.tokens].sort().values
        scaling = 2.0**-3 if self.whole else self.head_dim**-0.5
        return Attending(query.to(self.dtype), key.to(self.dtype), positions, scaling, self.sliding_window)

    def arguments(self) -> tuple[Attending, int, float]:
        """As `column_sums` takes them."""
        return self.given(), 0 if self.last is None else self.tokens - self.last, self.newest_weight


CASES = {
    "gqa1": Case(),
    "gqa3": Case(group=3, head_dim=80, tokens=97),
    "gqa4": Case(kv_heads=1, group=4, head_dim=128, tokens=150),
    "one block": Case(tokens=64),
    "shorter than a block": Case(tokens=5, group=3, head_dim=8),
    "gaps": Case(gaps=True, group=3),
    "sliding window": Case(sliding_window=20, tokens=200, kv_heads=1, group=3),
    "sliding window over gaps": Case(sliding_window=20, gaps=True, tokens=200, kv_heads=1, group=3),
    "sees itself alone": Case(sliding_window=1, tokens=70),
    "last 1": Case(last=1),
    "last 40": Case(last=40, group=3, tokens=200),
    "last 100, weighted": Case(last=100, newest_weight=1.2, gaps=True, sliding_window=90, tokens=210),
    "weighted": Case(newest_weight=1.2, tokens=129),
    "fp16": Case(dtype=torch.float16, group=3, rounding=1e-2),
    "bf16": Case(dtype=torch.bfloat16, group=3, head_dim=80, whole=True),
    "bf16, last 40, weighted": Case(dtype=torch.bfloat16, group=3, last=40, newest_weight=1.2, whole=True),
}


def interpret(file: str) -> None:
    """Write the kernels' sums of each case."""
    from structkv_bench.engine.column_sums_triton import in_two_passes

    torch.save({name: in_two_passes(*case.arguments()) for name, case in CASES.items()}, file)


def compile_for_gpu() -> None:
    """Compile both kernels for a head of 128, the keys and queries contiguous along it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from structkv_bench.engine import column_sums_triton as kernels

    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        constant = {"HEAD_DIM": 128, "PADDED": 128, "BLOCK": kernels.BLOCK, "query_dim": 1, "key_dim": 1}
        constant["DTYPE"] = kernels.DTYPES[dtype]
        types = dict.fromkeys(("query", "key"), f"*{name}") | dict.fromkeys(constant, "constexpr")
        types |= {"positions": "*i64", "scaling": "fp32"} | dict.fromkeys(
            ("totals", "weights", "sums"), "*fp32"
        )
        for kernel in (kernels._log_sums, kernels._key_sums):
            signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
            made = triton.compile(ASTSource(kernel, signature, constant), target=GPUTarget("cuda", 80, 32))
            assert made.asm["cubin"]
            print(kernel.__name__, name)


if __name__ == "__main__":
    interpret(sys.argv[1]) if sys.argv[1:] else compile_for_gpu()
