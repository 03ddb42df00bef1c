"""What is sent and when: prompts, lengths and arrival times, the same for the same seed."""

from batchlab.workload.build import Request, Workload, build

__all__ = ["Request", "Workload", "build"]
