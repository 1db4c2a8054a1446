"""Reddit comment dumps of any size, made up: input to measure and to test the pipeline with.

    <folder>/RC_2012-01.zst
    {"author":"Dento_ka12",…,"body":"The …","created_utc":1325376021,…,"id":"c00002k",
     "link_id":"t3_100004","parent_id":"t1_c00000q",…,"subreddit":"Menli","subreddit_id":"t5_2qh4","ups":3}

Comments stand in the order of time, threads interleaved, as in the public dumps; a thread that began
late in a month goes on in the next file. Each file is a task of its own that looks at no other one.
That works because ids are times: a month is cut into slots, as are its ids, and the threads that begin
in a month, their comments' slots and parents included, follow from the seed and the month's number.
The file of a month holds what these threads and those of the month before have in it.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import zstandard

from jobs.sample_data.dump_text import bodies, quantiles, vocabulary
from pipeline import progress, storage
from pipeline.arrays import Ints
from pipeline.config import BadInput, require, to_dict
from pipeline.engine import executors
from pipeline.engine.waiting import await_room

COMMENTS_PER_FILE = 2_000_000
_LEAST_PER_FILE = 100
_MOST_PER_FILE = 20_000_000  # some 5 GB of memory, by the 0.6 GB that 2 million take
_REQUEST = "_dump.json"  # the options of the dump; readers of the folder skip this file
_FIRST_YEAR = 2012
_FIRST_ID = 12 * 36**6  # "c000000"
_FIRST_LINK = 36**5  # "100000"
_SLOTS = 4  # of a month for each of its comments
_ROWS = 1 << 16  # lines made at once: 45 MB

# Threads: log-normal, median 2 comments, mean 10, the largest of 200,000 some 5,000.
_MEDIAN_THREAD = 2
_THREAD_SIGMA = 1.8
_LARGEST = 3  # threads that never end
_CHAINS = 0.01  # share of threads in which each comment answers the one before
_MEDIAN_DELAY = 1 / 200  # of a month: 3.6 hours after the submission
_DELAY_SIGMA = 1.5

_LEVEL = 3
_LEVEL_WINDOW_LOG = 21
_AUTHORS = 100_000
_SUBREDDITS = 2_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """A dump. The same options give the same bytes."""

    comments: int
    """Comments in all."""
    files: int = 0
    """Monthly files; 0: as many as make 2 million comments a file."""
    seed: int = 0
    """Another seed, other comments."""
    largest_thread_share: float = 0.01
    """Share of all comments in each of three threads that run through all files."""
    window_log: int = 31
    """The window that the frames ask of their reader, as a power of 2; 31, as in the public dumps."""

    def __post_init__(self) -> None:
        require(
            1 <= self.comments <= 2_000_000_000, "comments", self.comments, "1 to 2,000,000,000"
        )
        least = -(-self.comments // _MOST_PER_FILE)
        most = max(1, self.comments // _LEAST_PER_FILE)
        require(self.files == 0 or least <= self.files <= most, "files", self.files,
                f"{least:,} to {most:,}, or 0")  # fmt: skip
        require(self.seed >= 0, "seed", self.seed, ">= 0")
        require(0 <= self.largest_thread_share <= 0.2, "largest_thread_share",
                self.largest_thread_share, "0 to 0.2")  # fmt: skip
        require(_LEVEL_WINDOW_LOG <= self.window_log <= 31, "window_log", self.window_log,
                f"{_LEVEL_WINDOW_LOG} to 31")  # fmt: skip

    @property
    def months(self) -> int:
        return self.files or -(-self.comments // COMMENTS_PER_FILE)


def generate(options: Options, folder: str) -> int:
    """Writes the files that are not there yet, one task each; returns how many those were.

    Raises BadInput where the folder holds anything but files of the same dump.
    """
    dump_options = {**to_dict(options), "files": options.months}
    request = storage.join(folder, _REQUEST)
    if not storage.exists(request):
        if storage.is_occupied(folder):
            raise BadInput(f"--output {folder}: there are files here that are of no generated dump")
        storage.write_bytes(request, json.dumps(dump_options).encode())
    elif (present_options := json.loads(storage.read_bytes(request))) != dump_options:
        raise BadInput(f"--output {folder}: holds another generated dump ({present_options}); choose another "
                       "--output or remove it")  # fmt: skip
    files = [storage.join(folder, file_name(month)) for month in range(options.months)]
    missing = [month for month, file in enumerate(files) if not storage.exists(file)]

    def write(row: dict[str, Any]) -> dict[str, Any]:
        write_file(options, folder, row["item"])
        return row

    existing_count = len(files) - len(missing)
    with progress.bar("dump files", len(files), existing_count, unit="file") as bar:
        for _ in _write_months(write, missing):
            bar.update()
    return len(missing)


def _write_months(
    write: Callable[[dict[str, Any]], dict[str, Any]], months: list[int]
) -> Iterable[object]:
    """Writes the files of the months; yields an item after each."""
    if executors.current():
        return (write({"item": month}) for month in months)
    if not months:
        return ()
    import ray.data

    await_room(1)
    dataset = ray.data.from_items(months, override_num_blocks=len(months))
    return dataset.map(write).iter_rows()  # type: ignore[no-any-return]


def file_name(month: int) -> str:
    return f"RC_{_month_start(month):%Y-%m}.zst"


def write_file(options: Options, folder: str, month: int) -> None:
    """Writes the dump file of one month, atomically."""
    comments = _comments_of(options, month)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_LEVEL_WINDOW_LOG, write_checksum=1
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    frame = io.BytesIO()
    with compressor.stream_writer(frame, closefd=False) as stream:
        for start in range(0, len(comments.number), _ROWS):
            rng = np.random.default_rng([options.seed, month, 1, start])
            rows = _Comments(*(column[start : start + _ROWS] for column in comments))
            stream.write(_lines(rows, rng))
    # A frame may ask for more window than its matches need: byte 5 says 2^(10 + byte / 8). So the
    # writer needs 2 MiB where the reader must allow 2 GiB.
    view = frame.getbuffer()
    view[5] = (options.window_log - 10) << 3
    storage.write_bytes(storage.join(folder, file_name(month)), pa.py_buffer(view))


class _Comments(NamedTuple):
    """Arrays of equal length, in the order of time."""

    number: Ints
    """The id's number; the id is its base 36."""
    parent: Ints
    """The number of the comment that is answered; -1: it answers the submission."""
    link: Ints
    """The number of the submission."""
    created: Ints
    """Seconds since 1970."""


def _comments_of(options: Options, month: int) -> _Comments:
    """The comments in the file of a month."""
    per_month = -(-options.comments // options.months)
    ids = 2 * _SLOTS * per_month  # of a month
    first_id = _FIRST_ID + ids * month
    columns = _threads_of(options, month)
    if month < options.months - 1:
        columns = columns[:, columns[0] < first_id + ids]
    if month:
        earlier = _threads_of(options, month - 1)
        columns = np.concatenate([earlier[:, earlier[0] >= first_id], columns], axis=1)
        columns = columns[:, np.argsort(columns[0], kind="stable")]
    number, parent, link = columns
    start, end = (int(_month_start(m).timestamp()) for m in (month, month + 1))
    created = start + (number - first_id) * (end - start) // ids
    return _Comments(number, parent, link, created)


def _threads_of(options: Options, month: int) -> Ints:
    """`number`, `parent`, `link` [3, comments] of the threads that begin in a month, by number."""
    rng = np.random.default_rng([options.seed, month, 0])
    per_month = -(-options.comments // options.months)
    rows = options.comments * (month + 1) // options.months
    rows -= options.comments * month // options.months
    slots = _SLOTS * per_month

    # Each comment's thread: the largest ones first, then those of this month by their beginning.
    largest_size = int(rows * options.largest_thread_share)
    sizes = np.ceil(rng.lognormal(np.log(_MEDIAN_THREAD), _THREAD_SIGMA, rows)).astype(np.int64)
    sizes = np.concatenate([[largest_size] * _LARGEST, sizes])
    threads = int(np.searchsorted(np.cumsum(sizes), rows)) + 1
    thread = np.repeat(np.arange(threads), sizes[:threads])[:rows]
    starts = np.sort(rng.random(threads)) * slots
    delay = slots * rng.lognormal(np.log(_MEDIAN_DELAY), _DELAY_SIGMA, rows)
    delay = np.minimum(delay, slots - per_month)  # none is moved on to the month after the next
    slot = np.where(thread < _LARGEST, rng.random(rows) * slots, starts[thread] + delay)
    slot = slot.astype(np.int64) % (slots if month == options.months - 1 else 2 * slots)

    # Within a thread by time: a comment answers the submission or one of those before it.
    slot = np.sort(thread << 40 | slot) & (1 << 40) - 1
    first = np.searchsorted(thread, np.arange(threads))
    place = np.arange(rows) - first[thread]
    root_share = rng.beta(1, 1.5, threads)
    chain = (rng.random(threads) < _CHAINS) & (np.arange(threads) >= _LARGEST)
    parent_in_thread = np.where(
        chain[thread], place - 1, (place * np.cbrt(rng.random(rows))).astype(np.int64)
    )
    parent_place = first[thread] + np.minimum(parent_in_thread, place - 1)
    is_root = (place == 0) | ((rng.random(rows) < root_share[thread]) & ~chain[thread])

    # No two comments have the same slot, and those of one month before have the slots' other halves.
    order = np.argsort(slot, kind="stable")
    steps = np.arange(rows)
    slot[order] = np.maximum.accumulate(slot[order] - steps) + steps
    number = _FIRST_ID + 2 * (slots * month + slot) + month % 2
    parent = np.where(is_root, -1, number[np.where(is_root, 0, parent_place)])
    link = _FIRST_LINK + thread + np.where(thread < _LARGEST, 0, per_month * month)
    return np.stack([number, parent, link])[:, order]


def _lines(comments: _Comments, rng: np.random.Generator) -> pa.Buffer:
    """The comments as JSON lines."""
    rows = len(comments.number)
    names = _names()
    texts, deleted, by_bot = bodies(rng, rows)

    author = 2 + (_AUTHORS * rng.random(rows) ** 2).astype(np.int64)
    author = np.where(deleted, 0, np.where(by_bot, 1, author))
    spread = comments.link.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(48)
    place = names.subreddit_of[spread]
    subreddit = names.subreddits.take(pa.array(place))
    # A fifth of the authors have a flair; a comment in 35 was edited; one in 200 is a moderator's.
    flair = pa.array(np.where(author % 5, 0, author % len(names.flairs)))
    edit_time = comments.created + rng.integers(60, 90_000, rows)
    edited = pc.if_else(pa.array(rng.random(rows) < 0.028), _text(edit_time), "false")
    distinguished = pa.array((rng.random(rows) < 0.005).astype(np.int64))
    score = _text(np.rint(rng.standard_t(1.5, rows) * 2 + 1.5).clip(-500, 5000).astype(np.int64))
    number, link = _base36(comments.number, 7), _base36(comments.link, 6)
    name = pc.binary_join_element_wise("t1_", number, "")
    parent = pc.if_else(
        pa.array(comments.parent < 0),
        pc.binary_join_element_wise("t3_", link, ""),
        pc.binary_join_element_wise("t1_", _base36(comments.parent, 7), ""),
    )
    pieces = (
        '{"archived":true,"author":"', names.authors.take(pa.array(author)),
        '","author_flair_css_class":', names.flairs.take(flair),
        ',"author_flair_text":', names.flairs.take(flair),
        ',"body":"', texts,
        '","controversiality":', _text(rng.random(rows) < 0.03),
        ',"created_utc":', _text(comments.created),
        ',"distinguished":', pa.array(["null", '"moderator"']).take(distinguished),
        ',"downs":0,"edited":', edited,
        ',"gilded":', _text(rng.random(rows) < 0.002),
        ',"id":"', number,
        '","link_id":"t3_', link,
        '","name":"', name,
        '","parent_id":"', parent,
        '","permalink":"/r/', subreddit, "/comments/", link, "/_/", number,
        '/","retrieved_on":', _text(comments.created + 5_000_000),
        ',"score":', score,
        ',"score_hidden":false,"stickied":false,"subreddit":"', subreddit,
        '","subreddit_id":"t5_', _base36(36**3 * 2 + place, 4),
        '","ups":', score,
        "}\n",
    )  # fmt: skip
    lines = pc.binary_join_element_wise(*pieces, "")
    return lines.buffers()[2]


def _text(numbers: Any) -> pa.Array:
    return pa.array(numbers.astype(np.int64)).cast(pa.string())


def _base36(numbers: Ints, digits: int) -> pa.Array:
    """Each number as so many digits."""
    alphabet = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz", np.uint8)
    characters = np.empty((len(numbers), digits), np.uint8)
    for place in reversed(range(digits)):
        numbers, digit = np.divmod(numbers, 36)
        characters[:, place] = alphabet[digit]
    offsets = np.arange(len(characters) + 1, dtype=np.int32) * np.int32(digits)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(characters)]
    return pa.Array.from_buffers(pa.string(), len(characters), buffers)


class _Names(NamedTuple):
    authors: pa.Array
    subreddits: pa.Array
    subreddit_of: Ints
    flairs: pa.Array


@functools.cache
def _names() -> _Names:
    """Names that stay the same in all files; authors begin with the two that are nobody's name."""
    words = [word for word in vocabulary() if word.isascii() and word.isalpha()]
    rng = np.random.default_rng(2)
    word_numbers = rng.integers(200, 4000, (_AUTHORS, 2))
    authors = [
        f"{words[a].capitalize()}{'_' * (a % 2)}{words[b]}{number % 100 or ''}"[:20]
        for number, (a, b) in enumerate(word_numbers.tolist())
    ]
    return _Names(
        pa.array(["[deleted]", "AutoModerator", *authors]),
        pa.array([word.capitalize() for word in words[200 : 200 + _SUBREDDITS]]),
        quantiles(1 / np.arange(1, _SUBREDDITS + 1), 1 << 16),
        pa.array(["null", *(f'"{word}"' for word in words[300:350])]),
    )


def _month_start(month: int) -> datetime:
    return datetime(_FIRST_YEAR + month // 12, month % 12 + 1, 1, tzinfo=UTC)
