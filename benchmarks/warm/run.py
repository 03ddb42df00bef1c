"""The same batch sweep on one warm engine, and with a restart for each cell.

    .venv/bin/python benchmarks/warm/run.py        about 8 minutes on 2 cores; nothing else should run

Measures benchmarks/warm/sweep.yml both ways into a folder of its own and writes benchmarks/warm/results.csv: a row a
batch size with both throughputs, both mean TPOTs, their 95% intervals over the repeats, and the ratio warm / restarted.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from batchlab import estimate, measure, metrics, plan, scenario
from batchlab.progress import Progress
from batchlab.store import Store
from batchlab.study import Study, aggregate

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", type=Path, default=HERE / "sweep.yml")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv")
    args = parser.parse_args()
    loaded = scenario.load(args.scenario)
    with tempfile.TemporaryDirectory() as folder:
        frames, minutes = {}, {}
        for way in ("warm", "restarted"):
            study = Study(loaded, plan.expand(loaded), Store(Path(folder) / way))
            cells = study.cells()
            progress = Progress(total=len(cells), estimator=estimate.fit(study.store, cells), left=cells)
            began = time.monotonic()
            outcome = measure.run(loaded, cells, cells, study.store, progress, restart_each=way == "restarted")
            if outcome.failures:
                raise SystemExit(f"{way}: {outcome.failures[0][1]}")
            minutes[way] = (time.monotonic() - began) / 60
            frames[way] = study.frame()
    table = compare(frames["warm"], frames["restarted"])
    table.to_csv(args.out, index=False, float_format="%.4g")
    print(table.to_string(index=False, float_format="{:.4g}".format))
    print(
        f"whole sweep: warm {minutes['warm']:.1f} min, restarted {minutes['restarted']:.1f} min, "
        f"{minutes['restarted'] / minutes['warm']:.1f} times as long"
    )


def compare(warm: pd.DataFrame, restarted: pd.DataFrame) -> pd.DataFrame:
    """A row a batch size; the ratio's interval comes from the repeats, paired by seed."""
    rows = []
    both = {"warm": aggregate(warm), "restarted": aggregate(restarted)}
    for batch in both["warm"]["max_batch_size"]:
        row = {"max_batch_size": batch}
        for key in ("output_throughput_tok_s", "tpot_mean_ms", "running_batch_mean"):
            for way, frame in both.items():
                point = frame[frame["max_batch_size"] == batch].iloc[0]
                row[f"{key}_{way}"] = point[key]
                row[f"{key}_{way}_half"] = (point[f"{key}_hi"] - point[f"{key}_lo"]) / 2
            pairs = [f[f["max_batch_size"] == batch].set_index("seed")[key].astype(float) for f in (warm, restarted)]
            mean, low, high = metrics.interval(np.asarray(pairs[0] / pairs[1]))
            row |= {f"{key}_ratio": mean, f"{key}_ratio_lo": low, f"{key}_ratio_hi": high}
        rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
