"""Measure one cell on a machine, simulate the rest: what a recorded cell shows of its own host and card.

The fitted constants are means over a few hosts. Another host launches kernels faster or slower, another card of the
kind runs the same operators faster or slower; one cell of vLLM V1 whose iterations were recorded one by one shows by
how much. What it does not show stays as it was fitted.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from batchlab.errors import UsageError
from batchlab.sim.api import simulate
from batchlab.sim.fitted import fitted_constants
from batchlab.sim.host import SHOWN, HostOverheads, overheads_of
from batchlab.sim.measured import measured_cell, shown_launch, simulated_engine
from batchlab.store import Recorded

ENGINE = "vllm-v1"  # whose iterations show launches, because it plans ahead
HELD = 1.01  # times its full speed: an iteration that takes longer is held by the power limit


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine as one of its cells shows it."""

    cell: str
    host: HostOverheads
    card: float  # times as long as the tables say
    shown: tuple[str, ...]  # which of launch_us, pieces_us, eager_us, message_us, card the cell shows

    def constants(self) -> dict[str, Any]:
        """Arguments of `simulate`, beside the power limit, which no cell shows."""
        return {"host": self.host, "card_factor": self.card}

    def provenance(self) -> dict[str, Any]:
        """cell, shown (as read off it) and kept (as fitted), each name with its value."""
        known = {name: us for name, us in asdict(self.host).items() if us} | {"card": self.card}
        return {
            "cell": self.cell,
            "shown": {name: round(value, 4) for name, value in known.items() if name in self.shown},
            "kept": {name: round(value, 4) for name, value in known.items() if name not in self.shown},
        }


def calibrate(recorded: Recorded) -> Calibration:
    """What `recorded` shows of its machine: the launches (`sim.host.launch_times`), the median time of a first token
    from the engine to the client, and how much longer than simulated its decodes take the card (`card_factor`).

    Raises UsageError for an engine other than vLLM V1, and for a cell whose iterations were not recorded in process.
    """
    cell = recorded.meta["cell"]
    if simulated_engine(cell["engine"], cell["engine_version"]) != ENGINE:
        raise UsageError(
            f"cell {recorded.id} is of {cell['engine']} {cell['engine_version']}: only vLLM V1's iterations show a host"
        )
    if cell["transport"] != "inprocess":
        raise UsageError(
            f"cell {recorded.id} was measured over {cell['transport']}: name one in process, whose iterations were "
            "recorded one by one"
        )
    options = cell["engine_options"]
    as_run = {"quantization": options.get("quantization"), "tp": options.get("tensor_parallel_size", 1)}
    fitted = fitted_constants(ENGINE, cell["hardware"], as_run["quantization"])
    host, power = fitted.get("host", HostOverheads()), fitted.get("power")
    made, launch = measured_cell(recorded, **as_run), shown_launch(recorded)
    known = overheads_of(launch, host)
    if made.message_us is not None:
        known["message_us"] = max(made.message_us - host.stream_us * (made.running or 0.0), 0.0)
    host = replace(host, **known)
    limited, free = (simulate(**made.call, host=host, power=p).iterations for p in (power, None))
    card = card_factor(recorded.iterations, limited, free if power else limited, host)
    shown = (*known, *(["card"] if card else []))
    return Calibration(recorded.id, host, card or 1.0, shown)


def card_factor(measured: pa.Table, limited: pa.Table, free: pa.Table, host: HostOverheads) -> float | None:
    """How much longer the card takes for decodes than simulated, without the host's share. None where fewer than SHOWN
    iterations compare.

    `limited` and `free` are simulations of the same cell, with the power limit and without: what the limit holds back
    says nothing of the operators. All are tables of records.ITERATIONS.
    """
    held, full = _median_us(limited), _median_us(free)
    full = full.reindex(held.index)
    return _ratio(measured, held[held <= HELD * full], host)


def decodes_ratio(measured: pa.Table, simulated: pa.Table) -> float | None:
    """The same of whole iterations, at the power limit too."""
    return _ratio(measured, _median_us(simulated), HostOverheads())


def _ratio(measured: pa.Table, simulated_us: pd.Series, host: HostOverheads) -> float | None:
    """Median over measured iterations of decodes, each beside the simulated ones with as many."""
    took = _decodes(measured)
    mine = took[took["decodes"].isin(simulated_us.index)]
    if len(mine) < SHOWN:
        return None
    host_us = host.step_us + host.token_us * mine["decodes"].to_numpy()
    expected_us = simulated_us[mine["decodes"]].to_numpy()
    return float(np.median((mine["took_us"].to_numpy() - host_us) / (expected_us - host_us)))


def _median_us(iterations: pa.Table) -> pd.Series:
    """By number of decodes, where SHOWN iterations have as many."""
    each = _decodes(iterations).groupby("decodes")["took_us"].agg(["median", "size"])
    return each.loc[each["size"] >= SHOWN, "median"]


def _decodes(iterations: pa.Table) -> pd.DataFrame:
    """decodes and took_us of the iterations of decodes alone that follow two such."""
    columns = ("output_s", "prefill_tokens", "decode_tokens")
    output, prompts, decodes = (iterations[name].to_numpy() for name in columns)
    alone = prompts == 0
    among = alone[2:] & alone[1:-1] & alone[:-2] if len(alone) > 2 else np.empty(0, bool)
    took_us = 1e6 * np.diff(output)[1:]
    return pd.DataFrame({"decodes": decodes[2:][among], "took_us": took_us[among]})
