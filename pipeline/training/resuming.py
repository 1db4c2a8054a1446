"""Writes and reads the folder of a checkpoint, and finds the one that a run continues from.

state.safetensors, state.json    the state, the same on all ranks; rank 0 writes it
cursor-00000.json …              each rank's place in the training data
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline import storage
from pipeline.config import BadInput
from pipeline.storage import node_cache
from pipeline.training.checkpoints import read_state, write_state
from pipeline.training.loop import Cursor, Saved


def write_saved(
    folder: Path, state: Mapping[str, Any], cursor: Cursor, rank: int, world: int
) -> None:
    """Writes a rank's cursor; of rank 0 the state, too."""
    (folder / f"cursor-{rank:05d}.json").write_text(json.dumps(cursor))
    if rank == 0:
        write_state({**state, "ranks": world}, folder)


def read_saved(folder: Path) -> Saved:
    """Raises BadInput for an incomplete checkpoint."""
    try:
        cursors = [json.loads(path.read_text()) for path in sorted(folder.glob("cursor-*.json"))]
    except ValueError as error:
        raise BadInput(f"{folder}: a cursor is truncated ({error})") from None
    state = read_state(folder)
    ranks = state.pop("ranks", len(cursors) or 1)
    if len(cursors) != ranks:
        raise BadInput(f"{folder}: {len(cursors)} cursors of {ranks} ranks, so the place in the training "
                       "data is unknown")  # fmt: skip
    return Saved(state, cursors)


def read_saved_at(uri: str) -> Saved:
    """Raises BadInput for an incomplete checkpoint."""
    with tempfile.TemporaryDirectory() as local:
        node_cache.download(uri, Path(local))
        try:
            return read_saved(Path(local))
        except BadInput as error:  # it names the copy
            raise BadInput(str(error).replace(local, uri)) from None


def read_start(uri: str) -> Saved:
    """The state of another run, which a new run continues. Validations of the other run without improvement
    do not count against the new one. Raises BadInput for an incomplete state."""
    saved = read_saved_at(uri)
    selection = {**saved.state["selection"], "without_better": 0}
    return Saved({**saved.state, "selection": selection}, saved.cursors)


def newest_readable(checkpoints: list[str]) -> str:
    """The newest readable one of checkpoint folders, the oldest first; "": none can be read."""
    for checkpoint in reversed(checkpoints):
        with suppress(BadInput):
            read_saved_at(checkpoint)
            return checkpoint
    return ""


def last_checkpoint(folder: str) -> str:
    """The newest readable checkpoint of the earlier attempts of a run; "": there is none.

    Each attempt has a folder of its own in `folder`, and attempts and checkpoints are named by their time.
    Attempts without that checkpoint are removed. A kill may have truncated the newest checkpoint.
    """
    attempts = storage.list_folders(folder)
    checkpoint = newest_readable(
        [uri for attempt in attempts for uri in storage.list_folders(attempt)]
    )
    for attempt in attempts:
        if not checkpoint.startswith(f"{attempt}/"):
            storage.delete(attempt)
    return checkpoint
