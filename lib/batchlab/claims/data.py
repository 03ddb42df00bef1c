"""The published claims as data: data/published/claims.yml, and the printed tables beside it."""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from batchlab import audit, paths
from batchlab.errors import UsageError

Kind = Literal["value", "ordering", "trend", "saturation point", "ratio", "mechanism"]
OF_ITS_SETUP = ("value", "ratio", "saturation point")  # kinds whose numbers belong to a machine and a release
Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Strict):
    """A study: its card, its model, and its engines' releases by name."""

    title: Text
    name: Text
    hardware: Text
    model: Text
    engines: dict[str, str]


class Check(BaseModel):
    """A test by its function's name; every other key is an argument of that function."""

    model_config = ConfigDict(extra="allow", frozen=True)
    test: Text

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Claim(_Strict):
    """One claim. `printed` tests it by arithmetic, `cells` over recorded cells; a claim without both is untestable.

    `needs` says what a test would take that cannot be made here; `says` is what the claim asserts, for tests of claims
    against one another; `figure` is the report's figure that shows its cells. `blind`: what the claim may rest on and a
    simulation leaves out, so that a simulation in which it does not hold decides nothing.
    """

    number: Annotated[int, Field(ge=1)]
    source: Text
    theme: Text
    kind: Kind
    text: Text
    how: Text
    needs: Text
    tolerance: Annotated[float, Field(ge=0)] | None = None
    says: dict[str, str] = {}
    printed: Check | None = None
    cells: Check | None = None
    figure: str | None = None
    setup_bound: bool | None = None
    blind: str | None = None

    @property
    def belongs_to_setup(self) -> bool:
        """Whether another machine or release may well give another answer without the claim being wrong."""
        return self.kind in OF_ITS_SETUP if self.setup_bound is None else self.setup_bound


class Claims(_Strict):
    """The whole file."""

    sources: dict[str, Source]
    claims: Annotated[list[Claim], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> "Claims":
        numbers = [c.number for c in self.claims]
        if twice := {n for n in numbers if numbers.count(n) > 1}:
            raise ValueError(f"claims: number {min(twice)} is there twice; renumber one")
        for claim in self.claims:
            if claim.source not in self.sources:
                raise ValueError(
                    f"claim {claim.number}: no source `{claim.source}`; there are: {', '.join(self.sources)}"
                )
        return self

    def claim(self, number: int) -> Claim:
        """UsageError for a number that no claim has."""
        for claim in self.claims:
            if claim.number == number:
                return claim
        raise UsageError(f"no claim {number}; they are numbered {self.claims[0].number} to {self.claims[-1].number}")


def load(path: Path | None = None) -> Claims:
    """Read and check the claims. UsageError, one line that names the file, the claim and the key."""
    path = path or paths.PUBLISHED / "claims.yml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(raw, dict):
        raw = {
            key: value for key, value in raw.items() if not str(key).startswith("x-")
        }  # anchors, as in compose files
    try:
        return Claims.model_validate(raw)
    except ValidationError as error:
        finding = error.errors()[0]
        raise UsageError(
            f"{path}: {_where(raw, finding['loc'])}{finding['msg'].removeprefix('Value error, ')}"
        ) from None


def _where(raw: Any, location: tuple[int | str, ...]) -> str:
    """ "claim 13, kind: " for a place inside a claim, else its keys."""
    rest = list(location)
    if len(rest) >= 2 and rest[0] == "claims" and isinstance(rest[1], int):
        entry = raw["claims"][rest[1]]
        number = entry.get("number") if isinstance(entry, dict) else None
        rest = [f"claim {number or f'in place {rest[1] + 1}'}", ".".join(map(str, rest[2:]))]
    told = ", ".join(str(part) for part in rest if part)
    return f"{told}: " if told else ""


@cache
def table(name: str) -> pd.DataFrame:
    """A printed table: data/published/NAME.csv, as `audit.load` gives it."""
    return audit.load(paths.PUBLISHED / f"{name}.csv")
