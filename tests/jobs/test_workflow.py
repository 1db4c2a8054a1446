"""jobs.workflow: a list of commands that stops at the first failure and continues there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import workflow
from jobs.workflow import read_steps
from pipeline.config import BadInput, Stopped
from pipeline.corpora import author_key
from pipeline.engine import executors
from tests.helpers import INTERRUPTED, TERMINATED, job_command

ROOT = Path(__file__).parents[2]
THREE = """
variables: {folder: , name: "${folder}/made"}
steps:
  first: python -m jobs.submit --dry-run -- inspect --pool x
  second: cp ${folder}/input ${name}     # nothing of a job's
  third: touch ${folder}/third
"""


@pytest.fixture
def three(tmp_path) -> Path:
    (tmp_path / "three.yaml").write_text(THREE)
    return tmp_path / "three.yaml"


def run(file: Path, *settings: str, **options):
    return workflow.run(workflow.Config(file=str(file), set=settings, **options))


def test_a_workflow_stops_at_the_first_failure_and_continues_there(three, tmp_path, capfd):
    folder = f"folder={tmp_path}"
    with pytest.raises(Stopped, match=r"step second failed \(exit code 1\); the same command"):
        run(three, folder)
    assert not (tmp_path / "third").exists()
    (tmp_path / "input").write_text("input")
    done = run(three, folder)
    assert [step["step"] for step in done["steps"]] == ["first", "second", "third"]
    assert (done["steps"][0]["job"], done["steps"][0]["submitted"]) == ("submit", False)
    assert "\npipeline/: " in capfd.readouterr().out  # what the job printed
    assert (tmp_path / "made").read_text() == "input" and (tmp_path / "third").exists()
    skipped = run(three, folder, start_at="third")
    assert (skipped["skipped"], len(skipped["steps"])) == (["first", "second"], 1)
    skipped = run(three, folder, skip=("second",))
    assert [step["step"] for step in skipped["steps"]] == ["first", "third"]


def test_files_of_the_user_are_not_taken_for_polyrank_s(tmp_path, monkeypatch):
    for name in ("pipeline", "jobs", "serve"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    (tmp_path / "w.yaml").write_text("steps: {a: polyrank submit --dry-run -- inspect --pool x}")
    monkeypatch.chdir(tmp_path)
    assert [step["job"] for step in run(tmp_path / "w.yaml")["steps"]] == ["submit"]


def test_a_step_may_print_what_is_not_utf8(tmp_path, capfd):
    (tmp_path / "w.yaml").write_text("steps: {a: printf 'caf\\351\\n'}")
    assert [step["step"] for step in run(tmp_path / "w.yaml")["steps"]] == ["a"]
    assert "caf\ufffd\n" in capfd.readouterr().out


def test_a_comment_takes_no_option_from_a_command(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(
        "steps:\n  a: >\n    polyrank promote --name replies   # the gate\n    --corpus c --split valid\n"
    )
    with pytest.raises(BadInput, match=r"steps\.a: '# the gate --corpus c --split valid' is not"):
        read_steps(str(file))
    file.write_text("steps: {a: polyrank prepare_corpus --input a#b --output c}   # all of it\n")
    assert read_steps(str(file))[0].options == ("--input", "a#b", "--output", "c")


def test_a_value_may_begin_with_the_sign_of_a_comment(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(
        "variables: {table: a}\nsteps: {a: 'polyrank prepare_corpus --input ${table} '}\n"
    )
    assert read_steps(str(file), ("table='#1 in.csv'",))[0].options == ("--input", "#1 in.csv")


SLOW_TO_END = """
import signal, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    print("ready", flush=True)
    signal.pause()
except KeyboardInterrupt:
    time.sleep(1)  # longer than Popen waits by itself
    print("ended", flush=True)
"""


@pytest.mark.parametrize(("end", "number", "code"), [
    (os.killpg, signal.SIGINT, INTERRUPTED),  # as a terminal sends it
    (os.kill, signal.SIGTERM, TERMINATED),
])  # fmt: skip
def test_a_workflow_that_is_ended_waits_until_the_step_has_ended(tmp_path, end, number, code):
    (tmp_path / "step.py").write_text(SLOW_TO_END)
    (tmp_path / "w.yaml").write_text(f"steps: {{only: '{sys.executable} {tmp_path}/step.py'}}")
    process = subprocess.Popen(
        job_command("workflow", tmp_path / "w.yaml"),
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    end(process.pid, number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert rest.startswith("ended\n")


def test_a_refusal_of_a_step_is_the_workflow_s(tmp_path, capfd):
    (tmp_path / "w.yaml").write_text("steps: {only: python -m jobs.inspect --corpus /nowhere}")
    with pytest.raises(BadInput, match=r"step only failed \(exit code 2\)"):
        run(tmp_path / "w.yaml")
    assert "python -m jobs.inspect: /nowhere: not a corpus" in capfd.readouterr().err


ONE_JOB = "steps: {only: python -m jobs.submit --dry-run -- inspect --pool x}"


def test_a_job_whose_process_dies_is_started_again(tmp_path, dies, capfd):
    (tmp_path / "w.yaml").write_text(ONE_JOB)
    dies("submit", 2, -9)
    (step,) = run(tmp_path / "w.yaml")["steps"]
    assert (step["job"], step["submitted"]) == ("submit", False)
    printed = capfd.readouterr().err
    assert "step only: its process died (exit code 2, start 1 of 3)" in printed
    assert "step only: its process died (exit code -9, start 2 of 3)" in printed


def test_jobs_run_where_their_tasks_run(tmp_path, dies, capfd):
    (tmp_path / "w.yaml").write_text(ONE_JOB)
    dies("submit", *[-9] * 9)  # a process of its own would die
    with executors.in_this_process():
        (step,) = run(tmp_path / "w.yaml")["steps"]
    assert (step["job"], step["submitted"]) == ("submit", False)
    assert '{"job": "submit"' in capfd.readouterr().out


@pytest.mark.parametrize(("codes", "deaths"), [((-6, -11, 2), 3), ((-15,), 0)])
def test_a_death_is_no_refusal_whatever_its_exit_code(tmp_path, dies, capfd, codes, deaths):
    (tmp_path / "w.yaml").write_text(ONE_JOB)
    dies("submit", *codes)
    message = rf"step only failed \(exit code {codes[-1]}\); the same command continues there"
    with pytest.raises(Stopped, match=message):  # BadInput would be exit code 2
        run(tmp_path / "w.yaml")
    assert capfd.readouterr().err.count("its process died") == deaths


def test_a_dry_run_whose_first_input_is_not_there_fails(tmp_path):
    file = tmp_path / "steps.yaml"
    tokenize = "python -m jobs.tokenize_corpus --corpus nowhere --tokenizer t --output o"
    file.write_text(
        f"steps:\n  only: python -m jobs.inspect --corpus nowhere\n  then: {tokenize}\n"
    )
    config = workflow.Config(file=str(file), dry_run=True, start_at="then")
    with pytest.raises(BadInput, match=r"step then would fail \(exit code 2\)"):
        workflow.run(config)


def test_a_dry_run_starts_nothing_but_dry_runs(three, tmp_path, capfd):
    done = run(three, f"folder={tmp_path}", dry_run=True)
    assert [step["step"] for step in done["steps"]] == ["first", "second", "third"]
    printed = capfd.readouterr().out
    assert f"== 2/3 second: cp {tmp_path}/input {tmp_path}/made" in printed
    assert list(tmp_path.iterdir()) == [three]


@pytest.mark.parametrize(("text", "options", "message"), [
    ("steps: [", {}, "not a workflow"),
    ("steps: {}", {}, "steps: 'none' is not allowed"),
    ("steps: {a: }", {}, "steps.a: 'None' is not allowed; allowed: a command"),
    ("steps: {a: ls}\nmore: 1", {}, "a mapping with `steps`"),
    ("steps: {a: 'ls ${x}'}", {}, r"steps\.a: \$\{x\} is no variable"),
    ("variables: {x: }\nsteps: {a: 'ls ${x}'}", {}, "^--set x=…: missing"),
    ("variables: {x: 1}\nsteps: {a: ls}", {"set": ("y=1",)},
     "^set: 'y=1' is not allowed; allowed: NAME=VALUE with one of: x"),
    ("steps: {a: \"echo 'x\"}", {}, r"steps\.a: No closing quotation in"),
    ("steps: {a: '# nothing'}", {}, r"steps\.a: '# nothing' is not allowed"),
    ("steps: {a: no-such-program}", {}, r"^steps\.a: 'no-such-program' is not allowed"),
    ("steps: {a: polyrank nope}", {}, r"^steps\.a: 'nope' is not allowed"),
    ("steps: {a: polyrank embed-pool --nope 1}", {}, r"^steps\.a: .*--nope"),
    ("steps: {a: ls}", {"start_at": "b"}, "^start_at: 'b' is not allowed; allowed: a"),
    ("steps: {a: ls}", {"skip": ("b",)}, "^skip: 'b' is not allowed; allowed: a"),
])  # fmt: skip
def test_bad_workflows_are_refused_before_a_step_runs(tmp_path, text, options, message):
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(BadInput, match=message):
        workflow.run(workflow.Config(file=str(tmp_path / "w.yaml"), **options))


@pytest.mark.parametrize(
    "file", sorted((ROOT / "jobs" / "workflows").glob("*.yaml")), ids=lambda f: f.stem
)
def test_the_workflows_that_are_shipped_are_commands(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    steps = read_steps(str(file))
    for step in steps:
        workflow.check(step)
    verbs = [step.verb for step in steps]
    path = ["prepare_corpus", "pretrain", "finetune", "embed_pool", "promote"]
    taken = [verb for verb in dict.fromkeys(verbs) if verb in path]
    assert taken == [verb for verb in path if verb in taken]
    assert {"finetune", "embed_pool"} < {*taken}


def test_the_check_of_a_workflow_says_nothing_of_options_without_effect(tmp_path, capsys):
    """The step says it when it runs."""
    (tmp_path / "step.yaml").write_text("finetune: {negatives: 7}\n")
    options = ("--corpus", "c", "--encoder", "e", "--output", "o")
    command = ("polyrank", "finetune", "--config", str(tmp_path / "step.yaml"), *options)
    step = workflow.Step("train", command)
    workflow.check(step)
    assert step.config().finetune.negatives == 7
    assert capsys.readouterr().err == ""


def test_a_key_that_is_missing_is_named_before_a_step_runs(three, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(author_key.VARIABLE, raising=False)
    dialogue = ROOT / "jobs" / "workflows" / "dialogue.yaml"
    refusal = r"^steps\.reddit: POLYRANK_AUTHOR_SALT is not set: authors of s3://lake/reddit"
    for dry_run in (False, True):
        with pytest.raises(BadInput, match=refusal):
            run(dialogue, "lake=s3://lake", dry_run=dry_run)
    reddit = "polyrank prepare_corpus --format reddit --input s3://dumps --output s3://reddit"
    three.write_text(f"steps:\n  made: {reddit}\n  last: 'true'\n")
    assert len(run(three, start_at="last")["steps"]) == 1  # the step that needs the key is skipped


@pytest.mark.parametrize("page", ["CLUSTER.md", "jobs/workflows/dialogue.yaml"])
def test_the_documented_command_sends_the_key_with_the_workflow(page):
    sent = re.findall(r"python -m jobs\.submit .* workflow jobs/.*", (ROOT / page).read_text())
    assert len(sent) == 1 and f"--env {author_key.VARIABLE} " in sent[0]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_whole_path_runs_and_again_does_nothing(sample_files, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = {
        "lake": tmp_path, "dumps": sample_files / "reddit_dump", "dialogues": sample_files / "convai2",
        "vocabulary": 1000, "gpu": "false", "deploy": "true", "name": "dialogue-test",
        "pretrain": "jobs/configs/pretrain/tiny-cpu.yaml", "finetune": "jobs/configs/demo-poly.yaml",
    }  # fmt: skip
    arguments = [f"{name}={value}" for name, value in settings.items()]
    file = ROOT / "jobs" / "workflows" / "dialogue.yaml"
    first = {step["step"]: step for step in run(file, *arguments)["steps"]}
    assert first["promote"]["before"] == "" and first["promote"]["pool"]["name"] == "replies"
    again = {step["step"]: step for step in run(file, *arguments)["steps"]}
    made = [name for name in first if first[name].get("fingerprint")]
    assert len(made) == 8 and all(again[name]["already_done"] for name in made)
    assert again["promote"]["version"] == again["promote"]["before"]
