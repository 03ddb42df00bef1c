"""Does a table of serving numbers agree with arithmetic, with physics and with itself?

A row is one run; its columns carry their units in their names (see `table.COLUMNS`). Nothing here knows an engine: the
bounds hold for any.
"""

from batchlab.audit.checks import CHECKS, Finding, Setting, check
from batchlab.audit.table import COLUMNS, load, of_points

__all__ = ["CHECKS", "COLUMNS", "Finding", "Setting", "check", "load", "of_points"]
