"""README.md: the six lines and the Python of the first screen, run as they stand, on a small CSV."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from jobs import serve as serve_job
from pipeline.config import parse
from serve import api
from serve.engine import Engine
from serve.service import Service

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

# What makes the lines small enough for a test; the lines themselves stay as they are.
SMALL = {
    "prepare_corpus": (),
    "train_tokenizer": ("--tokenizer.vocabulary", 200),
    "finetune": (
        "--ranker.width", 16, "--ranker.windows", "[2, 4]", "--ranker.intermediate", 32,
        "--ranker.hidden", "[16]", "--ranker.encoding-width", 16, "--finetune.max-steps", 2,
        "--finetune.batch-examples", 8, "--loop.validate-every-epochs", 0,
        "--resources.cpus-per-worker", 1,
    ),
    "embed_pool": ("--embed.precision", "fp32"),
}  # fmt: skip


def lines() -> list[list[str]]:
    """The words of the six lines."""
    part = README.partition("## Your own data in six lines")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"(?m)^    (\S.*)$", part)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a checkout, with the user's faq.csv."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    rows = [f"how do i pay bill {at} ?,open page {at} of your bills" for at in range(60)]
    (tmp_path / "faq.csv").write_text("\n".join(["question,answer", *rows, ""]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_own_data_in_six_lines(home: Path, run_job_here):
    *jobs, serving, asking = lines()
    assert [words[:2] for words in jobs] == [["polyrank", verb] for verb in SMALL]
    for _, verb, *argv in jobs:
        done = run_job_here(verb, *argv, *SMALL[verb])
        assert done.code == 0, (verb, done.stderr[-2000:])
    assert (home / "my" / "ranker" / "ranker.json").is_file()
    assert serving[:2] == ["polyrank", "serve"]
    served = parse(serve_job.Config, serving[2:], "polyrank serve")
    engine = Engine(served.model, served.pools, "fp32")
    client = TestClient(api.create_app(Service(lambda: engine, most_waiting_s=60.0)))
    try:
        url = next(word for word in asking if word.startswith("localhost:8000"))
        answer = client.post(
            url.removeprefix("localhost:8000"),
            content=asking[asking.index("-d") + 1],
            headers={"content-type": "application/json"},
        )
    finally:
        engine.close()
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert len(results) == 3 and all("of your bills" in result["text"] for result in results)
    assert answer.json()["certified"]
    python_of_the_first_screen(home)


def python_of_the_first_screen(home: Path) -> None:
    """The same ranker and pool, where the demo leaves its own."""
    [block] = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
    for demo, mine in {
        ".demo/rankers/poly": "my/ranker",
        ".demo/pools/replies": "my/pools/answers",
    }.items():
        assert demo in block
        (home / demo).parent.mkdir(parents=True, exist_ok=True)
        (home / demo).symlink_to(home / mine)
    exec(compile(block, "README.md", "exec"), {})
