"""The published claims, each with a verdict that is computed from cells or from arithmetic over what is printed."""

from batchlab.claims.body import Body, bodies
from batchlab.claims.judging import VERDICTS, Verdict, all_verdicts, load, surprising, verdicts

__all__ = ["VERDICTS", "Body", "Verdict", "all_verdicts", "bodies", "load", "surprising", "verdicts"]
