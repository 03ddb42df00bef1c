"""What is sent and when: prompts, lengths and arrival times, the same for the same seed."""

from batchlab.workload.build import Load, Request, Workload, build, draw_load

__all__ = ["Load", "Request", "Workload", "build", "draw_load"]
