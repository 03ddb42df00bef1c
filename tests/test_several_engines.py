"""Tables, readings and figures of a frame with several engines in it: nothing may pass for another engine's."""

import pandas as pd

import synthetic
from batchlab import plots
from batchlab.report import readings, tables


def cells(*engines: str) -> pd.DataFrame:
    return pd.concat(
        [
            pd.DataFrame(
                [
                    synthetic.row(dataset, batch, 512, 0, "throughput", engine)
                    for dataset in synthetic.DATASETS
                    for batch in (2, 8)
                ]
            )
            for engine in engines
        ],
        ignore_index=True,
    )


def test_a_tables_rows_name_what_tells_them_apart():
    columns = ["dataset", "max_batch_size", "output_throughput_tok_s"]
    one = tables.table(cells("vllm"), columns)
    assert one.headings[0] == "dataset"
    two = tables.table(cells("tgi", "sglang"), columns)
    assert two.headings[:2] == ("engine", "dataset")
    assert {row[0] for row in two.rows} == {"TGI", "SGLang"} and len(two.rows) == 8
    both = cells("vllm")
    transports = pd.concat([both, both.assign(transport="inprocess")])
    assert tables.table(transports, {"dataset": "data"}).headings == ("transport", "data")
    simulated = pd.concat([both, both.assign(evidence="simulated", transport="simulated")])
    assert tables.table(simulated, columns).headings[:2] == ("evidence", "dataset")


def test_a_reading_of_the_spread_is_of_one_engine():
    frame = cells("tgi", "sglang")
    frame.loc[frame["engine"] == "tgi", "tpot_max_ms"] = frame["tpot_min_ms"] * 3
    frame.loc[frame["engine"] == "sglang", "tpot_max_ms"] = frame["tpot_min_ms"] * 7
    told = str(readings.tpot_range(frame, "max_batch_size", synthetic.DEFAULTS))
    assert "decode-heavy, TGI: the slowest request's TPOT is 3.0 times" in told
    assert "decode-heavy, SGLang: the slowest request's TPOT is 7.0 times" in told


def test_a_line_of_one_point_stands_at_the_default():
    """A sweep of the batch limit alone, looked at along the other one: the default's point, not the smallest's."""
    frame = cells("tgi", "sglang")
    line = plots.along(plots.points(frame), "max_num_tokens", {"max_batch_size": 8, "max_num_tokens": 512})
    assert set(line["max_batch_size"]) == {8} and len(line) == 4


def test_one_colour_an_engine_on_the_same_axes():
    points = plots.points(cells("tgi", "sglang", "tensorrt-llm"))
    for ax in plots.side_by_side(points, "max_batch_size", "output_throughput_tok_s", defaults=synthetic.DEFAULTS):
        lines = [line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 2]
        colours = {plots.style.COLOURS[engine] for engine in ("tgi", "sglang", "tensorrt-llm")}
        assert {line.get_color() for line in lines} == colours


def test_a_timeline_names_its_engine():
    frame = cells("tgi").iloc[:1]
    iterations = pd.DataFrame(
        {
            "scheduled_s": [0.0, 0.1],
            "output_s": [0.1, 0.2],
            "running": [1, 2],
            "waiting": [1, 0],
            "prefill_tokens": [16, 16],
            "decode_tokens": [0, 1],
            "kv_use": [0.001, 0.002],
            "preemptions": [0, 0],
        }
    )
    axes = plots.timeline(iterations, frame.iloc[0])
    assert any("TGI · max_batch_size 2" in text.get_text() for text in axes[0].texts)
    labels = [label.get_text() for label in axes[3].get_yticklabels()]
    assert len(set(labels)) == len(labels)  # a cache that is hardly used needs more digits
