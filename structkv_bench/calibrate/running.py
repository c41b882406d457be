"""Running text: prompts, and the tokens that come after them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from structkv_bench.calibrate.corpus import sentences
from structkv_bench.calibrate.prompts import OWN, fitting, text_of
from structkv_bench.errors import UserError

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

MOST_RUNGS = 10
"""A digit tells a window in a file."""


@dataclass(frozen=True)
class RunningText:
    """Settings of the text, and of what is sought on it."""

    source: str = OWN
    """Our own sentences, or a text file."""
    length: int = 1024
    """Tokens of a prompt."""
    queries: int = 64
    """Tokens after it, whose attention is compared."""
    samples: int = 4
    ladder: list[int] = field(default_factory=lambda: [32, 16, 8, 4, 2, 1])
    """Windows to choose from: the prompt's length divided by these; the last one is the whole."""
    sinks: list[int] = field(default_factory=lambda: [0, 4])
    """First tokens that every window has beside its last ones, each value measured by itself."""
    ratios: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.3, 0.5])
    """Shares of all entries; for each, the highest fidelity that takes no more is sought."""
    steps: int = 7
    """Bisections for each of them."""
    fidelities: list[float] = field(default_factory=lambda: [0.995, 0.998])
    """Measured beside those: the paper's."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        if min(self.length, self.queries, self.samples, self.steps) < 1:
            raise UserError("length, queries, samples and steps: give 1 or more")
        falling = all(a > b for a, b in zip(self.ladder, self.ladder[1:], strict=False))
        if not falling or self.ladder[-1:] != [1] or len(self.ladder) > MOST_RUNGS:
            raise UserError(
                f"ladder={list(self.ladder)}: give up to {MOST_RUNGS} falling divisors that end with 1"
            )
        if not self.sinks or min(self.sinks) < 0:
            raise UserError(f"sinks={list(self.sinks)}: give numbers of tokens, 0 or more")
        if not all(0 < share <= 1 for share in [*self.ratios, *self.fidelities]):
            raise UserError("ratios and fidelities: give shares above 0 and up to 1")

    def sequences(self, model: Model) -> list[list[int]]:
        """Token ids of `samples` texts, each a prompt and the queries after it.

        Raises:
            UserError: the model has too few positions, or the file too few tokens.
        """
        size = self.length + self.queries
        fitting([size], model)
        if self.source == OWN:
            return [self._own(model, size, seed) for seed in range(self.samples)]
        ids = model.prompts.encode(text_of(self.source))
        if len(ids) < size * self.samples:
            raise UserError(
                f"calibration={self.source}: has {len(ids)} tokens, {self.samples} samples take {size} each"
            )
        parts = [ids[size * sample : size * (sample + 1)] for sample in range(self.samples)]
        return [model.prompts.render(part, "", chat=False)[:size] for part in parts]

    @staticmethod
    def _own(model: Model, size: int, seed: int) -> list[int]:
        text, ids = sentences(seed), list[int]()
        while len(ids) < size:
            ids += model.prompts.encode(f" {next(text)}")
        return model.prompts.render(ids, "", chat=False)[:size]
