"""How much a run differs from itself: by hand, and lent only to runs of its kind."""

import math

import numpy as np
import pandas as pd
import pytest

from batchlab import metrics, noise

KEPT_UP, LATE = ("vllm", "http", False), ("vllm", "http", True)


def test_scatter_is_pooled_over_points_by_hand():
    """98 and 102 are 2% off their mean, 9 and 11 10%: squares 0.0008 and 0.02, one degree of freedom each."""
    found = noise.pooled(np.array([98.0, 9.0, 102.0, 11.0]), np.array([0, 1, 0, 1]), [KEPT_UP] * 4)
    assert found == {KEPT_UP: (pytest.approx(math.sqrt(0.0208 / 2)), 2)}
    assert noise.half(found[KEPT_UP]) == pytest.approx(4.3027 * math.sqrt(0.0104), rel=1e-4)


def test_a_late_front_end_lends_its_noise_to_late_ones_only():
    values, point = np.array([98.0, 102.0, 9.0, 11.0, 5.0]), np.array([0, 0, 1, 1, 2])
    found = noise.pooled(values, point, [KEPT_UP, KEPT_UP, LATE, LATE, LATE])
    assert found[LATE][0] > 4 * found[KEPT_UP][0] and found[LATE][1] == found[KEPT_UP][1] == 1


def test_a_point_counts_as_most_of_its_runs_do():
    found = noise.pooled(np.array([9.0, 10.0, 11.0]), np.zeros(3), [LATE, KEPT_UP, LATE])
    assert set(found) == {LATE}


def test_without_repeats_nothing_is_known():
    assert noise.pooled(np.array([1.0, 2.0, np.nan]), np.array([0, 1, 1]), [KEPT_UP] * 3) == {}
    assert math.isnan(noise.half(None))


def test_kinds_are_engine_transport_and_whether_the_front_end_is_late():
    rows = [("vllm", "http", 0.6, 10.0), ("vllm", "http", 0.4, 10.0), ("sglang", "http", None, 10.0)]
    frame = pd.DataFrame(rows, columns=["engine", "transport", "front_end_behind_s", "duration_s"])
    assert noise.kinds(frame) == [LATE, KEPT_UP, ("sglang", "http", False)]
    assert noise.kinds(frame.drop(columns="front_end_behind_s")) == [KEPT_UP, KEPT_UP, ("sglang", "http", False)]


def test_a_summary_tells_how_far_behind_the_front_end_is():
    requests = pd.DataFrame({"last_s": [1.0, 3.5]})
    iterations = pd.DataFrame({"output_s": [0.5, 3.0]})
    assert metrics.behind_s(requests, iterations) == 0.5
    assert "front_end_behind_s" in metrics.EXTRA_KEYS
