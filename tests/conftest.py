"""What all tests share: one local Ray, one MLflow data base, the sample files, and jobs to run."""

from __future__ import annotations

import fcntl
import functools
import gc
import inspect
import itertools
import json
import os
import secrets
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

# Ray, torch and the tokenizers read these once, when they are imported.
os.environ.pop("RAY_ADDRESS", None)  # never a cluster that others use
os.environ.pop("MLFLOW_EXPERIMENT_NAME", None)
os.environ.pop("POLYRANK_AUTHOR_SALT", None)
os.environ.update(
    XDG_CONFIG_HOME=tempfile.mkdtemp(prefix="polyrank-config-"),  # where the key of authors is made
    RAY_AUTH_TOKEN=secrets.token_hex(32),  # else Ray writes one into the home directory
    RAY_DATA_PARQUET_FOOTER_NUM_ACTORS="1",
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
    RAY_worker_niceness="0",  # at Ray's 15 a worker waits for minutes where other tests take the cores
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)
import mlflow
import pyarrow as pa
import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# `jobs` sets Ray's defaults before ray is there
from jobs import cluster, finetune, prepare_corpus, tokenize_corpus
from jobs.sample_data import sample
from pipeline import progress, storage
from pipeline.artifact import Artifact, folder_entries, open_artifact
from pipeline.engine import executors
from pipeline.engine.draft import Draft, draft
from pipeline.models import flops
from pipeline.models.convert_rt.tokenizer import save_vocabulary
from pipeline.models.encoder import Encoder
from pipeline.models.ranker import new_ranker
from pipeline.models.settings import Shape, ranker_config
from pipeline.models.sources import Source
from pipeline.models.tokens import Tokenizer
from pipeline.pools import build
from pipeline.pools.settings import EmbedConfig
from pipeline.pools.shard import ROWS
from pipeline.pools.vector_format import encode
from pipeline.training import estimate, tokenized_corpus
from pipeline.training.settings import TOKENS, TokenizeConfig
from pipeline.training.tokenized_corpus import TokenizedCorpus, Vocabulary
from tests.helpers import Finished, job_command

ROOT = Path(__file__).parents[1]
progress._SILENT_SECONDS = 0.0  # the work of tests is short, and some look for its bar
# A dry run measures steps for 5 s, a pre-training the peak of the processor for 1 s.
estimate._MEASURED_SECONDS = 0.05
flops._MEASURED_SECONDS, flops._MEASURED_SIZE["cpu"] = 0.01, 256

os.fsync = lambda file: None  # no file of a test has to outlive a power cut; a night writes dozens

gc.disable()  # until all tests are there

# The same examples in every run, so that more of them would find the same.
settings.register_profile(
    "polyrank", derandomize=True, deadline=None, database=None, max_examples=30
)
settings.load_profile("polyrank")


# Fixtures that start a Ray, or a job in a process, which starts one.
_RAY = {"local_ray", "from_zero", "job_server", "submit_job", "start_job"}
_PROCESSES = {"subprocess", "run_in_processes"}
_LONGEST = {"test_page_commands.py", "test_serve_files.py"}
# Files that share what takes 20 s of two slow cores to start: a Ray, and the process whose forks are ranks.
_TOGETHER = {
    "ray": {
        "cluster/test_serve_files.py", "cluster/test_from_zero.py",
        "pipeline/corpora/test_reddit_failures.py",
        *(f"pipeline/engine/test_{name}.py" for name in ("messages", "resources", "run")),
    },
    "ranks": {
        f"pipeline/training/test_{name}.py" for name in ("data_parallel", "distributed", "negatives")
    },
}  # fmt: skip
_COMPUTES = (
    "pipeline/models",
    "pipeline/training",
    "pipeline/pools",
    "pipeline/search",
)
# Of those, what any processor does alike: rows, texts, files; files of tests, and single tests.
_ALIKE = {
    *(f"pipeline/pools/test_{name}.py" for name in ("plan", "changes", "gate", "lock", "pool", "versions")),
    *(f"pipeline/models/{name}.py" for name in (
        "test_flops", "test_foreign_code", "test_settings", "test_sources", "test_tokens",
        "convert_rt/test_onnx", "convert_rt/test_start", "convert_rt/test_tokenizer",
        "interop/test_parlai", "interop/test_sentence_transformers")),
    *(f"pipeline/training/test_{name}.py" for name in (
        "tokenizer", "data", "pretraining_data", "utterance_pairs", "token_masking", "checkpoint",
        "data_parallel", "distributed")),  # what ranks exchange
    "pipeline/models/test_cpu.py::test_memory_that_is_kept_is_not_mapped_again_at_each_step",
    "pipeline/models/convert_rt/test_encoder.py::test_parameters_are_the_papers",
    "pipeline/models/convert_rt/test_encoder.py::test_the_papers_model_is_at_most_60_megabytes",
    "pipeline/pools/test_embed.py::test_columns_of_a_data_frame_keep_their_meaning",
    "pipeline/training/test_negatives.py::test_memory_does_not_grow_with_the_split",
    "pipeline/training/test_optimization.py::test_a_resumed_run_lets_go_of_the_checkpoint",
}  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` the files of a set of `_TOGETHER` run in one process, as if they were one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            names = (
                name for name, files in _TOGETHER.items() if file.removeprefix("tests/") in files
            )
            return next(names, file)

    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test-fast` leaves out: tests with a Ray (`ray`), and those that start other
    processes, themselves or by a fixture, or that are about whole jobs (`slow`). Marks what `make test-avx2`
    runs (`processor`): those of what computes, or chooses how; some files mark their own. The longest files
    come first, else one process would work on them at the end while the others have nothing to do."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "jobs"):
            item.add_marker("slow")
        if _RAY & set(getattr(item, "fixturenames", ())):
            item.add_marker("ray")
        definitions = item._fixtureinfo.name2fixturedefs.values()
        functions = [item.function, *(each.func for all in definitions for each in all)]
        if any(map(starts_processes, functions)):
            item.add_marker("slow")
        file = item.path.relative_to(ROOT / "tests")
        names = {file.as_posix(), f"{file.as_posix()}::{getattr(item, 'originalname', '')}"}
        if _ALIKE.isdisjoint(names) and any(map(file.is_relative_to, _COMPUTES)):
            item.add_marker("processor")
    # Collections look at the objects of tests alone, and less often: `make test-fast` takes a tenth less.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@functools.cache
def starts_processes(function: Callable[..., object]) -> bool:
    """Whether a function uses one of `_PROCESSES`, or a function inside of it does, or one of its module
    that it calls."""
    module = getattr(function, "__globals__", {})
    waiting, seen = [getattr(inspect.unwrap(function), "__code__", None)], set[CodeType]()
    while waiting:
        code = waiting.pop()
        if code is None or code in seen:
            continue
        if not _PROCESSES.isdisjoint(code.co_names):
            return True
        seen.add(code)
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        called = [module.get(name) for name in code.co_names]
        waiting += [
            f.__code__ for f in called if isinstance(f, FunctionType) and f.__globals__ is module
        ]
    return False


@pytest.fixture
def sizes_as_now() -> Callable[[Path], None]:
    """Lets an artifact's manifest name the sizes that its files have: other damage is found later."""

    def write(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        for entry in manifest["files"]:
            entry["bytes"] = (folder / entry["path"]).stat().st_size
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return write


@pytest.fixture(scope="session", autouse=True)
def tracking_uri() -> Iterator[str]:
    """One MLflow data base for the session (its migrations take seconds), outside of the tree; in memory
    where the machine has room for it, as each job writes to the disk a dozen times otherwise."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="polyrank-mlflow-", dir=memory if memory.is_dir() else None)
    uri = f"sqlite:///{folder}/mlflow.db"
    os.environ["MLFLOW_TRACKING_URI"] = uri
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("polyrank", artifact_location=f"{folder}/artifacts")
    shutil.copy(f"{folder}/mlflow.db", f"{folder}/empty.db")
    yield uri
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def other_store(tracking_uri: str) -> Callable[[Path], str]:
    """`other_store(path)`: the URI of a MLflow data base of its own, without any run."""

    def make(path: Path) -> str:
        shutil.copy(tracking_uri.removeprefix("sqlite:///").replace("mlflow.db", "empty.db"), path)
        return f"sqlite:///{path}"

    return make


@pytest.fixture(scope="session")
def local_ray(tracking_uri: str):
    """A Ray of 2 logical CPUs; jobs that run in this process use it."""
    with cluster.session(cpus=2):
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and golden numbers beside the checkout."""
    folder = Path(os.environ.get("POLYRANK_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture(scope="session")
def real_data(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archives of real data that tests read, unpacked: 0.3 GB. The rest lies in `shared / "data"`."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the workers' own: one unpacks for all
    with (root / "real.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "real").is_dir():
            (root / "unpacked").mkdir()
            for name in ("open_domain_dialogues", "ubuntu_dialogues", "wikipedia_articles"):
                archive = shared / "data" / f"{name}.tar.xz"
                subprocess.run(["tar", "-xJf", archive, "-C", root / "unpacked"], check=True)
            (root / "unpacked").rename(root / "real")
    return root / "real"


@pytest.fixture(scope="session")
def sample_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The raw sample files of all corpora, small."""
    folder = tmp_path_factory.mktemp("sample")
    size = sample.Size(reddit_threads=160, train_dialogues=150, valid_dialogues=50, articles=60)
    sample.generate(folder, seed=0, size=size)
    return folder


def prepared(corpus: str, files: Path, folder: Path) -> Artifact:
    config = prepare_corpus.Config(format=corpus, input=(str(files),), output=str(folder / corpus))
    with executors.in_this_process():
        prepare_corpus.run(config)
    return open_artifact(config.output, "corpus")


@pytest.fixture(scope="session")
def convai2_corpus(
    tracking_uri: str, sample_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """The published corpus of the sample files: `train` without, `valid` with 20 candidates."""
    return prepared("convai2", sample_files / "convai2", tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def reddit_corpus(
    tracking_uri: str, sample_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """The published corpus of the sample dumps, redacted and hashed: `train` and `test`."""
    return prepared("reddit", sample_files / "reddit_dump", tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def tiny_ranker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    """`tiny_ranker("poly", seed=0)`: a published ranker of random weights; a byte is a token."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("rankers")
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]",
               "sep_token": "[SEP]", "mask_token": "[MASK]"}  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*special.values(), *alphabet])}
    fast = FastTokenizer(models.BPE(vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, **special))
    shape = Shape(layers=1, width=16, heads=2, positions=96, init_std=0.2)

    @functools.cache
    def publish(architecture: str, seed: int = 0, earlier_turns: int = 10) -> Artifact:
        folder = root / f"{architecture}-{seed}-{earlier_turns}"
        torch.manual_seed(seed)
        places = {"pad": tokenizer.pad, "cls": tokenizer.cls, "sep": tokenizer.sep}
        Encoder.new(shape, len(vocabulary), places).save(folder / "encoder")
        tokenizer.save(folder / "encoder")
        save_vocabulary(["﹏", *string.ascii_lowercase], folder / "encoder")  # ConveRT's
        model = ranker_config({  # fields of other architectures are left out
            "architecture": architecture, "m": 3, "code_init_std": 1.0, "max_context_tokens": 48,
            "max_candidate_tokens": 32, "width": 16, "windows": [2, 40], "attention_width": 4,
            "intermediate": 32, "hidden": [16], "encoding_width": 16,
            "earlier_turns": earlier_turns,
        })  # fmt: skip
        ranker = new_ranker(model, folder / "encoder", seed)
        with torch.no_grad():
            for parameter in ranker.parameters():  # the towers differ, as after training
                parameter += 0.1 * torch.randn_like(parameter)
        ranker.save(folder / "files")
        config = finetune.Config(
            corpus="none", encoder="none", output=str(folder / "ranker"), ranker=model
        )
        out = draft(config.output, "ranker", config, {})
        if isinstance(out, Artifact):
            return out
        storage.upload(folder / "files", out.staging)
        return out.publish(folder_entries(folder / "files"), {"steps": 0})

    return publish


@pytest.fixture(scope="session")
def tokenize_in_process() -> Callable[..., TokenizedCorpus]:
    """`tokenize_in_process(corpus, tokenizer, output)`: what jobs.tokenize_corpus publishes, without Ray."""

    def publish(
        corpus: Artifact, tokenizer: Source, output: Path, **kept: object
    ) -> TokenizedCorpus:
        settings = TokenizeConfig(**kept)
        config = tokenize_corpus.Config(
            corpus="", tokenizer="", output=str(output), tokenize=settings
        )
        vocabulary = Vocabulary.of(Tokenizer.load(tokenizer.local()), "test")
        uris = {"corpus": corpus.uri, "tokenizer": str(tokenizer.local())}
        inputs = {name: {"uri": uri, "fingerprint": name} for name, uri in uris.items()}
        out = draft(str(output), TOKENS, config, inputs)
        with executors.in_this_process():
            made = tokenized_corpus.tokenize(out, corpus, tokenizer, vocabulary, settings)
        return TokenizedCorpus(out.publish(**made))

    return publish


@pytest.fixture
def actors_in_process() -> Iterator[list[str]]:
    """Tasks and actors run in this process, without Ray, whose processes take seconds to start.

    Returns the names of the tasks of actors that ran so far.
    """
    with executors.in_this_process() as here:
        yield here.actor_tasks


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Moves this process to a node with an empty disk, each time it is called; returns its folder.

    Artifacts at `local://…`, another name of this disk, are to it what those of an object store are.
    """
    nodes: list[Path] = []

    def move() -> Path:
        for left in nodes:
            shutil.rmtree(left, ignore_errors=True)
        nodes.append(tmp_path / f"node-{len(nodes)}")
        nodes[-1].mkdir()
        return nodes[-1]

    move()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(nodes[-1]))
    return move


@pytest.fixture(scope="session")
def publish_pool() -> Callable[..., Artifact]:
    """`publish_pool(uri, rows, vectors [N, D], [5, 7], model=…)`: a pool in shards that begin at rows 0, 5
    and 7, without Ray. `rows`: a table, or ids, which are the texts as well."""

    def publish(
        uri,
        rows,
        vectors_ND,
        cuts=(),
        dtype="float32",
        neighbours=False,
        config=None,
        **inputs,
    ) -> Artifact:
        out = draft(str(uri), "pool", config or EmbedConfig(), inputs)
        assert isinstance(out, Draft)
        table = rows if isinstance(rows, pa.Table) else pa.table([rows, rows, rows], ROWS)
        shards = [pair for pair in itertools.pairwise([0, *cuts, len(table)]) if pair[0] < pair[1]]
        entries, names = [], [f"part-{number:05d}" for number in range(len(shards))]
        for name, (start, end) in zip(names, shards, strict=True):
            layer = encode(vectors_ND[start:end], dtype)
            entries += build.write_shard(out, name, table[start:end], layer)
        width = vectors_ND.shape[1]
        with executors.in_this_process():
            more, statistics = build.index(out, names, width, neighbours)
        facts = {"dimensions": width, "dtype": dtype, "statistics": statistics}
        return out.publish([*entries, *more], {"candidates": len(table)}, **facts)

    return publish


_DIES = """
import os, sys
from pathlib import Path

codes = Path(os.environ.get("DEATHS", "/dev/null"))
if "jobs." + codes.stem in sys.orig_argv and (left := codes.read_text().split()):
    codes.write_text(" ".join(left[1:]))
    code = int(left[0])
    if code < 0:
        os.kill(os.getpid(), -code)
    os.write(2, b"Intel oneMKL FATAL ERROR: Cannot load somewhere/libtorch_cpu.so.\\n")
    os._exit(code)
"""


@pytest.fixture
def dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """`dies("inspect", 2, -9)`: the next two processes of this job end so, before they say a word; < 0: by
    a signal. Returns the names of the variables that let them."""

    def let(verb: str, *codes: int) -> tuple[str, ...]:
        folder = tmp_path / "deaths"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_DIES)
        (folder / verb).write_text(" ".join(map(str, codes)))
        monkeypatch.setenv("DEATHS", str(folder / verb))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return "DEATHS", "PYTHONPATH"

    return let


@pytest.fixture
def run_job_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """`run_job_here("prepare_corpus", "--corpus", …)`: a job's `main` in this process, without Ray."""

    def run(verb: str, *arguments: object) -> Finished:
        with executors.in_this_process():
            return run_main(monkeypatch, capfd, verb, *arguments)

    return run


@pytest.fixture
def run_job(local_ray, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """As `run_job_here`, but its tasks, actors and workers are processes of `local_ray`."""
    return functools.partial(run_main, monkeypatch, capfd)


def run_main(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    verb: str,
    *arguments: object,
) -> Finished:
    module = import_module(f"jobs.{verb}")
    monkeypatch.setattr(sys, "argv", [verb, *map(str, arguments)])
    capfd.readouterr()
    code = 0
    try:
        module.program.main(module.Config, module.run, verb)
    except SystemExit as stop:
        code = stop.code
    return Finished(code, *capfd.readouterr())


@pytest.fixture(scope="session")
def submit_job(tracking_uri: str):
    """`python -m jobs.<verb> …` as a user runs it, in a process and on a Ray of its own."""

    def submit(verb: str, *arguments: object) -> Finished:
        command = job_command(verb, *arguments)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return Finished(done.returncode, done.stdout, done.stderr)

    return submit


@pytest.fixture
def start_job(tracking_uri: str):
    """Starts `python -m jobs.<verb> …` and returns its process, the leader of a group of its own.

    It has a Ray of its own, or joins a `cluster` by its address.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(
        verb: str, *arguments: object, cluster: str = "", output: Path = Path(os.devnull)
    ) -> subprocess.Popen[bytes]:
        joins = {"RAY_ADDRESS": cluster, "RAY_AUTH_MODE": "token"} if cluster else {}
        with output.open("wb") as stdout:
            process = subprocess.Popen(
                job_command(verb, *arguments),
                cwd=ROOT,
                env={**os.environ, **joins},
                start_new_session=True,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):  # Ray's agents outlive their raylet by a minute
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
