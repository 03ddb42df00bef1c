"""Model shapes, the synthetic tokenizer, and models that are passed through."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from batchlab import models, paths
from batchlab.errors import UsageError

# published parameter counts (model cards); KV bytes: 2 (K and V) x layers x KV heads x head size x 2 bytes
PUBLISHED = {"llama-3-8b": (8_030_261_248, 131_072), "llama-2-7b": (6_738_415_616, 524_288)}
TOKENIZER = Tokenizer.from_str(models._word_level(4096))


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    return tmp_path / "build"


@pytest.fixture
def weights(tmp_path: Path, build: Path) -> Path:
    """A local folder that looks like a model with weights."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_agrees_with_the_published_model(name: str) -> None:
    parameters, kv_bytes = PUBLISHED[name]
    shape = models.shape(name)
    assert shape.parameters == parameters
    assert shape.weight_bytes == 2 * parameters
    assert shape.kv_bytes_per_token == kv_bytes


def test_tied_embeddings_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((paths.MODELS / "tiny-llama" / "config.json").read_text())
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    untied = models.shape("tiny-llama")
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    assert untied.parameters - models.shape("tied").parameters == config["vocab_size"] * config["hidden_size"]


def test_every_shape_of_the_repository_can_be_made(build: Path) -> None:
    assert {"tiny-llama", "llama-3-8b", "llama-2-7b"} <= set(models.names())
    for name in models.names():
        made = models.materialize(name)
        assert made.is_random and made.name == name and made.path == build / "models" / name
        assert made.vocab_size == made.tokenizer.get_vocab_size() == models.shape(name).vocab_size


@given(ids=st.lists(st.integers(4, 4095), min_size=1, max_size=50))
def test_n_words_are_n_tokens(ids: list[int]) -> None:
    text = TOKENIZER.decode(ids)
    assert len(text.split(" ")) == len(ids)
    assert TOKENIZER.encode(text).ids == ids


def test_special_ids_and_unknown_words(build: Path) -> None:
    tokenizer = models.materialize("tiny-llama").tokenizer
    assert [tokenizer.token_to_id(token) for token in models.SPECIALS] == [0, 1, 2, 3]
    assert tokenizer.encode("w4 nonsense w4096").ids == [4, 0, 0]
    config = json.loads((build / "models" / "tiny-llama" / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == (False, False)


def test_generation_config_asks_for_no_sampling(build: Path) -> None:
    made = models.materialize("tiny-llama")
    config = json.loads((made.path / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "repetition_penalty"} & set(config)
    assert config["do_sample"] is False


def test_files_are_reused_until_the_shape_changes(
        tmp_path: Path, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tmp_path / "shapes"
    (shapes / "small").mkdir(parents=True)
    config = json.loads((paths.MODELS / "tiny-llama" / "config.json").read_text()) | {"vocab_size": 32}
    (shapes / "small" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(paths, "MODELS", shapes)

    made = models.materialize("small")
    before = {p.name: p.stat().st_mtime_ns for p in made.path.iterdir()}
    assert models.materialize("small") == made
    assert {p.name: p.stat().st_mtime_ns for p in made.path.iterdir()} == before

    (shapes / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    assert models.materialize("small").tokenizer.get_vocab_size() == 64


def test_a_file_that_went_missing_is_made_again(build: Path) -> None:
    made = models.materialize("tiny-llama")
    (made.path / "tokenizer.json").unlink()
    assert models.materialize("tiny-llama").tokenizer.encode("w9").ids == [9]


def test_two_at_once_leave_whole_files_and_no_others(build: Path) -> None:
    errors: list[BaseException] = []

    def make() -> None:
        try:
            for _ in range(5):
                path = models.materialize("tiny-llama").path
                (path / ".made").unlink(missing_ok=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = models.materialize("tiny-llama").path
    assert not errors
    assert {p.name for p in made.iterdir()} == {
        ".made", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_a_folder_with_weights_is_passed_through(weights: Path) -> None:
    made = models.materialize(str(weights))
    assert (made.path, made.name, made.vocab_size, made.is_random) == (weights, "my-model", 1000, False)


def test_a_relative_folder_counts_from_the_root(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ROOT", weights.parent)
    monkeypatch.chdir("/")
    assert models.materialize("./my-model").path == weights


def test_a_hugging_face_id_is_passed_through(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_download", lambda model, file: str(weights / file))
    made = models.materialize("some-org/Some-Model.1B")
    assert (str(made.path), made.name, made.vocab_size, made.is_random) == (
        "some-org/Some-Model.1B", "some-org/Some-Model.1B", 1000, False)


def test_an_id_that_cannot_be_fetched_is_one_line(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"^model no-such-org/no-such-model: .*local folder$"):
        models.materialize("no-such-org/no-such-model")


@pytest.mark.parametrize("name", ["tiny-lama", "./gone", "/gone/for/good", "a/b/c", "~/gone"])
def test_a_missing_model_names_itself_and_the_mend(name: str, build: Path) -> None:
    with pytest.raises(UsageError) as caught:
        models.materialize(name)
    message = str(caught.value)
    assert message.startswith(f"model {name}: ") and "tiny-llama" in message and "\n" not in message


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def empty_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(("damage", "says"), [
    (remove_weights, "no weights"), (break_config, "not readable as JSON"), (remove_config, "holds no config.json"),
    (empty_config, "no vocab_size")])
def test_an_incomplete_folder_is_one_line(damage, says: str, weights: Path) -> None:
    damage(weights)
    with pytest.raises(UsageError) as caught:
        models.materialize(str(weights))
    assert str(weights) in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_says_how_to_get_one(weights: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json in it; save one there"):
        _ = models.materialize(str(weights)).tokenizer
    (weights / "tokenizer.json").write_text("[]")
    with pytest.raises(UsageError, match="not a tokenizer"):
        _ = models.materialize(str(weights)).tokenizer


@pytest.mark.parametrize(("change", "says"), [
    ({"vocab_size": 4}, "leaves no word"), ({"torch_dtype": "int3"}, "int3 is not one of"),
    ({"hidden_size": None}, "hidden_size")])
def test_a_bad_shape_names_its_file(
        change: dict, says: str, tmp_path: Path, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((paths.MODELS / "tiny-llama" / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    with pytest.raises(UsageError) as caught:
        models.materialize("bad")
    assert str(tmp_path / "bad" / "config.json") in str(caught.value) and says in str(caught.value)


def test_a_full_disk_is_one_line(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_write", full)
    with pytest.raises(UsageError, match=r"No space left on device.*BATCHLAB_BUILD"):
        models.materialize("tiny-llama")
