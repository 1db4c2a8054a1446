"""The threads of a search, and those that start after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pipeline.search.threads import in_parallel, one_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _threads(_: object = None) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("items", [1, 2, 5])
def test_a_block_has_one_core_also_after_others_were_set(items):
    for _ in range(2):
        assert in_parallel(_threads, range(items)) == [1] * items
        with one_thread():
            pass
    assert _threads() == 2


def test_blocks_within_a_block_wait_for_no_other_thread():
    inner = in_parallel(lambda _: in_parallel(_threads, range(3)), range(4))
    assert inner == [[1] * 3] * 4


def test_a_thread_that_starts_after_a_search_has_all_cores():
    in_parallel(_threads, range(4))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


def test_what_fails_on_one_core_leaves_all_cores():
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda number: 1 // number, [0])
    assert _threads() == 2
