"""Writes a figure as SVG and PNG, the same bytes for the same data, and shows it with alternative text."""

import base64
import html
import io
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import PlaceHolderLayoutEngine

from batchlab.errors import UsageError
from batchlab.plots.style import MUTED, styled

NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure as notebooks and the report show it: an SVG image with alternative text, and a caption."""

    name: str
    alt: str
    caption: str
    svg: bytes

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg).decode()
        return (
            f'<figure id="figure-{self.name}"><div class="scroll" tabindex="0">'
            f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(self.alt, quote=True)}"></div>'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>"
        )

    def __repr__(self) -> str:
        return f"Figure {self.name}: {self.alt} [{self.caption}]"


def save(fig: Figure, name: str, alt: str, study: Any) -> Shown:
    """Writes `study.figures_dir`/<name>.svg and .png and returns what to display.

    `alt` says in words what the figure shows. The caption is the figure's label, which every function of
    `batchlab.plots` sets; a figure made by hand sets it with `plots.attach(fig, frame)`. The files repeat the
    caption under the picture, so that a picture passed on alone still says what it is. UsageError for an
    empty alt, an empty caption or a name that is not lower-case words joined by hyphens.
    """
    alt, caption = " ".join(alt.split()), str(fig.get_label() or "").strip()
    if not alt:
        raise UsageError(f"figure {name!r} has no alternative text; say in `alt` what it shows")
    if not caption:
        raise UsageError(f"figure {name!r} has no caption: call plots.attach(fig, frame) before saving it")
    if not NAME.fullmatch(name):
        raise UsageError(f"figure name {name!r}: use lower-case letters, digits and hyphens")
    settle(fig)
    shown = Shown(name, alt, caption, render(fig, "svg"))
    footer = under(fig, caption)
    folder = Path(study.figures_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("svg", "png"):
        write_if_changed(folder / f"{name}.{kind}", render(fig, kind))
    footer.remove()
    close(fig)
    return shown


@styled
def settle(fig: Figure) -> None:
    """Lays the figure out once and for all, with positions rounded.

    The solver behind the constrained layout orders its variables by memory address, so that positions differ in
    their last bit from run to run; the SVG's ids are hashes of them.
    """
    if fig.get_layout_engine() is None:
        return
    fig.draw_without_rendering()
    places = [(ax, ax.get_position().bounds) for ax in fig.axes]
    fig.set_layout_engine("none")
    for ax, bounds in places:
        ax.set_position([round(b, 5) for b in bounds])


@styled
def render(fig: Figure, kind: str) -> bytes:
    """The figure's bytes, without date, version or random ids."""
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with drawn_once(fig):
        fig.savefig(buffer, format=kind, metadata=metadata, bbox_inches="tight", pad_inches=0.06)
    return buffer.getvalue()


@contextmanager
def drawn_once(fig: Figure) -> Iterator[None]:
    """Leaves out the first of the two drawings that saving with a tight box takes.

    matplotlib draws everything once without ink, so that layout and ticks are in place before it looks for the box. A
    settled figure's are, and looking for the box updates ticks, labels and titles by itself.
    """
    if not isinstance(fig.get_layout_engine(), PlaceHolderLayoutEngine):  # not by `settle`
        yield
        return
    draw, skipped = fig.draw, []

    def later(renderer: Any) -> None:
        if skipped:
            draw(renderer)
        skipped.append(renderer)

    fig.draw = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        del fig.draw


@styled
def under(fig: Figure, caption: str) -> Any:
    """The caption as small text below the picture."""
    width = int(fig.get_figwidth() * 16.8)
    text = "\n".join(textwrap.wrap(caption, width))
    to_figure = fig.transFigure.inverted()
    bottom = min([0.0, *(round(found.get_window_extent().transformed(to_figure).y0, 3) for found in fig.legends)])
    return fig.text(0.01, bottom - 0.01, text, ha="left", va="top", fontsize=7.5, color=MUTED, in_layout=True)


def slug(text: str) -> str:
    """Any text as a part of a figure's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def write_if_changed(path: Path, data: bytes) -> None:
    """Replaces the file in one step, and leaves it (and its time) alone when nothing changed."""
    if path.exists() and path.read_bytes() == data:
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)


def close(fig: Figure) -> None:
    """Forgets the figure if pyplot made it: a notebook would show it again, without alternative text."""
    from matplotlib import pyplot

    pyplot.close(fig)
