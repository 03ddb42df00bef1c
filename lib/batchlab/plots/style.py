"""One look for every figure: a colour an engine, a line and marker an evidence kind.

The colours are Okabe and Ito's, which stay apart in the common kinds of colour blindness
(https://jfly.uni-koeln.de/color/). Meaning never rests on colour alone: series are labelled where they end.
"""

import functools
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

STYLE_FILE = Path(__file__).with_name("batchlab.mplstyle")

COLOURS = {
    "vllm": "#0072B2",
    "vllm-v1": "#0072B2",
    "vllm-v0": "#56B4E9",
    "vllm-v0-multi-step": "#8C6BB1",
    "tensorrt-llm": "#D55E00",
    "tensorrt-llm-equal": "#E69F00",
    "tgi": "#009E73",
    "sglang": "#CC79A7",
    "sglang-simulated": "#CC79A7",
}
SPARE_COLOURS = ("#7F7F7F", "#B8860B", "#4D4D4D")
NAMES = {
    "vllm": "vLLM",
    "vllm-v1": "vLLM (V1)",
    "vllm-v0": "vLLM (V0)",
    "vllm-v0-multi-step": "vLLM (V0, multi-step)",
    "tensorrt-llm": "TensorRT-LLM",
    "tensorrt-llm-equal": "TensorRT-LLM (equal steps)",
    "tgi": "TGI",
    "sglang": "SGLang",
    "sglang-simulated": "SGLang",
}
TRANSPORTS = {"http": "HTTP", "inprocess": "in process"}
EVIDENCE = ("measured", "simulated", "published")
MUTED = "#666666"


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """How one series is drawn; `linestyle` is "none" where points must not be joined."""

    colour: str
    linestyle: str
    marker: str
    label: str


def context() -> AbstractContextManager[None]:
    """The style as a context: figures must be built and saved inside it."""
    return matplotlib.rc_context(fname=str(STYLE_FILE))


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a plotting function inside the style, leaving the caller's settings as they were."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            return function(*args, **kwargs)

    return inside


@styled
def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure outside pyplot, so that no notebook shows it twice, without alternative text."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def colour(engine: str) -> str:
    """The engine's own colour; an engine not listed above gets a spare one that depends on its name alone."""
    return COLOURS.get(engine) or SPARE_COLOURS[zlib.crc32(engine.encode()) % len(SPARE_COLOURS)]


def engine_name(engine: str) -> str:
    """The engine as its makers write it."""
    return NAMES.get(engine, engine)


def series_style(engine: str, evidence: str, transport: Any = None, *, name_transport: bool = False) -> SeriesStyle:
    """Measured: solid, filled. Simulated: dashed, squares. Published: crosses, not joined."""
    label = engine_name(engine)
    if evidence == "published":
        return SeriesStyle(colour(engine), "none", "x", f"{label}, published")
    if evidence == "simulated":
        return SeriesStyle(colour(engine), "--", "s", f"{label}, simulated")
    if name_transport:
        label = f"{label}, {TRANSPORTS.get(transport, transport)}"
    return SeriesStyle(colour(engine), "-", "D" if transport == "inprocess" else "o", label)
