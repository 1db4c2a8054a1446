"""Made-up Reddit comment dumps of any size, to measure and test the pipeline with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jobs import cluster, program
from jobs.sample_data import dump_generator
from pipeline import storage


@dataclass(frozen=True, kw_only=True)
class Config(dump_generator.Options):
    """Writes made-up Reddit comment dumps of any size, to measure and test with.

    The files are RC_2012-01.zst, RC_2012-02.zst, …; a core writes 200,000 comments a second. The same
    options give the same bytes. A job that was killed goes on with the files that are missing.
    """

    output: str = field(metadata=program.OUTPUT)
    """Folder of the files. It is the --input of jobs.prepare_corpus."""


def run(config: Config) -> program.Summary:
    began = time.time()
    folder = storage.absolute(config.output.rstrip("/"))
    options = dump_generator.Options(
        **{name: getattr(config, name) for name in dump_generator.Options.__dataclass_fields__}
    )
    with cluster.session(for_tasks=True):
        written_files = dump_generator.generate(options, folder)
    files = storage.list_files(folder)
    counts = {"comments": config.comments, "files": len(files), "files.written": written_files}
    return {
        "output": folder,
        "already_done": written_files == 0,
        "counts": counts,
        "bytes": sum(map(storage.size_of, files)),
        "seconds": round(time.time() - began, 1),
    }


if __name__ == "__main__":
    program.main(Config, run, "generate_dump")
