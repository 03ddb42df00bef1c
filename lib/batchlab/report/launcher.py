"""Starts a notebook's kernel: a fork of the server of this `make report` (warm.py), else ipykernel's own launcher."""

import runpy
import sys

from batchlab.report import warm

if __name__ == "__main__":
    status = warm.ask("kernel", sys.argv[1:])
    if status is not None:
        sys.exit(status)
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
