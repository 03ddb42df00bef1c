"""What if: the scenario's question on other cards and models, and with equal step times for every engine.

All of it is simulated. Cards are compared on equal terms: constants that were fitted on one of them are left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from batchlab import plan, simulated
from batchlab.cell import SIMULATED, Cell
from batchlab.errors import UsageError
from batchlab.scenario import NumRequests
from batchlab.study import Study

BATCHES = (8, 32, 128, 512)
REQUESTS = NumRequests(waves=2, min=32, max=1024)
SETUP = re.compile(r"(?P<model>\S+) on (?:(?P<cards>\d+) )?(?P<hardware>\S+?)(?:, (?P<quantization>\S+))?")


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on so many cards of a kind."""

    name: str
    model: str
    hardware: str
    cards: int
    quantization: str | None


def parse(text: str) -> Setup:
    """ "llama-3-70b on 2 h200_sxm, fp8" as a Setup; UsageError for anything else."""
    found = SETUP.fullmatch(" ".join(text.split()))
    if not found:
        raise UsageError(f"setup `{text}`: write MODEL on [NUMBER] CARD[, fp8], such as llama-3-70b on 2 h200_sxm, fp8")
    cards = int(found["cards"] or 1)
    return Setup(found[0], found["model"], found["hardware"], cards, found["quantization"])


def cells(study: Study, setups: Sequence[str], engine: str) -> list[tuple[Setup, str, Cell]]:
    """(setup, dataset, cell) over BATCHES, all requests at once, for the datasets of the study's throughput sweep."""
    scenario = study.scenario
    named = next(
        (s.datasets for s in scenario.sweeps if s.name == "throughput" and s.datasets), list(scenario.datasets)
    )
    spec = next((s for n, s in scenario.engines.items() if n == engine), None)
    made = []
    for setup in map(parse, setups):
        options: dict[str, Any] = {"args": {"fitted": False}}
        options |= {"quantization": setup.quantization} if setup.quantization else {}
        options |= {"tensor_parallel_size": setup.cards} if setup.cards > 1 else {}
        for name in named:
            for batch in BATCHES:
                cell = Cell(
                    engine=engine,
                    engine_version=spec.version if spec else "",
                    model=setup.model,
                    hardware=setup.hardware,
                    transport=SIMULATED,
                    max_batch_size=batch,
                    max_num_tokens=max(batch, scenario.defaults.max_num_tokens),
                    dataset=plan.spelled_out(scenario.datasets[name]),
                    num_requests=REQUESTS.of(batch),
                    request_rate=None,
                    arrival=None,
                    engine_options=options,
                    seed=scenario.seed,
                )
                made.append((setup, name, cell))
    return made


def frame(study: Study, setups: Sequence[str], engine: str) -> pd.DataFrame:
    """A row a cell: setup, cards, its coordinates, its summary, and output_throughput_tok_s for each card.

    Missing cells are simulated. UsageError for a setup that cannot be read, or that nothing is known of.
    """
    made = cells(study, setups, engine)
    study.simulate([cell for *_, cell in made])
    rows = []
    for setup, name, cell in made:
        meta = simulated.store(cell.hardware).meta(cell.id)
        rows.append(
            {
                "setup": setup.name,
                "cards": setup.cards,
                "engine": engine,
                "evidence": cell.evidence,
                "model": setup.model,
                "hardware": setup.hardware,
                "dataset": name,
                "max_batch_size": cell.max_batch_size,
                "max_num_tokens": cell.max_num_tokens,
                "kv_tokens": meta["provenance"]["engine"]["kv"]["tokens"],
                "step_times": meta["provenance"]["engine"]["step_times"]["kind"],
                **meta["summary"],
            }
        )
    made_frame = pd.DataFrame(rows)
    made_frame["throughput_per_card_tok_s"] = made_frame["output_throughput_tok_s"] / made_frame["cards"]
    return made_frame


FIGURES = ("output_throughput_tok_s", "tpot_mean_ms", "running_batch_mean", "ttft_mean_ms")


def equal_step_times(study: Study) -> pd.DataFrame:
    """TensorRT-LLM over vLLM V0, with each engine's own step times and with equal ones: a row a dataset, figure and
    max_batch_size, with the columns `own` and `equal` (ratios - 1).

    Empty where the scenario lacks the sweeps `equal-step-times` and `equal-step-times-latency`. TTFT comes from the
    latter, everything else from the former.
    """
    rows = []
    for sweep, others, figures in (
        ("equal-step-times", "throughput", FIGURES[:3]),
        ("equal-step-times-latency", "latency", FIGURES[3:]),
    ):
        if not (study.has(sweep) and study.has(others)):
            continue
        every = pd.concat([study.ensure(sweep), study.ensure(others)]).drop_duplicates("cell")
        every = every[every["max_num_tokens"] == study.scenario.defaults.max_num_tokens]
        for (dataset, batch), group in every.groupby(["dataset", "max_batch_size"], sort=False):
            by = group.set_index("engine")
            if not {"vllm-v0", "tensorrt-llm", "tensorrt-llm-equal"} <= set(by.index):
                continue
            for figure in figures:
                base, own, equal = (by.at[e, figure] for e in ("vllm-v0", "tensorrt-llm", "tensorrt-llm-equal"))
                row = {"dataset": dataset, "figure": figure, "max_batch_size": batch}
                rows.append(row | {"own": own / base - 1, "equal": equal / base - 1})
    columns = ["dataset", "figure", "max_batch_size", "own", "equal"]
    return pd.DataFrame(rows, columns=columns).sort_values(
        ["dataset", "figure", "max_batch_size"],
        key=lambda s: s if s.name == "max_batch_size" else s.map({v: n for n, v in enumerate(dict.fromkeys(s))}),
        kind="stable",
        ignore_index=True,
    )


def spread(ratios: pd.Series) -> tuple[float, float]:
    """The lowest and the highest of some ratios."""
    return float(np.min(ratios)), float(np.max(ratios))
