"""Fit the H200's constants on 28 of its measured cells, and test them on all others.

    python benchmarks/simulator/h200_fit.py [--write]

The cells are those recorded in data/results/h200_sxm (vLLM, in process). With --write the constants, the fit cells
and the errors go to lib/batchlab/sim/fitted.json, where `fitted_constants` finds them. Prints errors without and
with the fit, and with each run's own launches beside it.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace

from batchlab import paths
from batchlab.sim.fitted import FILE
from batchlab.sim.fitting import MeasuredCell, compare_cells, error_table, fit_constants
from batchlab.sim.host import HostOverheads
from batchlab.sim.measured import known_launches, measured_cell
from batchlab.store import Store
from batchlab.study import open_study
from batchlab.validation import measured_again

HARDWARE = "h200_sxm"
# (input and output length, max_batch_size, max_num_tokens, request rate, seed, whether KV memory was held): small and
# large batches, narrow and wide steps, both datasets once at a finite rate. The last four are of other engine starts,
# on other cards of the kind: those of the first start draw more power for the same work.
FIT_ON = {
    *((d, b, t, None, 0, False) for d in ((768, 128), (128, 768)) for b, t in ((8, 8192), (256, 8192), (512, 1024))),
    *((d, 64, 8192, 4.0, 0, False) for d in ((768, 128), (128, 768))),
    ((128, 768), 128, 8192, None, 2, False),
    ((128, 768), 256, 8192, None, 0, True),
    ((2048, 128), 256, 8192, 10.0, 0, False),
    ((1500, 300), 100, 3000, 7.0, 0, False),
}
# And the sweeps that were measured for it: every cell of these shapes.
SHAPES = {(32, 256), (256, 256), (3072, 256), (1024, 64)}


def cells() -> tuple[list[MeasuredCell], list[str]]:
    """Every valid recorded in-process cell that was not chosen by its error, and the names of those to fit on."""
    store = Store(paths.RESULTS / HARDWARE)
    read = [store.load(cell_id) for cell_id in sorted(store.ids())]
    inside = [r for r in read if r.meta["cell"]["transport"] == "inprocess" and not r.meta["invalid_reasons"]]
    # The constants were fixed, and the blind cells measured, while iterations with prompts alone were replayed.
    launches = {cell: replace(trace, graph=trace.graph[:0]) for cell, trace in known_launches(inside).items()}
    again = measured_again(open_study("h200"))
    made, chosen = [], []
    for recorded in inside:
        cell, cell_id = recorded.meta["cell"], recorded.id
        if cell.get("token_rule") or cell_id in again:
            continue
        made.append(replace(measured_cell(recorded), launches=launches[cell_id]))
        lengths = (cell["dataset"].get("input_len"), cell["dataset"].get("output_len"))
        point = (lengths, cell["max_batch_size"], cell["max_num_tokens"], cell["request_rate"], cell["seed"])
        held, ordinary = "kv_cache_gib" in cell["engine_options"], "args" not in cell["engine_options"]
        if cell["model"] == "llama-3-8b" and ordinary and ((*point, held) in FIT_ON or lengths in SHAPES):
            chosen.append(cell_id)
    return made, chosen


def show(title: str, table: list[dict]) -> None:
    print(title)
    for row in table:
        errors = f"mean error {row['mean_abs']:6.2%}, largest {row['max_abs']:6.2%} ({row['worst']})"
        print(f"  {row['figure']:26} {row['cells']:4} cells: {errors}, signed {row['mean']:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    made, chosen = cells()
    show("nothing fitted", error_table(compare_cells(made, HostOverheads())))
    fit = fit_constants(made, chosen)
    print(f"{len(chosen)} fit cells, {len(fit.test_cells)} test cells\n{fit.host}\n{fit.power}")
    show("fit cells", error_table(fit.errors, fitted=True))
    show("test cells", error_table(fit.errors))
    show("test cells, launches known", error_table(compare_cells(made, fit.host, fit.power, chosen, replay=True)))
    if args.write:
        entry = {
            "engine": "vllm-v1",
            "quantization": "none",
            "host": asdict(fit.host),
            "power": asdict(fit.power),
            "fit_cells": fit.fit_cells,
            "test_cells": fit.test_cells,
            "test_errors": error_table(fit.errors),
        }
        FILE.write_text(json.dumps({HARDWARE: entry}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
