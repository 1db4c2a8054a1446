"""The commands of the pages on corpora, rankers, pools and operation, run as written on small inputs.

Buckets (`s3://lake`) are folders here. Each section of a page starts in a new folder.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import embed_pool
from pipeline import tracking
from pipeline.artifact import open_artifact
from pipeline.retrieval.pools.embed import EmbedConfig
from pipeline.tasks import executors
from tests.helpers import Finished

ROOT = Path(__file__).parents[2]

_SMALL_TRAINING = (
    "--finetune.max-steps", 2, "--finetune.batch-examples", 8,
    "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32, "--loop.precision", "fp32",
    "--loop.validate-every-epochs", 0, "--resources.workers", 1, "--resources.gpu", "false",
    "--resources.cpus-per-worker", 1,
)  # fmt: skip
_SMALL_TAUGHT = ("--ranker.encoding-width", 16)  # as the tiny teacher
_SMALL: dict[str, tuple[object, ...]] = {
    "finetune": _SMALL_TRAINING,
    "generate_dump": ("--comments", 200),
}
"""Options that make a command small."""
_ELSEWHERE = ("submit", "benchmark")
"""Verbs that other tests run: test_submit.py in tests/cluster, test_benchmark_*.py."""


def commands_of(page: str) -> dict[str, list[list[str]]]:
    """The arguments of a page's jobs, by heading; buckets are relative folders."""
    sections: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (ROOT / page).read_text().replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif command := re.fullmatch(r" {4}python -m jobs\.(\w+ .*)", line):
            words = shlex.split(command[1].replace("s3://", ""), comments=True)
            if words[0] not in _ELSEWHERE:
                sections.setdefault(heading, []).append(words)
    return sections


def trains(commands: list[list[str]]) -> bool:
    """Whether a command starts workers, which take half a minute."""
    return any(words[0] == "finetune" and "--help" not in words for words in commands)


PAGES = (
    "pipeline/corpora/README.md",
    "pipeline/training/README.md",
    "pipeline/models/convert/README.md",
    "pipeline/retrieval/README.md",
    "OPERATING.md",
    "CLUSTER.md",
)
SECTIONS = [
    pytest.param(
        (page, heading),
        id=f"{page} {heading}",
        marks=[pytest.mark.long] if trains(commands) else [],
    )
    for page in PAGES
    for heading, commands in commands_of(page).items()
]


@pytest.fixture
def inputs(run_job_here, sample_files, reddit_corpus, tiny_ranker, tmp_path) -> dict[str, Path]:
    """What the paths of the pages name."""
    folder = tmp_path / "files"
    (folder / "chats").mkdir(parents=True)
    rows = "".join(f"question {n} ?,answer {n},t{n}\n" for n in range(20))
    (folder / "chats" / "part.csv").write_text(f"question,answer,thread\n{rows}")
    articles = [{"id": f"a{n}", "text": f"article {n}", "language": "en"} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(articles), folder / "articles.parquet")
    replies = [json.dumps({"id": f"r{n}", "text": f"reply {n}"}) for n in range(20)]
    (folder / "replies.jsonl").write_text("\n".join(replies))
    (folder / "convai2").mkdir()
    with_candidates = sample_files / "convai2" / "valid_self_original.sample.txt"
    for split in ("train", "valid"):
        shutil.copy(with_candidates, folder / "convai2" / f"{split}_self_original.txt")
    convai2 = folder / "corpora" / "convai2"
    options = ("--format", "convai2", "--input", folder / "convai2", "--output", convai2)
    assert run_job_here("prepare_corpus", *options).code == 0
    dumps = sample_files / "reddit_dump"
    rankers = {name: tiny_ranker(name).local() for name in ("bi", "poly", "cross")}
    published, subwords = folder / "published", folder / "subwords"
    options = ("--model", rankers["bi"], "--to", "sentence-transformers", "--output", published)
    assert run_job_here("convert_model", *options).code == 0
    options = ("--tokenizer.kind", "subwords", "--tokenizer.vocabulary", 300, "--output", subwords)
    assert run_job_here("train_tokenizer", "--corpus", reddit_corpus.uri, *options).code == 0
    return {
        "jobs": ROOT / "jobs",
        "models/all-MiniLM-L6-v2": published / "context",
        "tokenizers/subwords": subwords,
        "dumps/2015/RC_2011-01.zst": dumps / "RC_2011-01.zst",
        "RC_2015-01.zst": dumps / "RC_2011-01.zst",
        "RC_2015-02.zst": dumps / "RC_2011-02.bz2",
        "lake/dumps": dumps,
        "lake/raw/convai2": sample_files / "convai2",
        "chats": folder / "chats",
        "articles.parquet": folder / "articles.parquet",
        "replies.jsonl": folder / "replies.jsonl",
        "lake/exports": folder / "articles.parquet",
        "lake/reddit": Path(reddit_corpus.uri),
        "corpora/reddit": Path(reddit_corpus.uri),
        "lake/dstc7": convai2,
        "lake/test": convai2,
        "corpora/convai2": convai2,
        "corpora/ubuntu": convai2,
        "encoders/reddit": rankers["bi"] / "context_encoder",
        "rankers/convert": tiny_ranker("convert", earlier_turns=0).local(),
        "rankers/convert-multi": tiny_ranker("convert", seed=1).local(),
        "lake/rankers/poly": rankers["poly"],
        "lake/rankers/new": rankers["poly"],
        **{f"rankers/{name}": folder for name, folder in rankers.items()},
    }


@pytest.fixture
def home(inputs, tmp_path, monkeypatch) -> Callable[[list[list[str]]], Path]:
    """`home(commands)`: a new folder, the present one, where the inputs of the commands are. What one of them
    makes is not there."""

    def make(commands: list[list[str]]) -> Path:
        outputs = {
            after for words in commands for before, after in pairwise(words) if before == "--output"
        }
        folder = tmp_path / "home"
        for name, target in inputs.items():
            if name not in outputs:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(target)
        monkeypatch.chdir(folder)
        return folder

    return make


def make_pool(folder: Path, name: str, model: Path, articles: Path, *filters: str) -> None:
    """Two versions of a pool, of all articles but two and but one; no command makes them."""
    rows = pq.read_table(articles)
    for count in (len(rows) - 2, len(rows) - 1):
        pq.write_table(rows.slice(0, count), folder / "earlier.parquet")
        config = embed_pool.Config(
            model=str(model),
            candidates=(str(folder / "earlier.parquet"),),
            pools=str(folder),
            name=name,
            embed=EmbedConfig(filter_columns=filters),
        )
        with executors.in_this_process():
            embed_pool.run(config)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_commands_of_a_section_run(section, home, inputs, request, tracking_uri):
    page, heading = section
    commands = commands_of(page)[heading]
    run = request.getfixturevalue("run_job" if trains(commands) else "run_job_here")
    folder = home(commands)
    poly, articles = inputs["rankers/poly"], inputs["articles.parquet"]
    for pools in ("lake/pools", "pools"):
        (folder / pools).mkdir(parents=True, exist_ok=True)
    if page == "pipeline/retrieval/README.md":
        make_pool(folder / "lake" / "pools", "articles", poly, articles)
        make_pool(folder / "pools", "articles", poly, articles, "language")
    if page == "OPERATING.md":
        make_pool(folder / "lake" / "pools", "replies", poly, articles)
        shutil.copytree(
            poly, folder / "candidate"
        )  # as good as the champion, so it may be promoted
        for alias, model in (("champion", poly), ("candidate", folder / "candidate")):
            tracking.register("dialogue", open_artifact(str(model), "ranker"), alias)
    for verb, *arguments in commands:
        if "onnx" in arguments:
            pytest.importorskip("onnx")
        is_taught = any("convert_taught" in argument for argument in arguments)
        sizes = (*_SMALL.get(verb, ()), *(_SMALL_TAUGHT if is_taught else ()))
        if "--continue-from" in arguments:
            sizes = (*sizes, "--finetune.max-steps", 3)
        done: Finished = run(verb, *arguments, *sizes)
        assert done.code == 0, (verb, arguments, done.stderr[-2000:])
        if "--html" in arguments:
            assert (folder / "reddit.html").stat().st_size > 1000
        if "--output" in arguments and "--dry-run" not in arguments:
            assert (folder / arguments[arguments.index("--output") + 1]).exists()
