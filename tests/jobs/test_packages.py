"""All code, and the files that code reads, travel with a job. Files for readers of the project do not."""

import io
import re
from zipfile import ZipFile

from jobs import packages


def test_pages_pictures_and_results_of_benchmarks_stay_at_home():
    names = ZipFile(io.BytesIO(packages.archive())).namelist()
    assert not [name for name in names if re.search(r"\.(md|png)$|/results/", name)]
    needed = {
        "jobs/embed_pool.py", "jobs/configs/finetune/pairs.yaml", "jobs/schedules/crontab",
        "serve/openapi.json", "serve/playground/index.html", "serve/playground/icon.svg",
    }  # fmt: skip
    assert needed <= set(names)
    assert len(packages.archive()) < 1_000_000
