"""The schedulers that can be simulated, by the engine's name."""

from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.policies.sglang import SgLang
from batchlab.sim.policies.static import StaticBatching
from batchlab.sim.policies.tensorrt_llm import TensorRtLlm
from batchlab.sim.policies.tgi import Tgi
from batchlab.sim.policies.vllm_v0 import VllmV0
from batchlab.sim.policies.vllm_v1 import VllmV1

POLICIES: dict[str, type[Policy]] = {
    "vllm-v1": VllmV1,
    "vllm-v0": VllmV0,
    "tensorrt-llm": TensorRtLlm,
    "tgi": Tgi,
    "sglang": SgLang,
    "static": StaticBatching,
}

__all__ = ["POLICIES", "Limits", "Policy", "Step"]
