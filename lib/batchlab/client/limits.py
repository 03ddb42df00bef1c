"""Limits of the system that would otherwise cap the client in silence."""

import resource

from batchlab.errors import UsageError

SPARE = 64  # files that are open anyway: pipes, modules, libraries


def check_open_files(connections: int) -> None:
    """UsageError when a process may not open so many connections even with its soft limit raised."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and connections + SPARE > hard:
        raise UsageError(
            f"{connections} connections in one process need more open files than the system allows ({hard}): "
            "raise the hard limit (ulimit -Hn), use more processes or a lower concurrency"
        )


def raise_open_files(connections: int) -> None:
    """Raises the soft limit as far as `connections` need and the hard limit lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + SPARE
    if hard != resource.RLIM_INFINITY:
        need = min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
