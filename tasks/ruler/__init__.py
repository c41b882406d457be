"""RULER: niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe and fwe."""

from .suite import Ruler

__all__ = ["Ruler"]
