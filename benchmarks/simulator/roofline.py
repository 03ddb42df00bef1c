"""How near the roofline stand-in comes to measured operator times, on cards that have both.

    python benchmarks/simulator/roofline.py

Ratios of iteration times, roofline over tables, for Llama-3-8B: decode steps, prompt steps, and mixed ones.
"""

import itertools
import sys

import numpy as np

from batchlab.sim.hardware import load_card
from batchlab.sim.memory import QUANTIZATIONS
from batchlab.sim.models import load_model
from batchlab.sim.roofline import RooflineTimes
from batchlab.sim.tables import table_times

CARDS = ("a100_sxm", "h100_sxm", "h200_sxm", "l40s")
STEPS = {
    "decode": [([], n, n * c) for n, c in itertools.product((1, 4, 16, 64, 128, 256), (128, 512, 1024, 2048))],
    "prompt": [([(length, 0)] * n, 0, 0) for n, length in itertools.product((1, 2, 4, 8), (128, 512, 1024, 2048))],
    "mixed": [([(length, 0)], n, n * 1024) for n, length in itertools.product((16, 64, 256), (512, 1024))],
}


def main() -> None:
    model, none = load_model("llama-3-8b"), QUANTIZATIONS["none"]
    print(f"{'card':10} {'steps':8} {'mean abs error':>15} {'mean ratio':>11} {'lowest':>7} {'highest':>8}")
    for name in CARDS:
        card = load_card(name)
        tables, roofline = table_times(model, card, "vllm", none, 1), RooflineTimes(model, card, none, 1)
        for kind, steps in STEPS.items():
            ratios = np.array([roofline.step_s(*s) / tables.step_s(*s) for s in steps])
            error = np.abs(ratios - 1).mean()
            print(
                f"{name:10} {kind:8} {error:15.1%} {ratios.mean():11.2f} {ratios.min():7.2f} {ratios.max():8.2f}",
            )


if __name__ == "__main__":
    sys.exit(main())
