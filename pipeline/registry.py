"""Resolves names of MLflow's registry, `models:/name@alias`, to URIs."""

from __future__ import annotations

from pipeline.config import BadInput

REGISTRY = "models:/"


def model_uri(target: str) -> str:
    """The URI of a model; for an alias, of the model that it means now.

    Raises BadInput where the registry has no such alias.
    """
    if not target.startswith(REGISTRY):
        return target
    name, _, alias = target.removeprefix(REGISTRY).partition("@")
    if not alias:
        raise BadInput(f"model: {target!r} is not allowed; allowed: models:/name@alias, or a URI")
    import mlflow  # a second and a half
    from mlflow.exceptions import MlflowException

    try:
        return str(mlflow.MlflowClient().get_model_version_by_alias(name, alias).source)
    except MlflowException as error:
        raise BadInput(f"model: {target}: {str(error).splitlines()[0]}") from None
