"""From raw bytes to a row: HTTP, server-sent events, tokens. No network."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchlab.client import http, rows
from batchlab.client.exchange import Exchange
from batchlab.client.rows import request_row
from batchlab.client.sse import Events
from batchlab.client.stream import read_stream
from batchlab.workload import Request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(value, end="\n", space=" ", before=""):
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{before}data:{space}{text}{end}{end}".encode()


def chunked(*bodies):
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


def completion(text="a", reason=None, **more):
    choice = {"index": 0, "text": text, "finish_reason": reason, **more.pop("choice", {})}
    return {"id": "x", "choices": [choice], **more}


def chat(reason=None, **delta):
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(n, prompt=5):
    return {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}


def exchange(reads, times=None, closed=None):
    answered = Exchange(3, 5, 4, 0, b"")
    answered.sent_ns = 10
    answered.reads = list(reads)
    answered.times = list(times or range(1000, 1000 + len(answered.reads)))
    answered.closed_ns = closed
    return answered


def row(answered, api, t0_ns, keep_chunks):
    return rows.row(answered, rows.read(answered, api), t0_ns, keep_chunks)


def answer(*events, api="openai-completions", end=b""):
    return row(exchange([chunked(*[event(e) for e in events]) + end]), api, 0, True)


def read(api, *values, ended=True):
    raw = [v.encode() if isinstance(v, str) else json.dumps(v).encode() for v in values]
    return read_stream(api, raw, [100 * (n + 1) for n in range(len(raw))], ended)


# --- any split of the bytes gives the same tokens, each at the time of the read that ended its line -------------------

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def streams(draw):
    """A whole answer, the offset in it of the byte that ends each token's line, and a way to cut it."""
    end, space = draw(LINE_ENDS), draw(st.sampled_from(["", " "]))
    texts = draw(st.lists(st.text(max_size=40), min_size=1, max_size=8))
    bodies, raw, ends = [], bytearray(HEAD), []
    for number, text in enumerate(texts):
        comment = draw(st.sampled_from(["", f": keep-alive{end}{end}", f"id: 7{end}event: message{end}"]))
        body = event(completion(text + "x", "length" if number == len(texts) - 1 else None), end, space, comment)
        bodies.append((body, len(body) - 2 * len(end)))
    bodies.append((event("[DONE]", end, space), None))
    for body, line_end in bodies:
        raw += b"%x\r\n" % len(body)
        if line_end is not None:
            ends.append(len(raw) + line_end)
        raw += body + b"\r\n"
    raw += b"0\r\n\r\n"
    cuts = draw(st.lists(st.integers(1, len(raw) - 1), max_size=30, unique=True))
    return bytes(raw), ends, sorted(cuts)


@settings(max_examples=300, deadline=None)
@given(streams())
def test_any_split_gives_the_same_tokens_at_the_time_of_the_read_that_ended_the_line(stream):
    raw, ends, cuts = stream
    edges = [0, *cuts, len(raw)]
    reads = [raw[a:b] for a, b in itertools.pairwise(edges)]
    times = [1_000_000 * (n + 1) for n in range(len(reads))]
    got = row(exchange(reads, times), "openai-completions", 0, True)
    expected = [next(t for t, edge in zip(times, edges[1:], strict=True) if edge > end) for end in ends]
    assert got["error"] is None
    assert got["tokens"] == len(ends)
    assert got["first_s"] == expected[0] / 1e9 and got["last_s"] == expected[-1] / 1e9
    assert got["chunk_us"] == [(t - expected[0]) // 1000 for t in expected]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["data: a", "data:b", "data", ": c", "id: 1", "", "nonsense"]), max_size=12),
    LINE_ENDS,
    st.lists(st.integers(0, 200), max_size=20),
)
def test_events_do_not_depend_on_how_their_bytes_are_cut(lines, end, cuts):
    raw = "".join(line + end for line in lines).encode()
    whole, cut = Events(), Events()
    whole.feed(raw, 1)
    edges = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    for a, b in itertools.pairwise(edges):
        cut.feed(raw[a:b], 1)
    assert whole.close() and cut.close()
    assert whole.data == cut.data


def test_several_data_lines_are_one_event_and_its_time_is_the_last_line():
    events = Events()
    events.feed(b'data: {"a":\n', 1)
    events.feed(b"data: 1}\n", 2)
    events.feed(b"\n", 3)
    events.close()
    assert (events.data, events.times) == ([b'{"a":\n1}'], [2])


def test_a_line_of_megabytes_in_small_pieces_is_one_event():
    text = "y" * 3_000_000
    raw = event(text)
    events = Events()
    for at in range(0, len(raw), 1000):
        events.feed(raw[at : at + 1000], at)
    assert events.close() and events.data == [text.encode()]


def test_a_body_that_stops_inside_a_line_says_so():
    events = Events()
    events.feed(b"data: a\n\ndata: b", 1)
    assert not events.close()
    assert events.data == [b"a"]


# --- what is a token -------------------------------------------------------------------------------------------------


def test_role_empty_and_usage_chunks_are_no_token():
    """vllm 15106: the role chunk was counted as the first token."""
    stream = read(
        "openai-chat",
        chat(role="assistant", content=""),
        chat(content=""),
        chat(content="a"),
        chat(content="b", reason="length"),
        {"choices": [], "usage": usage(2)},
        "[DONE]",
    )
    assert stream.times == [300, 400] and stream.counts == [1, 1]
    assert stream.count_source == "usage" and stream.prompt_tokens == 5 and stream.error is None


@pytest.mark.parametrize("delta", [{"reasoning_content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_tokens(delta):
    stream = read("openai-chat", chat(**delta), chat(content="b", reason="stop"), "[DONE]")
    assert stream.times == [100, 200]


def test_a_chunk_of_several_tokens_is_counted_by_its_ids():
    """vllm 27485, 37666: a chunk is not a token."""
    stream = read(
        "openai-completions",
        completion(choice={"token_ids": [1, 2, 3]}),
        completion("", choice={"token_ids": [4]}),
        completion("", "length"),
        "[DONE]",
    )
    assert (stream.times, stream.counts, stream.tokens) == ([100, 200], [3, 1], 4)
    assert stream.count_source == "token_ids"


def test_a_chunk_of_several_tokens_is_counted_by_continuous_usage():
    """vllm 27485, 37666; an empty text may hold a token (half a character), which only the count shows."""
    stream = read(
        "openai-completions",
        completion(usage=usage(2)),
        completion("", usage=usage(3)),
        completion(usage=usage(3)),
        completion(reason="length", usage=usage(7)),
        {"choices": [], "usage": usage(7)},
        "[DONE]",
    )
    assert (stream.times, stream.counts, stream.tokens) == ([100, 200, 400], [2, 1, 4], 7)
    assert stream.count_source == "usage"


def test_usage_that_comes_with_the_last_text_alone_is_not_a_chunk_of_all_tokens():
    """TGI sends usage with the last text, and an empty finish reason before."""
    stream = read(
        "openai-completions",
        completion(reason=""),
        completion(reason=""),
        completion(reason="length", usage=usage(3)),
        "[DONE]",
    )
    assert (stream.counts, stream.count_source, stream.finish_reason) == ([1, 1, 1], "usage", "length")


def test_final_usage_that_differs_from_the_chunks_is_the_count_but_marked_as_unsure():
    """aiperf 339: tools disagreed on the number of tokens."""
    stream = read(
        "openai-completions",
        completion(),
        completion(),
        completion(reason="length"),
        {"choices": [], "usage": usage(6)},
        "[DONE]",
    )
    assert stream.tokens == 6 and sum(stream.counts) == 6 and stream.counts[0] == 1
    assert stream.count_source == "chunks"
    fewer = read(
        "openai-completions", completion(), completion(reason="length"), {"choices": [], "usage": usage(1)}, "[DONE]"
    )
    assert (fewer.tokens, fewer.count_source) == (1, "chunks")


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40), st.integers(0, 200))
def test_a_spread_count_gives_every_chunk_a_token(chunks, more):
    values = [completion() for _ in range(chunks - 1)] + [completion(reason="length")]
    stream = read("openai-completions", *values, {"choices": [], "usage": usage(chunks + more)}, "[DONE]")
    assert stream.tokens == sum(stream.counts) == chunks + more
    assert min(stream.counts) >= 1 and max(stream.counts[1:]) - min(stream.counts[1:]) <= 1


def test_without_usage_a_chunk_is_taken_for_a_token_and_marked():
    stream = read("openai-completions", completion(), completion(reason="length"), "[DONE]")
    assert (stream.tokens, stream.count_source, stream.prompt_tokens) == (2, "chunks", None)


def test_tokens_that_no_chunk_shows_are_an_error():
    got = answer(completion(""), completion("", "length"), {"choices": [], "usage": usage(4)}, "[DONE]")
    assert got["tokens"] == 4 and got["first_s"] is None and "continuous usage" in got["error"]


def test_tgi_tokens_and_details():
    token = {
        "index": 1,
        "token": {"id": 264, "text": " a", "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
    }
    details = {"finish_reason": "length", "generated_tokens": 2, "input_length": 9}
    last = token | {"generated_text": "a a", "details": details}
    stream = read("tgi", token, last)
    assert (stream.times, stream.tokens, stream.prompt_tokens) == ([100, 200], 2, 9)
    assert (stream.finish_reason, stream.count_source, stream.error) == ("length", "token_ids", None)


def test_the_engine_that_stopped_early_is_visible():
    """TensorRT-LLM 10824, TGI 1944: the engine stopped early and nobody noticed."""
    got = answer(completion(usage=usage(1)), completion(reason="stop", usage=usage(2)), "[DONE]")
    assert got["error"] is None
    assert (got["tokens"], got["output_len"], got["finish_reason"]) == (2, 4, "stop")


def test_cached_tokens_come_from_usage():
    told = usage(1) | {"prompt_tokens_details": {"cached_tokens": 48}}
    assert answer(completion(reason="length", usage=told), "[DONE]")["cached_tokens"] == 48


def test_another_id_in_every_chunk_does_not_matter():
    values = [completion(id=f"cmpl-{n}") for n in range(3)] + [completion(reason="length", id="cmpl-9"), "[DONE]"]
    assert answer(*values)["tokens"] == 4


# --- times and percentiles -------------------------------------------------------------------------------------------


def test_inter_token_latency_is_the_gap_divided_by_the_tokens_of_the_later_chunk():
    reads = [
        HEAD + b"",
        *(
            b"%x\r\n%b\r\n" % (len(e), e)
            for e in (
                event(completion(usage=usage(1))),
                event(completion(usage=usage(5))),
                event(completion(reason="length", usage=usage(6))),
            )
        ),
        b"0\r\n\r\n",
    ]
    got = row(exchange(reads, [0, 1_000_000, 9_000_000, 15_000_000, 16_000_000]), "openai-completions", 0, True)
    assert (got["first_tokens"], got["chunks"], got["tokens"]) == (1, 3, 6)
    assert got["itl_max_ms"] == 6.0 and got["itl_p50_ms"] == 4.0
    assert (got["chunk_us"], got["chunk_tokens"]) == ([0, 8000, 14000], [1, 4, 1])
    assert (got["first_s"], got["last_s"], got["end_s"]) == (0.001, 0.015, 0.016)


def test_without_chunks_kept_the_percentiles_are_still_there():
    raw = chunked(event(completion()), event(completion(reason="length")), event("[DONE]"))
    got = row(exchange([raw[:150], raw[150:]], [1_000_000, 3_000_000]), "openai-completions", 0, False)
    assert got["chunk_us"] is None and got["chunk_tokens"] is None
    assert got["itl_max_ms"] is not None


def test_a_chunk_list_that_does_not_fit_its_type_is_left_out():
    raw = [
        HEAD,
        *(b"%x\r\n%b\r\n" % (len(e), e) for e in (event(completion()), event(completion(reason="length")))),
        b"0\r\n\r\n",
    ]
    hour = 3_600_000_000_000
    got = row(exchange(raw, [0, 1, hour, hour]), "openai-completions", 0, True)
    assert got["error"] is None and got["last_s"] == 3600 and got["chunk_us"] is None


# --- failures --------------------------------------------------------------------------------------------------------


def failed(got):
    assert got["first_s"] is got["last_s"] is got["end_s"] is got["itl_p50_ms"] is got["chunk_us"] is None
    assert got["sent_s"] == 1e-8
    assert "\n" not in got["error"]
    return got["error"]


def test_a_stream_needs_a_finish_reason_or_done():
    assert "neither a finish reason nor [DONE]" in failed(answer(completion(), completion()))
    assert answer(completion(), completion(reason="length"))["error"] is None
    assert answer(completion(), completion(), "[DONE]")["error"] is None


def test_a_stream_that_breaks_is_an_error_even_after_its_finish_reason():
    """TensorRT-LLM breaks the connection when it fails inside a stream."""
    raw = chunked(event(completion()), event(completion(reason="length")))[:-5]
    got = row(exchange([raw], closed=2000), "openai-completions", 0, True)
    assert "broke after 2 tokens" in failed(got) and got["tokens"] == 2


def test_a_stream_that_said_done_is_whole_whatever_became_of_its_connection():
    raw = chunked(event(completion(reason="length")), event("[DONE]"))[:-5]
    broken = exchange([raw])
    broken.error = "the server reset the connection"
    assert row(broken, "openai-completions", 0, True)["error"] is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"error": "Model is overloaded", "error_type": "overloaded"}, "Model is overloaded (overloaded)"),
        ({"error": {"message": "no memory", "http_status_code": 424}}, "no memory (424)"),
        ({"error": {"message": "died", "type": "InternalServerError", "code": 500}}, "died (InternalServerError)"),
        ({"object": "error", "message": "died\nagain", "type": "Bad"}, "died again (Bad)"),
    ],
)
@pytest.mark.parametrize("api", ["openai-completions", "openai-chat", "tgi"])
def test_error_events_inside_a_stream_of_status_200(value, words, api):
    assert failed(answer(value, api=api)) == f"error in the stream: {words}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error":"Model is overloaded","error_type":"overloaded"}', "Model is overloaded (overloaded)"),
        ('{"object":"error","message":"too long","type":"BadRequestError","code":400}', "too long (BadRequestError)"),
        ('{"error":{"message":"loading","type":"Unavailable","code":"starting"}}', "loading (Unavailable)"),
        ('{"error":"1 validation error\\n  field"}', "1 validation error field"),
        ('{"detail":"Not Found"}', "Not Found"),
        ("<html>\n bad gateway</html>", "<html> bad gateway</html>"),
        ("", "no reason given"),
    ],
)
def test_bodies_of_refused_requests(body, words):
    raw = f"HTTP/1.1 429 Too Many\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    assert failed(row(exchange([raw]), "tgi", 0, True)) == f"HTTP 429: {words}"


def test_an_error_of_many_lines_becomes_one_short_line():
    body = json.dumps({"error": "x\n" * 5000})
    raw = f"HTTP/1.1 400 Bad\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    assert len(failed(row(exchange([raw]), "tgi", 0, True))) < 350


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"text":""}', "no event stream"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "an empty body"),
        (b"HTTP/1.1 307 Moved\r\nlocation: https://b/v1\r\ncontent-length: 0\r\n\r\n", "moved to https://b/v1"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b", "compressed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "before a whole answer"),
        (chunked(b"data: {broken\n\n"), "not JSON"),
        (chunked(b"data: [1]\n\n"), "not an object"),
        (chunked(b'data: {"choices":[7]}\n\n'), "unknown shape"),
        (chunked(event(completion("", "stop")), event("[DONE]")), "no token came (finish reason stop)"),
    ],
)
def test_answers_that_are_no_stream(raw, words):
    assert words in failed(row(exchange([raw], closed=2000), "openai-completions", 0, True))


def test_a_connection_that_closed_without_a_byte():
    assert "without an answer" in failed(row(exchange([]), "tgi", 0, True))


def test_an_interim_response_is_skipped():
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(event(completion(reason="length")), event("[DONE]"))
    assert row(exchange([raw]), "openai-completions", 0, True)["tokens"] == 1


def test_a_body_that_ends_with_the_connection():
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + event(completion(reason="length"))
    got = row(exchange([raw], closed=5000), "openai-completions", 0, True)
    assert got["error"] is None and got["end_s"] == 5e-6
    assert "broke" in row(exchange([raw]), "openai-completions", 0, True)["error"]


def test_an_answer_is_complete_only_when_http_says_so():
    raw = chunked(event(completion()))
    assert http.is_complete([raw])
    assert not http.is_complete([raw[:-1]])
    assert http.is_complete([b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno"])


# --- the engine's Python API -----------------------------------------------------------------------------------------


def test_rows_of_the_in_process_transport_have_the_same_columns():
    request = Request(3, 0.0, [7] * 5, None, 4)
    raw = {
        "scheduled_ns": 0,
        "sent_ns": 10,
        "end_ns": 5000,
        "chunks": [(1000, 1), (4000, 3)],
        "finish_reason": "length",
        "prompt_tokens": 5,
        "error": None,
    }
    got = request_row(request, raw, 0, keep_chunks=True)
    assert set(got) == set(answer(completion(reason="length"), "[DONE]"))
    assert (got["tokens"], got["first_tokens"], got["itl_max_ms"], got["end_s"]) == (4, 1, 0.001, 5e-6)
    lost = request_row(request, raw | {"error": "EngineDeadError"}, 0, keep_chunks=True)
    assert failed(lost) == "EngineDeadError"
    assert "no token" in failed(request_row(request, raw | {"chunks": []}, 0, keep_chunks=True))
