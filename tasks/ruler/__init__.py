"""RULER: all 13 tasks, as NVIDIA's generators make them or filling their length better."""

from .suite import Ruler

__all__ = ["Ruler"]
