"""LongBench: its 21 tasks, the 13 of LongBench-E, and LongBench v2."""

from .suite import LongBench
from .v2 import LongBenchV2

__all__ = ["LongBench", "LongBenchV2"]
