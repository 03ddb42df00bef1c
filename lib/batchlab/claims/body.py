"""A body of evidence: the cells of one scenario that are of one kind, measured or simulated, and lines through them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from batchlab import noise, study
from batchlab.claims.outcome import Missing, value
from batchlab.plots.gather import key, points
from batchlab.plots.labels import OTHER_AXIS, whole
from batchlab.plots.select import along, recorded, valid
from batchlab.plots.style import engine_name
from batchlab.report.setup import ALL_AT_ONCE
from batchlab.study import Study

AT_ONCE = (*ALL_AT_ONCE, "grid")  # the sweeps of the article's throughput figures
# a study's engine by name, and which of a scenario's engines stands for it, the first that is there
ENGINES = {
    "vllm": ("vllm", "vllm-v0", "vllm-v1"),
    "tensorrt-llm": ("tensorrt-llm",),
    "tgi": ("tgi",),
}
NOISY = ("output_throughput_tok_s", "request_throughput_req_s", "ttft_mean_ms", "tpot_mean_ms", "running_batch_mean")
Dataset = str | list[int]


@dataclass(frozen=True, slots=True)
class Line:
    """Valid points of one engine and dataset in the order of an axis; at least two."""

    axis: str
    rows: pd.DataFrame

    @property
    def x(self) -> np.ndarray:
        return self.rows[self.axis].to_numpy(float)

    def y(self, metric: str) -> np.ndarray:
        return pd.to_numeric(self.rows[metric]).to_numpy(float)

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(cell for cells in self.rows["cells"] for cell in cells)

    def at(self, i: int, metric: str) -> str:
        """ "40.1 ms at max_batch_size 256"."""
        return f"{value(self.rows.iloc[i], metric)} at {self.axis} {number_on(self.axis, self.x[i])}"

    def ends(self, metric: str) -> str:
        """ "5.36 ms at max_batch_size 4 and 79.0 ms at 512"."""
        last = self.rows.iloc[-1]
        return f"{self.at(0, metric)} and {value(last, metric)} at {number_on(self.axis, self.x[-1])}"

    def resolved(self, i: int, j: int, metric: str) -> bool:
        """Whether two points' intervals do not touch; true where there are none, as nothing then varies by chance."""
        ends = [self.rows.iloc[k].get(f"{metric}_{end}", math.nan) for k in (i, j) for end in ("lo", "hi")]
        low_i, high_i, low_j, high_j = map(float, ends)
        return not (math.isfinite(low_i) and math.isfinite(low_j)) or high_i < low_j or high_j < low_i

    def told(self, i: int) -> str:
        """The axis value at a place, or that there is none: a test looks for the first from which something holds."""
        inside = i < len(self.x)
        return number_on(self.axis, self.x[i]) if inside else f"none up to {number_on(self.axis, self.x[-1])}"

    def index(self, where: float) -> int:
        """The place of an axis value. Missing where no valid point has it."""
        found = np.flatnonzero(self.x == where)
        if not len(found):
            raise Missing(f"no valid point at {self.axis} {number_on(self.axis, where)}")
        return int(found[0])


def number_on(axis: str, x: float) -> str:
    return f"{x:g}" if axis == "request_rate" else whole(x)


@dataclass(slots=True)
class Body:
    """The planned cells of a scenario that are of one evidence kind, recorded or not."""

    scenario: str
    evidence: str
    frame: pd.DataFrame
    defaults: dict[str, int]
    _points: dict[tuple[str, ...], pd.DataFrame] = field(default_factory=dict)
    _noise: dict[str, dict[noise.Kind, tuple[float, int]]] = field(default_factory=dict)
    _known: Any = field(default=None, init=False, compare=False, repr=False)  # what tests said of it: known.py

    def points(self, sweeps: Iterable[str]) -> pd.DataFrame:
        """The points of these sweeps together, with their recorded cells' ids (`cells`); Missing where none is planned.

        A single measured run gets its interval from how much the repeated points of this body scatter.
        """
        names = tuple(sweeps)
        if names not in self._points:
            frame = self.frame[self.frame["sweep"].isin(names)]
            made = points(frame)
            by = [c for c in study.POINT if c in frame]
            ids: dict[tuple[str, ...], list[str]] = {}
            for row in frame[recorded(frame)].drop_duplicates("cell").to_dict("records"):
                ids.setdefault(key(row, by), []).append(row["cell"])
            made["cells"] = [tuple(ids.get(key(row, by), ())) for row in made.to_dict("records")]
            self._points[names] = self._with_intervals(made)
        if self._points[names].empty:
            raise Missing(f"scenario {self.scenario} has no sweep {' or '.join(names)}")
        return self._points[names]

    def whole(self, sweeps: Iterable[str]) -> pd.DataFrame:
        """The points of these sweeps. Missing, with how many, unless all are recorded."""
        names = tuple(sweeps)
        made = self.points(names)
        if gone := int((~recorded(made)).sum()):
            told = f"{gone} of {len(made)} points of {' and '.join(names)} in scenario {self.scenario} are not recorded"
            raise Missing(told, planned=True)
        return made

    def _with_intervals(self, made: pd.DataFrame) -> pd.DataFrame:
        for metric in NOISY:
            if metric not in made or made.empty:
                continue
            known = self.noise(metric)
            reach = np.array([noise.half(known.get(kind)) for kind in noise.kinds(made)])
            single = made.index[(made["n"] == 1) & ~np.isnan(reach)]
            half = pd.Series(reach, made.index)[single] * made.loc[single, metric].astype(float)
            for end, sign in (("lo", -1), ("hi", 1)):
                made.loc[single, f"{metric}_{end}"] = made.loc[single, metric].astype(float) + sign * half
        return made

    def noise(self, metric: str) -> dict[noise.Kind, tuple[float, int]]:
        """`noise.pooled` over this body; empty where nothing varies by chance.

        Only points of one request rate kind are comparable, so TTFT is pooled over finite rates, everything else over
        all.
        """
        if metric not in self._noise:
            frame = study.fair(self.frame)
            frame = frame[valid(frame)].drop_duplicates("cell")
            if metric == "ttft_mean_ms":
                frame = frame[np.isfinite(frame["request_rate"].astype(float))]
            found = {}
            if self.evidence == "measured" and len(frame):
                point = frame.groupby([c for c in study.POINT if c in frame], dropna=False).ngroup().to_numpy()
                found = noise.pooled(pd.to_numeric(frame[metric]).to_numpy(float), point, noise.kinds(frame))
            self._noise[metric] = found
        return self._noise[metric]

    def engine(self, role: str) -> str:
        """The scenario's engine that stands for a study's. Missing where it has none."""
        there = set(self.frame["engine"])
        for name in ENGINES.get(role, (role,)):
            if name in there:
                return name
        raise Missing(f"scenario {self.scenario} has no {engine_name(role)}")

    def studied(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of those engines that stand for one of the studies': no study ran SGLang."""
        there = set(self.frame["engine"])
        return frame[frame["engine"].isin({next((n for n in names if n in there), None) for names in ENGINES.values()})]

    def select(self, made: pd.DataFrame, role: str, dataset: Dataset, *, finite_rate: bool | None) -> pd.DataFrame:
        """The points of an engine and a dataset (a name, or the two lengths), all at once or at finite rates, or
        both.

        Of several ways of serving them (transport, release, engine options) the one that the scenario plans first:
        a line through two of them would mean nothing.
        """
        rows = made[made["engine"] == self.engine(role)]
        if isinstance(dataset, str):
            rows = rows[rows["dataset"] == dataset]
        else:
            rows = rows[(rows["input_len"] == dataset[0]) & (rows["output_len"] == dataset[1])]
        if finite_rate is not None:
            rows = rows[np.isfinite(rows["request_rate"].astype(float)) == finite_rate]
        by = [c for c in ("transport", "engine_version", "engine_options") if c in rows]
        ways = [key(row, by) for row in rows[by].to_dict("records")]
        return rows[np.array([way == ways[0] for way in ways], dtype=bool)]

    def line(
        self,
        dataset: Dataset,
        axis: str,
        *,
        engine: str = "vllm",
        sweeps: Iterable[str] = AT_ONCE,
        finite_rate: bool | None = False,
    ) -> Line:
        """The line of one engine and dataset along an axis, the other limit at its default.

        Missing, with how many cells, unless every planned point of the line is recorded; invalid points are left out.
        """
        rows = self.select(self.points(sweeps), engine, dataset, finite_rate=finite_rate)
        if axis in OTHER_AXIS:
            rows = along(rows, axis, self.defaults)
        name = dataset if isinstance(dataset, str) else f"({dataset[0]}, {dataset[1]})"
        what = f"{name} along {axis}, {engine_name(self.engine(engine))}"
        if len(rows) < 2:
            raise Missing(f"scenario {self.scenario} plans no cells of {what}")
        if gone := int((~recorded(rows)).sum()):
            raise Missing(
                f"{gone} of {len(rows)} points of {what} in scenario {self.scenario} are not recorded", planned=True
            )
        good = rows[valid(rows)].sort_values(axis, kind="stable")
        if len(good) < 2:
            raise Missing(f"fewer than two valid points of {what} in scenario {self.scenario}", planned=True)
        return Line(axis, good)

    def versions(self, sweeps: Iterable[str] | None = None) -> pd.DataFrame:
        """engine, engine_version, hardware, model of the recorded cells; Missing without any."""
        frame = self.frame if sweeps is None else self.frame[self.frame["sweep"].isin(tuple(sweeps))]
        planned, frame = len(frame) > 0, frame[recorded(frame)]
        if frame.empty:
            what = f"scenario {self.scenario}" if sweeps is None else f"{', '.join(sweeps)} in scenario {self.scenario}"
            raise Missing(f"no cell of {what} is {'recorded' if planned else 'planned'}", planned=planned)
        return frame[["engine", "engine_version", "hardware", "model"]].drop_duplicates()


def bodies(studies: Iterable[Study], *, simulate: bool = False) -> list[Body]:
    """One body an evidence kind of each study.

    Nothing is measured; missing simulated cells are made with `simulate`.
    """
    found = []
    for opened in studies:
        frame = with_simulated(opened) if simulate else opened.frame()
        for evidence, rows in frame.groupby("evidence", sort=False):
            found.append(Body(opened.scenario.name, str(evidence), rows, dict(opened.scenario.defaults)))
    return found


def with_simulated(opened: Study) -> pd.DataFrame:
    """The study's frame, its simulated cells made."""
    frame = opened.frame()
    simulated = frame["evidence"] == "simulated"
    if simulated.all():
        return opened.ensure()
    sweeps = frame.loc[simulated & ~recorded(frame), "sweep"].unique()
    for sweep in sweeps:
        if simulated[frame["sweep"] == sweep].all():
            opened.ensure(sweep)
    return opened.frame() if len(sweeps) else frame
