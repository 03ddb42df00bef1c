"""batchlab: rerun the studies of batching in LLM serving, cell by cell.

This file imports nothing on purpose: vLLM's engine process imports one module of this package, and it must not pull in
the lab's own dependencies.
"""

__version__ = "0.1.0"
