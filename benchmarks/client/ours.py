"""One burst with batchlab's client: python ours.py URL STREAMS OUTPUT_LEN FOLDER, which gets result.json."""

import json
import sys
from pathlib import Path

from batchlab.client import Target, replay
from batchlab.workload import build


def main(url: str, streams: int, output_len: int, folder: Path) -> None:
    workload = build(
        {"kind": "fixed", "input_len": 16, "output_len": output_len},
        num_requests=streams,
        request_rate=None,
        seed=0,
        nonce="benchmark",
        vocab_size=4096,
    )
    target = Target(url, "openai-completions", "m", prompt_format="ids", continuous_usage=True)
    replayed = replay(target, workload)
    good = [row for row in replayed.rows if row["error"] is None]
    told = {
        "ttft_ms": [(row["first_s"] - row["scheduled_s"]) * 1e3 for row in good],
        "tpot_ms": [
            (row["last_s"] - row["first_s"]) / (row["tokens"] - row["first_tokens"]) * 1e3
            for row in good
            if row["tokens"] > row["first_tokens"]
        ],
        "check": replayed.check | {"failed": len(replayed.rows) - len(good)},
    }
    (folder / "result.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
