"""BENCHMARKS.md: made from the JSON of runs, against the targets."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jobs.benchmarks import measure, report
from jobs.benchmarks.measure import BenchmarkRow
from jobs.benchmarks.report import TARGETS
from pipeline.config import BadInput

_SOURCE = {"kind": "run", "command": "python -m jobs.benchmark search", "size": "full",
           "date": "2026-01-02", "commit": "abc", "machine": "2 cores"}  # fmt: skip


def written(folder: Path, name: str, *rows: BenchmarkRow, **source: str) -> None:
    measure.report(list(rows), str(folder / f"{name}.json"), {**_SOURCE, **source})


def statuses(folder: Path) -> dict[str, str]:
    rows = report.newest(row for some in report.read(folder).values() for row in some)
    return {name: target.status(rows.get(name)) for name, target in TARGETS.items()}


def texts_of(svg: str) -> list[str]:
    """Another version of matplotlib may draw a line by other numbers."""
    picture = ET.fromstring(svg)
    assert picture.tag.endswith("svg")
    elements = picture.findall(".//{*}text")
    return [text.strip() for element in elements for text in element.itertext()]


def test_the_page_and_its_picture_are_those_of_the_files():
    """`python -m jobs.benchmarks.report` after a change of the files, the targets or the script."""
    found = report.read(report.RESULTS)
    assert (report.ROOT / "BENCHMARKS.md").read_text() == report.page(found)
    picture = (report.RESULTS / report.PICTURE).read_text()
    assert texts_of(picture) == texts_of(report.targets_picture(found))


def test_other_results_have_their_page_and_pictures_in_their_own_folder(tmp_path):
    for file in report.RESULTS.glob("search-*.json"):
        shutil.copy(file, tmp_path)
    before = (report.ROOT / "BENCHMARKS.md").read_bytes()
    report.main(["--results", str(tmp_path)])
    page = (tmp_path / "BENCHMARKS.md").read_text()
    names = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert report.PICTURE in names
    assert all((tmp_path / name).is_file() for name in names)
    assert (report.ROOT / "BENCHMARKS.md").read_bytes() == before


def test_every_target_of_the_issue_has_its_bound_here(shared):
    wanted = json.loads((shared / "targets.json").read_text())
    assert wanted.keys() <= TARGETS.keys()
    entries = (report.ROOT / "jobs/benchmarks/targets.yaml").read_text()
    assert len(re.findall(r"(?m)^\w", entries)) == len(TARGETS), "each once"
    for row, bounds in wanted.items():
        sign, bound = ("≥", bounds["min"]) if "min" in bounds else ("≤", bounds["max"])
        assert str(TARGETS[row]) == f"{sign} {bound:,.6g}", row
        if "value in 'ours'" in bounds.get("what", ""):
            assert TARGETS[row].field == "ours", row


def test_each_target_is_on_the_page_with_its_status():
    page = (report.ROOT / "BENCHMARKS.md").read_text()
    rows = report.newest(row for rows in report.read(report.RESULTS).values() for row in rows)
    lines, missed = page.splitlines(), page.partition("\n## Missed targets\n")[2]
    for target in TARGETS.values():
        status = target.status(rows.get(target.row))
        assert (f"`{target.row}` " in missed) == (status != report.MET), target.row
        if status == report.NOT_MEASURED:
            assert f"`{target.row}` ({target.what}; {target})" in page
            continue
        [line] = [line for line in lines if line.startswith(f"| `{target.row}`: {target.what} |")]
        assert f"| {target} {status} |" in line
        if status == report.MISSED:
            assert target.limit in line
    beside_rows = [
        line for line in lines if not line.startswith(("| `", "    python ", "    make "))
    ]
    assert len(beside_rows) <= 125, "beside the rows and their commands"


def test_the_page_begins_with_how_fast_and_beside_whom():
    """A row that is renamed would be missing silently."""
    page = (report.ROOT / "BENCHMARKS.md").read_text().partition("\n![")[0]
    for what, whom in report.FIRST_ROWS.values():
        assert f"| {what} |" in page and f"({whom})" in page


def test_a_bound_is_compared_with_the_number_that_it_is_for(tmp_path):
    written(
        tmp_path, "search-a",
        BenchmarkRow("search.exact_1m_m64.vs_plain_torch", 900.0, "ms", peer=4500.0, ratio=5.0),
        BenchmarkRow("search.exact_1m_m64.time_over_read_floor", 3.0, "passes"),
        BenchmarkRow("search.pruned_1m.time_share_of_exact", 0.41, "share"),
    )  # fmt: skip
    found = statuses(tmp_path)
    assert found["search.exact_1m_m64.vs_plain_torch"] == "**missed**", "of the ratio, not of ms"
    assert found["search.exact_1m_m64.time_over_read_floor"] == "met", "the bound itself is met"
    assert found["search.pruned_1m.time_share_of_exact"] == "**missed**"
    assert found["serve.rank_100k.overhead_ms"] == "not measured"


def test_a_full_run_counts_before_a_small_one_and_a_new_one_before_an_old_one(tmp_path):
    name = "serve.saturation_vs_in_process"

    def run(file: str, ratio: float, **source: str) -> str:
        written(tmp_path, file, BenchmarkRow(name, 1.0, "rankings/s", ratio=ratio), **source)
        return statuses(tmp_path)[name]

    assert run("serve-z", 0.95, size="small", date="2026-03-03") == "met"
    assert run("serve-b", 0.5, date="2026-01-01") == "**missed**"
    assert run("serve-a", 0.9, date="2026-01-02") == "met"


def test_a_row_that_failed_is_no_measurement(tmp_path):
    written(tmp_path, "serve-a", BenchmarkRow("serve.rank_100k.overhead_ms", None, "ms"))
    assert statuses(tmp_path)["serve.rank_100k.overhead_ms"] == "not measured"
    assert "| failed |" in report.page(report.read(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("nothing-1.json", "[]", "nothing-1.json"), ("serve-1.json", '[{"row": "a"}]', "lacks")],
)
def test_files_that_hold_no_rows_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=message):
        report.read(tmp_path)


def test_a_source_shows_no_folder_of_the_machine(monkeypatch):
    argv = ["jobs/benchmark.py", "search", "--model", "/home/me/secret/poly", "--size", "full"]
    monkeypatch.setattr("sys.argv", argv)
    source = measure.source("full")
    assert source["command"] == "python -m jobs.benchmark search --model poly --size full"
    assert "cores" in source["machine"]


def test_processors_have_columns_and_bounds_of_their_own(tmp_path):
    name = "search.exact_1m_m64.vs_plain_torch"
    for kind, ratio in (("avx512_bf16", 7.0), ("avx2", 5.0)):
        row = BenchmarkRow(name, 50.0, "ms", peer=50 * ratio, ratio=ratio)
        written(tmp_path, f"search-{kind}", row, processor=kind, date=f"2026-01-0{ratio:.0f}")
    page = report.page(report.read(tmp_path))
    assert "| by kind of processor | AVX2 alone | AVX512_BF16 |" in page
    cells = ("50 ms, ratio 5, ≥ 4 met", "50 ms, ratio 7, ≥ 8 **missed**")
    assert f"| `{name}` | {cells[0]} | {cells[1]} |" in page
    assert statuses(tmp_path)[name] == "**missed**", "targets are for the second kind"
