"""build/index.html: the list of the reports that are built."""

import json
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from jinja2 import Environment, FileSystemLoader, select_autoescape

from batchlab import paths
from batchlab.report.render import META_ID, TEMPLATES, write


def entry(report: Path) -> dict[str, Any] | None:
    """What a report says of itself; None for a page that is no report of ours."""
    soup = BeautifulSoup(report.read_text(encoding="utf-8"), "html.parser")
    script = soup.find("script", id=META_ID)
    try:
        found = json.loads(script.get_text()) if script else None
    except ValueError:
        return None
    return found and found | {"href": f"{report.parent.name}/{report.name}"}


def index() -> Path:
    """Writes build/index.html from the reports found there, in the order of their names."""
    reports = [e for e in (entry(p) for p in sorted(paths.BUILD.glob("*/report.html"))) if e]
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=select_autoescape(default=True))
    page = environment.get_template("index.html.j2").render(
        reports=reports, css=(TEMPLATES / "report.css").read_text()
    )
    paths.BUILD.mkdir(parents=True, exist_ok=True)
    return write(paths.BUILD / "index.html", page)
