"""Which files the demo takes from a folder, and what it refuses. `make demo` is the rest."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jobs import demo, demo_data, demo_questions, demo_stages, generate_dump
from jobs.workflow import Step
from pipeline.config import BadInput
from tests.helpers import free_port

REAL = (
    "reddit_dump/RC_2006-01.bz2",
    "reddit_dump/RC_2006-07.zst",
    "reddit_dump/RS_2006-01.zst",
    "convai2/derived/train_self_original.txt",
    "convai2/derived/train_self_original_no_cands.txt",
    "convai2/derived/valid_self_original.first500.txt",
    "convai2/original/valid_self_original_no_cands.first500.txt",
    "wikipedia/extracted_good/AA/wiki_00",
    "wikipedia/extracted_good/AB/wiki_00",
    "wikipedia/extracted_stubs_2018/AA/wiki_00",
    "wikipedia/enwiki-sample.xml.bz2",
)


@pytest.fixture
def layout(tmp_path: Path):
    """Empty files of the given names below a folder."""

    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    return make


def found(folder: Path) -> dict[str, list[str]]:
    """The files by format, relative to the folder."""
    data = vars(demo_data.find_files(folder))
    return {name: [str(Path(p).relative_to(folder)) for p in paths] for name, paths in data.items()}


def test_the_sample_files_are_found(sample_files):
    assert found(sample_files) == {
        "reddit": ["reddit_dump/RC_2011-01.zst", "reddit_dump/RC_2011-02.bz2"],
        "convai2": [
            "convai2/train_self_original.sample_no_cands.txt", "convai2/valid_self_original.sample.txt"
        ],
        "wikipedia": ["wikipedia/extracted/AA/wiki_00", "wikipedia/extracted/AA/wiki_01"],
    }  # fmt: skip


def test_of_real_data_the_whole_files_with_candidates_and_the_good_articles_are_taken(layout):
    assert found(layout(*REAL)) == {
        "reddit": ["reddit_dump/RC_2006-01.bz2", "reddit_dump/RC_2006-07.zst"],
        "convai2": [
            "convai2/derived/train_self_original.txt",
            "convai2/derived/valid_self_original.first500.txt",
        ],
        "wikipedia": ["wikipedia/extracted_good/AA/wiki_00", "wikipedia/extracted_good/AB/wiki_00"],
    }


@pytest.mark.parametrize(("prefix", "said"), [
    ("reddit_dump/RC_", "no Reddit dumps RC_* there"),
    ("convai2/derived/train", "no ConvAI2's train_self_original*.txt there"),
    ("convai2/derived/valid", "valid_self_original*.txt with candidates there"),
    ("wikipedia/extracted", "no WikiExtractor's wiki_* there"),
])  # fmt: skip
def test_a_format_that_is_missing_is_named(layout, prefix, said):
    folder = layout(*(name for name in REAL if not name.startswith(prefix)))
    with pytest.raises(BadInput) as caught:
        demo_data.find_files(folder)
    assert str(folder) in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused_before_any_work(run_job_here, tmp_path):
    refusal = run_job_here(
        "demo", "--data", tmp_path / "none", "--work", tmp_path / "work", "--port", free_port()
    ).refusal
    assert f"--data {tmp_path}/none: no such folder" in refusal


def test_a_port_in_use_is_refused_before_any_work(run_job_here, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal = run_job_here("demo", "--work", tmp_path / "work", "--port", port).refusal
    assert f"--port {port}: in use" in refusal
    assert list(tmp_path.iterdir()) == []


# What it shows


def test_the_true_article_is_marked_though_the_pool_keeps_it_without_another_sentence(capsys):
    results = [
        {"id": "a", "text": "one", "score": 2.0},
        {"id": "b", "text": "two", "score": 1.0},
        *({"id": f"c{place}", "text": "more", "score": 0.5} for place in range(3, 8)),
    ]
    for right in ({"id": "b"}, {"text": "one"}, {"id": "c5"}, {"id": "gone"}):
        demo_questions.show(results, **right)
    lines = capsys.readouterr().out.splitlines()
    marked = "".join(line[2] for line in lines)
    assert marked == " * " + "*  " + "   *" + "   "
    assert "(5.) more" in lines[9]


def stage(name: str, job: object, encoder: str = "", steps: int = 1) -> demo_stages.Stage:
    """A training whose output has its name."""
    config = SimpleNamespace(encoder=encoder, output=name, steps=steps)
    return demo_stages.Stage(SimpleNamespace(name=name, verb="finetune", job=job), config)


def test_trainings_side_by_side_share_one_bar_and_say_what_came_out(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    class Job:
        @staticmethod
        def run(config, watch) -> dict[str, object]:
            for step in range(1, config.steps + 1):
                watch(step, config.steps)
            return {"already_done": False, "counts": {"steps": config.steps}}

    demo_stages.run_side_by_side([stage(f"r{n}", Job, steps=n) for n in (3, 5, 4)], at_once=2)
    shown = capsys.readouterr()
    assert "12/12" in shown.err
    assert "r3=3/3" in shown.err and "r5=5/5" in shown.err
    for steps in (3, 5, 4):
        assert re.search(rf"^finetune +r{steps} +0\.\d s   {steps} steps$", shown.out, re.MULTILINE)


def test_a_stage_is_a_line_on_the_terminal_and_its_output_in_the_log(tmp_path, capsys, monkeypatch):
    def run(config):
        print("a line of the job")
        print("its bar", file=sys.stderr)
        if config.comments > 5:
            raise BadInput("too many")
        return {"counts": {"comments": 3, "files.new": 2}, "dropped": {"empty": 1, "long": 1}}

    monkeypatch.setattr(generate_dump, "run", run)
    command = ("python", "-m", "jobs.generate_dump", "--output", "out", "--comments")
    with demo_stages.log_to(tmp_path / "demo.log"):
        demo_stages.run_stage(Step("A dump", (*command, "5")))
    shown = capsys.readouterr()
    assert re.fullmatch(r"generate_dump +A dump +0\.\d s   3 comments, 2 left out\n", shown.out)
    assert shown.err == ""
    log = (tmp_path / "demo.log").read_text()
    assert "$ python -m jobs.generate_dump --output out --comments 5" in log
    assert "a line of the job" in log and "its bar" in log

    with pytest.raises(BadInput, match="too many"), demo_stages.log_to(tmp_path / "demo.log"):
        demo_stages.run_stage(Step("A dump", (*command, "6")))
    assert f"what the stages have printed: {tmp_path}/demo.log" in capsys.readouterr().err


def test_a_training_waits_for_the_one_it_starts_from():
    ended: list[str] = []

    class Job:
        @staticmethod
        def run(config, watch) -> dict[str, object]:
            assert config.encoder != "bi" or "bi" in ended
            ended.append(config.output)
            return {}

    encoders = {"articles": "encoder", "bi": "encoder", "poly": "bi"}
    stages = [stage(name, Job, encoder) for name, encoder in encoders.items()]
    demo_stages.run_side_by_side(stages, at_once=3)
    assert set(ended) == set(encoders)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_training_that_fails_fails_the_demo_and_those_that_wait_for_it(at_once):
    class Job:
        @staticmethod
        def run(config: object, watch) -> dict[str, object]:
            raise BadInput("no")

    with pytest.raises(BadInput, match=r"^no$"):
        stages = [stage("bi", Job), stage("poly", Job, "bi")]
        demo_stages.run_side_by_side(stages, at_once)


@pytest.fixture
def short_recipes(tmp_path, monkeypatch) -> None:
    """The demo's recipes with two steps each."""
    for name in ("pretrain/tiny-cpu", "demo-bi", "demo-cross", "demo-poly", "demo-articles"):
        recipe = yaml.safe_load((demo._CONFIGS / f"{name}.yaml").read_text())
        if "pretrain" in recipe:
            recipe["pretrain"]["steps"] = 2
            recipe["resources"]["workers"] = 1
            recipe["loop"]["warmup_steps"] = 0
        else:
            recipe["finetune"] |= {"max_steps": 2, "batch_examples": 8}
        file = tmp_path / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(demo, "_CONFIGS", tmp_path / "configs")


@pytest.mark.long
def test_the_demo_goes_from_dumps_to_answers(run_job, sample_files, short_recipes, tmp_path):
    """`make demo` is the same with more steps, on more dialogues."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "sample").symlink_to(sample_files)
    (sample_files / "DONE").touch()
    finished = run_job("demo", "--work", work, "--port", free_port())
    summary = finished.summary
    assert len(finished.stdout.splitlines()[-1]) < 500
    assert set(summary["r_at_1"]) == {"chance", "tf-idf", "bm25", "bi", "poly", "cross"}
    details = json.loads(Path(summary["details"]).read_text())
    assert {"Ranker: bi", "A pool of articles", "The service"} <= set(details["seconds"])
    for ranked in details["answers"].values():
        assert len(ranked) >= 3
    assert (work / "replies.png").stat().st_size > 10_000
    assert str(work / "replies.png") in finished.stdout
    assert "Traceback" not in finished.stderr
