"""Which rows stand in which batch: each once an epoch, whatever the rank, wherever resumed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.training.data import PLACE, Batches, Cursor, Rows

WORLDS = (1, 2, 3)


class Lengths:
    """Items are (number of the row, its length), the number of words in its response."""

    columns = ("example_id", "response")

    def prepare(self, rows, generator):
        return [(int(row["example_id"][1:]), len(row["response"].split())) for row in rows]

    def collate(self, items):
        return items


def lengths(count):
    """From 1 to 13, not in order."""
    return [1 + 7 * number % 13 for number in range(count)]


@pytest.fixture(scope="module")
def corpora(tiny):
    """A corpus of so many rows, in files of 20 and row groups of 7."""
    made = {}

    def make(count):
        if count not in made:
            rows = [{"response": " ".join(["w1"] * length)} for length in lengths(count)]
            made[count] = tiny.corpus(rows, rows_per_file=20, rows_per_group=7)
        return made[count]

    return make


def rows_of(corpus, rank=0, world=1, seed=0):
    return Rows.of(corpus, "train", Lengths.columns, rank, world, seed)


def batches_of(corpus, rank=0, world=1, seed=0, *, examples, **settings):
    """With so many examples for each rank."""
    return Batches(rows_of(corpus, rank, world, seed), Lengths(), examples * world, **settings)


def take(batches, count, cursor=None):
    walk = batches.start([cursor] * batches.rows.world if cursor else ())
    try:
        return list(islice(walk, count))
    finally:
        walk.close()


def epoch_of(batches, epoch=0):
    """The items of an epoch's batches; the first batch of the next one ends it."""
    found = []
    walk = batches.start([Cursor(epoch)] * batches.rows.world)
    for items, cursor in walk:
        if cursor.epoch != epoch:
            break
        found.append(items)
    walk.close()
    return found


def numbers(batches):
    return [number for items in batches for number, _ in items]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_share_the_split_and_a_rows_place_is_its_number_in_it(corpora, world):
    """Whatever the order of the epoch: 50 rows in files of 20, row groups of 7."""
    columns, together = (*Lengths.columns, PLACE), []
    for rank in range(world):
        rows = Rows.of(corpora(50), "train", columns, rank, world, seed=0)
        assert len(rows) == 50 // world
        for start in range(0, len(rows), 9):
            table = rows.epoch(1).read(start, min(start + 9, len(rows)))
            assert table.column_names == [*columns]
            assert table["example_id"].to_pylist() == [f"e{n}" for n in table[PLACE].to_pylist()]
            together += table[PLACE].to_pylist()
    assert len(set(together)) == len(together) == 50 // world * world
    whole = Rows.of(corpora(50), "train", columns, 0, 1, seed=0)
    assert whole.in_order().read(3, 50)[PLACE].to_pylist() == list(range(3, 50))


@settings(max_examples=15)
@given(st.integers(0, 15), st.integers(1, 50), st.integers(1, 3))
def test_a_part_of_a_share_is_that_part_of_it(corpora, start, length, world):
    rows = rows_of(corpora(50), rank=world - 1, world=world)
    stop = min(start + length, len(rows))
    whole = rows.epoch(1).read(0, len(rows)).to_pylist()
    assert rows.epoch(1).read(start, stop).to_pylist() == whole[start:stop]


@pytest.mark.parametrize(("before", "after", "done"), [(1, 3, 7), (3, 1, 9), (2, 2, 3), (3, 2, 7)])
def test_with_other_workers_as_many_steps_of_an_epoch_are_left(corpora, before, after, done):
    """61 rows, 6 in a step; windows of 12 to 15 rows, whatever is a whole number of batches."""
    first = batches_of(corpora(61), 0, before, examples=6 // before, window_rows=15)
    _, cursor = take(first, done)[-1]
    second = batches_of(corpora(61), after - 1, after, examples=6 // after, window_rows=15)
    left = [at for _, at in take(second, 12, cursor) if at.epoch == 0]
    assert done + len(left) == second.steps_per_epoch == 10


def test_a_rest_that_workers_cannot_share_is_left_out_of_the_batch(corpora):
    """Of 64 rows in a step, 7 workers take 9 each. The run is as long as it was."""
    shares = [Batches(rows_of(corpora(300), rank, 7), Lengths(), 64) for rank in range(7)]
    assert {share.examples for share in shares} == {9}
    assert {share.steps_per_epoch for share in shares} == {300 // 64}
    read = [number for share in shares for number in numbers(epoch_of(share))]
    assert len(set(read)) == len(read) == 300 // 7 // 9 * 63


@pytest.mark.parametrize("window_rows", [5, 4096])
def test_an_epoch_sees_each_row_once_in_another_order(corpora, window_rows):
    epochs = [
        numbers(epoch_of(batches_of(corpora(50), window_rows=window_rows, examples=5), epoch))
        for epoch in (0, 1)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("world", "window_rows"), [(1, 12), (2, 4096), (3, 1)])
def test_every_rank_has_the_same_number_of_batches(corpora, world, window_rows):
    """61 rows: neither ranks nor batches divide them."""
    counts = set()
    for rank in range(world):
        batches = batches_of(corpora(61), rank, world, examples=4, window_rows=window_rows)
        epoch = epoch_of(batches)
        assert {len(items) for items in epoch} == {4}
        assert len(set(numbers(epoch))) == len(epoch) * 4
        counts |= {len(epoch), batches.steps_per_epoch}
    assert counts == {61 // world // 4}


def test_rows_left_over_by_an_epoch_are_not_always_the_longest(corpora):
    """Six of 50 rows in a batch: two are left over. Their lengths are 1 to 13."""
    left = set()
    for epoch in range(5):
        used = set(numbers(epoch_of(batches_of(corpora(50), examples=6), epoch)))
        assert len(used) == 48
        left |= set(range(50)) - used
    assert min(lengths(50)[number] for number in left) < 8


def test_batches_of_so_many_rows_are_drawn_whatever_their_length(corpora):
    """Rows of one length would be negatives of one kind."""
    for items in epoch_of(batches_of(corpora(130), examples=10)):
        lengths_of_batch = [length for _, length in items]
        assert max(lengths_of_batch) - min(lengths_of_batch) >= 3


def test_any_cursor_goes_on_with_the_same_batches(corpora):
    """Over more than two epochs."""
    batches = batches_of(corpora(50), rank=1, world=2, window_rows=9, examples=4)
    whole = take(batches, 30)
    assert whole[-1][1].epoch >= 2
    for place in range(0, 28, 3):
        cursor = whole[place][1]
        again = batches_of(corpora(50), rank=1, world=2, window_rows=9, examples=4)
        assert take(again, 2, cursor) == whole[place + 1 : place + 3]


def test_batches_follow_from_the_seed(corpora):
    runs = [batches_of(corpora(50), seed=seed, examples=5) for seed in (1, 1, 2)]
    first, same, other = (take(batches, 4) for batches in runs)
    assert first == same != other


def test_threads_may_read_the_same_files_at_once(corpora):
    epoch = rows_of(corpora(200)).epoch(0)
    whole = epoch.read(0, 200)
    with ThreadPoolExecutor(4) as threads:
        reads = threads.map(lambda start: epoch.read(start, start + 20), [*range(0, 180, 9)] * 10)
        for place, table in enumerate(reads):
            assert table.equals(whole.slice(9 * (place % 20), 20))


@pytest.mark.parametrize(("world", "examples", "allowed"), [(1, 51, 50), (3, 17, 48)])
def test_too_few_examples_for_one_batch_are_refused(corpora, world, examples, allowed):
    """With a batch that is allowed: a multiple of the workers."""
    message = (
        rf"too few for a batch of {examples} on each of {world} .*batch_examples of {allowed} at"
    )
    with pytest.raises(BadInput, match=message):
        batches_of(corpora(50), 0, world, examples=examples)
    assert batches_of(corpora(50), 0, world, examples=examples - 1).batch_examples == allowed


def test_one_example_is_no_batch_of_any_size(corpora):
    with pytest.raises(BadInput, match=r"has 1 examples.* allowed: 2 examples or more"):
        batches_of(corpora(1), examples=64)


def test_a_corpus_without_the_split_is_refused(tiny, corpora):
    with pytest.raises(BadInput, match="no examples in valid/"):
        Rows.of(corpora(50), "valid", Lengths.columns, 0, 1, 0)


class Broken(Lengths):
    def collate(self, items):
        raise RuntimeError("cannot collate")


def test_an_error_in_the_thread_reaches_the_loop(corpora):
    batches = Batches(rows_of(corpora(50)), Broken(), 5)
    with pytest.raises(RuntimeError, match="cannot collate"):
        next(batches.start())


def test_the_thread_ends_with_its_iterator(corpora):
    before = set(threading.enumerate())
    walk = batches_of(corpora(50), examples=5).start()
    next(walk)
    (thread,) = set(threading.enumerate()) - before
    walk.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
