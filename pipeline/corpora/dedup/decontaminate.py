"""Examples of train that share words with what a model is evaluated on.

An example is contaminated if any run of 13 words stands in an evaluation set too (the rule of GPT-3:
Brown et al. 2020, appendix C). A shorter text counts as a whole: it is contaminated if a text of the set
is the same, word for word. The hashes of the sets' n-grams are one sorted array, which each node of
the cluster holds once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import executors, shards, storage
from pipeline.arrays import Bools, Ints
from pipeline.artifact import MANIFEST, Artifact, Draft, open_artifact
from pipeline.config import BadInput, require
from pipeline.corpora import buckets, raw
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.examples import (
    COMPARED,
    DROPS,
    Plan,
    file_drops,
    read_pieces,
    sides,
)
from pipeline.corpora.dedup.hashing import Hashes, Tokens
from pipeline.corpora.schema import Split
from pipeline.executors import Shared
from pipeline.records import TaskRecord

_HELD_OUT: tuple[Split, ...] = ("valid", "test")
_LINES = 10_000
_GRAMS = pa.schema(
    [
        ("gram", pa.uint64()),
        ("set", pa.int32()),
        ("group", pa.uint64()),
        ("id", pa.dictionary(pa.int32(), pa.string())),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What examples of train may share with an evaluation set."""

    own_splits: bool = True
    """The corpus's own valid and test splits are evaluation sets too."""
    text: Literal["example", "response"] = "example"
    """What is looked at, here and there: all turns and the response, or the response."""
    ngram_words: int = 13
    """Words in a run that must not be in an evaluation set."""
    min_words: int = 8
    """Shorter texts are compared whole, if they have as many words as this."""
    boilerplate_groups: int = 0
    """Runs in more groups (dialogues, threads, articles, lines) of the evaluation sets than this are
    boilerplate and don't count; 0: all count."""

    def __post_init__(self) -> None:
        require(self.ngram_words >= 1, "decontaminate.ngram_words", self.ngram_words, ">= 1")
        require(1 <= self.min_words <= self.ngram_words, "decontaminate.min_words", self.min_words,
                "1 to decontaminate.ngram_words")  # fmt: skip
        require(self.boilerplate_groups >= 0, "decontaminate.boilerplate_groups",
                self.boilerplate_groups, ">= 0")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NgramsRecord(TaskRecord):
    """A file of an evaluation set, or all of them."""

    ngrams: int
    """How many it has, each once."""


@dataclass(frozen=True)
class EvaluationSet:
    """Texts that train must not share."""

    name: str
    """As drop reasons say it."""
    files: tuple[str, ...]
    uri: str = ""
    """"": the corpus's own split."""


def own_sets(corpus: Artifact) -> list[EvaluationSet]:
    """The valid and the test split of a corpus, as far as it has them."""
    files = {split: tuple(corpus.files(f"{split}/", ".parquet")) for split in _HELD_OUT}
    return [EvaluationSet(split, found) for split, found in files.items() if found]


def open_set(uri: str) -> tuple[EvaluationSet, Artifact | dict[str, Any]]:
    """The set at a URI, and what a manifest says of it: a corpus's valid and test, or all texts of files.

    Raises BadInput for a URI that is not there, and for a corpus with train alone.
    """
    uri = uri.rstrip("/")
    if storage.exists(storage.join(uri, MANIFEST)):
        corpus = open_artifact(uri, "corpus")
        files = [file for split in own_sets(corpus) for file in split.files]
        if not files:
            raise BadInput(f"--evaluation {uri}: a corpus without a valid or test split; "
                           f"{storage.join(uri, 'train')} would be all its examples")  # fmt: skip
        return EvaluationSet(storage.name_of(uri), tuple(files), uri), corpus
    files = storage.expand([uri], "evaluation")
    reference = {"uri": uri, "kind": "raw", "fingerprint": storage.raw_fingerprint(files)}
    return EvaluationSet(storage.name_of(uri), tuple(files), uri), reference


@dataclass(frozen=True)
class Index:
    """All n-grams of the evaluation sets."""

    grams: Hashes
    """Sorted, each once."""
    sets: Ints
    """The first set that has it."""
    ids: pa.Array
    """An example of that set that has it."""
    names: tuple[str, ...]
    """Of the sets."""
    filter: Bools
    """Whether any n-gram begins with these bits: spares 9 of 10 texts' words the search for them."""

    @classmethod
    def of(cls, grams: Hashes, sets: Ints, ids: pa.Array, names: Iterable[str]) -> Index:
        filled = np.zeros(1 << (4 * len(grams)).bit_length(), bool)  # 4 to 8 places for each
        filled[_slots(grams, filled)] = True
        return cls(grams, sets, ids, tuple(names), filled)

    def contaminated(self, tokens: Tokens, options: Options) -> tuple[Ints, pa.Array, pa.Array]:
        """(texts that share an n-gram, why each is dropped, the id of the example that has it)"""
        n = options.ngram_words
        grams = hashing.ngrams(tokens, n, shortest=options.min_words)
        hits = np.flatnonzero(self.filter[_slots(grams.hashes, self.filter)])
        place = np.minimum(np.searchsorted(self.grams, grams.hashes[hits]), len(self.grams) - 1)
        found = self.grams[place] == grams.hashes[hits]
        hits, place = hits[found], place[found]
        text = np.searchsorted(grams.offsets, hits, side="right") - 1
        order = np.lexsort((self.sets[place], text))
        texts, first = np.unique(text[order], return_index=True)
        place = place[order[first]]
        reasons = [
            f"{n} words of {self.names[number]}" if words >= n else f"text of {self.names[number]}"
            for number, words in zip(self.sets[place], tokens.counts[texts], strict=True)
        ]
        return texts, pa.array(reasons, pa.string()), self.ids.take(pa.array(place))


def drop(draft: Draft, plan: Plan, index: Index, options: Options) -> list[TaskRecord]:
    """Files the drops of the tasks "contaminated-…"; returns their records."""
    shared = executors.share(index)
    work = functools.partial(_look_up, plan=plan, index=shared, options=options)
    return shards.run_tasks(
        draft, plan.tasks("contaminated", "train"), work, "contaminated", TaskRecord
    )


def _look_up(
    draft: Draft, task: str, number: int, plan: Plan, index: Shared[Index], options: Options
) -> TaskRecord:
    found = index.get()
    tables = [DROPS.empty_table()]
    for numbers, rows in read_pieces(plan.shards[number].uri, COMPARED):
        texts, reasons, match = found.contaminated(looked_at(rows, options), options)
        tables.append(pa.table([numbers[texts], reasons, match], schema=DROPS))
    file_drops(draft, task, pa.concat_tables(tables))
    return TaskRecord()


def build_index(draft: Draft, sets: list[EvaluationSet], options: Options) -> Index | None:
    """The n-grams of all sets; None where there are none.

    Raises BadInput for a file without texts, and a set (other than the corpus's own) without n-grams.
    """
    files = [(uri, number) for number, one in enumerate(sets) for uri in one.files]
    tasks = {f"evaluation-{number:05d}": number for number in range(len(files))}
    collect = functools.partial(_collect, files=files, options=options)
    records = shards.run_tasks(draft, tasks, collect, "evaluation sets: n-grams", NgramsRecord)
    for number, one in enumerate(sets):
        of_set = [r.ngrams for r, (_, its) in zip(records, files, strict=True) if its == number]
        if one.uri and not sum(of_set):
            raise BadInput(
                f"--evaluation {one.uri}: no text of decontaminate.min_words {options.min_words} or more"
            )
    merge = functools.partial(_merge, parts=list(tasks), options=options)
    label = "evaluation sets: index"
    shards.run_tasks(draft, {"evaluation-index": 0}, merge, label, NgramsRecord)
    rows = buckets.read(draft, ["evaluation-index"], 0, _GRAMS)
    if not rows.num_rows:
        return None
    names = [one.name for one in sets]
    shown = (one.name if names.count(one.name) == 1 else one.uri or one.name for one in sets)
    grams, numbers = rows["gram"].to_numpy(), rows["set"].to_numpy()
    return Index.of(grams, numbers, rows["id"].chunk(0), shown)


def looked_at(rows: pa.Table, options: Options) -> Tokens:
    """The words of each example."""
    return functools.reduce(hashing.beside, sides(rows, options.text, hashing.words))


def _collect(
    draft: Draft, task: str, number: int, files: list[tuple[str, int]], options: Options
) -> NgramsRecord:
    uri, which = files[number]
    tables = [_GRAMS.empty_table()]
    for ids, groups, words in _read(uri, options):
        grams = hashing.ngrams(words, options.ngram_words, shortest=options.min_words)
        text = np.repeat(np.arange(len(ids)), grams.counts)
        columns = [
            grams.hashes,
            np.full(len(text), which, np.int32),
            groups[text],
            pa.DictionaryArray.from_arrays(pa.array(text, pa.int32()), ids),
        ]
        tables.append(pa.table(columns, schema=_GRAMS))
    rows = _each_once(pa.concat_tables(tables).combine_chunks())
    buckets.write(draft, task, rows)
    return NgramsRecord(ngrams=rows.num_rows)


def _merge(
    draft: Draft, task: str, _number: int, parts: list[str], options: Options
) -> NgramsRecord:
    rows = _each_once(buckets.read(draft, parts, 0, _GRAMS))
    grams = rows["gram"].to_numpy()
    _, starts, groups = np.unique(grams, return_index=True, return_counts=True)
    first = np.lexsort((rows["set"].to_numpy(), grams))[starts]
    if options.boilerplate_groups:
        first = first[groups <= options.boilerplate_groups]
    rows = rows.take(pa.array(first))
    buckets.write(draft, task, rows)
    return NgramsRecord(ngrams=rows.num_rows)


def _slots(hashes: Hashes, table: Bools) -> Ints:
    """The place in a table of 2^b that the first b bits of each hash name."""
    return (hashes >> np.uint64(65 - len(table).bit_length())).astype(np.int64)


def _each_once(rows: pa.Table) -> pa.Table:
    """The first row of each n-gram in each group, by n-gram."""
    places = hashing.first_of_each(rows["gram"].to_numpy(), rows["group"].to_numpy())
    return rows.take(pa.array(places)).combine_chunks()


def _read(uri: str, options: Options) -> Iterator[tuple[pa.Array, Hashes, Tokens]]:
    """(ids, hashes of groups, words) of the texts of a file, some at a time."""
    if not uri.endswith(".parquet"):
        lines = raw.read_lines(uri, raw.Reading())
        while some := list(itertools.islice(lines, _LINES)):
            ids = _ids(uri, (number for number, _ in some))
            yield ids, hashing.strings(ids), hashing.words(pa.array([text for _, text in some]))
        return
    texts, others = _columns(uri, options)
    for numbers, rows in read_pieces(uri, texts + others):
        ids = rows["example_id"].chunk(0) if "example_id" in others else _ids(uri, numbers + 1)
        groups = hashing.strings(rows["group_id"].chunk(0) if "group_id" in others else ids)
        words = (
            hashing.words(rows["text"].chunk(0)) if texts == ["text"] else looked_at(rows, options)
        )
        yield ids, groups, words


def _columns(uri: str, options: Options) -> tuple[list[str], list[str]]:
    """(the columns with texts, those with names) of a Parquet file."""
    with storage.open_input(uri) as stream:
        try:
            schema = pq.ParquetFile(stream).schema_arrow
        except pa.ArrowInvalid as error:
            raise BadInput(f"{uri}: no Parquet file ({error})") from None

    def holds(name: str) -> bool:
        if name not in schema.names:
            return False
        wanted = pa.list_(pa.string()) if name == "context" else pa.string()
        return bool(schema.field(name).type == wanted)

    examples = ["response"] if options.text == "response" else ["context", "response"]
    texts = next((t for t in (examples, ["text"]) if all(map(holds, t))), None)
    if texts is None:
        raise BadInput(f"{uri}: no texts; needed: the columns context (a list) and response, or text; "
                       f"there are: {', '.join(schema.names)}")  # fmt: skip
    return texts, [name for name in ("example_id", "group_id") if holds(name)]


def _ids(uri: str, numbers: Iterable[int]) -> pa.Array:
    """Names for texts that have none, by line or row, from 1."""
    return pa.array([f"{storage.name_of(uri)}:{number}" for number in numbers], pa.string())
