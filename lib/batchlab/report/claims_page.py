"""The claims as HTML: counts, a table that can be filtered without a script, and a paragraph on what came of them."""

import html
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchlab.claims import VERDICTS, Verdict, load, surprising
from batchlab.claims.outcome import listed
from batchlab.errors import UsageError
from batchlab.report.readings import Reading, times

Link = Callable[[Verdict], str]  # where a verdict's figure is, "" for nowhere
EVIDENCE = {
    "measured": "measured",
    "simulated": "simulated",
    "published": "arithmetic",
    "none": "none",
}
MOST_CELLS = 8  # ids written out; the rest is counted


def same_page(v: Verdict) -> str:
    """The address of a verdict's figure in the report that it stands in itself."""
    return f"#figure-{v.figure}" if v.figure else ""


def slug(verdict: str) -> str:
    """ "not-reproduced": a verdict as a class and an id."""
    return verdict.replace(" ", "-")


def badge(verdict: str) -> str:
    return f'<span class="verdict {slug(verdict)}">{html.escape(verdict)}</span>'


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """A row a claim; `filters` adds the buttons. `link` gives the address of a verdict's figure."""

    verdicts: tuple[Verdict, ...]
    link: Link = lambda _: ""
    filters: bool = True

    def _repr_html_(self) -> str:
        if not self.verdicts:
            return '<p class="note">No claim is left by these filters.</p>'
        rows = "".join(self._row(v) for v in self.verdicts)
        head = "".join(f'<th scope="col">{h}</th>' for h in ("", "Source", "Claim", "Verdict", "Evidence"))
        body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f'<div class="claims">{self._filters() if self.filters else ""}{body}</div>'

    def __repr__(self) -> str:
        return "\n".join(f"{v.number} {v.source} {v.verdict}: {v.text} {v.detail}" for v in self.verdicts)

    def _filters(self) -> str:
        counts, sources = Counter(v.verdict for v in self.verdicts), Counter(v.source for v in self.verdicts)
        names = {s: load().sources[s].name for s in sources if s in load().sources}
        verdict = [("all", f"<b>{len(self.verdicts)}</b> claims")]
        verdict += [(slug(w), f"<b>{counts[w]}</b> {html.escape(w)}") for w in VERDICTS if counts[w]]
        source = [("all", "all sources")]
        source += [(s, f"{html.escape(s)} · {html.escape(names.get(s, s))} ({n})") for s, n in sources.items()]
        return self._choice("verdict", "tiles", verdict) + self._choice("source", "chips", source)

    @staticmethod
    def _choice(what: str, kind: str, options: Sequence[tuple[str, str]]) -> str:
        inputs = "".join(
            f'<input type="radio" name="claims-{what}" id="{what}-{key}" value="{key}"{" checked" * (key == "all")}>'
            f'<label for="{what}-{key}" class="{key}">{text}</label>'
            for key, text in options
        )
        return f'<fieldset class="{kind}"><legend>Show by {what}</legend>{inputs}</fieldset>'

    def _row(self, v: Verdict) -> str:
        href = self.link(v)
        figure = f' <a href="{html.escape(href, quote=True)}">figure</a>' if href else ""
        name = f' id="claim-{v.number}"' if self.filters else ""
        return (
            f'<tr{name} class="{slug(v.verdict)} {html.escape(v.source)}">'
            f'<td class="number">{v.number}</td><td>{html.escape(v.source)}</td>'
            f'<td class="long"><p>{html.escape(v.text)}</p><details><summary>Why</summary>'
            f"<p>{html.escape(v.detail)}{figure}</p>"
            f'<p class="note">Tested: {html.escape(v.how)}.</p>{cells(v)}</details></td>'
            f"<td>{badge(v.verdict)}</td><td>{EVIDENCE[v.evidence]}</td></tr>"
        )


def cells(v: Verdict) -> str:
    """The ids of the cells behind a verdict, which `batchlab summary` lists too."""
    if not v.cells:
        return ""
    more = f" and {len(v.cells) - MOST_CELLS} more" if len(v.cells) > MOST_CELLS else ""
    told = html.escape(", ".join(v.cells[:MOST_CELLS]) + more)
    return f'<p class="note">{len(v.cells)} cells of {html.escape(str(v.scenario))}: <code>{told}</code></p>'


def chosen(verdicts: Sequence[Verdict], source: str = "", verdict: str = "") -> tuple[Verdict, ...]:
    """The verdicts of a source and of a kind, either left out. UsageError for a name that there is not."""
    sources = list(load().sources)
    for name, given, known in (("source", source, sources), ("verdict", verdict, list(VERDICTS))):
        if given and given not in known:
            raise UsageError(f"{name} {given!r}: there are: {', '.join(known)}")
    return tuple(v for v in verdicts if source in ("", v.source) and verdict in ("", v.verdict))


def learned(verdicts: Sequence[Verdict]) -> Reading:
    """What came of the claims, in counts, and which are the furthest off."""
    counts = Counter(v.verdict for v in verdicts)
    by = Counter((v.verdict, v.evidence) for v in verdicts)
    kept, lost = counts["reproduced"], counts["not reproduced"]
    simulated = by["reproduced", "simulated"]
    how = f", {simulated} of them by simulation only," if simulated else ""
    told = [
        f"Of {len(verdicts)} claims {kept} {are(kept)} reproduced{how} and {lost} {are(lost)} not; "
        f"{counts['differs by setup']} differ with another card, release or setting, "
        f"{counts['inconsistent as printed']} cannot be as they are printed, and {counts['untestable here']} cannot be "
        "tested with what is recorded."
    ]
    for source in dict.fromkeys(v.source for v in verdicts):
        mine = Counter(v.verdict for v in verdicts if v.source == source)
        parts = [f"{mine[w]} {w.replace('differs', 'differing')}" for w in VERDICTS if mine[w]]
        told.append(f"{source}, {load().sources[source].name}: {listed(parts)}.")
    for v in surprising(list(verdicts)):
        told.append(f"Furthest off in {v.source}, {times(v.factor)}: claim {v.number}, {v.verdict}. {v.text}")
    return Reading(tuple(told))


def are(count: int) -> str:
    return "is" if count == 1 else "are"
