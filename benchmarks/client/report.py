"""results.csv → results.md (a table) and figure.svg/.png.

python benchmarks/client/report.py [--results FILE]
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from batchlab.plots.saving import render, settle, write_if_changed
from batchlab.plots.style import new_figure, styled

HERE = Path(__file__).resolve().parent
NAMES = {"batchlab": "batchlab", "vllm": "vllm bench serve", "guidellm": "GuideLLM", "aiperf": "AIPerf"}
COLOURS = {"batchlab": "#D55E00", "vllm": "#0072B2", "guidellm": "#009E73", "aiperf": "#CC79A7"}
MARKERS = {"batchlab": "o", "vllm": "s", "guidellm": "^", "aiperf": "D"}
PANELS = (
    ("ttft_p50_bias_ms", "TTFT p50: reported − true (ms)", "symlog", 1.0),
    ("tpot_bias_pct", "TPOT mean: reported − true (%)", "symlog", 0.1),
    ("cpu_us_per_chunk", "CPU while streaming (µs/chunk)", "log", None),
)
VALUES = [
    "ttft_p50_bias_ms",
    "ttft_p99_bias_ms",
    "ttft_sd_ms",
    "ttft_truth_sd_ms",
    "tpot_bias_pct",
    "tpot_sd_ms",
    "tpot_truth_sd_ms",
    "cpu_us_per_chunk",
    "cpu_us_per_chunk_in_all",
    "server_late_p50_ms",
    "server_late_p99_ms",
]


def load(path: Path) -> pd.DataFrame:
    frame = pd.read_csv(path)
    frame["reason"] = frame["reason"].astype(object).fillna("")
    return frame


def summarize(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a point: mean over repeats of each value, `<value>_lo` and `_hi` their range, n, valid (in all)."""
    keys = ["gap_ms", "streams", "client"]
    groups = frame.groupby(keys, sort=True)
    table = groups[VALUES].mean()
    for edge, how in (("lo", "min"), ("hi", "max")):
        table = table.join(groups[VALUES].agg(how).add_suffix(f"_{edge}"))
    table["n"] = groups.size()
    table["valid"] = groups["valid"].all()
    table["reason"] = groups["reason"].agg(lambda told: next((text for text in told if text), ""))
    return table.reset_index()


def markdown(table: pd.DataFrame, frame: pd.DataFrame) -> str:
    versions = frame.groupby("client")["version"].agg(lambda v: ", ".join(sorted(set(map(str, v)))))
    lines = [
        "# The replay client and its peers",
        "",
        f"{frame['machine'].iloc[-1]}; client on one core, ground-truth server on another; "
        f"{int(table['n'].max())} repeats, means of them; first token after 200 ms. "
        + ", ".join(f"{NAMES[name]} {versions[name]}" for name in NAMES if name in versions)
        + f". Measured until {frame['measured_at'].max()[:10]}, commit {frame['commit'].iloc[-1]}.",
        "",
        "Bias: reported − true, where true is what the server wrote and when; spread: standard deviation over the "
        "streams, reported (true). CPU of the client's process tree for each chunk: while streaming (with parsing "
        "and reporting). Late: the server's writes behind its own schedule, p50 / p99.",
        "",
        "![bias and CPU of the clients](figure.svg)",
        "",
        "| ms/token | streams | client | TTFT p50 bias (ms) | TTFT p99 bias (ms) | TTFT spread (ms) | TPOT bias (%) | "
        "TPOT spread (ms) | CPU (µs/chunk) | server late (ms) | |",
        "|--:|--:|:--|--:|--:|--:|--:|--:|--:|--:|:--|",
    ]
    order = {name: number for number, name in enumerate(NAMES)}
    table = table.assign(order=table["client"].map(order)).sort_values(
        ["gap_ms", "streams", "order"], ascending=[False, True, True]
    )
    for row in table.itertuples():
        cells = [
            f"{row.gap_ms:g}",
            str(row.streams),
            NAMES[row.client],
            _signed(row.ttft_p50_bias_ms, 1),
            _signed(row.ttft_p99_bias_ms, 1),
            _pair(row.ttft_sd_ms, row.ttft_truth_sd_ms, 1),
            _signed(row.tpot_bias_pct, 2),
            _pair(row.tpot_sd_ms, row.tpot_truth_sd_ms, 3),
            _pair(row.cpu_us_per_chunk, row.cpu_us_per_chunk_in_all, 1),
            f"{row.server_late_p50_ms:.1f} / {row.server_late_p99_ms:.1f}" if row.server_late_p50_ms >= 0 else "–",
            "" if row.valid else f"invalid: {row.reason}".replace("|", "/"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _signed(value: float, digits: int) -> str:
    return "–" if np.isnan(value) else f"{value:+.{digits}f}"


def _pair(value: float, other: float, digits: int) -> str:
    return "–" if np.isnan(value) else f"{value:.{digits}f} ({other:.{digits}f})"


@styled
def draw(table: pd.DataFrame):
    """A row of panels for each gap: TTFT bias, TPOT bias and CPU against the streams; invalid points are hollow."""
    gaps = sorted(table["gap_ms"].unique(), reverse=True)
    figure = new_figure(11, 3.1 * len(gaps))
    axes = figure.subplots(len(gaps), len(PANELS), squeeze=False, sharex=True, sharey="col")
    for row, gap in zip(axes, gaps, strict=True):
        part = table[table["gap_ms"] == gap]
        for ax, (value, title, scale, linear) in zip(row, PANELS, strict=True):
            _panel(ax, part, value)
            ax.set_yscale(scale, **({"linthresh": linear} if linear else {}))
            ax.set_title(f"{title}, {gap:g} ms/token", fontsize=9)
            ax.set_xscale("log", base=2)
            streams = sorted(table["streams"].unique())
            ax.set_xticks(streams, [str(n) for n in streams], rotation=45)
            ax.minorticks_off()
            if linear:
                ax.axhline(0, color="#999999", linewidth=0.8)
    for ax in axes[-1]:
        ax.set_xlabel("streams")
    axes[0][0].legend(fontsize=8)
    return figure


def _panel(ax: Axes, part: pd.DataFrame, value: str) -> None:
    for name, label in NAMES.items():
        points = part[(part["client"] == name) & part[value].notna()].sort_values("streams")
        if points.empty:
            continue
        colour = COLOURS[name]
        ax.vlines(points["streams"], points[f"{value}_lo"], points[f"{value}_hi"], color=colour, linewidth=1)
        ax.plot(points["streams"], points[value], color=colour, linewidth=1.2, label=label, zorder=2)
        for valid, face in ((True, colour), (False, "white")):
            some = points[points["valid"] == valid]
            ax.plot(
                some["streams"],
                some[value],
                linestyle="none",
                marker=MARKERS[name],
                markersize=5,
                markerfacecolor=face,
                markeredgecolor=colour,
                zorder=3,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Table and figure from the benchmark's results.")
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    results = parser.parse_args().results
    if not results.exists():
        print(f"{results} is missing; measure first: python benchmarks/client/run.py", file=sys.stderr)
        return 2
    frame = load(results)
    table = summarize(frame)
    write_if_changed(results.with_suffix(".md"), markdown(table, frame).encode())
    figure = draw(table)
    settle(figure)
    for kind in ("svg", "png"):
        write_if_changed(results.with_name(f"figure.{kind}"), render(figure, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
