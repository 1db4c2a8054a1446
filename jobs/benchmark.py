"""Speed, memory and endurance: ours beside others' code, measured side by side in one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs import program
from jobs.benchmarks import corpora, embed, inference_time, measure
from pipeline.artifact import open_artifact
from pipeline.config import require


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measures a part of polyrank: `python -m jobs.benchmark corpora --size full`.

    Only ratios of what ran in turn in one run mean anything on a shared machine.
    """

    POSITIONAL = "name"
    name: Literal["corpora", "embed", "paper"]
    """The part; the first argument, with or without its name."""
    size: Literal["small", "full"] = "small"
    """`small`: minutes. `full`: what the README's figures come from."""
    kills: int = 20
    """For corpora and embed: how often the job is killed before its rows are compared; 0: never."""
    data: str = ".data"
    """For embed: a folder with Wikipedia's articles, as WikiExtractor leaves them."""
    table: Literal[5] = 5
    """For paper: which of its tables; 5: inference time."""
    encoder: str = ""
    """For paper: an encoder, as for jobs.finetune."""
    corpus: str = ""
    """For paper: a corpus of dialogues."""
    json: str = ""
    """File for the rows of the report."""
    work: str = ".benchmark"
    """Folder for what is measured; its generated dumps are kept for the next run."""

    def __post_init__(self) -> None:
        require(self.kills >= 0, "kills", self.kills, ">= 0")
        if self.name == "paper":
            for name in ("encoder", "corpus"):
                require(bool(getattr(self, name)), name, "", "its URI, for paper")


def run(config: Config) -> program.Summary:
    work = Path(config.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    if config.name == "paper":
        encoder, _ = program.open_encoder(config.encoder)
        rows = inference_time.measure(config.size, encoder, open_artifact(config.corpus, "corpus"))
    elif config.name == "embed":
        rows = embed.measure(config.size, Path(config.data), work, config.kills)
    else:
        rows = corpora.measure(config.size, work, config.kills)
    measure.report(rows, config.json)
    figures = {row.row: row.ours if row.ratio is None else row.ratio for row in rows}
    return {"rows": figures, "machine": measure.environment()}


if __name__ == "__main__":
    program.main(Config, run, "benchmark")
