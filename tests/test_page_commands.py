"""Every command and all Python of the pages, run in the order of each page, on small inputs.

Each section of a page starts in a new folder: it holds what the paths of the page name, and what earlier
sections made. Buckets (`s3://lake`) are folders there. Jobs run in this process, a service answers over HTTP.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import mlflow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import (
    classify_intents,
    convert_model,
    embed_pool,
    prepare_corpus,
    serve,
    train_tokenizer,
    workflow,
)
from pipeline import tracking
from pipeline.artifact import Artifact, open_artifact
from pipeline.classification.settings import HeadConfig
from pipeline.config import parse
from pipeline.corpora.formats import pairs
from pipeline.engine import executors
from pipeline.pools.settings import EmbedConfig
from pipeline.training.settings import TokenizerConfig
from serve.engine import Engine
from serve.http import api
from serve.http.bearer_tokens import BearerTokens
from serve.service import Service
from tests.pages import BLOCKS, ROOT, Block, is_listed, program_of
from tests.serve.live import serving

pytestmark = pytest.mark.slow

_WORKER = (
    "--resources.workers", 1, "--resources.gpu", "false", "--resources.cpus-per-worker", 1,
    "--loop.precision", "fp32",
)  # fmt: skip
SMALL: dict[str, tuple[object, ...]] = {
    "finetune": (
        *_WORKER, "--finetune.batch-examples", 8, "--loop.validate-every-epochs", 0,
        "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32,
    ),
    "pretrain": (
        *_WORKER, "--pretrain.batch-tokens", 800, "--pretrain.micro-batch-tokens", 400,
        "--pretrain.max-context-tokens", 48, "--pretrain.max-response-tokens", 32,
    ),
    "train_tokenizer": ("--tokenizer.vocabulary", 300),
    "classify_intents": ("--head.epochs", 5),
    "evaluate": ("--latency-queries", 0),
    "generate_dump": ("--comments", 200),
}  # fmt: skip
"""Options that make a command small; what the page says besides stays."""
SMALL_CONVERT = (
    "--ranker.width", 16, "--ranker.windows", "[2, 4]", "--ranker.intermediate", 32,
    "--ranker.hidden", "[16]", "--ranker.encoding-width", 16,
)  # fmt: skip
SMALL_ENCODER = (
    "--encoder.layers", 1, "--encoder.width", 16, "--encoder.heads", 2, "--encoder.positions", 96,
)  # fmt: skip
POOLS = {
    "README.md": {".demo/pools": "replies"},
    "OPERATING.md": {"lake/pools": "replies"},
    "pipeline/OWN_DATA.md": {"my/pools": "answers"},
    "pipeline/pools/README.md": {"lake/pools": "articles", "pools": "articles"},
    "serve/README.md": {".demo/pools": "replies"},
}
"""Pools of two versions that no command of the page makes."""
MORE_INPUTS = {"CLUSTER.md": ("lake/dumps",), "OPERATING.md": ("dumps/2015",)}
"""Paths that a command of the page finds, and does not name."""
MORE_ARGUMENTS = {"serve/README.md": ("classifier=intents",)}
"""Of the service: the page asks a route that a table of its arguments brings."""
JOB = re.compile(r"(?:python -m jobs\.|polyrank )(\w+)(?: (.*))?", re.DOTALL)
RUNS = ("python", "polyrank", "curl", "export")
"""Programs whose commands are run, unless tests/pages_not_run.md lists them."""

SOURCES = list(dict.fromkeys(block.page for block in BLOCKS))


def to_run(page: str) -> list[Block]:
    """Those of the page that are not listed, and that no earlier page says in the same words."""
    first = {block.text: block.page for block in reversed(BLOCKS)}
    return [block for block in BLOCKS
            if block.page == page == first[block.text] and not is_listed(block)]  # fmt: skip


def job_words(command: str) -> list[str]:
    """The verb and the options of a job; none for another command. Buckets become folders, but not for
    what is only sent."""
    found = JOB.match(re.sub(r"^([A-Z_]+=\S* )+", "", command))
    if not found:
        return []
    words = [found[1], *shlex.split(found[2] or "", comments=True)]
    return words if words[0] == "submit" else [word.replace("s3://", "") for word in words]


def small(words: list[str]) -> list[object]:
    """The job's words, with options that make it small."""
    verb, *argv = words
    if verb == "submit":
        return [verb, "--dry-run", *argv]
    if "--help" in argv:
        return [*words]
    more = [*SMALL.get(verb, ())]
    longer = "--continue-from" in argv
    if verb == "finetune":
        more += SMALL_CONVERT if any("convert_" in word for word in argv) else ()
        more += ("--finetune.max-steps", 3 if longer else 2)
    if verb == "pretrain":
        more += () if "--start" in argv else SMALL_ENCODER
        more += ("--pretrain.steps", 4 if longer else 2)
    return [*words, *more]


@pytest.fixture(scope="module")
def inputs(
    tracking_uri: str,
    sample_files: Path,
    reddit_corpus: Artifact,
    tiny_ranker: Callable[..., Artifact],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """What the paths of the pages name, but for what their commands make."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = [f"how do i pay bill {at} ?,open page {at} of your bills,t{at}" for at in range(60)]
    table = "\n".join(["question,answer,thread", *rows, ""])
    (folder / "chats").mkdir()
    for file in ("faq.csv", "test.csv", "chats/part.csv"):
        (folder / file).write_text(table)
    messages = [f"text {at} of {name},{name}" for at in range(20) for name in ("pay", "block")]
    (folder / "banking77").mkdir()
    for file, column in (("messages.csv", "label"), ("banking77/train.csv", "category")):
        (folder / file).write_text("\n".join([f"text,{column}", *messages, ""]))
    articles = [{"id": f"a{n}", "text": f"article {n}", "language": "en"} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(articles), folder / "articles.parquet")
    (folder / "exports" / "replies").mkdir(parents=True)
    shutil.copy(folder / "articles.parquet", folder / "exports" / "replies" / "part.parquet")
    replies = [json.dumps({"id": f"r{n}", "text": f"reply {n}"}) for n in range(20)]
    (folder / "replies.jsonl").write_text("\n".join(replies))
    (folder / "beir" / "faq" / "qrels").mkdir(parents=True)
    texts = [json.dumps({"_id": f"{n}", "text": f"reply {n}"}) for n in range(20)]
    for file in ("corpus", "queries"):
        (folder / "beir" / "faq" / f"{file}.jsonl").write_text("\n".join(texts))
    (folder / "beir" / "faq" / "qrels" / "test.tsv").write_text("1\t2\t1\n")
    (folder / "convai2").mkdir()
    for split in ("train", "valid"):  # both with candidates, as score_candidates needs them
        shutil.copy(
            sample_files / "convai2" / "valid_self_original.sample.txt",
            folder / "convai2" / f"{split}_self_original.txt",
        )
    names = ("dialogues", "pairs", "published", "subwords", "intents")
    made = {name: str(folder / name) for name in names}
    rankers = {name: tiny_ranker(name).local() for name in ("bi", "poly", "cross")}

    def make(job: ModuleType, **config: Any) -> None:
        with executors.in_this_process():
            job.run(job.Config(**config))

    bi, poly = str(rankers["bi"]), str(rankers["poly"])
    convai2 = (str(folder / "convai2"),)
    make(prepare_corpus, format="convai2", input=convai2, output=made["dialogues"])
    make(convert_model, model=bi, to="sentence-transformers", output=made["published"])
    subwords = TokenizerConfig(kind="subwords", vocabulary=300)
    make(train_tokenizer, corpus=(reddit_corpus.uri,), output=made["subwords"], tokenizer=subwords)
    messages_file, head = (str(folder / "messages.csv"),), HeadConfig(epochs=5)
    make(classify_intents, encoder=poly, input=messages_file, output=made["intents"], head=head)
    columns = pairs.Options(context_column="question", response_column="answer")
    faq = (str(folder / "faq.csv"),)
    make(prepare_corpus, format="pairs", input=faq, output=made["pairs"], pairs=columns)
    earlier, pools = folder / "earlier.parquet", str(folder / "pools")
    for pool, keys, model in (("articles", ("language",), poly), ("answers", (), bi)):
        for count in (18, 19):
            pq.write_table(pa.Table.from_pylist(articles[:count]), earlier)
            place = {"candidates": (str(earlier),), "pools": pools, "name": pool}
            make(embed_pool, model=model, embed=EmbedConfig(filter_columns=keys), **place)
    shutil.copytree(folder / "pools" / "articles", folder / "pools" / "replies")
    dumps, dialogues = sample_files / "reddit_dump", Path(made["dialogues"])
    reddit, encoder = Path(reddit_corpus.uri), rankers["bi"] / "context_encoder"
    return {
        **{name: folder / name for name in ("faq.csv", "test.csv", "chats", "messages.csv", "banking77",
                                            "beir", "articles.parquet", "replies.jsonl", "intents")},
        "made-pools": folder / "pools",
        "dumps/2015": dumps,
        "dumps/RC_2015-01.zst": dumps / "RC_2011-01.zst",
        "dumps/RC_2015-02.bz2": dumps / "RC_2011-02.bz2",
        "dumps/wikipedia": sample_files / "wikipedia" / "extracted",
        "RC_2015-01.zst": dumps / "RC_2011-01.zst",
        "RC_2015-02.zst": dumps / "RC_2011-02.bz2",
        "lake/exports": folder / "exports",
        "lake/dumps": dumps,
        "lake/raw/convai2": sample_files / "convai2",
        "lake/reddit": reddit,
        "lake/rankers/poly": rankers["poly"],
        "lake/rankers/new": rankers["poly"],
        "my/corpus": Path(made["pairs"]),
        "my-2/corpus": Path(made["pairs"]),
        "my/ranker": rankers["bi"],
        "lake/dstc7": dialogues,
        "lake/test": dialogues,
        "lake/convai2": dialogues,
        "corpora/convai2": dialogues,
        "corpora/ubuntu": dialogues,
        ".demo/corpora/convai2": dialogues,
        "corpora/reddit": reddit,
        "encoders/reddit": encoder,
        "models/all-MiniLM-L6-v2": Path(made["published"]) / "context",
        "sentence-transformers/all-MiniLM-L6-v2": Path(made["published"]) / "context",
        "models/bert-base-uncased": encoder,
        "tokenizers/subwords": Path(made["subwords"]),
        **{f"{above}rankers/{name}": model for name, model in rankers.items()
           for above in ("", ".demo/")},
    }  # fmt: skip


class Reader:
    """Types what a page says."""

    def __init__(self, page: str, inputs: dict[str, Path], home: Path,
                 run_job: Callable[..., object], patch: pytest.MonkeyPatch) -> None:  # fmt: skip
        text = (ROOT / page).read_text()
        more = MORE_INPUTS.get(page, ())
        self.files = {name: inputs[name] for name in inputs if name in text or name in more}
        self.page, self.home = page, home
        self.run_job, self.patch = run_job, patch
        self.served: list[str] = []
        self.service, self.url = ExitStack(), ""
        pools = inputs["made-pools"]
        for place, name in POOLS.get(page, {}).items():
            self.files[place] = home / "pools" / place
            shutil.copytree(pools / name, self.files[place] / name)

    def section(self, number: int, blocks: list[Block]) -> None:
        """Runs the blocks in a new folder."""
        folder = self.home / str(number)
        for name in ("configs", "schedules", "workflows"):  # copies: jobs.submit sends no links
            shutil.copytree(ROOT / "jobs" / name, folder / "jobs" / name)
        commands = [words for block in blocks if (words := job_words(block.text))]
        outputs = {after for words in commands for option, after in itertools.pairwise(words)
                   if option == "--output"}  # fmt: skip
        for name, target in self.files.items():
            if name not in outputs:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(target)
        self.patch.chdir(folder)
        for block in blocks:
            self.run(block)
        pools = {after for words in commands for option, after in itertools.pairwise(words)
                 if option == "--pools" and words[0] == "embed_pool"}  # fmt: skip
        for name in outputs | pools:
            if (folder / name).exists():
                self.files[name] = (folder / name).resolve()
        dry = {words[words.index("--output") + 1] for words in commands
               if "--output" in words and "--dry-run" in words}  # fmt: skip
        assert {name for name in outputs if not (folder / name).exists()} <= dry

    def run(self, block: Block) -> None:
        if block.kind == "python":
            text = block.text.replace("http://localhost:8000", self.url)
            exec(compile(text, block.page, "exec"), {})
        elif words := job_words(block.text):
            self.job(words)
        else:
            words = shlex.split(re.sub(r"\$(\w+)", lambda name: os.environ[name[1]], block.text))
            getattr(self, words[0])(words[1:])

    def job(self, words: list[str]) -> None:
        if words[0] == "serve":
            self.serve(words[1:])
            return
        done = self.run_job(*small(words))
        assert done.code == 0, (words, done.stderr[-2000:])

    def serve(self, argv: list[str]) -> None:
        """Serves as the command says, behind the tokens whose hashes are set."""
        self.served = argv
        self.service.close()
        more = MORE_ARGUMENTS.get(self.page, ())
        options = [*argv, *(word for value in more for word in ("--arguments", value))]
        found = serve._arguments(parse(serve.Config, options, "serve"))
        engine = Engine(found.model, found.pools, "fp32", classifier=found.classifier)
        self.service.enter_context(closing(engine))
        service = self.service.enter_context(closing(Service(lambda: engine, max_wait_s=60.0)))
        hashes = os.environ.get("POLYRANK_TOKENS_SHA256", "").split()
        app = api.create_app(service, tokens=BearerTokens(hashes))
        self.url = self.service.enter_context(serving(app))

    def curl(self, words: list[str]) -> None:
        (url,) = [word for word in words if word.startswith("localhost:8000")]
        pairs = list(itertools.pairwise(words))
        headers = dict(value.split(": ", 1) for option, value in pairs if option == "-H")
        (body,) = [value for option, value in pairs if option == "-d"]
        url = url.replace("localhost:8000", self.url)
        request = urllib.request.Request(url, body.encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)

    def export(self, words: list[str]) -> None:
        for word in words:
            self.patch.setenv(*word.split("=", 1))

    def python(self, words: list[str]) -> None:
        """Prints a token and its hash, which the service then asks for."""
        command = [sys.executable, *words]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        token, hashed = printed.split()
        assert hashlib.sha256(token.encode()).hexdigest() == hashed
        self.patch.setenv("TOKEN", token)
        self.patch.setenv("POLYRANK_TOKENS_SHA256", hashed)
        self.serve(self.served)


@pytest.fixture(scope="module")
def registry(inputs, other_store, tracking_uri, tmp_path_factory) -> Path:
    """A data base of MLflow whose model `dialogue` has all three aliases."""
    folder = tmp_path_factory.mktemp("registry")
    mlflow.set_tracking_uri(other_store(folder / "mlflow.db"))
    poly = inputs["rankers/poly"]
    shutil.copytree(poly, folder / "candidate")  # as good as the champion: it may be promoted
    versions = [tracking.register("dialogue", open_artifact(str(model), "ranker"), alias)
                for alias, model in (("champion", poly), ("candidate", folder / "candidate"))]  # fmt: skip
    for version in reversed(versions):
        tracking.move_alias("dialogue", "champion", version)
    mlflow.set_tracking_uri(tracking_uri)
    return folder / "mlflow.db"


@pytest.fixture
def reader(
    inputs, registry, run_job_here, tracking_uri, tmp_path, monkeypatch
) -> Iterator[Callable[[str], Reader]]:
    """`reader(page)`, with a copy of the registry."""
    shutil.copy(registry, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])

    def run_step(command: tuple[str, ...], hides_failure: bool = False) -> tuple[int, str]:
        """A step of a workflow in this process; tests/jobs/test_workflow.py starts processes."""
        step = workflow.Step("", command)
        done = run_job_here(step.verb, *step.options)
        return done.code, done.stdout.splitlines()[-1]

    monkeypatch.setattr(workflow, "_run_command", run_step)
    # The graph takes 18 s of a core: tests/pipeline/models/convert_rt/test_onnx.py makes it.
    monkeypatch.setattr(
        "pipeline.models.interop.to_onnx.export",
        lambda ranker, folder: (folder / "model.onnx").write_bytes(b""),
    )
    monkeypatch.setattr("pipeline.models.convert_rt.start._LEAST_STEPS", 2)
    with ExitStack() as stack:

        def make(page: str) -> Reader:
            made = Reader(page, inputs, tmp_path, run_job_here, monkeypatch)
            stack.callback(made.service.close)
            return made

        yield make
    mlflow.set_tracking_uri(tracking_uri)


@pytest.mark.parametrize("page", [page for page in SOURCES if to_run(page)])
def test_the_commands_of_a_page_run(page, reader):
    sections = itertools.groupby(to_run(page), key=lambda block: block.heading)
    types = reader(page)
    for number, (_, blocks) in enumerate(sections):
        types.section(number, list(blocks))
    if page == "pipeline/training/PRETRAINING.md":
        the_files_of_its_table_are_there(types.files["encoders/reddit"])


def the_files_of_its_table_are_there(encoder: Path) -> None:
    page = (ROOT / "pipeline" / "training" / "PRETRAINING.md").read_text()
    table = page.partition("then holds:")[2].partition("\n\n| ")[2].partition("\n\n")[0]
    names = re.findall(r"`([^`]+)`", " ".join(re.findall(r"(?m)^\| (`.*?`) \| ", table)))
    assert [name for name in names if not (encoder / name).exists()] == [] and len(names) == 7


def test_every_block_is_run_or_listed():
    """A new block of a page, or a command in a comment of a shipped file, is one or the other."""
    forgotten = [
        f"{block.page}: {block.text.strip()[:80]}"
        for block in BLOCKS
        if not is_listed(block)
        and block.kind != "python"
        and not (block.kind == "command" and program_of(block.text) in RUNS)
    ]
    assert forgotten == []
