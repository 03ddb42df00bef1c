"""TGI's traps: what its flags must be, weights in which no end ever comes, a batch limit that chunking undoes."""

import json

import numpy as np
import pytest

from batchlab import models
from batchlab.engines import tgi, weights
from batchlab.engines.tgi import TgiEngine
from batchlab.errors import EngineError, UsageError
from batchlab.scenario import EngineSpec, Limits

LIMITS = Limits(max_batch_size=16, max_num_tokens=128)


def engine(tmp_path, monkeypatch, options=None, version="3.3.5", **spec):
    monkeypatch.setattr(TgiEngine, "find", classmethod(lambda cls, spec: ["text-generation-launcher"]))
    files = models.materialize("tiny-llama")
    one = TgiEngine(EngineSpec(version=version, **spec), options or {}, files, "http", log=tmp_path / "log")
    one._work = tmp_path
    return one


def told(one, limits=LIMITS):
    words = one.arguments(limits, "127.0.0.1", 3000)
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_prompt_must_fit_into_a_prefill_and_leave_room(tmp_path, monkeypatch):
    small = told(engine(tmp_path, monkeypatch, {"max_model_len": 256}))
    assert (small["--max-batch-prefill-tokens"], small["--max-input-tokens"]) == ("128", "128")
    large = told(engine(tmp_path, monkeypatch, {"max_model_len": 256}), Limits(max_batch_size=16, max_num_tokens=4096))
    assert (large["--max-total-tokens"], large["--max-input-tokens"]) == ("256", "255")


def test_no_request_is_refused_for_being_one_too_many(tmp_path, monkeypatch):
    flags = told(engine(tmp_path, monkeypatch))
    assert int(flags["--max-concurrent-requests"]) > 10_000 and flags["--max-batch-size"] == "16"
    assert "--max-batch-total-tokens" not in flags  # ignored for flash models


def test_chunks_and_prefix_cache_are_off(tmp_path, monkeypatch):
    environment = engine(tmp_path, monkeypatch).environment()
    assert environment["PREFILL_CHUNKING"] == environment["PREFIX_CACHING"] == "0"


def test_with_chunks_on_the_batch_limit_does_not_hold_and_the_cell_says_so(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch, env={"PREFILL_CHUNKING": "1"})
    one.limits = LIMITS
    assert any("beyond --max-batch-size" in reason for reason in one.read(0).reasons)
    for same in (engine(tmp_path, monkeypatch), engine(tmp_path, monkeypatch, version="2.4.1", env=one.spec.env)):
        same.limits = LIMITS
        assert not same.read(0).reasons


def test_what_it_cannot_do_is_said(tmp_path, monkeypatch):
    with pytest.raises(EngineError, match="takes no size for its KV cache"):
        engine(tmp_path, monkeypatch, {"kv_cache_gib": 1}).start(LIMITS)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="bfloat16 and float16, not float32"):
        TgiEngine.find(EngineSpec(version="3.3.5", dtype="float32"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BATCHLAB_TGI_LAUNCHER", raising=False)
    with pytest.raises(UsageError, match="no text-generation-launcher on the PATH"):
        TgiEngine.find(EngineSpec(version="3.3.5"))


def test_the_real_token_budget_is_read_from_log_or_gauge(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch)
    one.log.write_text("INFO text_generation_router_v3: Setting max batch total tokens to 123456\n")
    assert one.learned() == {"kv_tokens": 123456}
    one.log.write_text("")
    monkeypatch.setattr(tgi, "ask", lambda url: "# TYPE x gauge\ntgi_batch_max_total_tokens 777\n")
    assert one.learned() == {"kv_tokens": 777}


def test_it_is_asked_for_text_and_without_ignore_eos(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch)
    assert one.text_prompts and one.target().api == "tgi" and not one.target().ignore_eos


def test_a_running_batch_that_nothing_tells_is_said_to_be_unchecked(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch)
    one.limits = LIMITS
    traced = one.read(0)
    assert traced.source == "none" and any("running batch" in line for line in traced.unchecked)


# random weights -------------------------------------------------------------------------------------------------------
@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(weights.paths, "BUILD", tmp_path)
    return weights.with_weights(models.materialize("tiny-llama"))


def tensors(model):
    """The bfloat16 tensors as float32, read as https://github.com/huggingface/safetensors#format describes the file."""
    data = (model.path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header.pop("__metadata__")
    assert all(entry["dtype"] == "BF16" for entry in header.values())
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(body)
    return {
        name: (np.frombuffer(body[slice(*entry["data_offsets"])], np.uint16).astype(np.uint32) << 16)
        .view(np.float32)
        .reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_weights_have_the_models_tensors(made):
    shape, found = models.shape("tiny-llama"), tensors(made)
    assert {name: tensor.shape for name, tensor in found.items()} == dict(weights.tensors(shape))
    assert sum(tensor.size for tensor in found.values()) == shape.parameters
    assert found["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(weights.SCALE, rel=0.05)
    assert (found["model.norm.weight"] == 1).all()


def test_no_special_token_is_ever_the_likeliest(made):
    """Their logits are 0 for every hidden state, and somebody else's is above 0."""
    shape = models.shape("tiny-llama")
    head = tensors(made)["model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"]
    hidden = np.random.default_rng(1).normal(size=(200, shape.hidden)).astype(np.float32)
    assert (np.argmax(hidden @ head.T, axis=1) >= len(models.SPECIALS)).all()


def test_weights_are_written_once_and_again_when_the_shape_changes(made):
    file = made.path / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert weights.with_weights(models.materialize("tiny-llama")).path == made.path
    assert file.stat().st_mtime_ns == before
    config = json.loads((made.path / "config.json").read_text())
    (made.path / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    weights.with_weights(models.materialize("tiny-llama"))
    assert file.stat().st_mtime_ns > before


def test_a_disk_without_room_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(weights.paths, "BUILD", tmp_path)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(UsageError, match=r"GiB, 0\.0 are free; free some, or set BATCHLAB_BUILD"):
        weights.with_weights(models.materialize("tiny-llama"))


def test_bfloat16_is_the_upper_half():
    values = np.array([1.0, -2.0, 0.5], np.float32)
    halves = weights._encoded(values, "bfloat16")
    assert halves.dtype == np.uint16 and (halves.astype(np.uint32) << 16).view(np.float32).tolist() == [1.0, -2.0, 0.5]
