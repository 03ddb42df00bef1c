"""The kernel's receive times on the monotonic clock."""

import struct

import numpy as np

from batchlab.client.clock import arrivals, offset_ns
from batchlab.client.worker import _lag_p99_ms

SECOND = 1_000_000_000


def stamp(ns):
    return struct.pack("qq", *divmod(ns, SECOND))


def test_stamps_move_by_the_offset_of_the_clocks():
    wall = 1_796_000_000 * SECOND
    got = arrivals([500, 900], [stamp(wall + 100), stamp(wall + 800)], -wall)
    assert got.tolist() == [100, 800]


def test_a_read_without_a_stamp_keeps_its_own_time():
    assert arrivals([500, 900], [b"", stamp(800)], 0).tolist() == [500, 800]
    assert arrivals([500, 900], [b"", b""], 0).tolist() == [500, 900]


def test_nothing_arrives_after_it_was_read_or_before_what_came_first():
    assert arrivals([500, 900], [stamp(700), stamp(400)], 0).tolist() == [500, 500]


def test_no_reads():
    assert arrivals([], [], 0).tolist() == []


def test_the_offset_is_the_same_each_time():
    assert abs(offset_ns() - offset_ns()) < 1_000_000


def test_loop_lag_counts_sockets_not_wakes():
    wakes = np.array([[1_000_000, 1]] * 50 + [[9_000_000, 950]])
    assert _lag_p99_ms(wakes) == 9.0
    assert _lag_p99_ms(np.array([[1_000_000, 999], [9_000_000, 1]])) == 1.0
    assert _lag_p99_ms(np.empty((0, 2), np.int64)) == 0.0
