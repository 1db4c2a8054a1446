"""Peers of jobs.pretrain: a bare PyTorch loop, and the Trainer of `transformers`.

Both run in processes of their own with one thread each, and return tokens a second, padding not counted,
of each interval of some steps.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
import torch

from pipeline import storage
from pipeline.models import cpu
from pipeline.models.encoder import prepare_for_training
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.tokens import Tokenizer
from pipeline.training.loop import Optimization, optimization
from pipeline.training.pretraining import Pretraining
from pipeline.training.pretraining_data import MicroBatch, PretrainingBatches
from pipeline.training.tokenized_corpus import TokenizedCorpus

Rates = list[float]


@dataclass(frozen=True)
class Arm:
    """The training that all sides do."""

    recipe: Pretraining
    precision: str
    """bf16 or fp32."""
    interval: int
    """Steps of an interval; the recipe's steps are a multiple."""


def bare_loops(arm: Arm, processes: int) -> Rates:
    """`processes` bare loops at the same time, each over its own micro-batches; their sum."""
    rates = _in_processes(_bare_loop, arm, processes)
    return [sum(interval_rates) for interval_rates in zip(*rates, strict=True)]


def hf_trainer(arm: Arm, tokens_per_step: float) -> Rates:
    """The Trainer, with as many tokens in a step on average."""
    return _in_processes(_hf_trainer, arm, 1, tokens_per_step)[0]


def _in_processes(
    function: Callable[..., Rates], arm: Arm, processes: int, *arguments: object
) -> list[Rates]:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, context) as pool:
        barrier = manager.Barrier(processes)
        futures = [
            pool.submit(function, arm, rank, processes, barrier.wait, *arguments)
            for rank in range(processes)
        ]
        return [future.result() for future in futures]


def _bare_loop(arm: Arm, rank: int, world: int, wait: Callable[[], object]) -> Rates:
    """A plain loop over batches in memory: no Ray, no reports, no checks."""
    _use_one_thread()
    recipe, steps = arm.recipe, arm.recipe.pretrain.steps
    walk = PretrainingBatches(
        recipe.corpora, recipe.weights, recipe.pretrain, rank, world, recipe.loop.seed
    ).start()
    batches = [next(walk)[0].parts for _ in range(steps)]
    walk.close()
    device = torch.device("cpu")
    model, _ = recipe.model()
    prepare_for_training(model, device, recipe.loop.precision)
    model.train()
    optimizer = optimization(recipe.loop, model, steps)
    wait()
    rates, began = Rates(), time.perf_counter()
    for number, parts in enumerate(batches, start=1):
        bare_step(model, parts, optimizer, device, arm.precision == "bf16")
        if number % arm.interval == 0:
            interval_batches = batches[number - arm.interval : number]
            tokens = sum(part.token_count for parts in interval_batches for part in parts)
            now = time.perf_counter()
            rates.append(tokens / (now - began))
            began = now
    return rates


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
    """The Trainer with its defaults, but the same precision, seed, learning rate and number of micro-batches
    in a step. `remove_unused_columns` would take away the mask of special tokens, and
    the collator would make it anew in Python."""
    from transformers import (
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
    tokens, ends = list[int](), list[float]()

    def collate_and_count(examples: list[dict[str, list[int]]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(examples)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=_masked_lm(model),
            args=TrainingArguments(
                output_dir=folder, max_steps=config.steps, use_cpu=True,
                bf16=arm.precision == "bf16", seed=recipe.loop.seed,
                per_device_train_batch_size=max(1, round(tokens_per_step / length / config.lanes)),
                gradient_accumulation_steps=config.lanes, learning_rate=recipe.loop.learning_rate,
                remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=rows,
            data_collator=collate_and_count,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    size = arm.interval
    return [
        sum(tokens[first_step * config.lanes : (first_step + size) * config.lanes])
        / (ends[first_step + size] - ends[first_step])
        for first_step in range(0, config.steps, size)
    ]


def _masked_lm(model: PretrainingModel) -> Any:
    """The plain `transformers` model of the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        from pathlib import Path

        from transformers import AutoModelForMaskedLM

        model.save(Path(folder))
        return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)


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
                    special = [1, *[0] * len(first), 1, *[0] * len(second), 1]
                    segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
                    yield {
                        "input_ids": ids,
                        "token_type_ids": segments,
                        "special_tokens_mask": special,
                    }
                    tokens -= len(ids)
                    if tokens <= 0:
                        return


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    cpu.keep_memory()  # as every worker of ours does, or big tensors would be mapped anew each step
