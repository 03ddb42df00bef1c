"""Checks of printed values against one another."""

import math

import pandas as pd

from batchlab.audit.bounds import Found, Row, found

SAME_RUN = (
    "input_len",
    "output_len",
    "max_batch_size",
    "max_num_tokens",
    "request_rate_req_s",
    "num_requests",
    "dataset",
)
RATIO_SLACK = 0.006  # of a printed ratio beside its last digit's rounding


def two_throughputs(row: Row, _: pd.DataFrame) -> Found:
    """Tokens a second are requests a second times their length."""
    tokens, length = row.get("output_throughput_tok_s"), row.get("output_len")
    requests = row.get("request_throughput_req_s")
    bound = requests * length
    if math.isnan(tokens * bound) or abs(tokens / bound - 1) <= row.tolerance:
        return None
    told = f"{tokens:,.0f} tok/s beside {requests:g} req/s of {length:g} tokens, which are {bound:,.0f} tok/s"
    return found("output_throughput_tok_s", tokens, bound, told, low=tokens < bound)


def ratio(row: Row, table: pd.DataFrame) -> Found:
    """A printed ratio against the two values that it is of."""
    over = row.values.get("ratio_over")
    if not isinstance(over, str):
        return None
    for column in ("output_throughput_tok_s", "request_throughput_req_s", "tpot_mean_ms", "ttft_mean_ms"):
        printed, value = row.get(f"{column}_ratio"), row.get(column)
        base = _other(row, table, over, column)
        if math.isnan(printed * value * base):
            continue
        true = value / base
        if abs(printed - true) > _rounding(printed) + RATIO_SLACK * true:
            told = f"{column}: {value:g} over {base:g} is {true:.3g}, not {printed:g}"
            return found(f"{column}_ratio", printed, true, told, low=printed < true)
    return None


def _rounding(value: float) -> float:
    """Half a unit of the last digit that was printed."""
    digits = f"{value:g}".partition(".")[2]
    return 0.5 * 10 ** -len(digits)


def _other(row: Row, table: pd.DataFrame, over: str, column: str) -> float:
    """The value of the row that `over` names (an engine or a setting) and that is otherwise of the same run."""
    same = pd.Series(True, index=table.index)
    for name in SAME_RUN:
        if name in table:
            mine = row.values.get(name)
            known = mine is not None and not (isinstance(mine, float) and math.isnan(mine))
            same &= (table[name] == mine) if known else table[name].isna()
    named = pd.Series(False, index=table.index)
    for name in ("engine", "setting"):
        if name in table:
            named |= table[name] == over
    values = table.loc[same & named, column] if column in table else pd.Series(dtype=float)
    return float(values.iloc[0]) if len(values) else math.nan


def stated_limit(row: Row, table: pd.DataFrame) -> Found:
    """What the text reads off its own table as the most under a limit. Told once an engine, at the row that it is."""
    for metric, limit, axis, stated in (
        ("tpot_mean_ms", "tpot_limit_ms", "max_batch_size", "stated_max_batch_size"),
        ("ttft_mean_ms", "ttft_limit_ms", "request_rate_req_s", "stated_request_rate_req_s"),
    ):
        said, most, here = row.get(stated), row.get(limit), row.get(axis)
        if math.isnan(said * most) or axis not in table or metric not in table:
            continue
        mine = table[table["engine"] == row.values["engine"]] if "engine" in table else table
        under = mine.loc[mine[metric] <= most, axis]
        true = float(under.max()) if len(under) else 0.0
        if true and true != said and here == true:
            value = row.get(metric)
            told = f"the largest {axis} under {most:g} ms is {true:g} ({value:g} ms), not {said:g}"
            return found(stated, said, true, told, low=said < true)
    return None
