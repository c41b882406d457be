"""How sure a mean score is, and whether two methods differ on the same samples.

A score is one sample's result, a fraction from 0 to 1. Scores that are all 0 or 1 (right or wrong) get the
formulas made for proportions, since no resample of ten right answers contains a wrong one. What the data
cannot tell is None. Limits are at 95 %, tests two-sided at 5 %; tests/test_statistics.py simulates both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Scores = Sequence[float] | Values

ALPHA, POWER = 0.05, 0.8
RESAMPLES = 2000
LEAST_SCORES = 10  # with 5, a bootstrap interval holds the truth in 83-90 %
LEAST_PAIRS = 5  # McNemar's test cannot reach 5 % with fewer
ROUNDING = 1e-12  # what floats may leave of 0

NORMAL = NormalDist()
Z = NORMAL.inv_cdf(1 - ALPHA / 2)


@dataclass(frozen=True)
class Interval:
    """Limits of a mean score, from 0 to 1, or None."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same samples.

    Attributes:
        difference: Mean of the first less mean of the second, from -1 to 1.
        low, high: Limits of the difference, or None.
        p_value: Of no difference, or None.
        n_needed: Pairs, over all tasks, that would show a true difference of this size with 80 % power.
    """

    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    n_needed: int | None


def interval(scores: Scores, seed: int = 0) -> Interval:
    """The 95 % interval of the mean of one task's scores.

    The same scores, in any order, give the same interval. Graded scores give none if all are equal or there
    are fewer than ten.

    Raises:
        ValueError: there are no scores, or one is not from 0 to 1.
    """
    [x] = [np.sort(x) for x in _checked([scores])]
    if _right_or_wrong(x):
        return _wilson(x)
    if len(x) < LEAST_SCORES or x.std() <= ROUNDING:
        return Interval(None, None)
    return _bca(x, seed)


def interval_of_mean_of_means(groups: Sequence[Scores], seed: int = 0) -> Interval:
    """The 95 % interval of the plain mean of the tasks' means; of one task, see `interval`.

    Args:
        groups: One sequence of scores per task, of any lengths. Graded ones give no interval if a task has
            one sample alone.
        seed: Of the bootstrap, where there is one task.

    Raises:
        ValueError: There is no task, a task has no scores, or a score is not from 0 to 1.
    """
    samples = _checked(groups)
    if len(samples) == 1:
        return interval(samples[0], seed)
    if not all(map(_right_or_wrong, samples)) and min(map(len, samples)) == 1:
        return Interval(None, None)
    return _price_bonett(samples)


def compare(a: Scores, b: Scores) -> Comparison:
    """Whether two methods differ on one task; see `compare_groups`."""
    return compare_groups([(a, b)])


def compare_groups(pairs: Sequence[tuple[Scores, Scores]]) -> Comparison:
    """Whether two methods differ in the plain mean of the tasks' means.

    One task of rights and wrongs gets McNemar's test, all else a t-test of the differences, within tasks
    (Welch). Where few rights and wrongs differ, p may be just below 5 % and the limits, wider, include 0.
    Not the bootstrap: where few of 50 samples differ, it finds a difference in 6-17 % of cases without one,
    and its p-values, at least 1 / RESAMPLES, are too coarse for `holm` over many comparisons.

    Args:
        pairs: Both methods' scores per task, those of one sample at the same place.

    Raises:
        ValueError: As for `interval_of_mean_of_means`, or a task's two methods differ in length.
    """
    first, second = _checked([a for a, _ in pairs]), _checked([b for _, b in pairs])
    if any(len(a) != len(b) for a, b in zip(first, second, strict=True)):
        raise ValueError("a paired comparison needs both methods' scores of the same samples")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    difference, error, freedom = _mean_of_means(differences)
    low, high, p_value = _t_test(differences, difference, error, freedom)
    if all(map(_right_or_wrong, first + second)):
        low, high = _bonett_price(differences)
        p_value = p_value if len(differences) > 1 else _mcnemar(differences[0])
    needed = None if p_value is None else _pairs_needed(difference, error, sum(map(len, differences)))
    return Comparison(difference, low, high, p_value, needed)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for being several (Holm 1979), in the order given; None stays and is not counted."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted = list(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        adjusted[place] = largest = max(largest, min(1.0, p * (len(known) - rank)))
    return adjusted


def _checked(groups: Sequence[Scores]) -> list[Values]:
    """The tasks' scores as arrays."""
    samples = [np.asarray(scores, dtype=np.float64) for scores in groups]
    if not samples or any(x.ndim != 1 or len(x) == 0 for x in samples):
        raise ValueError("no scores: every task needs at least one")
    if not all(((x >= 0) & (x <= 1)).all() for x in samples):
        raise ValueError("a score must be a fraction from 0 to 1")
    return samples


def _right_or_wrong(x: Values) -> bool:
    """Whether all scores are 0 or 1."""
    return bool(((x == 0) | (x == 1)).all())


def _mean_of_means(samples: Sequence[Values]) -> tuple[float, float, float]:
    """The mean of the tasks' means, its standard error, and that error's degrees of freedom (Welch 1947).

    Both NaN where a task has one sample; no freedom, NaN, where there is no spread either.
    """
    mean = float(np.mean([x.mean() for x in samples]))
    if any(len(x) == 1 for x in samples):
        return mean, np.nan, np.nan
    freedoms = np.array([len(x) - 1 for x in samples])
    variances = np.array([x.var(ddof=1) / len(x) for x in samples]) / len(samples) ** 2
    total = float(variances.sum())
    if sqrt(total) <= ROUNDING:
        return mean, 0.0, np.nan
    return mean, sqrt(total), float(total**2 / (variances**2 / freedoms).sum())


def _wilson(x: Values) -> Interval:
    """Wilson's score interval of a proportion (1927): it has a width at 0 and 1, and holds at small n."""
    n, share = len(x), float(x.mean())
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    reach = Z / (1 + Z**2 / n) * sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return Interval(max(0.0, middle - reach), min(1.0, middle + reach))


def _price_bonett(samples: Sequence[Values]) -> Interval:
    """Price and Bonett's interval of a mean of proportions (2004): four samples more, half of them right.

    As in Wilson's interval, which has no form for several tasks, they keep a width at 0 and 1: a bootstrap
    within tasks holds the truth in 65 % of cases where most tasks are all wrong and one is graded. Graded
    scores join in with their own variance, which for rights and wrongs is Price and Bonett's.
    """
    more = 4 / len(samples)
    sizes = np.array([len(x) + more for x in samples])
    means = np.array([x.sum() + more / 2 for x in samples]) / sizes
    variances = np.array([(x**2).sum() + more / 2 for x in samples]) / sizes - means**2
    middle, reach = float(means.mean()), Z * sqrt((variances / sizes).sum()) / len(samples)
    return Interval(max(0.0, middle - reach), min(1.0, middle + reach))


def _bca(x: Values, seed: int) -> Interval:
    """A BCa bootstrap interval (Efron 1987), expanded for small samples.

    Hesterberg's expansion (2015): Student's t in place of the normal, and n / (n - 1) times the variance.
    Skewed scores need BCa: the percentile interval holds the truth in 88 % of 20 scores that are mostly 1.
    For a mean, BCa's bias and acceleration are the same number, a sixth of the mean's skewness.
    """
    from scipy import stats  # type: ignore[import-untyped]

    rng, n = np.random.default_rng(seed), len(x)
    share = (x - x.mean()) / n
    values, counts = np.unique(share, return_counts=True)
    if len(values) <= n // 8:  # how often each value is drawn: the same law, many times as fast
        sums = rng.multinomial(n, counts / n, RESAMPLES) @ values
    else:
        sums = share[rng.integers(n, size=(RESAMPLES, n), dtype=np.int32)].sum(axis=1)
    skew = float((share**3).sum()) / float((share**2).sum()) ** 1.5 / 6
    reach = float(stats.t.ppf(1 - ALPHA / 2, n - 1))
    # The formula has a pole where skew * end is 1; no limit lies beyond the outermost resample.
    levels = [NORMAL.cdf(skew + end / max(1 - skew * end, ROUNDING)) for end in (skew - reach, skew + reach)]
    low, high = np.clip(x.mean() + sqrt(n / (n - 1)) * np.quantile(sums, levels), 0, 1)
    return Interval(float(low), float(high))


def _t_test(
    differences: Sequence[Values], difference: float, error: float, freedom: float
) -> tuple[float | None, float | None, float | None]:
    """Limits and p-value of a mean difference; without a spread no limits, and the p-value of a sign test."""
    from scipy import stats

    if not error > ROUNDING:
        if any(len(x) == 1 for x in differences):
            return None, None, None if any(x.any() for x in differences) else 1.0
        return None, None, _mcnemar(np.concatenate(differences))  # the same in all samples: a sign test
    reach = float(stats.t.ppf(1 - ALPHA / 2, freedom)) * error
    p_value = float(2 * stats.t.sf(abs(difference) / error, freedom))
    return max(-1.0, difference - reach), min(1.0, difference + reach), p_value


def _mcnemar(x: Values) -> float:
    """The mid-p form of McNemar's test of differences -1, 0, 1 (Fagerland, Lydersen and Laake 2013).

    The exact form cries wolf in 2-3 % of cases, not 5 %, and so misses differences.
    """
    from scipy import stats

    wins, losses = int((x > 0).sum()), int((x < 0).sum())
    fewer, n = min(wins, losses), wins + losses
    p_value = 2 * stats.binom.cdf(fewer, n, 0.5) - stats.binom.pmf(fewer, n, 0.5)
    return min(1.0, float(p_value))


def _bonett_price(differences: Sequence[Values]) -> tuple[float, float]:
    """Bonett and Price's interval of a difference of paired proportions (2012): one win and one loss more.

    They keep a width where the methods never differ. Several tasks share the two.
    """
    more = 1 / len(differences)
    sizes = np.array([len(x) + 2 * more for x in differences])
    wins = np.array([(x > 0).sum() + more for x in differences]) / sizes
    losses = np.array([(x < 0).sum() + more for x in differences]) / sizes
    variance = ((wins + losses - (wins - losses) ** 2) / sizes).sum()
    middle, reach = float((wins - losses).mean()), Z * sqrt(variance) / len(differences)
    return max(-1.0, middle - reach), min(1.0, middle + reach)


def _pairs_needed(difference: float, error: float, n: int) -> int | None:
    """Pairs for 80 % power in a t-test (Guenther 1981); McNemar's test has 76-82 % there."""
    if abs(difference) <= ROUNDING or np.isnan(error):
        return None
    for_normal = ((Z + NORMAL.inv_cdf(POWER)) * error / difference) ** 2 * n
    return max(LEAST_PAIRS, ceil(for_normal + Z**2 / 2))
