"""TGI's router: what it answers on each route, and how it refuses."""

import os
import time
from typing import Any

from standins import common, faults, tgi_args
from standins.engine import Engine, Iteration, Speed
from standins.http import Handler, Request
from standins.stream import Answer

FAILED = "Request failed during generation: Server error: CUDA out of memory"
BAD_JSON = "Failed to deserialize the JSON body into the target type"


class Router:
    """sizes: max_input_tokens, max_total_tokens, max_batch_prefill_tokens; kv_tokens: what warm-up found."""

    def __init__(
        self, options: tgi_args.Options, version: str, fault: faults.Faults, sizes: tuple[int, int, int], kv_tokens: int
    ) -> None:
        self.options, self.version, self.fault = options, version, fault
        self.most_input, self.total, self.prefill = sizes
        self.kv_tokens = kv_tokens
        self.chunking = version[0] >= "3" and os.environ.get("PREFILL_CHUNKING", "1") not in ("0", "false")
        caching = os.environ.get("PREFIX_CACHING", "1" if version[0] >= "3" else "0")
        self.cache = common.PrefixCache(16, caching not in ("0", "false"))
        # with chunked prefill the batch limit does not hold back those who join a running batch
        batch = options.max_batch_size if options.max_batch_size and not self.chunking else 1 << 20
        self.engine = Engine(
            "tgi",
            max_batch_size=batch,
            max_num_tokens=self.prefill if not self.chunking else max(self.prefill, self.most_input),
            kv_tokens=kv_tokens,
            block_size=1,
            options={
                "waiting_served_ratio": options.waiting_served_ratio,
                "max_waiting_tokens": options.max_waiting_tokens,
            },
            speed=Speed(step_ms=4.0),
            tell=self.iterated,
        )
        self.in_flight = 0
        self.last: Iteration | None = None
        self.forwards = {"prefill": (0, 0.0), "decode": (0, 0.0)}
        self.counts = dict.fromkeys(("tgi_request_count", "tgi_request_success"), 0)

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("GET", "/health"): self.health,
            ("GET", "/info"): self.info,
            ("GET", "/metrics"): self.metrics,
            ("POST", "/generate_stream"): self.generate_stream,
            ("POST", "/generate"): self.generate,
            ("POST", "/v1/completions"): self.completions,
        }

    def iterated(self, it: Iteration) -> None:
        self.last = it
        kind = "prefill" if it.context else "decode"
        count, total = self.forwards[kind]
        self.forwards[kind] = (count + 1, total + it.ended - it.started)

    # requests ----------------------------------------------------------------------------------------------------
    def _checked(self, prompt: Any, new_tokens: int | None, strikes: bool) -> tuple[int, int] | tuple[str, str, int]:
        """Prompt and new tokens; or message, error_type and status."""
        if self.in_flight >= self.options.max_concurrent_requests or (strikes and "overload" in self.fault):
            return "Model is overloaded", "overloaded", 429
        if not isinstance(prompt, str):
            return "Input validation error: inputs must be a string", "validation", 422
        length = common.count(prompt)
        if length == 0:
            return "Input validation error: `inputs` cannot be empty", "validation", 422
        if length > self.most_input:
            message = f"`inputs` must have less than {self.most_input} tokens. Given: {length}"
            return f"Input validation error: {message}", "validation", 422
        wanted = new_tokens if new_tokens is not None else 100
        if wanted < 1:
            return "Input validation error: `max_new_tokens` must be strictly positive", "validation", 422
        if length + wanted > self.total:
            message = (f"`inputs` tokens + `max_new_tokens` must be <= {self.total}. Given: {length} `inputs` tokens "
                       f"and {wanted} `max_new_tokens`")  # fmt: skip
            return f"Input validation error: {message}", "validation", 422
        return length, wanted

    def _lengths(self, wanted: int, strikes: bool) -> tuple[int, str, faults.Faults]:
        fault = self.fault if strikes else faults.NONE
        wanted = min(wanted, int(fault.number("clamp") or wanted))
        stop = fault.number("stop-early")
        return int(stop or wanted), "eos_token" if stop else "length", fault

    def _submit(self, request: Request, prompt: str, length: int, answer: Answer) -> str | None:
        self.cache.hit(prompt)
        self.in_flight += 1
        self.counts["tgi_request_count"] += 1

        def token(left: int) -> None:
            if left <= 0:
                self.in_flight -= 1
                self.counts["tgi_request_success"] += 1
            answer.token(left)

        refusal = self.engine.submit(length, answer.output, token)
        self.in_flight -= refusal is not None
        return refusal

    async def generate_stream(self, request: Request) -> None:
        """Always 200: what is wrong comes as an event."""
        strikes = self.fault.strikes()
        parsed = self._parsed(request)
        if parsed is None:
            return
        prompt, parameters = parsed
        checked = self._checked(prompt, parameters.get("max_new_tokens"), strikes)
        if len(checked) == 3:
            self._error_event(request, *checked[:2])
            return
        length, wanted = checked
        output, reason, fault = self._lengths(wanted, strikes)

        def chunk(many: int, done: int, reason: str | None) -> dict[str, Any]:
            details = {"finish_reason": reason, "generated_tokens": done, "seed": None, "input_length": length}
            return {
                "index": done,
                "token": {"id": 264, "text": " a", "logprob": -0.5, "special": False},
                "generated_text": " a" * done if reason else None,
                "details": details if reason and parameters.get("details") else None,
            }

        error = {"error": FAILED, "error_type": "generation"}
        prefix = b"data:" if self.version[0] < "3" else b"data: "
        answer = Answer(request, output, reason, fault, chunk=chunk, error=error, prefix=prefix)
        if refusal := self._submit(request, prompt, length, answer):
            self._error_event(request, f"Input validation error: {refusal}", "validation")

    def _parsed(self, request: Request) -> tuple[Any, dict] | None:
        try:
            body = request.json()
            prompt, parameters = body["inputs"], body.get("parameters") or {}
        except (ValueError, KeyError, TypeError) as error:
            request.reply(422, f"{BAD_JSON}: {error}")
            return None
        refused = self.fault.text("refuse-field")
        if refused in parameters:  # serde ignores what it does not know, but of what it knows the type must be right
            request.reply(422, f"{BAD_JSON}: parameters.{refused}: invalid type")
            return None
        return prompt, parameters

    def _error_event(self, request: Request, message: str, kind: str) -> None:
        request.begin()
        request.event({"error": message, "error_type": kind})
        request.end()

    async def generate(self, request: Request) -> None:
        """The whole answer at once."""
        strikes = self.fault.strikes()
        parsed = self._parsed(request)
        if parsed is None:
            return
        prompt, parameters = parsed
        checked = self._checked(prompt, parameters.get("max_new_tokens"), strikes)
        if len(checked) == 3:
            request.reply(checked[2], {"error": checked[0], "error_type": checked[1]})
            return
        length, wanted = checked
        output, reason, _ = self._lengths(wanted, strikes)
        began = time.monotonic()

        def token(left: int) -> None:
            if left:
                return
            spent = str(round(1e3 * (time.monotonic() - began)))
            details = {"finish_reason": reason, "generated_tokens": output, "seed": None, "prefill": [], "tokens": []}
            headers = {"x-prompt-tokens": str(length), "x-generated-tokens": str(output), "x-total-time": spent}
            request.reply(200, {"generated_text": " a" * output, "details": details}, headers)

        if refusal := self.engine.submit(length, output, token):
            request.reply(422, {"error": f"Input validation error: {refusal}", "error_type": "validation"})

    async def completions(self, request: Request) -> None:
        """The OpenAI route; errors in the stream have a shape of their own."""
        strikes = self.fault.strikes()
        body = request.json()
        checked = self._checked(body.get("prompt"), body.get("max_tokens"), strikes)
        if len(checked) == 3:
            request.begin()
            request.event({"error": {"message": checked[0], "http_status_code": checked[2]}})
            request.end()
            return
        length, wanted = checked
        output, reason, fault = self._lengths(wanted, strikes)

        def chunk(many: int, done: int, reason: str | None) -> dict[str, Any]:
            usage = {"prompt_tokens": length, "completion_tokens": done, "total_tokens": length + done}
            return {
                "object": "text_completion",
                "id": "",
                "created": int(time.time()),
                "choices": [{"index": 0, "text": " a", "logprobs": None, "finish_reason": reason or ""}],
                "model": body.get("model", ""),
                "system_fingerprint": f"{self.version}-native",
            } | ({"usage": usage} if reason else {})

        error = {"error": {"message": FAILED, "http_status_code": 424}}
        answer = Answer(request, output, reason, fault, chunk=chunk, tail=lambda done: ["[DONE]"], error=error)
        self._submit(request, body["prompt"], length, answer)

    # what it says of itself --------------------------------------------------------------------------------------
    async def health(self, request: Request) -> None:
        request.reply(200)

    async def info(self, request: Request) -> None:
        o = self.options
        value = {
            "model_id": o.model_id,
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": o.max_concurrent_requests,
            "max_best_of": o.max_best_of,
            "max_stop_sequences": o.max_stop_sequences,
            "max_input_tokens": self.most_input,
            "max_total_tokens": self.total,
            "validation_workers": o.validation_workers,
            "max_client_batch_size": o.max_client_batch_size,
            "router": "text-generation-router",
            "version": self.version,
            "sha": None,
            "docker_label": None,
        }
        if self.version[0] < "3":
            value |= {"max_batch_total_tokens": self.kv_tokens, "max_waiting_tokens": o.max_waiting_tokens,
                      "waiting_served_ratio": o.waiting_served_ratio, "max_batch_size": o.max_batch_size}  # fmt: skip
        request.reply(200, value)

    async def metrics(self, request: Request) -> None:
        policy = self.engine.policy
        gauges = {
            "tgi_batch_current_size": policy.holding,
            "tgi_batch_current_max_tokens": policy.reserved,
            "tgi_batch_max_total_tokens": self.kv_tokens,
            "tgi_queue_size": policy.queue_length,
        }
        lines = [f"# TYPE {name} gauge\n{name} {value}" for name, value in gauges.items()]
        lines += [f"# TYPE {name} counter\n{name} {value}" for name, value in self.counts.items()]
        lines.append("# TYPE tgi_batch_forward_duration histogram")
        for method, (count, total) in self.forwards.items():
            lines += [f'tgi_batch_forward_duration_bucket{{method="{method}",le="+Inf"}} {count}',
                      f'tgi_batch_forward_duration_sum{{method="{method}"}} {total}',
                      f'tgi_batch_forward_duration_count{{method="{method}"}} {count}']  # fmt: skip
        request.reply(200, "\n".join([*lines, ""]))
