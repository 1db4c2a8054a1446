"""jobs.pretrain beside a bare PyTorch loop and beside the Trainer of `transformers`, on CPUs.

All sides train the same shape on the same tokens in the same precision, one thread a process. They run in
turn, some rounds; a rate is the median over the intervals of all rounds, the first half of each run left out.
The bare loop gets the very micro-batches of the job, from memory. The peers run in processes of their own,
and return tokens a second, padding not counted, of each interval of some steps.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow.parquet as pq
import torch

from jobs import cluster
from jobs import pretrain as pretrain_job
from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow, run_job, take_turns
from jobs.demo_stages import run_here
from jobs.sample_data import sample
from pipeline import storage, tracking
from pipeline.artifact import open_artifact
from pipeline.config import digest, parse
from pipeline.models import cpu
from pipeline.models.encoder import prepare_for_training
from pipeline.models.precision import resolve_precision
from pipeline.models.tokens import Tokenizer
from pipeline.training.loop import Optimization, optimization
from pipeline.training.pretraining import Pretraining
from pipeline.training.pretraining_data import MicroBatch, PretrainingBatches
from pipeline.training.settings import TOKENS
from pipeline.training.tokenized_corpus import TokenizedCorpus

Rates = list[float]
Progress = list[tuple[float, int]]
"""(the time, tokens so far) at the beginning of a training and after each step"""
_SAMPLE = {"small": sample.Size(), "full": sample.Size(reddit_threads=40_000)}
_VOCABULARY = {"small": 2_000, "full": 30_000}
_SHAPE = {"small": (4, 256, 4), "full": (6, 384, 12)}  # full: all-MiniLM's
_STEPS, _STEPS_BESIDE_TRAINER = 40, 16  # the Trainer takes twice the time and more
_ROUNDS = {"small": 1, "full": 3}
# Steps of a rate, some 6 s. The first half of each run is left out: until a process has touched all the
# memory that its longest batches need (2 GB, 15 to 20 steps), its pages are mapped and zeroed.
_INTERVAL = 4
# BERT's has 65,536: two workers exchange gradients eight times as often here.
_STEP_TOKENS = 8_192
_MICRO_BATCHES = 4  # of a step: two workers have two each, and four one


@dataclass(frozen=True)
class Arm:
    """The training that both sides do."""

    options: list[str]
    """Of jobs.pretrain."""
    recipe: Pretraining
    precision: str
    """bf16 or fp32."""

    def rates(self, progress: Progress) -> Rates:
        """Tokens a second of each interval, as the job logs them."""
        points = itertools.pairwise(progress[:: self.recipe.loop.log_every_steps])
        return [(tokens - before) / (end - start) for (start, before), (end, tokens) in points]


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    size, work = config.size, work / "pretrain"
    uri = tokens(size, config.corpus[0] if config.corpus else "", work)
    layers, width, heads = _SHAPE[size]
    options = list(map(str, (
        "--corpus", uri, "--output", work / "encoder", "--shape.layers", layers, "--shape.width", width,
        "--shape.heads", heads, "--pretrain.batch-tokens", _STEP_TOKENS,
        "--pretrain.micro-batch-tokens", _STEP_TOKENS // _MICRO_BATCHES,
        "--loop.validate-every-steps", 0, "--loop.validate-every-epochs", 0,
        "--loop.log-every-steps", _INTERVAL, "--keep-training-state", "false",
        "--resources.cpus-per-worker", 1, *config.overrides, "--pretrain.steps",
    )))  # fmt: skip
    joint, pair = (_arm([*options, str(_STEPS), "--resources.workers", n]) for n in ("1", "2"))
    mlm = _arm([*options, str(_STEPS_BESIDE_TRAINER), "--pretrain.objective", "mlm"])
    arms = {
        "pretrain.vs_bare_loop": (joint, _bare_loop, 1),
        "pretrain.vs_hf_trainer": (mlm, _hf_trainer, 1),
        "pretrain.scaling_two_workers": (pair, _bare_loop, 2),
    }
    if find_spec("accelerate") is None:
        del arms["pretrain.vs_hf_trainer"]
        print("pretrain.vs_hf_trainer is left out: the Trainer of transformers needs the package "
              "accelerate; pip install -e '.[bench]'", flush=True)  # fmt: skip
    ways = {name: functools.partial(_run_both, *sides) for name, sides in arms.items()}
    waits = Rates()
    for name, rounds in take_turns(ways, _ROUNDS[size]).items():
        ours, peer, data_waits = (list(chain(*rates)) for rates in zip(*rounds, strict=True))
        waits = waits or data_waits
        arm = arms[name][0]
        steps = f"{arm.recipe.pretrain.steps} steps, the second half of each"
        note = f"{layers} layers of {width}, {arm.precision}; {len(rounds)} rounds of {steps}."
        yield BenchmarkRow.beside(name, median(ours), median(peer), "tokens/s", note)
    note = f"Of the job beside the bare loop: {layers} layers of {width}."
    yield BenchmarkRow.alone("pretrain.data_wait_share", fmean(waits), "share of the time", note)


def _arm(options: list[str]) -> Arm:
    config = parse(pretrain_job.Config, options, "jobs.pretrain")
    corpora = tuple(map(TokenizedCorpus.open, config.corpus))
    weights = tuple(float(corpus.train_tokens) for corpus in corpora)
    recipe = Pretraining(corpora, weights, config.shape, config.pretrain, config.loop)
    return Arm(options, recipe, resolve_precision(config.loop.precision, torch.device("cpu")))


def _run_both(arm: Arm, peer: Callable[..., Rates], processes: int) -> tuple[Rates, Rates, Rates]:
    """(tokens a second of the job, of the peer, the job's shares of waiting for data)

    The peer's processes run at the same time, and their rates are added. Each is given the tokens of a step
    of the job.
    """
    output = arm.options[arm.options.index("--output") + 1]
    shutil.rmtree(output, ignore_errors=True)
    run_job("pretrain", *arm.options)
    run = tracking.Run(open_artifact(output, "encoder").manifest["run_id"], tracking.server())
    histories = run.histories(("tokens_per_s", "data_wait_share", "steps_per_s"))
    values = ([value for _, value in points] for points in histories.values())
    rates, waits, steps_per_s = map(_steady, values)
    step_tokens = fmean(a / b for a, b in zip(rates, steps_per_s, strict=True))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, context) as pool:
        wait = manager.Barrier(processes).wait
        shares = [(rank, processes, wait, step_tokens) for rank in range(processes)]
        futures = [pool.submit(peer, arm, *share) for share in shares]
        peer_rates = [future.result() for future in futures]
    return rates, _steady(list(map(sum, zip(*peer_rates, strict=True)))), waits


def _steady(rates: Rates) -> Rates:
    """The rates of the end of a run."""
    return rates[len(rates) // 2 :]


def tokens(size: str, corpus: str, work: Path) -> str:
    """The URI of a tokenized corpus: `corpus`, or made of it, or of the sample corpora (""). Reuses the
    output of an earlier call."""
    if corpus and open_artifact(corpus, TOKENS, "corpus").kind == TOKENS:
        return corpus
    with cluster.session(for_tasks=True):
        if not corpus:
            raw, corpus = work / f"sample-{size}", f"{work}/corpora-{size}/reddit"
            if not (raw / "DONE").exists():
                sample.generate(raw, size=_SAMPLE[size])
                (raw / "DONE").touch()
            dumps = ("--format", "reddit", "--input", raw / "reddit_dump")
            run_here("prepare_corpus", *dumps, "--output", corpus)
        folder = work / f"tokens-{digest([corpus, size])}"
        tokenizer, tokens = folder / "tokenizer", folder / "tokens"
        run_here("train_tokenizer", "--corpus", corpus, "--output", tokenizer,
                 "--tokenizer.vocabulary", _VOCABULARY[size])  # fmt: skip
        run_here(
            "tokenize_corpus", "--corpus", corpus, "--tokenizer", tokenizer, "--output", tokens
        )
    return str(tokens)


def _bare_loop(
    arm: Arm, rank: int, world: int, wait: Callable[[], object], _tokens: float
) -> Rates:
    """A plain loop over its own micro-batches in memory: no Ray, no reports, no checks."""
    _use_one_thread()
    recipe, steps = arm.recipe, arm.recipe.pretrain.steps
    inputs = (recipe.corpora, recipe.weights, recipe.pretrain)
    walk = PretrainingBatches(*inputs, rank, world, recipe.loop.seed).start()
    batches = [next(walk)[0].parts for _ in range(steps)]
    walk.close()
    device = torch.device("cpu")
    model, _ = recipe.model()
    prepare_for_training(model, device, recipe.loop.precision)
    model.train()
    optimizer = optimization(recipe.loop, model, steps)
    wait()
    progress: Progress = [(time.perf_counter(), 0)]
    for parts in batches:
        bare_step(model, parts, optimizer, device, arm.precision == "bf16")
        tokens = progress[-1][1] + sum(part.token_count for part in parts)
        progress.append((time.perf_counter(), tokens))
    return arm.rates(progress)


def bare_step(
    model: Callable[..., Any],
    parts: Sequence[MicroBatch],
    optimizer: Optimization,
    device: torch.device,
    bf16: bool,
) -> None:
    """One update of the weights."""
    predicted = max(1, sum(part.predicted_count for part in parts))
    pairs = max(1, sum(part.pair_count for part in parts))
    for part in parts:
        batch = part.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            sums = model(*batch.model_inputs)
        (sums.mlm_sum / predicted + sums.next_sum / pairs).backward()
    optimizer.clip()
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad(set_to_none=True)


def _hf_trainer(
    arm: Arm, rank: int, world: int, wait: Callable[[], object], tokens_per_step: float
) -> Rates:
    """The Trainer with its defaults, but the same precision, seed, learning rate, and micro-batches and
    tokens in a step (on average). `remove_unused_columns` would take away the mask of special tokens, and
    the collator would make it anew in Python."""
    from transformers import (
        AutoModelForMaskedLM,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    _use_one_thread()
    recipe, config = arm.recipe, arm.recipe.pretrain
    corpus = recipe.corpora[0]
    tokenizer = Tokenizer.load(corpus.tokenizer().local())
    model, _ = recipe.model()
    rows = list(_rows(corpus, recipe, int(config.steps * tokens_per_step)))
    length = sum(len(row["input_ids"]) for row in rows) / len(rows)
    collate = DataCollatorForLanguageModeling(tokenizer.hf, mlm_probability=config.masked_share)
    progress: Progress = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, *_: object, **__: object) -> None:
            progress.append((time.perf_counter(), state.num_input_tokens_seen))

        on_step_end = on_train_begin

    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        trainer = Trainer(
            model=AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False),
            args=TrainingArguments(
                output_dir=folder, max_steps=config.steps, use_cpu=True,
                bf16=arm.precision == "bf16", seed=recipe.loop.seed,
                per_device_train_batch_size=max(1, round(tokens_per_step / length / config.lanes)),
                gradient_accumulation_steps=config.lanes, learning_rate=recipe.loop.learning_rate,
                remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
                dataloader_pin_memory=False, include_num_input_tokens_seen="non_padding",
            ),
            train_dataset=rows,
            data_collator=collate,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return arm.rates(progress)


def _rows(
    corpus: TokenizedCorpus, recipe: Pretraining, tokens: int
) -> Iterator[dict[str, list[int]]]:
    """Pairs of the corpus as `transformers` takes them, of so many tokens at least if there are."""
    keep_context, keep_response = recipe.pretrain.kept_tokens
    cls, sep = corpus.vocabulary.cls, corpus.vocabulary.sep
    for uri in corpus.artifact.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(columns=["context", "response"]):
                for row in batch.to_pylist():
                    first, second = row["context"][-keep_context:], row["response"][:keep_response]
                    ids = [cls, *first, sep, *second, sep]
                    yield {
                        "input_ids": ids,
                        "token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1),
                        "special_tokens_mask": [1, *[0] * len(first), 1, *[0] * len(second), 1],
                    }
                    tokens -= len(ids)
                    if tokens <= 0:
                        return


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    cpu.keep_memory()  # as every worker of ours does, or big tensors would be mapped anew each step
