"""The executed notebooks of a scenario as one HTML file that needs no network and no second file."""

import json
import os
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from bs4 import BeautifulSoup, Tag
from nbconvert.exporters import HTMLExporter
from traitlets.config import Config

from batchlab import paths, plots, study
from batchlab.errors import UsageError
from batchlab.report import merge, summary
from batchlab.report.execute import scenario_name
from batchlab.report.setup import ALL_AT_ONCE

TEMPLATES = Path(__file__).with_name("templates")
META_ID = "batchlab-report"
FETCHED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
    "embed": "src",
}
STANDARD = (*ALL_AT_ONCE, "grid", "latency")


def render(scenario: str) -> Path:
    """Writes build/<scenario>/report.html from what is built there and from the records; measures nothing.

    UsageError when nothing is executed yet, an image has no alternative text, or something would be fetched.
    """
    opened = study.open_study(scenario)
    folder = paths.BUILD / scenario_name(scenario)
    notebook, sections = merge.merge(merge.need_some(folder, scenario))
    cells = opened.frame()
    told = about(opened, cells)
    page, _ = exporter().from_notebook_node(
        notebook,
        resources={
            "metadata": {"name": opened.scenario.title, "path": str(paths.NOTEBOOKS)},
            "title": opened.scenario.title,
            "question": opened.scenario.question,
            "facts": summary.facts(opened.scenario, cells),
            "best": summary.best_settings(best_points(opened))._repr_html_(),
            "best_note": summary.BEST_NOTE,
            "sections": [asdict(s) for s in sections],
            "section_titles": {s.anchor: s.title for s in sections},
            "failures": merge.failures(folder),
            "css": (TEMPLATES / "report.css").read_text(),
            "js": (TEMPLATES / "report.js").read_text(),
            "meta_id": META_ID,
            "meta_json": safe_json(told),
            "rendered": told["rendered"],
        },
    )
    page = without_dead_links(page)
    check(page, folder)
    return write(folder / "report.html", page)


def without_dead_links(page: str) -> str:
    """The page without links to figures that it lacks: claims name them whether a scenario makes them or not."""
    there = set(re.findall(r'id="(figure-[\w-]+)"', page))
    return re.sub(r' <a href="#(figure-[\w-]+)">figure</a>', lambda m: m[0] if m[1] in there else "", page)


def exporter() -> HTMLExporter:
    """nbconvert's HTML exporter with our own small template, pictures embedded, no widgets or scripts."""
    config = Config(
        {
            "HTMLExporter": {
                "template_name": "batchlab",
                "extra_template_basedirs": [str(TEMPLATES)],
                "embed_images": True,
                "exclude_anchor_links": True,
                "skip_svg_encoding": False,
            },
            "NbConvertBase": {
                "display_data_priority": [
                    "text/html",
                    "text/markdown",
                    "image/svg+xml",
                    "image/png",
                    "image/jpeg",
                    "text/plain",
                ]
            },
        }
    )
    return HTMLExporter(config=config)


def about(opened: study.Study, cells: pd.DataFrame) -> dict[str, Any]:
    """What the index says of a report, kept inside it."""
    facts = dict(summary.facts(opened.scenario, cells))
    return {
        "scenario": opened.scenario.name,
        "title": opened.scenario.title,
        "question": opened.scenario.question,
        "machine": facts["Machine"],
        "engines": facts["Engines"],
        "recorded": facts.get("Recorded", ""),
        "cells": asdict(summary.counts(cells)),
        "rendered": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def best_points(opened: study.Study) -> pd.DataFrame:
    """Points of the standard sweeps together; where none is named so, of all sweeps, each averaged by itself.

    (A sweep of its own may have engine options of its own, which a point's coordinates do not show.)
    """
    names = [s.name for s in opened.scenario.sweeps]
    standard = [opened.frame(n) for n in names if n in STANDARD]
    frames = [pd.concat(standard)] if standard else [opened.frame(n) for n in names]
    together = pd.concat([plots.points(frame) for frame in frames], ignore_index=True)
    return together.drop_duplicates([c for c in study.POINT if c in together])


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\u0021--")


def check(page: str, folder: Path) -> None:
    """UsageError for an image without alternative text, and for anything that a browser would fetch."""
    soup = BeautifulSoup(page, "html.parser")
    for image in soup.find_all("img"):
        if not str(image.get("alt") or "").strip():
            raise UsageError(
                f"{folder}: an image in {place(image)} has no alternative text; "
                "show it with plots.save(fig, name, alt, study)"
            )
    for name, attribute in FETCHED.items():
        for tag in soup.find_all(name):
            address = str(tag.get(attribute) or "")
            if address and not address.startswith(("data:", "#")):
                raise UsageError(
                    f"{folder}: {place(tag)} would fetch {address[:80]}; embed it in the notebook"
                )
    for style in soup.find_all("style"):
        if found := re.search(r"@import|url\(\s*['\"]?(?!data:|#)", style.get_text()):
            raise UsageError(f"{folder}: a style in {place(style)} would fetch something (`{found[0]}`)")


def place(tag: Tag) -> str:
    """The cell that an element stands in."""
    cell = tag.find_parent(class_="cell")
    return f"cell {cell.get('id')}" if cell else "the page's frame"


def write(path: Path, page: str) -> Path:
    """Writes the page in one step."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(page, encoding="utf-8")
    os.replace(part, path)
    return path
