"""Intervals of mean scores and paired comparisons.

Rules protected here:
- A 95 % interval holds the true mean in 93-97 % of samples, whatever the scores look like.
- Between equal methods a test finds a difference in 4-6 % of samples.
- As many pairs as `n_needed` find a difference in about 80 % of samples.
- What the scores cannot tell is None; the same scores give the same answer.

Each simulation draws from its own seed, so it passes or fails alike every time.
"""

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
import scipy.stats

from structkv_bench.report.statistics import (
    Comparison,
    Interval,
    compare,
    compare_groups,
    holm,
    interval,
    interval_of_mean_of_means,
)

NOTHING = Interval(None, None)
NOMINAL = pytest.approx(95, abs=2.5)
"""93-97 %, and half a percent, the standard error of 1,500 simulated intervals."""


def right_or_wrong(share):
    return lambda rng, n: (rng.random(n) < share).astype(float)


def graded(zeros, ones, a, b):
    """Scores such as an answer's F1: some 0, some 1, the others from a beta distribution."""

    def draw(rng, n):
        kind, between = rng.random(n), rng.beta(a, b, n)
        return np.where(kind < zeros, 0.0, np.where(kind > 1 - ones, 1.0, between))

    return draw


SHAPES = {
    "f1 of a fair method": graded(0.3, 0.2, 2, 3),
    "f1, mostly 0": graded(0.7, 0.05, 2, 3),
    "f1, mostly 1": graded(0.05, 0.7, 3, 2),
    "rouge": graded(0, 0, 8, 25),
}


def held(tasks, times, seed=0):
    """Share of samples, in percent, whose interval holds the true mean of the tasks' means."""
    rng = np.random.default_rng(seed)
    truth = np.mean([draw(rng, 300_000).mean() for draw, _ in tasks])
    found = [interval_of_mean_of_means([draw(rng, n) for draw, n in tasks]) for _ in range(times)]
    return 100 * np.mean([one.low <= truth <= one.high for one in found])


def found(sample, times, seed=0):
    """Share of comparisons, in percent, that find a difference; `sample` draws a task's or tasks' pairs."""
    rng = np.random.default_rng(seed)
    p_values = [compare_groups(sample(rng)).p_value for _ in range(times)]
    return 100 * np.mean([p < 0.05 for p in p_values])


def like(draw, kept):
    """Pairs of equally good methods that agree on a share of the samples, and so correlate."""

    def pair(rng, n):
        a = draw(rng, n)
        return a, np.where(rng.random(n) < kept, a, draw(rng, n))

    return pair


def better_answers(rng, n):
    luck, other = rng.random((2, n))
    return (luck < 0.6).astype(float), (np.where(rng.random(n) < 0.7, luck, other) < 0.5).astype(float)


def better_scores(rng, n):
    sample = rng.beta(2, 2, n)
    a, b = rng.normal(0, 0.12, (2, n))
    return np.clip(sample + 0.05 + a, 0, 1), np.clip(sample + b, 0, 1)


# --- intervals


@pytest.mark.parametrize("n", [20, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_interval_of_graded_scores_holds_the_mean(shape, n):
    assert held([(SHAPES[shape], n)], times=1500) == NOMINAL


@pytest.mark.parametrize(("share", "n"), [(0.5, 20), (0.8, 50), (0.93, 100)])
def test_an_interval_of_rights_and_wrongs_holds_the_mean(share, n):
    assert held([(right_or_wrong(share), n)], times=1500) == NOMINAL


def test_an_interval_over_tasks_holds_the_mean_of_means():
    graded_tasks = list(zip(SHAPES.values(), (12, 20, 15), strict=False))
    answers = [(right_or_wrong(share), 20) for share in (1, 0.99, 0.95, 0.8, 0.5)]
    for tasks in (graded_tasks, answers, graded_tasks[:2] + answers[:2]):
        assert held(tasks, times=1500) == NOMINAL


@pytest.mark.parametrize("share", [0.02, 0.03, 0.97, 0.98])
def test_tasks_that_are_nearly_all_wrong_or_right_beside_a_graded_one_leave_room(share):
    """RULER at a small budget: ten tasks at the floor and one with a few points, ten samples each."""
    graded = (lambda rng, n: rng.choice([0.0, 0.1, 0.2], n, p=[0.7, 0.2, 0.1]), 10)
    assert held([(right_or_wrong(share), 10)] * 10 + [graded], times=1500) >= 92.5


def test_rights_and_wrongs_get_wilsons_interval():
    for right, n in ((0, 10), (7, 20), (10, 10), (1, 1)):
        theirs = scipy.stats.binomtest(right, n).proportion_ci(method="wilson")
        ours = interval([1] * right + [0] * (n - right))
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


def test_ten_of_ten_right_is_no_certainty_over_tasks_either():
    perfect = interval_of_mean_of_means([[1] * 10] * 3)
    assert perfect.high == 1
    assert 0.7 < perfect.low < 0.95


def test_the_bootstrap_agrees_with_scipys_and_with_students_t():
    scores = np.random.default_rng(1).beta(5, 5, 200)
    ours = interval(scores)
    theirs = scipy.stats.bootstrap((scores,), np.mean, method="BCa", rng=1).confidence_interval
    students = scipy.stats.t.interval(0.95, 199, scores.mean(), scipy.stats.sem(scores))
    for low, high in (theirs, students):
        assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.003)


def test_a_skewed_sample_has_more_room_on_its_long_side():
    scores = [0.01] * 18 + [0.02, 1.0]
    limits = interval(scores)
    assert limits.high - np.mean(scores) > 2 * (np.mean(scores) - limits.low)


@pytest.mark.parametrize("scores", [[0.4], [0.1] * 30, [0.3, 0.5], [0.2] * 5 + [0.9] * 4])
def test_too_few_or_equal_graded_scores_give_no_interval(scores):
    assert interval(scores) == NOTHING
    assert interval_of_mean_of_means([scores, scores[:1]]) == NOTHING


def test_limits_stay_within_the_scores():
    limits = interval([0.99] + [1.0] * 19)
    assert 0 <= limits.low < limits.high <= 1


def test_the_same_scores_give_the_same_interval():
    scores = list(np.random.default_rng(2).random(30))
    first = interval(scores)
    interval([0.1, 0.9] * 20)
    assert interval(scores) == interval(scores[::-1]) == first
    assert interval_of_mean_of_means([scores]) == first
    assert interval(scores, seed=1) != first


# --- comparisons


def test_mcnemars_test_finds_no_difference_between_equals():
    pair = like(right_or_wrong(0.6), 0.4)
    assert 4 <= found(lambda rng: [pair(rng, 100)], times=5000) <= 6


@pytest.mark.parametrize("draw", [SHAPES["f1 of a fair method"], SHAPES["rouge"]])
def test_a_paired_t_test_finds_no_difference_between_equals(draw):
    pair = like(draw, 0.4)
    assert 4 <= found(lambda rng: [pair(rng, 50)], times=4000) <= 6


def test_a_comparison_over_tasks_finds_no_difference_between_equals():
    pairs = [(like(draw, 0.4), n) for draw, n in zip(SHAPES.values(), (20, 30, 40, 60), strict=True)]
    pairs.append((like(right_or_wrong(0.8), 0.4), 50))
    assert 4 <= found(lambda rng: [pair(rng, n) for pair, n in pairs], times=3000) <= 6


def test_a_differences_interval_holds_it():
    rng = np.random.default_rng(3)
    for pair, n in ((better_answers, 60), (better_scores, 30)):
        truth = np.subtract(*pair(rng, 1_000_000)).mean()
        all_limits = [compare(*pair(rng, n)) for _ in range(1500)]
        assert 100 * np.mean([one.low <= truth <= one.high for one in all_limits]) == NOMINAL


@pytest.mark.parametrize(("wins", "losses"), [(9, 2), (2, 9), (4, 4), (5, 0), (1, 0), (30, 17)])
def test_mcnemars_mid_p_is_binomtests_less_half_the_chance_of_what_was_seen(wins, losses):
    a = [1] * wins + [0] * losses + [1, 0] * 20
    b = [0] * wins + [1] * losses + [1, 0] * 20
    exact = scipy.stats.binomtest(wins, wins + losses).pvalue
    seen = scipy.stats.binom.pmf(wins, wins + losses, 0.5)
    # Where both sides are equal, their two tails share what was seen and make 1 together.
    by_hand = exact - seen if wins != losses else 1
    assert compare(a, b).p_value == pytest.approx(by_hand)
    assert compare(a, b).p_value <= exact


def test_graded_scores_get_scipys_paired_t_test():
    a, b = better_scores(np.random.default_rng(4), 40)
    theirs = scipy.stats.ttest_rel(a, b)
    low, high = theirs.confidence_interval()
    ours = compare(a, b)
    assert (ours.low, ours.high, ours.p_value) == pytest.approx((low, high, theirs.pvalue))
    assert ours.difference == pytest.approx(a.mean() - b.mean())


def test_two_tasks_get_welchs_test_of_their_differences():
    rng = np.random.default_rng(5)
    one, other = better_scores(rng, 20), better_scores(rng, 35)
    # Welch asks whether two means differ: the mean of two means is half of one less the other's negative.
    theirs = scipy.stats.ttest_ind(one[0] - one[1], other[1] - other[0], equal_var=False)
    assert compare_groups([one, other]).p_value == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize("pair", [better_answers, better_scores])
def test_one_task_compares_as_the_plain_form(pair):
    a, b = pair(np.random.default_rng(6), 50)
    assert compare_groups([(a, b)]) == compare(a, b)


@pytest.mark.parametrize("pair", [better_answers, better_scores])
def test_the_methods_change_sides(pair):
    a, b = pair(np.random.default_rng(7), 50)
    one, other = compare(a, b), compare(b, a)
    assert (one.difference, one.low, one.high) == pytest.approx((-other.difference, -other.high, -other.low))
    assert (one.p_value, one.n_needed) == (pytest.approx(other.p_value), other.n_needed)


@pytest.mark.parametrize("pair", [better_answers, better_scores])
def test_n_needed_pairs_find_the_difference_in_four_of_five_cases(pair):
    n = compare(*pair(np.random.default_rng(8), 200_000)).n_needed
    assert 77 <= found(lambda rng: [pair(rng, n)], times=2000) <= 83


def test_n_needed_over_tasks_is_of_all_of_them_shared_as_now():
    rng = np.random.default_rng(9)
    n = compare_groups([better_answers(rng, 100_000), better_scores(rng, 50_000)]).n_needed
    answers, scores = round(n * 2 / 3), round(n / 3)
    power = found(lambda rng: [better_answers(rng, answers), better_scores(rng, scores)], times=2000)
    assert 77 <= power <= 83


def test_equal_methods_have_no_difference_to_find():
    assert compare([0.2, 0.7, 0.5], [0.2, 0.7, 0.5]) == Comparison(0.0, None, None, 1.0, None)
    answers = compare([1] * 50, [1] * 50)
    assert (answers.p_value, answers.n_needed) == (1.0, None)
    assert -0.1 < answers.low < 0 < answers.high < 0.1
    assert compare([1, 0], [0, 1]).n_needed is None


def test_one_graded_difference_tells_nothing():
    compared = compare([0.9], [0.4])
    assert compared.difference == pytest.approx(0.5)
    assert (compared.low, compared.high, compared.p_value, compared.n_needed) == (None,) * 4


def test_one_pair_of_answers_proves_nothing():
    compared = compare([1], [0])
    assert compared.p_value == pytest.approx(0.5)
    assert compared.low < 0
    assert compared.n_needed is None


def test_mcnemars_test_needs_five_pairs_whatever_the_difference():
    assert compare([1] * 9, [0] * 9).n_needed == 5
    assert compare([1] * 5, [0] * 5).p_value < 0.05 < compare([1] * 4, [0] * 4).p_value


@pytest.mark.parametrize(
    ("groups", "says"),
    [([], "no scores"), ([[0.5, 1], []], "no scores"), ([[1.5]], "fraction"), ([[float("nan")]], "fraction")],
)
def test_scores_that_are_none_are_refused(groups, says):
    with pytest.raises(ValueError, match=says):
        interval_of_mean_of_means(groups)
    with pytest.raises(ValueError, match=says):
        compare_groups([(group, group) for group in groups])


def test_unpaired_scores_are_refused():
    with pytest.raises(ValueError, match="same samples"):
        compare([1, 0], [1])


# --- several comparisons


def test_holm_by_hand():
    # Sorted: .005 * 4, .01 * 3, .03 * 2, .04 * 1, none below the one before it.
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([None]) == [None]
    assert holm([]) == []


def test_holm_rejects_what_the_step_down_procedure_rejects():
    def rejected(p_values, level):
        """Holm's definition: from the smallest on, until one is above the level / those that are left."""
        left, hits = sorted(range(len(p_values)), key=lambda place: p_values[place]), set()
        while left and p_values[left[0]] <= level / len(left):
            hits.add(left.pop(0))
        return hits

    for p_values in permutations([0.001, 0.011, 0.012, 0.02, 0.3]):
        adjusted = holm(p_values)
        for level in (0.005, 0.01, 0.03, 0.045, 0.05, 0.1, 0.5):
            hits = {place for place, p in enumerate(adjusted) if p <= level}
            assert hits == rejected(p_values, level)


def test_scipy_is_loaded_only_when_used():
    # `structkv-bench --help` imports this package and should not wait for scipy.
    script = "import sys, structkv_bench.report.statistics; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_difference_that_is_the_same_in_all_samples_is_one() -> None:
    """Without a spread there is no t, yet fifteen wins and no loss are no chance; two are."""
    ones, zeros = np.ones(10), np.zeros(10)
    assert compare_groups([(ones, zeros), (ones[:5], zeros[:5])]).p_value == pytest.approx(2**-15)
    assert compare_groups([(ones * 0.5, zeros), (ones[:5] * 0.5, zeros[:5])]).p_value < 0.05
    assert compare_groups([(ones[:2] * 0.5, zeros[:2])]).p_value > 0.05
    assert compare_groups([(ones, ones), (zeros, zeros)]).p_value == 1.0
