"""A vLLM scheduler that writes down what it does and takes its limits from a file.

This module runs inside vLLM's engine process, so it imports the standard library and vLLM, nothing else. It is named on
vLLM's command line (`--scheduler-cls batchlab.engines.vllm_trace.TracingScheduler`) and finds its files by environment:

BATCHLAB_TRACE    file that gets a line an event (see below), appended by one `write` each
BATCHLAB_CONTROL  JSON file {"max_batch_size": B, "max_num_tokens": T}, read whenever it changes
BATCHLAB_CORES    optional: the cores, comma separated, that this process's scheduling loop is bound to

Lines, comma separated; times are time.monotonic_ns():
A,kernels                                            the first line: FlashAttention and its version, or nothing
L,time,max_batch_size,max_num_tokens                     new limits are in force
I,scheduled,output,running,admitted,waiting,prefill_tokens,decode_tokens,kv_use,preemptions,max_batch_size,\
  max_num_tokens,launched                            launched: nothing where another process launches kernels
R,request_id,queued,first_output,last_output,tokens,cached_tokens,preemptions   a request left the engine

It subclasses AsyncScheduler: with a subclass of Scheduler, vLLM switches asynchronous scheduling off.
"""

import json
import os
import time
from collections import deque

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

_now = time.monotonic_ns


def _attention():
    """FlashAttention's version as vLLM chooses it for this card; nothing where it uses another kernel."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        version = get_flash_attn_version()
    except Exception:  # moved in another release, or refused on this card: the trace goes on without
        version = None
    return f"FlashAttention {version}" if version else ""


class TracingScheduler(AsyncScheduler):
    """AsyncScheduler of vLLM V1 (0.26 to 0.33) with a trace and limits that can change while it is warm."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._trace_fd = os.open(os.environ["BATCHLAB_TRACE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._control_path = os.environ["BATCHLAB_CONTROL"]
        self._control_seen = None
        self._wanted_batch_size = None
        # 0.32 admits by max_num_active_reqs and keeps max_num_running_reqs as the model runner's slots;
        # 0.26 has only the latter, and asserts len(running) <= it in every step.
        self._batch_limit = "max_num_active_reqs" if hasattr(self, "max_num_active_reqs") else "max_num_running_reqs"
        self._largest = (self.max_num_running_reqs, self.max_num_scheduled_tokens)
        self._write(f"A,{_attention()}\n")
        self._in_flight = deque()  # schedule()'s outputs whose results have not come back
        self._launches_here = self.parallel_config.distributed_executor_backend == "uni"
        self._launched_ns = {}  # by id of schedule()'s output
        self._preempted = 0
        self._queued_ns = {}
        self._first_ns = {}
        self._cached = {}
        self._read_control()
        cores = os.environ.get("BATCHLAB_CORES")
        if cores:
            # The loop waits for the CPU worker by spinning on sched_yield(). On a core shared with the server and the
            # client that starves both for seconds (seen on Linux 6.18); beside the worker, for which it waits, it
            # starves nobody.
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})

    # limits ------------------------------------------------------------------------------------------------------
    def _read_control(self):
        try:
            changed = os.stat(self._control_path).st_mtime_ns
            if changed == self._control_seen:
                return
            with open(self._control_path) as file:
                limits = json.load(file)
            batch_size, num_tokens = int(limits["max_batch_size"]), int(limits["max_num_tokens"])
        except (OSError, ValueError, KeyError):
            return  # absent or half written: the limits in force stay
        self._control_seen = changed
        # never above what the engine was started with: its buffers have that size
        self._wanted_batch_size = min(batch_size, self._largest[0])
        self.max_num_scheduled_tokens = min(num_tokens, self._largest[1])
        self._apply_batch_size()

    def _apply_batch_size(self):
        # Below the number that runs now, 0.26 would fail its assertion: wait until enough have left.
        if self._wanted_batch_size is None or len(self.running) > self._wanted_batch_size:
            return
        setattr(self, self._batch_limit, self._wanted_batch_size)
        self._wanted_batch_size = None
        self._write(f"L,{_now()},{getattr(self, self._batch_limit)},{self.max_num_scheduled_tokens}\n")

    # trace -------------------------------------------------------------------------------------------------------
    def _write(self, line):
        os.write(self._trace_fd, line.encode())

    def add_request(self, request):
        self._queued_ns.setdefault(request.request_id, _now())
        super().add_request(request)

    def schedule(self, *args, **kwargs):
        self._read_control()
        if self._wanted_batch_size is not None:
            self._apply_batch_size()
        started = _now()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens == 0:
            return output
        prefill = 0
        prefilling = []
        for new in output.scheduled_new_reqs:
            self._cached.setdefault(new.req_id, new.num_computed_tokens)
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            # after a preemption the outputs so far are computed again, which is prefill work too
            if tokens > 1 or request.num_computed_tokens - tokens < request.num_prompt_tokens:
                prefill += tokens
                prefilling.append(request_id)
        running, waiting = self.get_request_counts()
        self._in_flight.append(
            (
                output,
                started,
                len(output.num_scheduled_tokens),
                running,
                waiting,
                prefill,
                output.total_num_scheduled_tokens - prefill,
                self.kv_cache_manager.usage,
                self._preempted,
                getattr(self, self._batch_limit),
                self.max_num_scheduled_tokens,
                prefilling,
            )
        )
        self._preempted = 0
        return output

    def get_grammar_bitmask(self, scheduler_output):
        # what the engine's loop asks next, when the model runner has launched an iteration's kernels and returned
        if self._launches_here:
            self._launched_ns[id(scheduler_output)] = _now()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output, model_runner_output):
        result = super().update_from_output(scheduler_output, model_runner_output)
        launched = self._launched_ns.pop(id(scheduler_output), "")
        if not self._in_flight or self._in_flight[0][0] is not scheduler_output:
            return result  # an empty step
        _, started, *numbers, prefilling = self._in_flight.popleft()
        ended = _now()
        for request_id in prefilling:
            request = self.requests.get(request_id)
            if request is not None and request.num_output_tokens and request_id not in self._first_ns:
                self._first_ns[request_id] = ended
        self._write(f"I,{started},{ended},{','.join(map(str, numbers))},{launched}\n")
        return result

    def _preempt_request(self, *args, **kwargs):
        self._preempted += 1
        return super()._preempt_request(*args, **kwargs)

    def _free_request(self, request, *args, **kwargs):
        request_id, ended = request.request_id, _now()
        queued = self._queued_ns.pop(request_id, None)
        if queued is not None:
            first = self._first_ns.pop(request_id, ended)
            self._write(
                f"R,{request_id},{queued},{first},{ended},{request.num_output_tokens},"
                f"{self._cached.pop(request_id, 0)},{request.num_preemptions}\n"
            )
        return super()._free_request(request, *args, **kwargs)
