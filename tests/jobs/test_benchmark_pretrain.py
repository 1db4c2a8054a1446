"""`jobs.benchmark pretrain`: all sides train the same."""

from __future__ import annotations

import copy
from collections import Counter
from importlib.util import find_spec

import pytest
import torch

from jobs import benchmark
from jobs import pretrain as pretrain_job
from jobs.benchmarks import pretrain
from jobs.benchmarks.measure import Run
from jobs.benchmarks.pretrain import bare_step
from pipeline.training.loop import optimization
from pipeline.training.pretraining import Pretraining
from pipeline.training.tokenized_corpus import TokenizedCorpus

TINY = ("--encoder.layers", "1", "--encoder.width", "16", "--encoder.heads", "2",
        "--encoder.dropout", "0", "--pretrain.steps", "8", "--pretrain.batch-tokens", "512",
        "--pretrain.micro-batch-tokens", "256", "--pretrain.max-context-tokens", "48",
        "--pretrain.max-response-tokens", "32", "--loop.precision", "fp32")  # fmt: skip


@pytest.fixture(scope="module")
def corpus(reddit_corpus, tmp_path_factory) -> str:
    work = tmp_path_factory.mktemp("tokens")
    uri = pretrain.tokens("small", reddit_corpus.uri, work)
    assert pretrain.tokens("small", reddit_corpus.uri, work) == uri  # found, not made again
    assert pretrain.tokens("small", uri, work) == uri
    return uri


@pytest.fixture
def recipe(corpus, tmp_path) -> Pretraining:
    options = ["--corpus", corpus, "--output", str(tmp_path / "encoder"), *TINY]
    config = pretrain.parse(pretrain_job.Config, options, "test")
    tokens = TokenizedCorpus.open(corpus)
    return Pretraining((tokens,), (1.0,), config.shape, config.pretrain, config.loop)


@pytest.fixture
def in_process(run_job_here, monkeypatch):
    """Jobs run on the tests' Ray; returns the options that each was given."""
    asked: list[tuple[str, ...]] = []

    def run(verb, *options):
        asked.append((verb, *map(str, options)))
        return Run(run_job_here(verb, *options).summary, 1.0, 1.0)

    monkeypatch.setattr(pretrain, "run_job", run)
    return asked


@pytest.mark.long  # the recipe's own training takes 38 s
def test_a_bare_step_moves_the_weights_as_the_job_does(recipe):
    task = recipe.build(0, 1)
    theirs = copy.deepcopy(task.module)
    batches = task.batches.start(())
    batch, _ = next(batches)
    batches.close()
    modules = (task.module, theirs)
    optimizer, their_optimizer = (optimization(recipe.loop, module, 8) for module in modules)
    for each in (optimizer, their_optimizer):
        each.set_rate(0.01)
    bare_step(theirs, batch.parts, their_optimizer, torch.device("cpu"), bf16=False)
    task.backward(task.module, batch, torch.autocast("cpu", enabled=False))
    optimizer.clip()
    optimizer.optimizer.step()
    start, _ = recipe.model()
    pairs = zip(task.module.parameters(), theirs.parameters(), start.parameters(), strict=True)
    for ours, bare, before in pairs:
        torch.testing.assert_close(ours, bare)
        assert not torch.equal(ours, before)


@pytest.mark.long
def test_the_trainer_reads_the_pairs_of_the_job(recipe):
    """As many as have the tokens that are asked for, each as the job lays it out."""
    corpus = recipe.corpora[0]
    facts = corpus.vocabulary
    rows = list(pretrain._rows(corpus, recipe, 3_000))
    total = sum(len(row["input_ids"]) for row in rows)
    assert 3_000 <= total < 3_000 + len(rows[-1]["input_ids"])
    task = recipe.build(0, 1)
    walk = task.batches.start(())
    seen = Counter[tuple[int, ...]]()
    for _ in range(200):
        for part in next(walk)[0].parts:
            for ids, segments, length in zip(
                part.tokens.ids_BT, part.tokens.segments_BT, part.tokens.lengths, strict=True
            ):
                assert ids[0] == facts.cls and ids[length - 1] == facts.sep
                seen[tuple(segments[:length].tolist())] += 1
    walk.close()
    for row in rows:
        ids, special = row["input_ids"], row["special_tokens_mask"]
        assert ids[0] == facts.cls and ids[-1] == facts.sep
        assert sum(special) == 3 and all(special[at] for at, i in enumerate(ids) if i == facts.sep)
        longest = recipe.pretrain.longest_pair
        assert len(ids) == len(special) == len(row["token_type_ids"]) <= longest
    assert {tuple(row["token_type_ids"]) for row in rows[:50]} & set(seen)


@pytest.mark.long
def test_rows(in_process, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(pretrain._ROUNDS, "small", 1)
    config = benchmark.Config(part="pretrain", corpus=(corpus,), overrides=TINY)
    found = pretrain.measure(config, tmp_path)
    rows = {row.row: row for row in found}
    names = {"pretrain.vs_bare_loop", "pretrain.scaling_two_workers"}
    if find_spec("accelerate"):
        names.add("pretrain.vs_hf_trainer")
    assert set(rows) == {*names, "pretrain.data_wait_share"}
    for name in names:
        row = rows[name]
        assert row.ours > 0
        assert row.ratio == pytest.approx(row.ours / row.peer)
    assert 0 <= rows["pretrain.data_wait_share"].ours <= 1
    workers = {options[options.index("--resources.workers") + 1] for options in in_process
               if "--resources.workers" in options}  # fmt: skip
    assert workers == {"1", "2"}
    assert sum("mlm" in options for options in in_process) == bool(find_spec("accelerate"))
