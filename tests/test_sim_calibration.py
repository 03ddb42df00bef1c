"""One cell tells its host and card: known times are found again, and the command simulates with them."""

import json
from dataclasses import replace

import pytest

from batchlab import records
from batchlab.cell import Cell
from batchlab.cli import main
from batchlab.errors import UsageError
from batchlab.sim import simulate
from batchlab.sim.calibration import calibrate
from batchlab.sim.fitted import fitted_constants
from batchlab.store import Store

pytest.importorskip("aiconfigurator_core")

CELL = Cell("vllm", "0.26.0", "llama-3-8b", "h200_sxm", "inprocess", 32, 8192, {"input_len": 768, "output_len": 60},
            60, 6.0, None, {}, 0)  # fmt: skip
FITTED = fitted_constants("vllm-v1", "h200_sxm")
TRUE = replace(FITTED["host"], eager_us=1200, message_us=2500)
SLOWER = 1.08  # the card, times
CALL = ["simulate", "--engine", "vllm-v1", "--hardware", "h200_sxm", "--model", "llama-3-8b", "--input-len", "768",
        "--output-len", "60", "--num-requests", "30", "--request-rate", "6", "--max-batch-size", "32",
        "--max-num-tokens", "8192", "--json"]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Records of cells "measured" on a host and card of known times."""
    made = Store(tmp_path_factory.mktemp("results") / "h200_sxm")
    requests = [(i / 6, 768, 60) for i in range(60)]
    limits = {"max_batch_size": 32, "max_num_tokens": 8192}
    for cell in (CELL, replace(CELL, transport="http"), replace(CELL, hardware="a100_sxm")):
        run = simulate(
            "vllm-v1",
            "h200_sxm",
            "llama-3-8b",
            requests,
            **limits,
            host=TRUE,
            power=FITTED["power"],
            card_factor=SLOWER,
        )
        made.save(cell, {"invalid_reasons": []}, run.requests, run.iterations.cast(records.ITERATIONS))
    return made


def test_known_times_are_found_again(store):
    found = calibrate(store.load(CELL.id))
    assert found.shown == ("eager_us", "message_us", "card")
    assert found.host.eager_us == pytest.approx(TRUE.eager_us, rel=0.03)
    assert found.host.message_us == pytest.approx(TRUE.message_us, rel=0.01)
    assert found.card == pytest.approx(SLOWER, rel=0.01)
    kept = ("step_us", "token_us", "launch_us", "pieces_us", "prompt_us")
    assert all(getattr(found.host, name) == getattr(TRUE, name) for name in kept)


def test_a_cell_that_shows_no_host_is_refused(store):
    with pytest.raises(UsageError, match="measured over http: name one in process"):
        calibrate(store.load(replace(CELL, transport="http").id))


def test_the_command_simulates_that_host_and_says_so(store, capsys):
    assert main([*CALL, "--host-of", str(store.path(CELL.id))]) == 0
    printed = capsys.readouterr()
    mine = json.loads(printed.out)
    told = mine["provenance"]["host_of"]
    assert told["cell"] == CELL.id and told["shown"]["card"] == pytest.approx(SLOWER, rel=0.01)
    assert mine["provenance"]["host_overheads"]["eager_us"] == pytest.approx(TRUE.eager_us, rel=0.03)
    assert f"eager_us, message_us, card read off cell {CELL.id}" in printed.err
    assert main(CALL) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert "host_of" not in fitted["provenance"] and mine["ttft_mean_ms"] > 1.2 * fitted["ttft_mean_ms"]


def test_a_beginning_of_an_id_is_enough_where_one_cell_begins_so(store, capsys, monkeypatch):
    monkeypatch.setattr("batchlab.paths.RESULTS", store.folder.parent)
    assert main([*CALL, "--host-of", CELL.id[:8]]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["host_of"]["cell"] == CELL.id
    assert main([*CALL, "--host-of", ""]) == 2
    assert "3 cells begin so" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "changes", "message"),
    [
        ("nowhere", {}, "there is no such cell"),
        (CELL.id, {"vllm-v1": "tgi"}, "only vllm-v1 has a host that cells show"),
        (replace(CELL, hardware="a100_sxm").id, {}, "is of a100_sxm, not of --hardware h200_sxm"),
        (CELL.id, {"--json": "--unfitted"}, "exclude each other"),
    ],
)
def test_a_cell_that_does_not_match_is_one_line(store, capsys, monkeypatch, named, changes, message):
    monkeypatch.setattr("batchlab.paths.RESULTS", store.folder.parent)
    assert main([*(changes.get(word, word) for word in CALL), "--host-of", named]) == 2
    err = capsys.readouterr().err
    assert message in err and err.strip().count("\n") == 0
