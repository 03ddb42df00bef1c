"""What the claims' tests said of a body of evidence, kept from one report to the next (kept.py).

An outcome follows from the body's cells, the test and its arguments, the study, and what is published: all of that is
in the names under which outcomes are kept, so that a changed record is judged anew.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from batchlab import kept, paths
from batchlab.claims.body import Body
from batchlab.claims.data import Check, Source
from batchlab.claims.outcome import Missing, Outcome

KIND = "outcomes"


class Known:
    """A body's outcomes by the digest of test and study; `name` is the body's own digest."""

    __slots__ = ("name", "new", "outcomes")

    def __init__(self, body: Body) -> None:
        self.name, self.new = digest(body), False
        found = kept.find(KIND, self.name)
        self.outcomes: dict[str, Any] = found if isinstance(found, dict) else {}


def of(body: Body) -> Known:
    """What is known of a body; read from the disk once."""
    if body._known is None:
        body._known = Known(body)
    return body._known


def outcome(body: Body, check: Check, source: Source, test: Callable[[], Outcome]) -> Outcome:
    """What `test` says, without running it where it was run on the same before. Missing as it raised it then."""
    known = of(body)
    key = kept.digest(check.model_dump_json(), source.model_dump_json())
    if (found := as_outcome(known.outcomes.get(key))) is None:
        try:
            found = test()
            known.outcomes[key] = asdict(found) | {"holds": bool(found.holds), "factor": float(found.factor)}
        except Missing as missing:
            found = missing
            known.outcomes[key] = {"missing": str(missing), "planned": missing.planned}
        known.new = True
    if isinstance(found, Missing):
        raise found
    return found


def save(body: Body) -> None:
    """Keeps what is new of a body."""
    known = body._known
    if known and known.new:
        kept.keep(KIND, known.name, known.outcomes)
        known.new = False


def as_outcome(found: Any) -> Outcome | Missing | None:
    """What was kept, as it was; None where it is nothing of the kind."""
    try:
        if "missing" in found:
            return Missing(str(found["missing"]), planned=bool(found["planned"]))
        return Outcome(
            bool(found["holds"]), str(found["detail"]), tuple(found["cells"]), float(found["factor"]),
            tuple(found["differs"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError):
        return None


def digest(body: Body) -> str:
    """Of a body's cells and of what is published or given as data beside them."""
    beside = [*paths.PUBLISHED.glob("*"), *paths.MODELS.glob("*/*.json")]
    data = [file for file in beside if file.is_file()]
    split = body.frame.to_dict("split", index=False)
    cells = json.dumps([body.scenario, body.evidence, body.defaults, split], default=str)
    return kept.digest(cells, kept.of_files(data))
