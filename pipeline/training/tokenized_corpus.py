"""A corpus as token ids. It is written once, and pre-training reads it in every epoch.

    train/….parquet      columns `context` and `response`, list<uint16> (uint32 for a vocabulary of more
    valid/….parquet      than 65,535 entries), ids without special tokens, in the corpus' order of rows
    token_counts.npy     int64 [vocabulary]: how often each token occurs in train, both columns
    tokenizer/           the tokenizer itself: the artifact is all that pre-training reads
    manifest.json        `vocabulary` has the facts of the tokenizer that a trainer needs

Each shard of the corpus is one task. A corpus without a valid split gives a share of its groups.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import cost, storage
from pipeline.arrays import Ints
from pipeline.artifact import Artifact, file_entry, folder_entries, open_artifact
from pipeline.config import BadInput, digest
from pipeline.corpora.schema import Split, example_files
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord, sum_counts
from pipeline.engine.run import run_tasks
from pipeline.models.sources import External, Source
from pipeline.models.tokens import Tokenizer
from pipeline.storage import npy
from pipeline.training.settings import TOKENS, TokenizeConfig

_COUNTS = "token_counts.npy"
# The draft drops folders whose names begin with "_" when it is published.
_TASK_COUNTS = "_token_counts"
_TOKENIZER = "tokenizer"
_SPLITS: tuple[Split, ...] = ("train", "valid")
_COLUMNS = ["context", "response", "group_id"]
_ROWS_PER_GROUP = 16_384
_ROWS_AT_ONCE = 4096
_LARGEST_UINT16_VOCABULARY = 65_535


@dataclass(frozen=True)
class Vocabulary:
    """The facts of a tokenizer that a trainer needs."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    special: tuple[int, ...]
    """All special ids, those above and [UNK] among them."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, uri: str) -> Vocabulary:
        """Raises BadInput if the tokenizer has no mask token; `uri` is its URI."""
        mask = tokenizer.hf.mask_token_id
        if mask is None:
            raise BadInput(f"--tokenizer {uri}: the tokenizer has no mask_token")
        special = tuple(sorted(tokenizer.hf.all_special_ids))
        return cls(len(tokenizer), tokenizer.pad, tokenizer.cls, tokenizer.sep, int(mask), special)


@dataclass(frozen=True)
class TokenizedCorpus:
    """A published corpus of token ids."""

    artifact: Artifact

    @classmethod
    def open(cls, uri: str) -> TokenizedCorpus:
        """Raises BadInput if there is no such corpus at the URI."""
        return cls(open_artifact(uri, TOKENS))

    @property
    def vocabulary(self) -> Vocabulary:
        facts = dict(self.artifact.manifest["vocabulary"])
        return Vocabulary(**{**facts, "special": tuple(facts["special"])})

    @property
    def tokenizer_version(self) -> str:
        """Equal for equal tokenizers, wherever they came from."""
        return str(self.artifact.manifest["tokenizer_version"])

    @property
    def train_tokens(self) -> int:
        """Tokens of the train split; special tokens are not counted."""
        counts = self.artifact.counts
        return counts["tokens.train.context"] + counts["tokens.train.response"]

    @property
    def tokenize_config(self) -> TokenizeConfig:
        """The settings by which the texts were truncated."""
        return TokenizeConfig(**self.artifact.manifest["config"]["tokenize"])

    def tokenizer(self) -> Source:
        """The folder of the tokenizer."""
        uri = storage.join(self.artifact.uri, _TOKENIZER)
        return External(uri, self.artifact.fingerprint)

    def token_counts(self) -> Ints:
        """How often each token occurs in train: int64 [vocabulary]."""
        data = storage.read_bytes(storage.join(self.artifact.uri, _COUNTS))
        counts: Ints = npy.from_bytes(data)
        return counts


def require_train(corpus: Artifact) -> None:
    """Raises BadInput where the corpus has no train split."""
    if not corpus.paths("train/", ".parquet"):
        raise BadInput(f"--corpus {corpus.uri}: the corpus has no examples in train/")


def tokenize(
    draft: Draft, corpus: Artifact, source: Source, vocabulary: Vocabulary, config: TokenizeConfig
) -> dict[str, Any]:
    """Fills the draft; returns the arguments of its `publish`."""
    paths = [path for split in _SPLITS for path in corpus.paths(f"{split}/", ".parquet")]
    valid_share = 0.0 if corpus.paths("valid/", ".parquet") else config.valid_share
    tasks = {
        path.replace("/", "-").removesuffix(".parquet"): {
            "uri": storage.join(corpus.uri, path),
            "path": path,
        }
        for path in paths
    }

    def work(draft: Draft, task: str, shard: dict[str, str]) -> TaskRecord:
        return _tokenize_shard(draft, task, shard, source, vocabulary.size, config, valid_share)

    records = run_tasks(draft, tasks, work, "tokenize", TaskRecord)
    if not any(entry["path"].startswith("train/") for record in records for entry in record.files):
        raise BadInput(f"--corpus {corpus.uri}: no example of train/ has a context and a response")
    total_V = np.zeros(vocabulary.size, np.int64)
    for task in tasks:
        total_V += npy.from_bytes(storage.read_bytes(draft.path(_TASK_COUNTS, f"{task}.npy")))
    files = [entry for record in records for entry in record.files]
    files.append(draft.write_file(_COUNTS, npy.to_bytes(total_V)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / _TOKENIZER
        Tokenizer.load(source.local()).save(folder)
        storage.upload(folder.parent, draft.staging)
        files += folder_entries(folder.parent)
        version = digest([file_entry("", (folder / "tokenizer.json").read_bytes())["sha256"]])
    return {
        "files": files,
        "counts": sum_counts(record.counts for record in records),
        "dropped": sum_counts(record.dropped for record in records),
        "vocabulary": asdict(vocabulary),
        "tokenizer_version": version,
    }


def estimate(corpus: Artifact, source: Source, config: TokenizeConfig) -> cost.Estimate:
    """Estimates the cost: tokenizes some rows of the first shard in this process to measure a rate."""
    entries = example_files(corpus, *_SPLITS)
    tokenizer = _load(source.local())
    with storage.open_input(storage.join(corpus.uri, entries[0]["path"])) as stream:
        batch = next(pq.ParquetFile(stream).iter_batches(_ROWS_AT_ONCE, columns=_COLUMNS))
    began = time.process_time()  # of all threads
    _tokenize_rows(batch, tokenizer, config, pa.uint32(), Counter())
    seconds = time.process_time() - began
    rows, sizes = sum(entry["rows"] for entry in entries), [entry["bytes"] for entry in entries]
    return cost.Estimate(
        input_files=len(sizes),
        input_bytes=sum(sizes),
        rows=rows,
        tasks=len(sizes),
        requests=cost.reads(sizes) + 3 * len(sizes),
        cpu_hours=seconds / len(batch) * rows / 3600,
        basis=f"{len(batch):,} rows, measured here",
    )


def is_held_out(group_id: str, share: float) -> bool:
    """Whether a group of train is for validation.

    The hash is another one than that of the corpus' own splits, which left a part of its values to train.
    """
    value = hashlib.md5(b"valid " + group_id.encode(), usedforsecurity=False).digest()[:8]
    return int.from_bytes(value, "big") < share * 2**64


def _tokenize_shard(
    draft: Draft,
    task: str,
    shard: dict[str, str],
    source: Source,
    vocabulary_size: int,
    config: TokenizeConfig,
    valid_share: float,
) -> TaskRecord:
    """`valid_share`: above 0 for shards of train alone."""
    tokenizer = _load(source.local())
    split, _, file = shard["path"].partition("/")
    kind = pa.uint16() if vocabulary_size <= _LARGEST_UINT16_VOCABULARY else pa.uint32()
    tables: dict[str, list[pa.Table]] = {"train": [], "valid": []}
    dropped: Counter[str] = Counter()
    with storage.open_input(shard["uri"]) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(_ROWS_AT_ONCE, columns=_COLUMNS):
            table, groups = _tokenize_rows(batch, tokenizer, config, kind, dropped)
            valid_N = pa.array([is_held_out(group, valid_share) for group in groups], pa.bool_())
            tables["valid"].append(table.filter(valid_N))
            tables[split].append(table.filter(pc.invert(valid_N)))
    counts: Counter[str] = Counter()
    files = []
    count_V = np.zeros(vocabulary_size, np.int64)
    for name, parts in tables.items():
        table = pa.concat_tables(parts) if parts else None
        if table is None or not table.num_rows:
            continue
        path = f"{name}/{file}"
        files.append(draft.write_table(path, table, rows_per_group=_ROWS_PER_GROUP))
        counts["examples"] += table.num_rows
        counts[f"examples.{name}"] += table.num_rows
        for column in ("context", "response"):
            ids_N = table[column].combine_chunks().flatten().to_numpy()
            counts[f"tokens.{name}.{column}"] += len(ids_N)
            if name == "train":
                count_V += np.bincount(ids_N, minlength=vocabulary_size)
    storage.write_bytes(draft.path(_TASK_COUNTS, f"{task}.npy"), npy.to_bytes(count_V))
    return TaskRecord(files=files, counts=dict(counts), dropped=dict(dropped))


def _tokenize_rows(
    batch: pa.RecordBatch,
    tokenizer: Tokenizer,
    config: TokenizeConfig,
    kind: pa.DataType,
    dropped: Counter[str],
) -> tuple[pa.Table, list[str]]:
    """(rows that have tokens on both sides, their groups)"""
    # Ranking cuts a context and a response in the same two functions; their special tokens go.
    contexts = tokenizer.contexts(batch["context"].to_pylist(), config.max_context_tokens + 2)
    responses = tokenizer.candidates(batch["response"].to_pylist(), config.max_response_tokens + 2)
    pairs, groups = list[tuple[list[int], list[int]]](), list[str]()
    for context, response, group in zip(
        contexts, responses, batch["group_id"].to_pylist(), strict=True
    ):
        if len(context) == 2 or len(response) == 2:
            dropped["empty context" if len(context) == 2 else "empty response"] += 1
            continue
        pairs.append((context[1:-1], response[1:-1]))
        groups.append(group)
    columns = {
        "context": pa.array([context for context, _ in pairs], pa.list_(kind)),
        "response": pa.array([response for _, response in pairs], pa.list_(kind)),
    }
    return pa.table(columns), groups


@functools.lru_cache(maxsize=2)
def _load(folder: Path) -> Tokenizer:
    """Once for all tasks of a process."""
    return Tokenizer.load(folder)
