"""build/index.html: what came of the published claims, and the list of the reports that are built."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from jinja2 import Environment, FileSystemLoader, select_autoescape

from batchlab import paths
from batchlab.claims import VERDICTS, Verdict, all_verdicts, surprising
from batchlab.errors import UsageError
from batchlab.report.claims_page import EVIDENCE, ClaimsTable, Link, badge, learned, slug
from batchlab.report.readings import times
from batchlab.report.render import META_ID, TEMPLATES, write

FIGURE = re.compile(r'id="(figure-[\w-]+)"')
MOST = 440  # characters of a surprise's reasons; the table below holds all of them


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
    """Writes build/index.html from the reports found there, in the order of their names, and from what is recorded.

    Nothing is measured or simulated for it.
    """
    pages = {p.parent.name: p for p in sorted(paths.BUILD.glob("*/report.html"))}
    reports = [e for e in (entry(p) for p in pages.values()) if e]
    verdicts = judged()
    told = [v.verdict for v in verdicts]
    link = figures(pages)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=select_autoescape(default=True))
    page = environment.get_template("index.html.j2").render(
        reports=reports,
        css=(TEMPLATES / "report.css").read_text(),
        claims=ClaimsTable(tuple(verdicts), link)._repr_html_() if verdicts else "",
        learned=learned(verdicts).sentences[0] if verdicts else "",
        counts=[{"verdict": w, "slug": slug(w), "count": n} for w in VERDICTS if (n := told.count(w))],
        surprises=[surprise(v, link) for v in surprising(verdicts)],
    )
    paths.BUILD.mkdir(parents=True, exist_ok=True)
    return write(paths.BUILD / "index.html", page)


def judged() -> Sequence[Verdict]:
    """The claims' verdicts; none, and a line that says why, where claims or scenarios cannot be read."""
    try:
        return all_verdicts(simulate=False)
    except UsageError as error:
        print(f"index: no verdicts on the claims: {error}", file=sys.stderr)
        return []


def figures(pages: dict[str, Path]) -> Link:
    """The address of a verdict's figure in the report that holds it, or of the claim there; "" without a report."""
    there = {name: set(FIGURE.findall(page.read_text(encoding="utf-8"))) for name, page in pages.items()}

    def link(v: Verdict) -> str:
        if v.scenario not in there:
            return ""
        name = f"figure-{v.figure}"
        return f"{v.scenario}/report.html#{name}" if v.figure and name in there[v.scenario] else ""

    return link


def surprise(v: Verdict, link: Link) -> dict[str, Any]:
    """A card of the front page: how far off, which claim, why, and where to look."""
    first, *rest = re.split(r"(?<=\.) (?=[A-Z])", v.detail)
    for sentence in rest:
        if len(first) + len(sentence) > MOST:
            break
        first += f" {sentence}"
    return {
        "number": v.number,
        "source": v.source,
        "text": v.text,
        "slug": slug(v.verdict),
        "badge": badge(v.verdict),
        "evidence": EVIDENCE[v.evidence],
        "factor": times(v.factor),
        "why": first,
        "href": link(v),
    }
