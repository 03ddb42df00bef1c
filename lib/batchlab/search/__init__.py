"""The highest request rate, and the best limits, that keep what a service promises: bisection, at a stated confidence.

from batchlab import search
search.highest_rate(study, {"ttft_p90_ms": 1000, "tpot_mean_ms": 20}, dataset="prefill-heavy")
search.best_batch_size(study, {"tpot_mean_ms": 20}, dataset="prefill-heavy")
search.best_settings(study, search.Goodput(0.95, ttft_ms=1000, tpot_ms=20), dataset="prefill-heavy")
"""

from batchlab.search.answer import Answer
from batchlab.search.api import best_batch_size, best_settings, highest_rate
from batchlab.search.requirements import Goodput, Requirement, requirements

__all__ = ["Answer", "Goodput", "Requirement", "best_batch_size", "best_settings", "highest_rate", "requirements"]
