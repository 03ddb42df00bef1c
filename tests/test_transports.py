"""The cost of serving: pairs of points over both transports, on invented cells."""

import numpy as np
import pandas as pd
import pytest

import synthetic
from batchlab import plots, transports
from batchlab.plots.transports import serving_cost
from batchlab.report import serving


def both():
    """The synthetic cells over HTTP, and in process a tenth faster at a batch of 32."""
    http = synthetic.cells().assign(engine_options="{}", token_rule=None)
    inside = http.assign(transport="inprocess", cell=http["cell"] + "-in")
    faster = inside["max_batch_size"] == 32
    inside.loc[faster, "output_throughput_tok_s"] /= 0.9
    inside.loc[faster, "tpot_mean_ms"] *= 0.9
    return pd.concat([http, inside], ignore_index=True)


def test_pairs_are_the_same_points_over_both_transports():
    points = plots.points(both())
    found = transports.pairs(points)
    assert len(found) == len(points) / 2
    lost = found.set_index(["dataset", "max_batch_size", "max_num_tokens"])["throughput_lost"]
    assert lost["decode-heavy", 32, 512] == pytest.approx(0.1) and lost["decode-heavy", 8, 512] == pytest.approx(0)
    slow = found[found["max_batch_size"] == 32].iloc[0]
    assert slow["tpot_added_ms"] == pytest.approx(0.1 * slow["tpot_mean_ms_http"])
    assert found["apart"].map(bool).tolist() == (found["max_batch_size"] == 32).tolist()


def test_a_single_transport_or_an_invalid_half_makes_no_pair():
    cells = both()
    assert transports.pairs(plots.points(cells[cells["transport"] == "http"])).empty
    bad = synthetic.make_invalid(cells, (cells["transport"] == "inprocess") & (cells["max_batch_size"] == 8))
    assert 8 not in set(transports.pairs(plots.points(bad))["max_batch_size"])
    simulated = cells.assign(evidence=np.where(cells["transport"] == "http", "measured", "simulated"))
    assert transports.pairs(plots.points(simulated)).empty
    assert transports.pairs(plots.points(cells.iloc[0:0])).empty


def test_the_figure_shows_the_differences():
    points = plots.points(both())
    left, right = serving_cost(transports.pairs(points), points, defaults=synthetic.DEFAULTS)[:2]
    drawn = {line.get_xydata()[-1][1] for line in left.lines if len(line.get_xdata()) == len(synthetic.BATCHES)}
    assert max(drawn) == pytest.approx(0.1) and "decode-heavy" in " ".join(t.get_text() for t in left.texts)
    assert right.get_ylabel() == "TPOT added over HTTP (ms)"
    assert "HTTP" in left.figure.get_label() and "in process" in left.figure.get_label()


def test_the_reading_names_the_largest_loss():
    points = plots.points(both())
    told = str(serving.reading(transports.pairs(points), points))
    assert "decode-heavy: over HTTP 10.0% of the throughput is lost at most, at max_batch_size 32" in told
    nothing = transports.pairs(plots.points(both().iloc[0:0]))
    none = plots.points(both().iloc[0:0])
    assert str(serving.reading(nothing, none)) == serving.NOTHING == str(serving.figure(nothing, none, None))
    assert serving.NOTHING in str(serving.numbers(nothing))


def test_an_engine_over_one_transport_only_is_no_part_of_the_cost():
    other = synthetic.cells("throughput", "sglang").assign(engine_options="{}", token_rule=None)
    points = plots.points(pd.concat([both(), other], ignore_index=True))
    pairs = transports.pairs(points)
    assert set(pairs["engine"]) == {"vllm"}
    assert set(transports.halves(points, pairs)["engine"]) == {"vllm"}
    caption = serving_cost(pairs, points, defaults=synthetic.DEFAULTS)[0].figure.get_label()
    assert "SGLang" not in caption and "not recorded" not in caption


def test_points_without_a_valid_half_are_counted():
    cells = both()
    bad = synthetic.make_invalid(cells, (cells["transport"] == "http") & (cells["max_batch_size"] == 8))
    points = plots.points(bad)
    pairs = transports.pairs(points)
    assert transports.unpaired(points, pairs) == 2
    whole = plots.points(cells)
    assert transports.unpaired(whole, transports.pairs(whole)) == 0
    assert "2 planned points are left out" in str(serving.reading(pairs, points))


def test_at_a_finite_rate_the_reading_tells_what_ttft_gains():
    http = synthetic.cells("latency").assign(engine_options="{}", token_rule=None)
    inside = http.assign(transport="inprocess", cell=http["cell"] + "-in", ttft_mean_ms=http["ttft_mean_ms"] - 3)
    points = plots.points(pd.concat([http, inside], ignore_index=True))
    told = str(serving.reading(transports.pairs(points), points))
    assert "4 req/s: mean TTFT over HTTP differs by +3.0 to +3.0 ms" in told
