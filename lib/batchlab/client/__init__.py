"""The replay client: sends a workload over HTTP and times every token, without distorting what it measures."""

from batchlab.client.replay import ClientCheck, Replay, replay
from batchlab.client.target import Target

__all__ = ["ClientCheck", "Replay", "Target", "replay"]
