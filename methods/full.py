"""The full cache: the reference of every table."""

from __future__ import annotations

from dataclasses import dataclass

from structkv_bench.engine.method import Compressor, Method


@dataclass(frozen=True)
class Full(Method):
    """Keeps every entry of every token."""

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor that keeps everything."""
        return Compressor()
