"""Names of many series: below the panels, since there is no room for them where the series end."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from batchlab.plots.select import series, several_transports
from batchlab.plots.style import series_style

MANY = 3  # series from which on a legend names them


def many(points: pd.DataFrame) -> bool:
    """Whether the frame has so many series that a legend names them."""
    return len(points) > 0 and len(list(series(points))) >= MANY


def marker_size(place: int, count: int) -> float:
    """Points; of many series each is smaller than the one before, so that equal values show as rings."""
    return 6.0 if count < MANY else max(3.5, 8.5 - 1.8 * place)


def legend(figure: Figure, points: pd.DataFrame) -> None:
    """A legend of the frame's series under the panels, if they are many; their evidence once where it is the same."""
    if not many(points):
        return
    named = several_transports(points)
    looks = [series_style(*key, name_transport=named) for key, _ in series(points)]
    alike = points["evidence"].nunique() == 1
    suffix = f", {points['evidence'].iloc[0]}"
    handles = [
        Line2D(
            [],
            [],
            color=look.colour,
            linestyle=look.linestyle,
            marker=look.marker,
            markersize=marker_size(place, len(looks)),
            label=look.label.removesuffix(suffix) if alike else look.label,
        )
        for place, look in enumerate(looks)
    ]
    figure.legend(
        handles=handles,
        title=points["evidence"].iloc[0].capitalize() if alike else None,
        title_fontsize=9,
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=min(len(handles), 4),
        handlelength=2.6,
        alignment="left",
    )
