"""Simulated engines: an engine's real scheduling policy, iteration by iteration, over measured operator times."""

from batchlab.sim.api import simulate
from batchlab.sim.host import HostOverheads
from batchlab.sim.policies import POLICIES
from batchlab.sim.power import PowerLimit
from batchlab.sim.result import SimResult

__all__ = ["POLICIES", "HostOverheads", "PowerLimit", "SimResult", "simulate"]
