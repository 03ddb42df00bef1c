"""A Jupyter kernel that is this same Python, whatever kernels the machine has installed."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchlab import paths
from batchlab.report import warm

NAME = "python3"
QUIET = ("--log-level=CRITICAL",)  # a kernel warns of its transport and of every interrupt


@contextmanager
def own_kernel() -> Iterator[str]:
    """The name of a kernel that runs `sys.executable` with this repository's library, inside the context.

    Notebooks say `python3`; a kernel of that name in a person's own folder may be another Python without
    batchlab. JUPYTER_PATH comes first in Jupyter's search, so a kernelspec there wins.
    """
    with tempfile.TemporaryDirectory(prefix="batchlab-kernel-") as folder:
        spec = Path(folder) / "kernels" / NAME
        spec.mkdir(parents=True)
        launcher = "batchlab.report.launcher" if warm.ADDRESS in os.environ else "ipykernel_launcher"
        library = os.pathsep.join(filter(None, [str(paths.ROOT / "lib"), os.environ.get("PYTHONPATH")]))
        (spec / "kernel.json").write_text(
            json.dumps(
                {
                    "argv": [sys.executable, "-m", launcher, *QUIET, "-f", "{connection_file}"],
                    "display_name": "Python 3 (batchlab)",
                    "language": "python",
                    "env": {"PYTHONPATH": library},
                }
            )
        )
        before = os.environ.get("JUPYTER_PATH")
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [folder, before]))
        try:
            yield NAME
        finally:
            if before is None:
                del os.environ["JUPYTER_PATH"]
            else:
                os.environ["JUPYTER_PATH"] = before
