"""Figures: what they draw, what they say about it, and that they are the same bytes every time."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

import synthetic
from batchlab import plots
from batchlab.errors import UsageError
from batchlab.plots import batch, labels, saving, select, style


@pytest.fixture
def study(tmp_path):
    return SimpleNamespace(figures_dir=tmp_path / "figures")


def drawn(ax: Axes, *, filled: bool) -> list[tuple[float, float]]:
    """The points of the panel that are drawn as filled, or as hollow, markers."""
    found = []
    for line in ax.lines:
        if line.get_marker() not in ("o", "s", "D", "x") or line.get_linestyle() != "None":
            continue
        hollow = to_hex(line.get_markerfacecolor()) == "#ffffff"
        if hollow != filled:
            found += list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    return [(float(x), float(y)) for x, y in found]


def texts(ax: Axes) -> str:
    return " | ".join(t.get_text() for t in ax.texts)


def test_against_draws_the_mean_of_each_point():
    cells = synthetic.cells()
    line = plots.along(plots.points(cells), "max_batch_size", synthetic.DEFAULTS)
    one = line[line["dataset"] == "decode-heavy"]
    ax = plots.against(one, "max_batch_size", "output_throughput_tok_s")
    mine = cells[(cells["dataset"] == "decode-heavy") & (cells["max_num_tokens"] == 512)]
    expected = mine.groupby("max_batch_size")["output_throughput_tok_s"].mean()
    assert dict(drawn(ax, filled=True)) == pytest.approx(expected.to_dict())
    assert [t.get_text() for t in ax.get_xticklabels()] == [str(b) for b in synthetic.BATCHES]
    assert ax.get_xscale() == "log" and ax.get_ylim()[0] == 0
    assert ax.get_ylabel() == "Output throughput (tok/s)"
    assert "vLLM" in texts(ax) and "max_num_tokens 512" in texts(ax) and "all requests at once" in texts(ax)


def test_interval_is_drawn_as_bars_or_as_a_band():
    one = plots.points(synthetic.cells()).query("dataset == 'decode-heavy' and max_num_tokens == 512")
    row = one[one["max_batch_size"] == 8].iloc[0]
    bars = plots.against(one, "max_batch_size", "tpot_mean_ms")
    segments = [s for c in bars.collections for s in c.get_segments() if np.isclose(s[0][0], 8)]
    assert [row["tpot_mean_ms_lo"], row["tpot_mean_ms_hi"]] == pytest.approx(list(segments[0][:, 1]))
    band = plots.against(one, "max_batch_size", "tpot_mean_ms", band=True)
    heights = band.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(one["tpot_mean_ms_hi"].max())


def test_invalid_points_are_hollow_and_break_the_line():
    cells = synthetic.cells()
    cells = synthetic.make_invalid(cells, cells["max_batch_size"] == 4, "client lagged")
    one = plots.points(cells).query("dataset == 'decode-heavy' and max_num_tokens == 512")
    ax = plots.against(one, "max_batch_size", "output_throughput_tok_s")
    assert [x for x, _ in drawn(ax, filled=False)] == [4]
    assert 4 not in [x for x, _ in drawn(ax, filled=True)]
    line = next(each for each in ax.lines if each.get_linestyle() == "-")
    assert np.isnan(line.get_ydata()[list(line.get_xdata()).index(4)])
    assert "hollow: 1 invalid (client lagged ×3)" in ax.figure.get_label()


def test_missing_points_are_named_and_never_drawn():
    cells = synthetic.cells()
    cells = synthetic.make_missing(cells, cells["max_batch_size"].isin([2, 32]))
    one = plots.points(cells).query("dataset == 'decode-heavy' and max_num_tokens == 512")
    ax = plots.against(one, "max_batch_size", "output_throughput_tok_s")
    assert {x for x, _ in drawn(ax, filled=True)} == {1, 4, 8, 16}
    assert "not recorded: 2, 32" in texts(ax)
    assert "2 of 6 not recorded" in ax.figure.get_label()
    assert "2" in [t.get_text() for t in ax.get_xticklabels()]


@pytest.mark.parametrize("draw", [
    lambda points: plots.side_by_side(points, "max_batch_size", "ttft_mean_ms", log_y=True),
    lambda points: plots.side_by_side(points, "max_num_tokens", "ttft_mean_ms"),
    lambda points: plots.running_batches(points),
])
@pytest.mark.parametrize("frame", ["nothing recorded", "nothing planned"])
def test_empty_frames_say_so(draw, frame, study):
    cells = synthetic.cells()
    cells = synthetic.make_missing(cells, cells["cell"].notna()) if frame == "nothing recorded" else cells.iloc[0:0]
    axes = draw(plots.points(cells))
    shown = plots.save(axes[0].figure, "empty", "nothing yet", study)
    assert not any(drawn(ax, filled=True) for ax in axes)
    assert ("no cell recorded yet" if frame == "nothing recorded" else "nothing planned") in shown.caption


def test_evidence_kinds_differ_in_line_and_marker():
    measured, simulated, published = (style.series_style("vllm", kind) for kind in style.EVIDENCE)
    assert (measured.linestyle, measured.marker) == ("-", "o")
    assert (simulated.linestyle, simulated.marker) == ("--", "s")
    assert (published.linestyle, published.marker) == ("none", "x")
    assert len({style.colour(e) for e in ("vllm", "tensorrt-llm", "tgi", "sglang")}) == 4
    assert style.colour("an-engine-to-come") == style.colour("an-engine-to-come")


def test_caption_names_evidence_engine_transport_machine_and_n():
    both = pd.concat([synthetic.cells(), synthetic.cells("throughput", "tensorrt-llm", "simulated")])
    caption = plots.caption(plots.points(both))
    assert "measured, vLLM 0.32.0, HTTP, test machine, 2 cores, n = 3 × 64 requests" in caption
    assert "simulated, TensorRT-LLM 0.32.0" in caption
    assert "95% interval" in caption


def test_caption_counts_invalid_repeats_behind_valid_points():
    cells = synthetic.cells()
    cells = synthetic.make_invalid(cells, (cells["max_batch_size"] == 4) & (cells["repeat"] == 1), "late")
    points = plots.points(cells)
    row = points[points["max_batch_size"] == 4].iloc[0]
    assert row["valid"] and row["n"] == 2
    assert "left out: 2 invalid repeats (late ×2)" in plots.caption(points)


def test_several_points_at_one_value_are_refused():
    mixed = plots.points(pd.concat([synthetic.cells("throughput"), synthetic.cells("latency")]))
    with pytest.raises(UsageError, match="several points at max_batch_size"):
        plots.side_by_side(mixed, "max_batch_size", "tpot_mean_ms")


def test_along_takes_the_default_line_and_serves_a_grid():
    points = plots.points(synthetic.cells())
    by_tokens = plots.along(points, "max_num_tokens", {"max_batch_size": 16, "max_num_tokens": 512})
    assert set(by_tokens["max_batch_size"]) == {16}
    assert set(by_tokens["max_num_tokens"]) == set(synthetic.TOKENS)
    elsewhere = plots.along(points, "max_num_tokens", {"max_batch_size": 999})
    assert set(elsewhere["max_batch_size"]) == {16}
    with pytest.raises(UsageError, match="axis 'batch'"):
        plots.along(points, "batch")


def test_spread_takes_valid_repeats_only():
    cells = synthetic.cells()
    first = (cells["max_batch_size"] == 8) & (cells["dataset"] == "decode-heavy")
    cells.loc[first & (cells["repeat"] == 2), "tpot_max_ms"] = 1e6
    cells = synthetic.make_invalid(cells, first & (cells["repeat"] == 2))
    table = plots.spread(cells, "max_batch_size")
    row = table[(table["dataset"] == "decode-heavy") & (table["max_batch_size"] == 8)].iloc[0]
    kept = cells[first & (cells["repeat"] != 2)]
    assert row["n"] == 2
    assert row["tpot_max_ms"] == kept["tpot_max_ms"].max() and row["tpot_min_ms"] == kept["tpot_min_ms"].min()
    assert row["ratio"] == pytest.approx(row["tpot_max_ms"] / row["tpot_min_ms"])


def test_spread_figure_reaches_from_min_to_max():
    cells = plots.along(synthetic.cells(), "max_batch_size", synthetic.DEFAULTS)
    one = cells[cells["dataset"] == "prefill-heavy"]
    ax = plots.tpot_spread(one, "max_batch_size")
    table = plots.spread(one, "max_batch_size")
    spans = {round(s[0][0]): (s[0][1], s[1][1]) for c in ax.collections for s in c.get_segments()}
    assert spans == {b: (low, high) for b, low, high in
                     table[["max_batch_size", "tpot_min_ms", "tpot_max_ms"]].itertuples(index=False)}
    assert all(word in texts(ax) for word in ("slowest", "median", "fastest"))


def test_running_batch_has_the_limit_as_a_line():
    one = plots.points(synthetic.cells()).query("dataset == 'decode-heavy' and max_num_tokens == 512")
    ax = plots.running_batch(one)
    limit = ax.lines[0]
    assert list(limit.get_xdata()) == list(limit.get_ydata()) == [1, 32]
    assert dict(drawn(ax, filled=True))[16] == pytest.approx(16 * 0.95)
    assert "limit" in texts(ax)


def test_timeline_shows_every_iteration_or_means_of_them():
    cell = synthetic.cells().iloc[4]
    few = synthetic.iterations(100)
    axes = plots.timeline(few, cell)
    assert list(axes[0].patches[0].get_data().values) == list(few["running"])
    assert "100 iterations" in axes[0].figure.get_label()
    many = synthetic.iterations(5000)
    rows, size = batch.bins(many)
    assert len(rows) <= batch.MOST_POINTS and size == 9
    assert rows["prefill_tokens"].iloc[0] == pytest.approx(many["prefill_tokens"].iloc[:9].mean())
    assert rows["preemptions"].sum() == many["preemptions"].sum() == 1
    assert "means of 9" in plots.timeline(many, cell)[0].figure.get_label()


def test_timeline_without_iterations_is_refused():
    with pytest.raises(UsageError, match="no recorded iterations"):
        plots.timeline(synthetic.iterations(10).iloc[0:0], synthetic.cells().iloc[0])


def test_coverage_marks_valid_invalid_and_missing():
    cells = synthetic.cells()
    cells = synthetic.make_invalid(cells, cells["max_batch_size"] == 32)
    cells = synthetic.make_missing(cells, cells["max_batch_size"] == 2)
    ax = plots.coverage(cells)[0]
    marks = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])): line for line in ax.lines}
    assert to_hex(marks[8.0, 512.0].get_markerfacecolor()) == "#0072b2"
    assert to_hex(marks[32.0, 512.0].get_markerfacecolor()) == "#ffffff"
    assert marks[2.0, 512.0].get_marker() == "."


def figure():
    axes = plots.side_by_side(plots.points(synthetic.cells()), "max_batch_size", "output_throughput_tok_s",
                              defaults=synthetic.DEFAULTS)
    return axes[0].figure


def test_saved_files_and_shown_html_repeat_byte_for_byte(tmp_path):
    first, second = (SimpleNamespace(figures_dir=tmp_path / n) for n in ("first", "second"))
    shown = [plots.save(figure(), "throughput", "Throughput rises.", s) for s in (first, second)]
    for kind in ("svg", "png"):
        one, two = ((s.figures_dir / f"throughput.{kind}").read_bytes() for s in (first, second))
        assert one == two
    assert shown[0]._repr_html_() == shown[1]._repr_html_()
    assert b"<dc:date>" not in (first.figures_dir / "throughput.svg").read_bytes()
    assert b"Matplotlib v" not in (first.figures_dir / "throughput.svg").read_bytes()


def test_equal_figures_leave_the_file_alone(study):
    plots.save(figure(), "throughput", "Throughput rises.", study)
    path = study.figures_dir / "throughput.svg"
    before = path.stat().st_mtime_ns
    plots.save(figure(), "throughput", "Throughput rises.", study)
    assert path.stat().st_mtime_ns == before
    assert sorted(p.name for p in study.figures_dir.iterdir()) == ["throughput.png", "throughput.svg"]


def test_shown_html_has_image_alt_and_caption(study):
    html = plots.save(figure(), "throughput", 'It "rises" & <flattens>.', study)._repr_html_()
    assert html.startswith("<figure") and 'src="data:image/svg+xml;base64,' in html
    assert 'alt="It &quot;rises&quot; &amp; &lt;flattens&gt;."' in html
    assert "<figcaption>measured, vLLM 0.32.0" in html


@pytest.mark.parametrize("alt", ["", "  \n "])
def test_empty_alternative_text_is_an_error(study, alt):
    with pytest.raises(UsageError, match="no alternative text"):
        plots.save(figure(), "throughput", alt, study)
    assert not study.figures_dir.exists()


def test_a_figure_without_caption_or_with_an_odd_name_is_an_error(study):
    fig = figure()
    with pytest.raises(UsageError, match="lower-case"):
        plots.save(fig, "../Throughput", "x", study)
    fig.set_label("")
    with pytest.raises(UsageError, match="no caption"):
        plots.save(fig, "throughput", "x", study)


def test_figures_leave_the_callers_style_alone():
    import matplotlib
    before = dict(matplotlib.rcParams)
    figure()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (float("nan"), "–"), (0, "0"), (1234.5, "1,234"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"),
    (0.01234, "0.0123")])
def test_numbers_have_three_digits(value, text):
    assert labels.number(value) == text


def test_metrics_have_words_and_units():
    assert labels.axis_label("ttft_p99_ms") == "P99 TTFT (ms)"
    assert labels.axis_label("tpot_mean_ms") == "Mean TPOT (ms)"
    assert labels.axis_label("kv_use_peak") == "Peak KV cache use"
    assert labels.axis_label("another_thing") == "Another_thing"


def test_a_wrong_column_is_one_clear_line():
    with pytest.raises(UsageError, match=r"no column .ttft_mean.*ttft_mean_ms"):
        select.require(plots.points(synthetic.cells()), "ttft_mean")


def test_layout_does_not_depend_on_memory_addresses():
    """The constrained layout's solver does: without settling, a figure of four panels comes out in two versions."""
    cell, trace = synthetic.cells().iloc[4], synthetic.iterations(100)
    drawn = set()
    for _ in range(10):
        figure_of_four = plots.timeline(trace, cell)[0].figure
        saving.settle(figure_of_four)
        drawn.add(saving.render(figure_of_four, "svg"))
    assert len(drawn) == 1


def test_grids_write_each_mean_into_its_field():
    cells = synthetic.cells()
    cells = synthetic.make_invalid(cells, cells["max_batch_size"] == 32)
    cells = synthetic.make_missing(cells, cells["max_batch_size"] == 2)
    points = plots.points(cells)
    axes = plots.grids(points, "output_throughput_tok_s")
    assert len(axes) == 2
    fields = {t.get_position(): t.get_text() for t in axes[0].texts if t.get_position() != (0, 1.025)}
    batches, tokens = list(synthetic.BATCHES), list(synthetic.TOKENS)
    rows = points[points["dataset"] == "prefill-heavy"]
    expected = {}
    for row in rows.to_dict("records"):
        at = batches.index(row["max_batch_size"]), tokens.index(row["max_num_tokens"])
        expected[at] = {2: "–", 32: f"({labels.number(row['output_throughput_tok_s'])})"}.get(
            row["max_batch_size"], labels.number(row["output_throughput_tok_s"]))
    assert fields == expected
    assert "in brackets: 2 invalid" in axes[0].figure.get_label()


def test_labels_name_the_transport_only_where_it_differs():
    http, inside = synthetic.cells(), synthetic.cells().assign(transport="inprocess")
    inside["cell"] += "-inside"
    alone = plots.side_by_side(plots.points(inside), "max_batch_size", "tpot_mean_ms")[0]
    both = plots.side_by_side(plots.points(pd.concat([http, inside])), "max_batch_size", "tpot_mean_ms")[0]
    assert "vLLM" in texts(alone) and "in process" not in texts(alone)
    assert "vLLM, in process" in texts(both) and "vLLM, HTTP" in texts(both)


def test_many_engines_are_named_below_the_panels(study):
    engines = ("tensorrt-llm", "vllm-v0", "vllm-v1")
    frame = pd.concat([synthetic.cells("throughput", e, "simulated") for e in engines])
    axes = plots.side_by_side(plots.points(frame), "max_batch_size", "output_throughput_tok_s")
    (legend,) = axes[0].figure.legends
    assert legend.get_title().get_text() == "Simulated"
    assert [t.get_text() for t in legend.get_texts()] == ["TensorRT-LLM", "vLLM (V0)", "vLLM (V1)"]
    assert not any("vLLM" in texts(ax) for ax in axes)
    sizes = {line.get_markersize() for line in axes[0].lines if line.get_marker() == "s"}
    assert len(sizes) == 3, "equal values would hide one another"
    shown = plots.save(axes[0].figure, "many", "x", study)
    told = "simulated, TensorRT-LLM 0.32.0, vLLM (V0) 0.32.0, vLLM (V1) 0.32.0, test machine, 2 cores, n = 3 × 64"
    assert shown.caption.startswith(told) and "interval" not in shown.caption
    mixed = plots.points(pd.concat([frame, synthetic.cells()]))
    (legend,) = plots.running_batches(mixed)[0].figure.legends
    assert "vLLM" in [t.get_text() for t in legend.get_texts()] and legend.get_title().get_text() == ""
    assert "vLLM (V0), simulated" in [t.get_text() for t in legend.get_texts()]
