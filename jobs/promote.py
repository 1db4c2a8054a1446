"""Another version of a pool, or of a registered model, for those who follow it; and back again."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from jobs import program
from pipeline import storage
from pipeline.artifact import read_artifact
from pipeline.config import BadInput, require
from pipeline.retrieval.pools import versions
from pipeline.retrieval.pools.lock import locked
from pipeline.retrieval.pools.pool import KIND, Pool, make_current

_PREVIOUS = "previous"
_LOCK_EXPIRES_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Makes a version of a pool its CURRENT one, or a version of a registered model its champion.

    Services that follow the pool or the alias go over to it within seconds. `--version previous` rolls
    back.
    """

    ALIASES = MappingProxyType({"model": "registered_model"})
    pools: str = ""
    """Folder of all pools; with `--name`."""
    name: str = ""
    """The pool's name."""
    registered_model: str = ""
    """Name of a registered model in MLflow, instead of a pool; `--model` means the same."""
    version: str = _PREVIOUS
    """Of a pool: such as v-0123456789ab; of a model: a number, or one of its aliases. `previous`: of a
    pool the newest version made before the CURRENT one."""
    alias: str = "champion"
    """Of a model: the alias that moves; `previous` then names the version that it leaves."""

    def __post_init__(self) -> None:
        given = (self.pools, self.name, self.registered_model)
        require(bool(self.pools and self.name) != bool(self.registered_model),
                "pools and name, registered_model", given, "either a pool or a model")  # fmt: skip


def run(config: Config) -> program.Summary:
    return _model(config) if config.registered_model else _pool(config)


def _pool(config: Config) -> program.Summary:
    """Under the pool's lock, so that no job publishes in between."""
    with locked(config.pools, config.name, _LOCK_EXPIRES_S):
        before = versions.current_name(config.pools, config.name)
        version = config.version
        if version == _PREVIOUS:
            version = _version_before(config, before)
        Pool.open(storage.join(config.pools, config.name, version))
        make_current(config.pools, config.name, version)
    return {"pool": config.name, "version": version, "before": before}


def _version_before(config: Config, current: str) -> str:
    """Raises BadInput where there is none."""
    folder = storage.join(config.pools, config.name)
    made = {
        storage.name_of(uri): str(read_artifact(uri, KIND).manifest["created_at"])
        for uri in storage.list_folders(folder)
        if versions.is_version(uri)
    }
    older = [name for name in made if made[name] < made.get(current, "~") and name != current]
    if not older:
        raise BadInput(f"version: {folder} has none before {current or 'CURRENT'}; there are: "
                       f"{', '.join(sorted(made)) or 'none'}")  # fmt: skip
    return max(older, key=lambda name: made[name])


def _model(config: Config) -> program.Summary:
    from pipeline import tracking

    before, version = tracking.move_alias(config.registered_model, config.alias, config.version)
    return {
        "model": config.registered_model,
        "alias": config.alias,
        "version": version,
        "before": before,
    }


if __name__ == "__main__":
    program.main(Config, run, "promote")
