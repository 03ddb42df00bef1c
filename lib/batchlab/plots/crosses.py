"""One metric along both limits, all engines in each panel: a column a dataset, a row a limit."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from batchlab.plots.batch import running_batch
from batchlab.plots.captions import attach
from batchlab.plots.labels import OTHER_AXIS
from batchlab.plots.legend import legend
from batchlab.plots.limits import SUBTITLE, against, panels
from batchlab.plots.select import along, datasets
from batchlab.plots.style import styled


def varied(points: pd.DataFrame, defaults: Any = None) -> dict[str, pd.DataFrame]:
    """{limit: its line of points} for each limit that has at least two values."""
    lines = {axis: along(points, axis, defaults) for axis in OTHER_AXIS} if len(points) else {}
    return {axis: line for axis, line in lines.items() if line[axis].nunique() > 1}


@styled
def crosses(
    points: pd.DataFrame, metric: str, *, defaults: Any = None, log_y: bool = False, note: str = ""
) -> list[Axes]:
    """`against` along max_batch_size and along max_num_tokens, a panel a dataset and limit.

    Two datasets stand side by side; of any other number each has a row of its own. The running batch size has its
    limit as a line. `points` is of one request rate.
    """
    lines, names = varied(points, defaults), datasets(points) or [""]
    places = [(axis, name) for axis in lines for name in names]
    if len(names) != 2:
        places = [(axis, name) for name in names for axis in lines]
    axes = panels(len(places), height_in=3.3)
    for ax, (axis, name) in zip(axes, places, strict=False):
        rows = lines[axis][lines[axis]["dataset"] == name]
        if metric == "running_batch_mean" and axis == "max_batch_size":
            running_batch(rows, ax)
        else:
            # TTFT spans orders of magnitude along the batch limit only, where requests queue
            against(rows, axis, metric, ax, log_y=log_y and axis == "max_batch_size")
        for text in ax.texts:
            if text.get_position() == (0, SUBTITLE):  # a long one would squeeze the panels
                text.set_in_layout(False)
    shown = pd.concat(lines.values()) if lines else points
    # the point in which the limits' lines meet is in both
    shown = shown.drop_duplicates(["engine", "transport", "dataset", *OTHER_AXIS])
    attach(axes[0].figure, shown, note)
    legend(axes[0].figure, shown)
    return axes
