"""`python -m batchlab replay`: the client against an engine that already runs."""

import argparse
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchlab import metrics, models, records, scrape, validity
from batchlab.cell import Cell
from batchlab.client import Target, replay
from batchlab.client.negotiate import accepted
from batchlab.errors import UsageError
from batchlab.flags import count, print_summary, rate, seconds
from batchlab.workload import Workload, build

SAFE_VOCABULARY = 4096  # token ids that every model of the field has


def add_parser(commands: Any) -> None:
    p = commands.add_parser("replay", help="against an engine that already runs")
    p.add_argument("--base-url", required=True, help="http(s)://host[:port][/path], with or without a last /v1")
    p.add_argument("--api", required=True, choices=("openai-completions", "openai-chat", "tgi"))
    p.add_argument("--model", required=True, help="the name that the engine serves it by")
    p.add_argument("--input-len", required=True, type=count, help="prompt tokens")
    p.add_argument("--output-len", required=True, type=count, help="output tokens")
    p.add_argument("--num-requests", required=True, type=count)
    p.add_argument("--request-rate", required=True, type=rate, help="requests a second, or inf: all at once")
    p.add_argument("--max-concurrency", type=count, help="most requests in flight; with rate inf a closed loop")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--prompt-format", choices=("ids", "text"), help="default: ids for openai-completions, else text")
    p.add_argument(
        "--tokenizer",
        help="for text prompts: a folder, a Hugging Face id or a name in data/models/; default: that of --model",
    )
    p.add_argument("--api-key-env", metavar="VAR", help="environment variable that holds the API key")
    p.add_argument("--timeout", type=seconds, default=3600.0, metavar="SECONDS", help="for the whole run")
    p.add_argument("--processes", type=count, help="client processes; default: by load and cores")
    p.add_argument("--no-warm-up", action="store_true", help="send no request of the same shape beforehand")
    p.add_argument(
        "--metrics-url",
        metavar="URL",
        help="the engine's Prometheus page: its running batch is polled beside the replay",
    )
    p.add_argument("--records", metavar="FILE", help="write a row a request, as Parquet")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    p.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Replay, print the summary; 0, or 1 when no request was completed."""
    _check_output(args.records)
    target = _target(args)
    workload = _workload(args, target, args.num_requests, "measured")
    if not args.no_warm_up:
        target = _warm_up(args, target)
    with scrape.scraping(args.metrics_url) if args.metrics_url else nullcontext() as samples:
        replayed = replay(
            target,
            workload,
            processes=args.processes,
            max_concurrency=args.max_concurrency,
            timeout_s=args.timeout,
            progress=_progress if sys.stderr.isatty() else None,
        )
    table = records.table(replayed.rows, records.REQUESTS)
    if args.records:
        pq.write_table(table, args.records, compression="zstd")
    requests = table.to_pandas()
    polled = records.table(samples.rows(replayed.t0_ns) if samples else [], records.ITERATIONS).to_pandas()
    reasons = validity.reasons(
        _cell(args), requests, polled, replayed.check, traced=False, chat=args.api == "openai-chat"
    )
    summary = metrics.summary(requests, polled, max_batch_size=None, invalid_reasons=reasons)
    print_summary(summary, as_json=args.json)
    check = replayed.check
    print(
        f"client: {check['processes']} processes, busiest {100 * check['cpu_share_max']:.0f}% of a core, sends late by "
        f"{check['send_lag_p99_ms'] or 0:.1f} ms (p99), loop lag {check['loop_lag_p99_ms']:.1f} ms (p99)",
        file=sys.stderr,
    )
    if samples:
        told = samples.told()
        print(
            f"engine: its running batch is from {told['samples']} polls of {told['polled']}, one every "
            f"{told['period_s']:g} s, not from its iterations ({told['failed']} polls failed)",
            file=sys.stderr,
        )
    return 0 if summary["completed"] else 1


def _check_output(path: str | None) -> None:
    if path and not os.access(Path(path).resolve().parent, os.W_OK):
        raise UsageError(f"--records {path}: its folder does not exist or cannot be written; give another file")


def _target(args: argparse.Namespace) -> Target:
    key = None
    if args.api_key_env and not (key := os.environ.get(args.api_key_env)):
        raise UsageError(f"--api-key-env {args.api_key_env}: that variable is not set")
    text_only = args.api != "openai-completions"
    return Target(
        base_url=args.base_url,
        api=args.api,
        model=args.model,
        api_key=key,
        ignore_eos=True,
        continuous_usage=args.api != "tgi",
        prompt_format=args.prompt_format or ("text" if text_only else "ids"),
    )


def _workload(args: argparse.Namespace, target: Target, count: int, nonce: str) -> Workload:
    dataset = {"kind": "fixed", "input_len": args.input_len, "output_len": args.output_len}
    vocabulary, tokenizer = SAFE_VOCABULARY, None
    source = args.tokenizer or (args.model if args.model in models.names() else None)
    if source:
        files = models.materialize(source)
        vocabulary, tokenizer = files.vocab_size, files.tokenizer if target.prompt_format == "text" else None
    elif target.prompt_format == "text":
        # words that any tokenizer can read; the engine's own count of them is checked afterwards
        tokenizer = models.materialize("tiny-llama").tokenizer
        print(
            "batchlab: no --tokenizer given: prompts are made of plain words, and their length in the model's "
            "tokens is the engine's to say",
            file=sys.stderr,
        )
    offered = None if math.isinf(args.request_rate) or nonce != "measured" else args.request_rate
    return build(
        dataset,
        num_requests=count,
        request_rate=offered,
        seed=args.seed,
        nonce=f"{nonce}/{os.getpid()}",
        vocab_size=vocabulary,
        tokenizer=tokenizer,
    )


def _warm_up(args: argparse.Namespace, target: Target) -> Target:
    """A request of the same shape, which also finds out which optional keys this server takes."""
    taken = accepted(target, lambda form: _workload(args, form, 1, "warm-up"), timeout_s=args.timeout)
    if taken != target:
        print(
            "batchlab: this server refuses some optional keys; sent without "
            + ("continuous usage" if taken.ignore_eos else "ignore_eos and min_tokens: it may stop early"),
            file=sys.stderr,
        )
    return taken


def _progress(done: int, total: int) -> None:
    sys.stderr.write(f"\r\x1b[K{done}/{total} requests" + ("\n" if done == total else ""))
    sys.stderr.flush()


def _cell(args: argparse.Namespace) -> Cell:
    """The coordinates that the checks need; what is not known of a stranger's engine stays out of them."""
    offered = None if math.isinf(args.request_rate) else args.request_rate
    arrival = {"kind": "closed", "concurrency": args.max_concurrency} if args.max_concurrency else None
    return Cell(
        "attach",
        "unknown",
        args.model,
        "unknown",
        "http",
        sys.maxsize,
        sys.maxsize,
        {"kind": "fixed", "input_len": args.input_len, "output_len": args.output_len},
        args.num_requests,
        offered,
        arrival,
        {},
        args.seed,
    )
