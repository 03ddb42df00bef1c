"""Workloads: lengths, arrival times and prompts."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from batchlab.errors import UsageError
from batchlab.workload import build

FIXED = {"kind": "fixed", "input_len": 40, "output_len": 8}


def make(dataset=None, **more):
    settings = {"num_requests": 50, "request_rate": None, "seed": 1, "nonce": "cell/1", "vocab_size": 4096}
    return build(dataset or FIXED, **settings | more)


def times(**more):
    return np.array([r.scheduled_s for r in make({"input_len": 1, "output_len": 1}, **more).requests])


@pytest.fixture(scope="module")
def words():
    """The synthetic kind: a prompt of N words is N tokens."""
    names = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{n}" for n in range(4, 4096))]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:4])
    return tokenizer


def _trained(prefix_space, template):
    text = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 9
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, tokenizer.token_to_id(token)) for token in special]
        )
    return tokenizer


@pytest.fixture(
    scope="module",
    params=[(False, None), (True, None), (False, "<s> $A"), (True, "<s> $A </s>")],
    ids=["plain", "prefix-space", "bos", "bos-eos"],
)
def merging(request):
    """A byte-level BPE, whose tokens merge when their texts are joined."""
    return _trained(*request.param)


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_nonce_and_index_give_the_same_workload(words):
    assert make() == make() and make(tokenizer=words) == make(tokenizer=words)
    longer = make(num_requests=80)
    assert [r.prompt_ids for r in longer.requests[:50]] == [r.prompt_ids for r in make().requests]


def test_prompts_differ_from_their_first_ids_on():
    """vllm 54227 and 52884, aiperf 449: one seed in every cell measured the prefix cache."""
    cells = [make(nonce=nonce, seed=seed) for nonce in ("a", "b", "a/warm-up") for seed in (1, 2)]
    starts = [tuple(r.prompt_ids[:8]) for cell in cells for r in cell.requests]
    assert len(set(starts)) == len(starts) == 300
    for cell in cells:
        assert len({r.prompt_ids[0] for r in cell.requests}) == 50  # not one id shared inside a cell


def test_cells_that_differ_in_a_limit_get_the_same_lengths_and_times():
    dataset = {"kind": "uniform", "input_len": [5, 90], "output_len": [5, 90]}
    one, other = (make(dataset, nonce=nonce, request_rate=5) for nonce in "ab")
    assert [(r.scheduled_s, len(r.prompt_ids), r.output_len) for r in one.requests] == [
        (r.scheduled_s, len(r.prompt_ids), r.output_len) for r in other.requests
    ]
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(one.requests, other.requests, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(6, 5000), st.integers(0, 2**31), st.text(max_size=10))
def test_ids_have_the_asked_length_and_are_never_special(length, vocab, seed, nonce):
    workload = make({"input_len": length, "output_len": 1}, vocab_size=vocab, seed=seed, nonce=nonce, num_requests=3)
    for request in workload.requests:
        assert len(request.prompt_ids) == length and request.prompt_text is None
        assert all(4 <= id < vocab and type(id) is int for id in request.prompt_ids)


def test_a_prompt_of_one_token(words):
    """vllm 24591: input length 1 gave an empty prompt."""
    requests = make({"input_len": 1, "output_len": 1}, tokenizer=words).requests
    assert all(len(r.prompt_ids) == 1 and r.prompt_text for r in requests)
    assert len({r.prompt_text for r in requests}) == 50


def test_words_of_the_synthetic_tokenizer_are_tokens(words):
    for request in make(tokenizer=words).requests:
        assert len(request.prompt_text.split()) == 40
        assert words.encode(request.prompt_text).ids == request.prompt_ids
        assert not set(request.prompt_ids) & {0, 1, 2, 3}


@pytest.mark.parametrize("length", [3, 4, 7, 64, 500])
def test_text_has_exactly_the_asked_tokens_after_encoding_again(merging, length):
    """vllm 10847: prompts were off their length after encoding again. The server adds its special tokens too."""
    requests = make({"input_len": length, "output_len": 1}, tokenizer=merging, vocab_size=500).requests
    for request in requests:
        assert merging.encode(request.prompt_text).ids == request.prompt_ids
        assert len(request.prompt_ids) == length
    assert length < 64 or len({r.prompt_text[:30] for r in requests}) == 50


def test_text_is_exact_although_the_tokenizer_file_truncates_and_pads(words):
    limited = Tokenizer.from_str(words.to_str())
    limited.enable_truncation(10)
    limited.enable_padding(length=16)
    assert make(tokenizer=limited).requests == make(tokenizer=words).requests
    assert limited.truncation["max_length"] == 10  # the caller's tokenizer is left alone


def test_text_that_is_impossible_is_refused(words):
    wrapped = _trained(False, "<s> $A </s>")
    with pytest.raises(UsageError, match=r"input_len 2 leaves no room .* at least 3"):
        make({"input_len": 2, "output_len": 1}, tokenizer=wrapped, vocab_size=500)
    lossy = Tokenizer.from_str(words.to_str())
    lossy.decoder = decoders.Replace("w", "v")
    with pytest.raises(UsageError, match="prompt format ids"):
        make(tokenizer=lossy)


# --- shared prefixes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "common"), [(0, 0), (0.25, 10), (0.99, 39)])
def test_a_share_of_the_prompt_is_common_and_the_rest_differs_at_once(words, share, common):
    for tokenizer in (None, words):
        ids = [r.prompt_ids for r in make(FIXED | {"shared_prefix": share}, tokenizer=tokenizer).requests]
        assert all(len(one) == 40 for one in ids)
        assert len({tuple(one[:common]) for one in ids}) == 1
        assert len({one[common] for one in ids}) == 50


def test_the_shared_prefix_of_other_cells_is_another():
    one, other = (make(FIXED | {"shared_prefix": 0.5}, nonce=nonce).requests[0].prompt_ids for nonce in "ab")
    assert one[:8] != other[:8]


def test_shared_prefixes_of_prompts_of_different_lengths():
    dataset = {"kind": "uniform", "input_len": [10, 9000], "output_len": [1, 1], "shared_prefix": 0.5}
    requests = sorted(make(dataset).requests, key=lambda r: len(r.prompt_ids))
    for shorter, longer in itertools.pairwise(requests):
        half = math.floor(len(shorter.prompt_ids) / 2)
        assert shorter.prompt_ids[:half] == longer.prompt_ids[:half]


# --- lengths ---------------------------------------------------------------------------------------------------------


def lengths(dataset, **more):
    workload = make(dataset, **{"num_requests": 2000} | more)
    return np.array([(len(r.prompt_ids), r.output_len) for r in workload.requests]), workload.note


@pytest.mark.parametrize("spec", [[3, 9], {"low": 3, "high": 9}])
def test_uniform_lengths_reach_both_ends(spec):
    drawn, note = lengths({"kind": "uniform", "input_len": spec, "output_len": [7, 7]})
    assert set(drawn[:, 0]) == set(range(3, 10)) and set(drawn[:, 1]) == {7} and note is None


def test_lognormal_lengths_have_their_median_and_say_what_was_cut():
    spec = {"median": 50, "sigma": 1.0, "max": 200}
    drawn, note = lengths({"kind": "lognormal", "input_len": spec, "output_len": spec | {"max": 10**6}})
    assert abs(np.median(drawn[:, 1]) - 50) < 5 and drawn.min() >= 1
    assert abs(np.log(drawn[:, 1]).std() - 1) < 0.1
    over = int((drawn[:, 0] == 200).sum())
    cut, _, rest = note.partition(" ")  # one or two are drawn at 200 and not cut
    assert 100 < over < 220 and over - 5 < int(cut) <= over and rest == "of 2000 prompts cut to 200 tokens (max)"
    assert np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1] < 0.1


def test_mixed_lengths_keep_their_shares_exactly_and_are_shuffled():
    parts = [{"weight": 3, "input_len": 8, "output_len": 4}, {"weight": 1, "input_len": 64, "output_len": 32}]
    drawn, _ = lengths({"kind": "mixed", "parts": parts}, num_requests=1001)
    long = drawn[:, 0] == 64
    assert long.sum() == 250 and (drawn[long, 1] == 32).all() and (drawn[~long] == [8, 4]).all()
    assert np.flatnonzero(np.diff(long)).size > 10 and long[:500].sum() < 200


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"kind": "fixed", "input_len": 0, "output_len": 1}, "input_len 0 must be"),
        ({"kind": "fixed", "input_len": 1}, "output_len None must be"),
        ({"kind": "uniform", "input_len": [9, 3], "output_len": [1, 1]}, "low must be"),
        ({"kind": "uniform", "input_len": 3, "output_len": [1, 1]}, r"must be \[low, high\]"),
        ({"kind": "lognormal", "input_len": {"median": 3}, "output_len": {}}, "median, sigma and max"),
        ({"kind": "lognormal", "input_len": {"median": 3, "sigma": 0, "max": 3}, "output_len": {}}, "greater than 0"),
        ({"kind": "mixed", "parts": []}, "weight greater than 0"),
        ({"kind": "mixed", "parts": [{"weight": 1, "input_len": 0, "output_len": 1}]}, "input_len 0"),
        ({"kind": "gaussian"}, "kind 'gaussian' is unknown"),
        (FIXED | {"shared_prefix": 1}, "shared_prefix 1"),
        ({"kind": "uniform", "input_len": [1, 90], "output_len": [90, 90]}, "shorten them or raise max_model_len"),
    ],
)
def test_datasets_that_cannot_work(dataset, words):
    with pytest.raises(UsageError, match=words):
        make(dataset, max_len=128)


def test_fixed_lengths_beyond_the_engine_are_refused_and_drawn_ones_cut():
    assert make(max_len=48).note is None
    with pytest.raises(UsageError, match="input_len \\+ output_len is 48, but the engine takes 47"):
        make(max_len=47)
    spec = {"median": 50, "sigma": 0.5, "max": 4000}
    drawn, note = lengths({"kind": "lognormal", "input_len": spec, "output_len": spec}, max_len=100)
    assert drawn.sum(axis=1).max() == 100 and drawn.min() >= 1 and "of 2000 requests cut to 100 tokens" in note


# --- arrivals --------------------------------------------------------------------------------------------------------


def test_all_at_once():
    assert not times().any() and not times(request_rate=math.inf).any()


@pytest.mark.parametrize(
    "arrival",
    [
        None,
        {"kind": "constant"},
        {"kind": "poisson"},
        {"kind": "gamma", "burstiness": 0.25},
        {"kind": "gamma", "burstiness": 50},
    ],
)
@pytest.mark.parametrize("rate", [0.5, 4, 1000])
def test_every_process_meets_the_asked_rate_exactly(arrival, rate):
    """vllm 21104: the achieved rate was below the asked one."""
    for count in (2, 3, 64):
        at = times(arrival=arrival, request_rate=rate, num_requests=count)
        assert at[0] == 0 and (np.diff(at) >= 0).all() and at[-1] == pytest.approx((count - 1) / rate)
    assert times(arrival=arrival, request_rate=rate, num_requests=1).tolist() == [0]


def _spread(**more):
    gaps = np.diff(times(num_requests=20_000, request_rate=10, **more))
    return gaps.std() / gaps.mean()


def test_the_gaps_vary_as_the_process_says():
    assert _spread(arrival={"kind": "constant"}) < 1e-6
    assert _spread(arrival={"kind": "poisson"}) == pytest.approx(1, abs=0.05)
    assert _spread(arrival={"kind": "gamma", "burstiness": 0.25}) == pytest.approx(2, abs=0.15)
    assert _spread(arrival={"kind": "gamma", "burstiness": 4}) == pytest.approx(0.5, abs=0.05)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 500), st.floats(0.1, 500), st.integers(2, 300))
def test_a_ramp_has_the_mean_rate_of_its_ends(start, end, count):
    """guidellm 93: the ramp-up biased the rate."""
    at = times(arrival={"kind": "ramp", "to": end}, request_rate=start, num_requests=count)
    assert at[0] == 0 and (np.diff(at) >= 0).all()
    assert (count - 1) / at[-1] == pytest.approx((start + end) / 2, rel=1e-6)


def test_a_ramp_starts_and_ends_at_its_rates():
    at = times(arrival={"kind": "ramp", "to": 90}, request_rate=10, num_requests=40_001)
    counts, edges = np.histogram(at, 40)
    rates = counts / np.diff(edges)
    assert rates[0] == pytest.approx(11, rel=0.15) and rates[-1] == pytest.approx(89, rel=0.1)
    assert times(arrival={"kind": "ramp", "to": 10}, request_rate=10) == pytest.approx(
        times(arrival={"kind": "poisson"}, request_rate=10)
    )


def test_a_closed_loop_says_its_concurrency():
    workload = make(arrival={"kind": "closed", "concurrency": 8})
    assert workload.concurrency == 8 and make().concurrency is None
    assert not any(r.scheduled_s for r in workload.requests)


@pytest.mark.parametrize(
    ("arrival", "rate", "words"),
    [
        (None, 0, "request_rate 0 must be greater"),
        (None, -1, "request_rate -1"),
        (None, math.nan, "request_rate nan"),
        ({"kind": "poisson"}, None, "needs a finite request_rate"),
        ({"kind": "uniform"}, 1, "kind 'uniform' is unknown"),
        ({"kind": "infinite"}, 4, "sets its own pace"),
        ({"kind": "closed", "concurrency": 2}, 4, "sets its own pace"),
        ({"kind": "closed"}, None, "concurrency of at least 1"),
        ({"kind": "gamma"}, 4, "burstiness greater than 0"),
        ({"kind": "ramp"}, 4, "last rate `to`"),
        ({"kind": "trace"}, None, "dataset of kind trace"),
        ({"kind": "gamma", "burstiness": 1e-9}, 4, "larger burstiness"),
    ],
)
def test_arrivals_that_cannot_work(arrival, rate, words):
    with pytest.raises(UsageError, match=words):
        make(arrival=arrival, request_rate=rate)


def test_no_requests_and_no_vocabulary():
    with pytest.raises(UsageError, match="num_requests 0"):
        make(num_requests=0)
    with pytest.raises(UsageError, match="vocab_size 5"):
        make(vocab_size=5)


# --- traces ----------------------------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:59.9999999,374,44
2023-11-16 18:16:00.0000001,0,7
2023-11-16 18:16:00.9999999,396,109
2023-11-16 18:16:03.9999999,20,5
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118.0,GPT-4,417,276,693,API log
"""
MOONCAKE = "".join(
    json.dumps(line) + "\n"
    for line in [
        {"timestamp": 0, "input_length": 1300, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 9, "hash_ids": [0, 3]},
        {"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [4, 5]},
    ]
)


def trace(tmp_path, text, form, count, dataset=None, **more):
    path = tmp_path / "trace"
    path.write_text(text)
    dataset = {"kind": "trace", "file": str(path), "format": form, **(dataset or {})}
    return make(dataset, num_requests=count, **{"arrival": {"kind": "trace"}} | more)


def shape(workload):
    return [(round(r.scheduled_s, 7), len(r.prompt_ids), r.output_len) for r in workload.requests]


def test_azure_times_have_seven_decimals(tmp_path):
    workload = trace(tmp_path, AZURE, "azure", 3)
    assert shape(workload) == [(0, 374, 44), (1, 396, 109), (4, 20, 5)]
    assert workload.note == "1 recorded requests without prompt or answer left out"
    zoned = AZURE.replace("9999999,", "999999+00:00,")
    assert shape(trace(tmp_path, zoned, "azure", 3)) == shape(workload)


def test_burstgpt_leaves_failed_requests_out(tmp_path):
    workload = trace(tmp_path, BURSTGPT, "burstgpt", 2)
    assert shape(workload) == [(0, 472, 18), (113, 417, 276)] and "1 recorded requests" in workload.note


def test_a_trace_is_scaled_in_rate_and_cut_with_a_note(tmp_path):
    workload = trace(tmp_path, AZURE, "azure", 3, {"rate_scale": 4, "clip": 100})
    assert shape(workload) == [(0, 100, 44), (0.25, 100, 100), (1, 20, 5)]
    assert workload.note.endswith("2 prompts and 1 outputs of 3 requests cut to 100 tokens (clip)")
    short = trace(tmp_path, AZURE, "azure", 3, {"clip": 100}, max_len=110)
    assert [(n, m) for _, n, m in shape(short)] == [(66, 44), (10, 100), (20, 5)]
    assert short.note.endswith("1 of 3 requests cut to 110 tokens (the engine's limit)") is False
    assert short.note.endswith("2 of 3 requests cut to 110 tokens (the engine's limit)")


def test_a_trace_of_lengths_with_other_arrivals(tmp_path):
    assert [t for t, _, _ in shape(trace(tmp_path, AZURE, "azure", 3, arrival=None))] == [0, 0, 0]
    assert shape(trace(tmp_path, AZURE, "azure", 3, arrival={"kind": "constant"}, request_rate=2))[2] == (1, 20, 5)


def test_mooncake_blocks_are_shared_prefixes(tmp_path, words):
    for tokenizer in (None, words):
        workload = trace(tmp_path, MOONCAKE, "mooncake", 3, tokenizer=tokenizer)
        assert shape(workload) == [(0, 1300, 3), (1.5, 1024, 9), (3, 600, 2)]
        first, second, third = (r.prompt_ids for r in workload.requests)
        assert first[:512] == second[:512]
        starts = (first[:64], third[:64], first[512:576], second[512:576], third[512:576])
        assert len({tuple(ids) for ids in starts}) == 5
    other = trace(tmp_path, MOONCAKE, "mooncake", 3, nonce="another cell")
    assert other.requests[0].prompt_ids[:8] != first[:8]


def test_a_cut_that_makes_prompts_equal_says_so(tmp_path):
    workload = trace(tmp_path, MOONCAKE, "mooncake", 3, {"clip": 512})
    assert workload.requests[0].prompt_ids == workload.requests[1].prompt_ids
    assert workload.note.endswith("1 prompts became equal to another by the cut")


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("azure", "time,tokens\n1,2\n", ":1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("azure", AZURE.replace("2023-11-16 18:16:00.9", "16/11/2023 18:16:00.9"), ":4: TIMESTAMP '16/11/2023"),
        ("azure", AZURE.replace("-16 18:16:00.99", "-16 18:76:00.99"), ":4: TIMESTAMP"),
        ("azure", AZURE.replace("396", "many"), ":4: ContextTokens is 'many', not a number; mend or delete"),
        ("azure", AZURE.replace("109", "-1"), ":4: GeneratedTokens is '-1', not a whole number"),
        ("azure", AZURE.replace("396,109", "396"), ":4: GeneratedTokens is '', not a number"),
        ("azure", AZURE.replace("18:16:03", "18:15:03"), ":5: its time is before"),
        ("burstgpt", BURSTGPT.replace("118.0", "later"), ":4: Timestamp is 'later'"),
        ("burstgpt", AZURE, ":1: no column Timestamp, Request tokens, Response tokens"),
        ("mooncake", MOONCAKE.replace('{"timestamp": 1500', '{"timestamp": '), ":2: not JSON"),
        ("mooncake", "[1]\n" + MOONCAKE, ":1: not a JSON object"),
        ("mooncake", MOONCAKE.replace("1024", "1025"), ":2: 2 hash_ids do not fit input_length 1025"),
        ("mooncake", MOONCAKE.replace("1024", '"1024"'), ":2: input_length is '1024', not a whole number"),
        ("mooncake", MOONCAKE.replace("[0, 3]", '["a", 3]'), ":2: hash_ids must be a list of whole numbers"),
        ("azure", AZURE[: AZURE.index("2023-11-16 18:16:03")], "holds 2 usable requests, 3 are asked for: lower num_"),
        ("parquet", AZURE, "format 'parquet' is unknown"),
    ],
)
def test_a_damaged_trace_is_named_with_its_line_and_the_mend(tmp_path, form, text, words):
    with pytest.raises(UsageError) as caught:
        trace(tmp_path, text, form, 3)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_that_is_missing_or_packed(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        make({"kind": "trace", "file": str(tmp_path / "none"), "format": "azure"}, arrival={"kind": "trace"})
    packed = tmp_path / "packed"
    packed.write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(UsageError, match="not a text file; unpack"):
        make({"kind": "trace", "file": str(packed), "format": "azure"}, arrival={"kind": "trace"})
    with pytest.raises(UsageError, match="rate_scale -1"):
        trace(tmp_path, AZURE, "azure", 1, {"rate_scale": -1})
    with pytest.raises(UsageError, match="arrival trace sets its own pace"):
        trace(tmp_path, AZURE, "azure", 1, request_rate=3)
