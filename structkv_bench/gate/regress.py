"""The regression gate: two result sets of the same cells, models and prompts, compared sample by sample.

Predictions are greedy, so the same code gives the same ids wherever it runs, and what is counted (entries,
bytes, tokens) comes out the same to the digit. Scores alone would see little: a small set keeps its means
through faults that change every answer. Two things do differ between honest runs, and are let pass:

- The last digits of logits, with the batch and the processor. Ids may differ where the answer came near a
  tie: where `tie_margin`, its smallest lead of the best token over the second, is within the tolerance in
  either set. Where ids agree the margins must agree too, within the same tolerance; they tell of a fault
  that changes no answer yet. A paired test watches that answers which differ by ties are not worse.
- Seconds, with the load of the machine. A cell's time is judged as a share of the full cache's in the same
  set on the same sample, which a slow machine hardly moves: between an idle and a busy machine the smoke
  set's seconds differed 5-fold, its shares at most 2-fold. That all became slower alike, `make bench` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from structkv_bench.errors import UserError
from structkv_bench.gate.baseline import ResultSet
from structkv_bench.gate.pairs import Obstacle, Pair, named, paired
from structkv_bench.report.statistics import ALPHA, Comparison, compare, holm
from structkv_bench.store import Row

TIE_MARGINS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""How near is a tie, by the model's dtype. In float32 the margins of the smoke set moved by 3e-5 at most
between one thread and two, and between AVX-512, AVX2 and SSE."""
SLOWER = 3.0
"""How many times a share of the full cache's time may grow."""
NOTICEABLE_S = 0.1
"""Less than this is not slower."""
POINTS = 1.0
"""What the mean of a metric may lose, of 100, whatever the paired test says."""
EXACT = 1e-9


@dataclass(frozen=True)
class Tolerances:
    """What may differ."""

    tie_margin: float | None = None
    """None: as `TIE_MARGINS` says."""
    slower: float = SLOWER
    points: dict[str, float] = field(default_factory=dict)
    """By metric (`score`, or one of a task's extra scores); those not named may lose `POINTS`."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Tolerances:
        """From NAME=NUMBER words, as typed.

        Raises:
            UserError: a word is not of that form.
        """
        given: dict[str, float] = {}
        for word in words:
            name, _, number = word.partition("=")
            try:
                given[name] = float(number)
            except ValueError:
                given[name] = -1.0
            if not name or not 0 <= given[name] < float("inf"):
                raise UserError(f"--tolerance {word}: give tie_margin, slower or a metric, such as score=2")
        return cls(given.pop("tie_margin", None), given.pop("slower", SLOWER), given)

    def tie(self, pair: Pair) -> float:
        """How near is a tie in this cell."""
        if self.tie_margin is not None:
            return self.tie_margin
        return TIE_MARGINS[pair.cell.config["model"]["dtype"]]


@dataclass(frozen=True)
class Fault:
    """What one check found wrong with a cell."""

    check: str
    says: str


@dataclass(frozen=True)
class Judged:
    """One cell of the baseline that could be compared."""

    label: str
    samples: int
    ties: int
    """Samples whose answers differ by a near tie."""
    score_before: float | None
    """Mean, of 100."""
    score_after: float | None
    faults: list[Fault]


@dataclass(frozen=True)
class Verdict:
    """What came of a comparison."""

    baseline: str
    current: str
    cells: list[Judged]
    obstacles: list[Obstacle]
    notes: list[str]

    @property
    def regressed(self) -> list[Judged]:
        """The cells with faults."""
        return [cell for cell in self.cells if cell.faults]

    @property
    def exit_code(self) -> int:
        """1: a regression; 2: the sets can't be compared; 0: neither."""
        return 2 if self.obstacles else int(bool(self.regressed))

    @property
    def headline(self) -> str:
        """All of it in a line."""
        if self.obstacles:
            every = len(self.cells) + len(self.obstacles)
            return f"can't be compared: {len(self.obstacles)} of {every} cells of the baseline"
        samples, ties = sum(cell.samples for cell in self.cells), sum(cell.ties for cell in self.cells)
        found = f"a regression in {len(self.regressed)}" if self.regressed else "no regression"
        return f"{found} of {len(self.cells)} cells; {samples} samples compared, {ties} near ties let pass"


Check = Callable[[Pair, Tolerances], str | None]


def gate(before: ResultSet, after: ResultSet, tolerances: Tolerances) -> Verdict:
    """Hold `after` to every cell and sample of `before`; what else it has is not looked at."""
    pairs, obstacles = paired(before, after)
    cells = []
    for pair, loss in zip(pairs, _losses(pairs, tolerances), strict=True):
        found = {name: check(pair, tolerances) for name, check in CHECKS.items()} | {"scores": loss}
        faults = [Fault(name, says) for name, says in found.items() if says]
        ties = len(pair.other_answer()) - len(_changed(pair, tolerances))
        cells.append(
            Judged(pair.cell.label, len(pair.rows), ties, _points(pair, 0), _points(pair, 1), faults)
        )
    more = len(after.cells.keys() - before.cells.keys())
    untimed = sum(not pair.shares for pair in pairs)
    notes = {
        "cells of the current set are not in the baseline": more,
        "cells have no full cache beside them to compare seconds with": untimed,
    }
    said = [f"{count} {what}" for what, count in notes.items() if count]
    return Verdict(before.place, after.place, cells, obstacles, said)


def _points(pair: Pair, which: int) -> float | None:
    return 100 * mean(rows[which]["score"] for rows in pair.rows) if pair.rows else None


def _losses(pairs: Sequence[Pair], tolerances: Tolerances) -> list[str | None]:
    """Of each pair the metrics that fell, beyond tolerance and chance (Holm, over all cells and metrics)."""
    found: list[tuple[int, str, Comparison]] = []
    for place, pair in enumerate(pairs):
        for metric in _metrics(pair):
            before, after = ([_score(rows[i], metric) for rows in pair.rows] for i in (0, 1))
            found.append((place, metric, compare(before, after)))
    said: list[list[str]] = [[] for _ in pairs]
    adjusted = holm([comparison.p_value for _, _, comparison in found])
    for (place, metric, comparison), p_value in zip(found, adjusted, strict=True):
        lost = 100 * comparison.difference
        if p_value is not None and p_value < ALPHA and lost > tolerances.points.get(metric, POINTS):
            said[place].append(f"{metric} fell by {lost:.2f} points (p = {p_value:.2g})")
    return ["; ".join(words) or None for words in said]


def _metrics(pair: Pair) -> list[str]:
    extra = dict.fromkeys(name for a, b in pair.rows for name in a["extra_scores"].keys() & b["extra_scores"])
    return ["score", *extra] if pair.rows else []


def _score(row: Row, metric: str) -> float:
    return float(row["score"] if metric == "score" else row["extra_scores"][metric])


def _answers(pair: Pair, _: Tolerances) -> str | None:
    return f"failed: {named(pair.failed)}" if pair.failed else None


def _changed(pair: Pair, tolerances: Tolerances) -> list[str]:
    """Samples whose answers differ, and no near tie explains it."""
    tie = tolerances.tie(pair)
    return [a["sample"] for a, b in pair.other_answer() if min(a["tie_margin"], b["tie_margin"]) > tie]


def _predictions(pair: Pair, tolerances: Tolerances) -> str | None:
    changed = _changed(pair, tolerances)
    return f"other answers, far from a tie: {named(changed)}" if changed else None


def _logits(pair: Pair, tolerances: Tolerances) -> str | None:
    moves = {a["sample"]: abs(a["tie_margin"] - b["tie_margin"]) for a, b in pair.same_answer()}
    moved = [sample for sample, by in moves.items() if by > tolerances.tie(pair)]
    return (
        f"same answers, but margins moved by up to {max(moves.values()):.2g}: {named(moved)}"
        if moved
        else None
    )


def _scorer(pair: Pair, _: Tolerances) -> str | None:
    other = [a["sample"] for a, b in pair.same_answer() if not _same_scores(a, b)]
    return f"same answers, other scores: {named(other)}" if other else None


def _same_scores(a: Row, b: Row) -> bool:
    old, new = ({"score": row["score"], **row["extra_scores"]} for row in (a, b))
    return old.keys() == new.keys() and all(abs(old[name] - new[name]) <= EXACT for name in old)


def _memory(pair: Pair, _: Tolerances) -> str | None:
    counted = ("kept_entries", "kv_bytes")
    other = [a["sample"] for a, b in pair.rows if any(a[name] != b[name] for name in counted)]
    before, after = (sum(rows[i]["kv_bytes"] for rows in pair.rows) for i in (0, 1))
    return f"other entries kept ({before} bytes, now {after}): {named(other)}" if other else None


def _prefill(pair: Pair, _: Tolerances) -> str | None:
    other = [a["sample"] for a, b in pair.rows if abs(a["prefill_pct"] - b["prefill_pct"]) > EXACT]
    return f"another share of the prompt prefilled: {named(other)}" if other else None


def _speed(pair: Pair, tolerances: Tolerances) -> str | None:
    slow = []
    for name, shares in pair.shares.items():
        before, after = (median(getattr(share, when) for share in shares) for when in ("before", "after"))
        more_s = (after - before) * median(share.full_s for share in shares)
        if after > tolerances.slower * before and more_s > NOTICEABLE_S:
            slow.append(f"{name} {before:.2f} of the full cache's, now {after:.2f}")
    return "; ".join(slow) or None


CHECKS: dict[str, Check] = {
    "answers": _answers,
    "predictions": _predictions,
    "logits": _logits,
    "scorer": _scorer,
    "memory": _memory,
    "prefill": _prefill,
    "speed": _speed,
}
"""On each cell by itself; `scores` looks at all of them."""
EVERY_CHECK = (*CHECKS, "scores")
