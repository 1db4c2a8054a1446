"""Which versions of a pool stay."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.engine import draft as drafts
from pipeline.engine.draft import Draft, draft
from pipeline.models.precision import NUMERICS
from pipeline.pools import lock, versions
from pipeline.pools.lock import lease
from pipeline.pools.pool import make_current
from pipeline.pools.settings import EmbedConfig

DAY = 86_400


@pytest.fixture
def pools(request, tmp_path):
    yield getattr(request, "param", str(tmp_path))
    fsspec.filesystem("memory").store.clear()


IN_MEMORY = pytest.mark.parametrize("pools", ["memory://bucket/pools"], indirect=True)
"""As in an object store."""


def begin(pools: str, version: str, model: str = "m") -> Draft:
    inputs = {"model": {"uri": model, "fingerprint": model}}
    out = draft(storage.join(pools, "p", version), "pool", EmbedConfig(), inputs)
    assert isinstance(out, Draft)
    out.write_file("rows/part-00000.arrow", b"rows")
    return out


@pytest.fixture
def publish(pools, monkeypatch):
    """`publish("v-1", age_days)`: a version that was published so long ago, and is CURRENT now."""

    def run(version: str, age_days: float, rows: int = 0, model: str = "m") -> Artifact:
        when = datetime.fromtimestamp(time.time() - age_days * DAY, UTC)
        with monkeypatch.context() as patch:
            patch.setattr(drafts, "datetime", type("Then", (), {"now": lambda _: when}))
            found = begin(pools, version, model).publish([], {"candidates": rows})
        make_current(pools, "p", version)
        return found

    return run


def there(pools: str) -> list[str]:
    return [storage.name_of(uri) for uri in storage.list_folders(storage.join(pools, "p"))]


@pytest.fixture
def four(publish):
    """Versions of the last four nights; v-1 is the newest."""
    for night in (4, 3, 2, 1):
        publish(f"v-{night}", night)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("keep", "days", "gone"),
    [(0, 0, []), (1, 0, ["v-2", "v-3", "v-4"]), (3, 0, ["v-4"]), (9, 0, []), (1, 2.5, ["v-3", "v-4"])],
)  # fmt: skip
def test_the_newest_stay_and_the_young(pools, keep, days, gone):
    assert versions.remove_old(pools, "p", keep, days).removed == gone
    assert there(pools) == [name for name in ("v-1", "v-2", "v-3", "v-4") if name not in gone]


@pytest.mark.usefixtures("four")
def test_current_stays_however_old_it_is(pools):
    make_current(pools, "p", "v-4")
    assert versions.remove_old(pools, "p", 1, 0).removed == ["v-2", "v-3"]
    assert there(pools) == ["v-1", "v-4"]


def test_the_newest_version_of_the_model_before_stays_for_a_rollback(pools, publish):
    for night, model in zip(range(6, 0, -1), "aabbbb", strict=True):
        publish(f"v-{night}", night, model=model)
    assert versions.remove_old(pools, "p", 2, 0).removed == ["v-3", "v-4", "v-6"]
    assert there(pools) == ["v-1", "v-2", "v-5"]
    assert versions.remove_old(pools, "p", 1, 0).removed == ["v-2", "v-5"]


@IN_MEMORY
@pytest.mark.usefixtures("four")
def test_what_is_served_stays_until_it_is_given_back(pools):
    served = lease(storage.join(pools, "p", "v-3"))
    assert versions.remove_old(pools, "p", 1, 0).removed == ["v-2", "v-4"]
    served.stop()
    assert versions.remove_old(pools, "p", 1, 0).removed == ["v-3"]


@pytest.mark.usefixtures("four")
def test_what_abandoned_jobs_have_left_goes_and_what_is_not_ours_stays(pools):
    abandoned = storage.name_of(begin(pools, "v-5").staging)
    storage.write_bytes(storage.join(pools, "p", "notes", "a.txt"), b"mine")
    assert versions.remove_old(pools, "p", 0, 0).removed == [abandoned]
    assert there(pools) == ["notes", "v-1", "v-2", "v-3", "v-4"]


@IN_MEMORY
def test_a_removal_that_was_killed_is_finished_by_the_next(pools, publish, monkeypatch):
    publish("v-2", 2)
    publish("v-1", 1)
    delete = storage.delete

    def power_cut(uri):
        if not uri.endswith("manifest.json"):
            raise KeyboardInterrupt
        delete(uri)

    with monkeypatch.context() as patch:
        patch.setattr(lock, "_CURRENT_EXPIRES_S", 0.1)  # its owner is this process, which lives on
        patch.setattr(storage, "delete", power_cut)
        with pytest.raises(KeyboardInterrupt):
            versions.remove_old(pools, "p", 1, 0)
    assert there(pools) == ["v-1", "v-2"]
    assert versions.remove_old(pools, "p", 1, 0).removed == ["v-2"]


def test_the_last_version_of_a_larger_pool_stays(pools, publish):
    sizes = (90, 100, 70, 10, 30, 10)
    for night, rows in zip(range(6, 0, -1), sizes, strict=True):
        publish(f"v-{night}", night, rows)
    found = versions.remove_old(pools, "p", 2, 0, 0.2)
    # v-4 has more than v-2, which stays; v-5 has more than v-4; v-6 has not.
    assert found.kept_larger == [("v-4", 70), ("v-5", 100)]
    assert found.removed == ["v-3", "v-6"]
    publish("v-0", 0, 95)
    assert versions.remove_old(pools, "p", 1, 0, 0.2).kept_larger == []
    assert there(pools) == ["v-0"]


@dataclass(frozen=True)
class Settings:
    embed: EmbedConfig = field(default_factory=EmbedConfig)


@pytest.mark.parametrize(
    ("model", "settings", "same"),
    [
        ("m", {}, True),
        ("other", {}, False),
        ("m", {"rows_per_shard": 7, "id_column": "x"}, True),
        ("m", {"precision": "bf16"}, True),  # what it was then and is now decides, not the wish
        ("m", {"dtype": "int8"}, False),
    ],
)
def test_vectors_are_the_same_for_the_same_model_whatever_rows_and_shards(
    tmp_path, model, settings, same
):
    found = Artifact("", {"config": {"embed": {"text_column": "a"}}})  # the others were added later
    pool = SimpleNamespace(
        model_fingerprint="m", precision="bf16", numerics=NUMERICS, artifact=found
    )
    now = Artifact("", {"fingerprint": model})
    wanted = Settings(EmbedConfig(**settings))
    assert versions.has_vectors_of(pool, now, wanted, "bf16") is same
    assert not versions.has_vectors_of(pool, now, wanted, "fp32")


def test_a_pool_without_versions_has_none_before(tmp_path, capsys):
    (tmp_path / "p").mkdir()
    assert versions.open_before(str(tmp_path), "p") is None
    assert capsys.readouterr().out == ""
    (tmp_path / "p" / "CURRENT").write_text("v-gone\n")
    assert versions.open_before(str(tmp_path), "p") is None
    assert "pool p: its CURRENT version cannot be opened" in capsys.readouterr().out
    assert not list(Path(tmp_path).glob("p/v-*"))
