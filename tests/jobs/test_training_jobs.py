"""jobs.finetune: what it publishes and records, and what it refuses.

On a cluster, killed and started again: test_end_to_end.py.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from jobs import finetune
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import parse
from pipeline.engine import executors
from pipeline.models.ranker import load_ranker
from tests.helpers import curve, same_weights

STEPS = {"bi": 4, "poly": 5, "cross": 3}
COMMON = (
    "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32,
    "--finetune.batch-examples", 8, "--finetune.epochs", 9, "--finetune.valid-examples", 40,
    "--loop.precision", "fp32", "--loop.log-every-steps", 1, "--resources.cpus-per-worker", 1,
)  # fmt: skip
OWN = {"bi": (), "poly": ("--ranker.m", 3), "cross": ("--finetune.negatives", 2)}


def arguments(
    architecture: str, corpus: object, encoder: object, output: object, *more: object
) -> list[str]:
    given = (
        "--corpus", corpus, "--encoder", encoder, "--output", output,
        "--ranker.architecture", architecture, "--finetune.max-steps", STEPS[architecture],
        *COMMON, *OWN[architecture], *more,
    )  # fmt: skip
    return [str(argument) for argument in given]


@pytest.fixture(scope="module")
def encoder(tiny_ranker) -> Path:
    """A plain `transformers` directory."""
    return tiny_ranker("bi").local() / "context_encoder"


@pytest.fixture(scope="module")
def trained(
    convai2_corpus, encoder, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], SimpleNamespace]:
    """`trained("poly")`: a ranker trained in this process. The bi-encoder starts from `encoder`, with
    relative paths and a name in the registry; the poly-encoder starts from the bi-encoder."""
    home = tmp_path_factory.mktemp("training")

    @functools.cache
    def train(architecture: str) -> SimpleNamespace:
        if architecture == "bi":
            (home / "encoder").symlink_to(encoder)
            (home / "corpus").symlink_to(convai2_corpus.uri)
            argv = arguments("bi", "corpus", "encoder", "rankers/bi", "--register-as", "tiny-bi")
        else:
            start = train("bi").artifact.uri if architecture == "poly" else encoder
            output = home / "rankers" / architecture
            argv = arguments(architecture, convai2_corpus.uri, start, output)
        with pytest.MonkeyPatch.context() as patch, executors.in_this_process():
            patch.chdir(home)
            summary = finetune.run(parse(finetune.Config, argv, "test"))
        artifact = open_artifact(str(home / "rankers" / architecture), "ranker")
        return SimpleNamespace(summary=summary, artifact=artifact, argv=argv, home=home)

    return train


def run_of(artifact: Artifact) -> mlflow.entities.Run:
    return mlflow.MlflowClient().get_run(artifact.manifest["run_id"])


# What comes out

ARCHITECTURES = list(STEPS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_published_ranker_has_learnt_and_the_summary_says_what_its_manifest_says(
    trained, architecture, encoder
):
    ranker = load_ranker(trained(architecture).artifact.local())
    assert ranker.config.architecture == architecture
    tower = ranker.cross.encoder if architecture == "cross" else ranker.dual.context_encoder
    start = load_file(encoder / "model.safetensors")
    now = tower.hf.state_dict()
    moved = [name for name in start if not torch.equal(start[name], now[name])]
    assert len(moved) > len(start) // 2
    assert all(torch.isfinite(value).all() for value in now.values())

    made = trained(architecture)
    assert made.summary["output"] == made.artifact.uri
    assert made.summary["fingerprint"] == made.artifact.fingerprint
    assert made.summary["already_done"] is False
    assert made.summary["counts"] == made.artifact.counts
    parameters = sum(value.numel() for value in ranker.parameters())
    assert made.artifact.counts == {"steps": STEPS[architecture], "parameters": parameters}
    assert made.summary["metrics"]["step"] == STEPS[architecture]
    assert math.isfinite(made.summary["metrics"]["loss"])


def test_what_precision_auto_means_is_recorded(convai2_corpus, encoder, tmp_path, monkeypatch):
    """It depends on the hardware, which a manifest does not know."""
    monkeypatch.setattr("pipeline.models.precision.use_bf16", lambda device: True)
    argv = arguments("bi", convai2_corpus.uri, encoder, tmp_path / "bi", "--loop.precision", "auto")
    with executors.in_this_process():
        finetune.run(parse(finetune.Config, argv, "test"))
    artifact = open_artifact(str(tmp_path / "bi"), "ranker")
    assert artifact.manifest["config"]["loop"]["precision"] == "auto"
    assert artifact.manifest["precision"] == run_of(artifact).data.tags["precision"] == "bf16"


def test_the_manifest_names_the_whole_ancestry(trained, convai2_corpus, encoder):
    bi, poly = trained("bi").artifact, trained("poly").artifact
    inputs = poly.manifest["inputs"]
    assert inputs["corpus"] == convai2_corpus.reference()
    assert inputs["encoder"] == bi.reference()
    origin = inputs["encoder"]["inputs"]["encoder"]
    assert (origin["kind"], len(origin["fingerprint"])) == ("external", 16)
    assert inputs["encoder"]["inputs"]["corpus"]["fingerprint"] == convai2_corpus.fingerprint


def test_an_external_encoder_is_named_by_its_contents_wherever_it_lies(
    run_job_here, trained, convai2_corpus, encoder, tmp_path
):
    shutil.copytree(encoder, tmp_path / "copy")
    first = trained("bi")
    again = arguments("bi", convai2_corpus.uri, tmp_path / "copy", first.artifact.uri)
    assert run_job_here("finetune", *again).summary["already_done"] is True
    (tmp_path / "copy" / "tokenizer_config.json").write_text("{}")
    assert "encoder" in run_job_here("finetune", *again).refusal


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_run_holds_the_curve_the_settings_and_the_lineage(trained, architecture):
    artifact = trained(architecture).artifact
    run = run_of(artifact)
    steps = STEPS[architecture]
    losses = curve(artifact)
    assert list(losses) == list(range(1, steps + 1))
    assert losses[steps] == trained(architecture).summary["metrics"]["loss"]
    assert set(curve(artifact, "learning_rate")) == set(losses)
    assert run.info.status == "FINISHED"
    assert run.data.params["finetune.max_steps"] == str(steps)
    assert run.data.params["ranker.architecture"] == architecture
    tags = run.data.tags
    assert (tags["job"], tags["output_uri"]) == ("finetune", artifact.uri)
    assert tags["output_fingerprint"] == artifact.fingerprint
    for name, reference in artifact.manifest["inputs"].items():
        assert tags[f"input.{name}.fingerprint"] == reference["fingerprint"]
        assert tags.get(f"input.{name}.run_id") == reference.get("run_id")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_validations_are_curves_and_the_best_is_in_the_summary(trained, architecture):
    made = trained(architecture)
    found = curve(made.artifact, "valid_r1")
    assert STEPS[architecture] in found
    metrics = made.summary["metrics"]
    assert metrics["best_valid_r1"] == max(found.values()) == found[int(metrics["best_step"])]
    logged = run_of(made.artifact).data.metrics
    assert logged["delivered_valid_r1"] == metrics["best_valid_r1"]
    assert logged["delivered_step"] == metrics["best_step"]
    assert set(curve(made.artifact, "valid_loss")) == set(found)


def test_a_valid_split_without_a_wrong_candidate_is_said(capsys):
    finetune._print_validation(0, {}, 3)
    assert "none of the 3 examples of valid/ has a wrong candidate" in capsys.readouterr().out
    finetune._print_validation(0, {}, 0)  # no valid split
    assert not capsys.readouterr().out


def pairs_corpus(run_job_here, folder, rows):
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = run_job_here(
        "prepare_corpus", "--format", "pairs", "--input", folder / "pairs.jsonl",
        "--pairs.shares", 1, 0, 0, "--output", folder / "corpus",
    )  # fmt: skip
    assert made.code == 0, made.stderr
    return folder / "corpus"


@pytest.mark.parametrize(("context", "response", "side"), [
    ("q{}", "a response whose first thirty-two letters are these {}", "responses"),
    ("an instruction that is the same for each of the texts", "a{}", "contexts"),
])  # fmt: skip
def test_texts_that_all_read_the_same_are_refused(
    run_job_here, encoder, tmp_path, context, response, side
):
    """The loss would be 0 and the accuracy 1. A ranker that is not trained may be made."""
    rows = [{"context": context.format(n), "response": response.format(n)} for n in range(20)]
    corpus = pairs_corpus(run_job_here, tmp_path, rows)
    argv = arguments("bi", corpus, encoder, tmp_path / "out")
    refused = run_job_here("finetune", *argv).refusal
    assert f"corpus: all {side} of train/ read the same to the model; allowed: texts" in refused
    assert run_job_here("finetune", *argv, "--finetune.epochs", 0).code == 0


def test_a_tokenizer_with_more_tokens_than_the_encoder_is_refused(run_job_here, encoder, tmp_path):
    folder = tmp_path / "encoder"
    shutil.copytree(encoder, folder)
    model = AutoModel.from_pretrained(folder)
    model.resize_token_embeddings(20)
    model.save_pretrained(folder)
    rows = [{"context": f"q{n}", "response": f"a{n}"} for n in range(20)]
    corpus = pairs_corpus(run_job_here, tmp_path, rows)
    refused = run_job_here("finetune", *arguments("bi", corpus, folder, tmp_path / "out")).refusal
    assert (
        "allowed: one of a single model: it has 20 tokens, and its tokenizer finds tok" in refused
    )


def test_a_registered_model_is_the_candidate_of_its_name(trained):
    artifact = trained("bi").artifact
    version = mlflow.MlflowClient().get_model_version_by_alias("tiny-bi", "candidate")
    assert version.source == artifact.uri
    assert version.tags["fingerprint"] == artifact.fingerprint
    assert version.run_id == artifact.manifest["run_id"]


def test_a_ranker_that_was_trained_by_adapters_is_a_plain_one(
    run_job_here, convai2_corpus, encoder, tmp_path
):
    pytest.importorskip("peft")
    output = tmp_path / "out"
    argv = arguments("poly", convai2_corpus.uri, encoder, output, "--finetune.lora-rank", 2)
    made = run_job_here("finetune", *argv).summary
    assert made["counts"]["parameters"] == load_ranker(output).parameter_count
    for tower in ("context_encoder", "candidate_encoder"):
        start = load_file(encoder.parent / tower / "model.safetensors")
        now = load_file(output / tower / "model.safetensors")
        assert now.keys() == start.keys()
        moved = {name for name in now if not torch.equal(now[name], start[name])}
        assert moved == {
            name for name, value in now.items() if value.dim() == 2 and name.startswith("encoder.")
        }
    assert run_job_here("finetune", *argv).summary["already_done"] is True


# Again


def test_the_same_command_again_finds_its_work_done(run_job_here, trained, monkeypatch):
    made = trained("bi")
    assert [path.name for path in (made.home / "rankers").glob("bi*")] == ["bi"]
    monkeypatch.chdir(made.home)
    again = run_job_here("finetune", *made.argv).summary
    assert again["already_done"] is True
    assert again["fingerprint"] == made.artifact.fingerprint
    changed = run_job_here("finetune", *made.argv, "--loop.learning-rate", "0.1").refusal
    assert "loop.learning_rate: 5e-05 there, 0.1 here" in changed


def test_without_a_step_a_ranker_is_its_encoder_s(run_job_here, convai2_corpus, encoder, tmp_path):
    """As a table's first row: what training adds to."""
    argv = arguments("bi", convai2_corpus.uri, encoder, tmp_path / "out", "--finetune.epochs", 0)
    done = run_job_here("finetune", *argv)
    assert done.summary["counts"]["steps"] == 0
    tokenizer = load_ranker(tmp_path / "out").tokenizer
    examples = pq.read_table(f"{convai2_corpus.uri}/train", partitioning=None).to_pylist()
    contexts = tokenizer.ids(["\n".join(example["context"]) for example in examples])
    longer = sum(len(ids) + 2 > 48 for ids in contexts)
    assert 0 < longer <= len(examples) <= 2000
    said = f"train: {longer:,} of {len(examples):,} contexts are longer than the 48 tokens"
    assert said in done.stdout
    tower = tmp_path / "out" / "context_encoder"
    made, given = (load_file(folder / "model.safetensors") for folder in (tower, encoder))
    assert all(torch.equal(value, given[name]) for name, value in made.items())


def test_a_guide_is_an_input_and_says_what_it_excludes(
    run_job_here, trained, convai2_corpus, encoder, tmp_path
):
    """Without one the job is the same as before there were guides."""
    bi = trained("bi").artifact
    assert "guide" not in bi.manifest["config"] and "guide" not in bi.manifest["inputs"]
    limits = ("--finetune.guide.margin", 0.01)
    argv = arguments("bi", convai2_corpus.uri, encoder, tmp_path / "bi", "--guide", bi.uri, *limits)
    assert run_job_here("finetune", *argv).code == 0
    guided = open_artifact(str(tmp_path / "bi"), "ranker")
    assert guided.manifest["inputs"]["guide"] == bi.reference()
    assert all(0 < share < 1 for share in curve(guided, "guide_excludes").values())
    assert not same_weights(bi.local(), tmp_path / "bi")
    assert run_job_here("finetune", *argv).summary["already_done"] is True
    other = [*argv, "--guide", trained("poly").artifact.uri]
    assert "--guide has other contents than it had" in run_job_here("finetune", *other).refusal


# What is refused


def test_prompts_of_a_published_encoder_go_from_ranker_to_ranker(
    run_job_here, convai2_corpus, encoder, tmp_path
):
    published = tmp_path / "published"
    shutil.copytree(encoder, published)
    prompts = {"prompts": {"query": "query: ", "document": "passage: "}}
    (published / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    start = published
    for name in ("bi", "poly"):
        argv = arguments(name, convai2_corpus.uri, start, tmp_path / name, "--finetune.epochs", 0)
        done = run_job_here("finetune", *argv)
        assert "prompts of the encoder: 'query: ' before contexts, 'passage: '" in done.stdout
        start = tmp_path / name
        ranker = load_ranker(start)
        assert ranker.candidate_rows(["tea"]) == ranker.tokenizer.candidates(["passage: tea"], 48)
        assert ranker.context_rows([["tea"]]) == ranker.tokenizer.contexts([["query: tea"]], 48)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind}
               for kind in ("Transformer", "Pooling", "Dense", "Normalize")]  # fmt: skip
    (published / "modules.json").write_text(json.dumps(modules))
    (published / "Pooling").mkdir()
    (published / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    argv = arguments("bi", convai2_corpus.uri, published, tmp_path / "max", "--dry-run", "true")
    shown = run_job_here("finetune", *argv).stdout
    assert "trained with the reduction 'max', this ranker has --ranker.reduction mean" in shown
    assert "the encoder's Dense layer is left out" in shown
    assert "the encoder's vectors have length 1, those of this ranker any" in shown
    by_hand = arguments(
        "bi", convai2_corpus.uri, published, tmp_path / "own", "--finetune.epochs", 0,
        "--ranker.context-prompt", "ask: ",
    )  # fmt: skip
    assert run_job_here("finetune", *by_hand).code == 0
    config = load_ranker(tmp_path / "own").config
    assert (config.context_prompt, config.candidate_prompt) == ("ask: ", "")


@pytest.fixture
def refused(run_job_here, convai2_corpus, encoder, tmp_path):
    """The refusal of a job, before anything was made or run."""

    def run(*more: object, verb: str = "finetune", **changed: object) -> str:
        given = {"corpus": convai2_corpus.uri, "encoder": encoder, "output": tmp_path / "out"}
        last_run = newest_run_id()
        argv = arguments("bi", *{**given, **changed}.values(), *more)
        refusal = run_job_here(verb, *argv).refusal
        assert not list(tmp_path.glob("out*"))
        assert newest_run_id() == last_run
        return refusal

    return run


def newest_run_id() -> list[str]:
    """Of all experiments; none where there is no run. To read all runs takes 0.3 s."""
    found = mlflow.search_runs(search_all_experiments=True, max_results=1, output_format="list")
    return [run.info.run_id for run in found]


CONVERT = ("--ranker.architecture", "convert")
CROSS = ("--ranker.architecture", "cross")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--finetune.chunk-examples", 4, "--loop.compile"], ["loop.compile: True", "false where"]),
        ([*CROSS, "--finetune.negatives-from", "given"], ["from: 'given'", "gives no candidates"]),
        (
            [*CROSS, "--finetune.negatives-from", "both"],
            ["negatives_from: 'both'", "'batch' or 'given' with ranker.architecture 'cross'"],
        ),
        (
            ["--finetune.chunk-examples", 8],
            ["finetune.chunk_examples: 8", "0, or below finetune.batch_examples, 8"],
        ),
        (
            ["--loop.stop-after-validations", 3, "--loop.validate-every-epochs", 0],
            ["loop.stop_after_validations: 3", "0 or 10 where loop.validate_every_epochs is 0"],
        ),
        (
            ["--finetune.negatives", 7],
            ["7 has no effect; it is read with finetune.negatives_from 'given', 'both', 'mined' (here "
             "'batch') or ranker.architecture 'cross' (here 'bi')"],
        ),
        (
            ["--ranker.architecture", "poly", "--ranker.context-codes", "first_m",
             "--ranker.code-attention", "scaled_dot"],
            ["ranker.code_attention: 'scaled_dot' has", "'learnt' (here 'first_m')"],
        ),
        (
            [*CONVERT, "--ranker.quantised", "false", "--ranker.block-weights", "int8"],
            ["ranker.block_weights: 'int8'", "'float16' with ranker.quantised false"],
        ),
        (
            [*CONVERT, "--ranker.earlier-turns", 0, "--ranker.number-earlier-turns", "true"],
            ["ranker.number_earlier_turns: True", "false with ranker.earlier_turns 0"],
        ),
        (["--finetune.guide.margin", 0.1], ["finetune.guide.margin: 0.1", "allowed: 0.0 without --guide"]),
        (["--guide", "none"], ["--guide none: no such folder, nor to be had from the hub"]),
        (["--resources.workers", 3], ["finetune.batch_examples: 8", "a multiple of the 3 workers"]),
        (["--resources.shard-weights", "true"], ["only jobs.pretrain shards weights"]),
        (["--ranker.m", 3], ["ranker.m", "ranker.architecture 'bi'", "allowed with: poly"]),
        (["--ranker.max-context-tokens", 97], ["max_context_tokens: 97", "at most 96"]),
        (
            [*CROSS, "--ranker.max-context-tokens", 80],
            ["max_context_tokens + max_candidate_tokens: 111", "at most 96"],
        ),
    ],
)  # fmt: skip
def test_settings_that_are_not_allowed_are_refused_before_any_work(refused, options, parts):
    refusal = refused(*options)
    assert [part for part in parts if part not in refusal] == []


def test_one_encoder_does_not_start_from_a_ranker_with_two(refused, tiny_ranker):
    """It would get the contexts' encoder, which never read a reply."""
    start = tiny_ranker("bi")
    refusal = refused(*CROSS, encoder=start.uri)
    assert f"--encoder {start.uri}: has an encoder for contexts and another one for" in refusal
    assert "--ranker.share-towers true" in refusal and "/context_encoder" in refusal


@pytest.mark.parametrize("missing", ["tokenizer", "weights"])
def test_an_encoder_that_is_not_whole_is_refused(refused, encoder, tmp_path, missing):
    folder = tmp_path / "encoder"
    shutil.copytree(encoder, folder)
    for file in folder.glob({"tokenizer": "tokenizer*", "weights": "*.safetensors"}[missing]):
        file.unlink()
    refusal = refused(encoder=folder)
    assert str(folder) in refusal and missing in refusal


@pytest.mark.parametrize(("changed", "said"), [
    ({}, "needed here: tokenizer"),
    ({"--tokenizer": "none"}, "--tokenizer none: no such folder, nor to be had from the hub"),
    ({"--tokenizer": "", "--start": "none"}, "--start none: no such folder, nor to be had"),
    ({"--encoder.width": 15, "--encoder.heads": 2}, "shape.width: 15"),
])  # fmt: skip
def test_pretraining_refuses_a_misfit(run_job_here, convai2_corpus, tmp_path, changed, said):
    corpus = convai2_corpus.uri
    given = {"--corpus": corpus, "--tokenizer": corpus, "--output": tmp_path / "out", **changed}
    refusal = run_job_here("pretrain", *(part for pair in given.items() for part in pair)).refusal
    assert said in refusal
    assert list(tmp_path.iterdir()) == []


# More steps


@pytest.mark.slow
def test_a_published_ranker_continues_with_more_steps(
    run_job_here, convai2_corpus, reddit_corpus, encoder, tiny_ranker, tmp_path, monkeypatch
):
    """To the weights of one long run, learnt codes and the best validation included."""

    def argv(name: str, steps: int, *more: object) -> list[str]:
        return arguments(
            "poly", convai2_corpus.uri, encoder, tmp_path / name, "--loop.schedule", "constant",
            "--loop.warmup-steps", 2, "--loop.validate-every-steps", 3,
            "--finetune.max-steps", steps, "--keep-training-state", "true", *more,
        )  # fmt: skip

    assert run_job_here("finetune", *argv("short", 6)).summary["counts"]["steps"] == 6
    more = ("--continue-from", tmp_path / "short")
    going_on = run_job_here("finetune", *argv("long", 10, *more)).summary
    whole = run_job_here("finetune", *argv("whole", 10)).summary
    assert going_on["counts"] == whole["counts"] and going_on["counts"]["steps"] == 10
    assert same_weights(tmp_path / "long", tmp_path / "whole")
    assert not same_weights(tmp_path / "short", tmp_path / "whole")
    best = {name: value for name, value in whole["metrics"].items() if name.startswith("best_")}
    assert best.items() <= going_on["metrics"].items() and best
    folders = (str(tmp_path / name) for name in ("long", "short", "whole"))
    long, short, complete = (open_artifact(folder, "ranker") for folder in folders)
    assert {**curve(short), **curve(long)} == curve(complete)
    assert long.manifest["inputs"]["continue_from"] == short.reference()
    again = run_job_here("finetune", *argv("long", 12, "--continue-from", tmp_path / "long"))
    assert "holds the result of another job" in again.refusal

    monkeypatch.setattr("pipeline.training.estimate._MEASURED_SECONDS", 0.0)
    cost = run_job_here("finetune", *argv("no", 10, *more, "--dry-run", "true")).summary["estimate"]
    assert cost["steps"] == 4

    def refusal(steps: int = 10, *options: object) -> str:
        refused = run_job_here("finetune", *argv("no", steps, *more, *options)).refusal
        assert not list(tmp_path.glob("no*"))
        return refused

    assert "finetune.max_steps: 6" in refusal(6)
    assert "finetune.epochs: 0.0 " in refusal(0, "--finetune.epochs", 0)
    few = refusal(0, "--finetune.epochs", 0.01)
    assert "finetune.epochs: 0.01" in few and "--continue-from has 6" in few
    assert "ranker.m is 3 there, 4 here" in refusal(10, "--ranker.m", 4)
    assert "finetune.batch_examples is 8" in refusal(10, "--finetune.batch-examples", 4)
    assert "loop.head_lr_factor is 10.0" in refusal(10, "--loop.head-lr-factor", 1)
    assert "corpus is [" in refusal(10, "--corpus", reddit_corpus.uri)
    assert "encoder is [" in refusal(10, "--encoder", tiny_ranker("bi").uri)


def test_a_ranker_without_its_training_state_cannot_be_continued(refused, trained):
    without = trained("poly").artifact
    assert not without.paths("training_state/")
    refusal = refused("--continue-from", without.uri)
    assert "has no training_state" in refusal
    assert "--keep-training-state true, into another --output" in refusal


# Compiled


@pytest.mark.long  # 23 s on two slow cores, most of them torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler hides it otherwise
def test_a_compiled_run_that_was_killed_ends_with_the_same_weights(
    convai2_corpus, encoder, tmp_path, monkeypatch
):
    """And has the losses of a run that was not compiled. Only the compiler's first half, which makes the
    graphs, takes part: the kernels of its second half would take minutes."""
    compiled, compile_model = [], torch.compile

    def compile_graphs(model: torch.nn.Module) -> object:
        compiled.append(model)
        return compile_model(model, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_graphs)

    def run(name: str, *more: object, stop_at: int = 0) -> Path:
        def watch(step: int, steps: int) -> None:
            if step == stop_at:
                raise KeyboardInterrupt

        argv = arguments(
            "bi", convai2_corpus.uri, encoder, tmp_path / name, "--finetune.dropout", 0,
            "--loop.checkpoint-every-steps", 1, "--loop.validate-every-epochs", 0,
            "--finetune.max-steps", 3, *more,
        )  # fmt: skip
        with executors.in_this_process():
            finetune.run(parse(finetune.Config, argv, "test"), watch)
        return tmp_path / name

    plain = run("plain")
    assert compiled == []
    whole = run("whole", "--loop.compile", "true")
    with pytest.raises(KeyboardInterrupt):
        run("killed", "--loop.compile", "true", stop_at=2)
    killed = run("killed", "--loop.compile", "true")
    assert len(compiled) == 3
    assert same_weights(killed, whole)
    losses = [curve(open_artifact(str(folder), "ranker")) for folder in (plain, whole, killed)]
    assert losses[1] == losses[2] == pytest.approx(losses[0], abs=1e-4)
