"""Makes rayjob.yaml, rayservice.yaml and the schedule raycronjob.yaml of raycluster.yaml and the config of
serve/: `make kuberay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).parent
_JOB = "python -m jobs.embed_pool --config jobs/schedules/reembed.yaml"
_MADE = "# Made by `make kuberay`.\n"
_CRON_NOTE = """\
# KubeRay: a cluster of its own for every night, which goes when the night is over. It needs KubeRay 1.7,
# which reads timeZone (1.6 has the operator's), with the feature gate RayCronJob, which is alpha, and the
# secret of kuberay/raycluster.yaml. It has no concurrencyPolicy: the pool's lock keeps two nights apart.
#   kubectl apply -f jobs/schedules/raycronjob.yaml
"""
_JOB_NOTE = """\
# A job on a cluster of its own. It needs KubeRay 1.6 and the secret of kuberay/raycluster.yaml.
#   kubectl create -f kuberay/rayjob.yaml
"""
_SERVICE_NOTE = """\
# The service alone, on a cluster of its own that KubeRay replaces after a change. It needs KubeRay 1.6 and
# the secret of kuberay/raycluster.yaml. Requests go to polyrank-service-serve-svc:8000, jobs to
# polyrank-service-head-svc:8265.
#   kubectl apply -f kuberay/rayservice.yaml
"""


class _Dumper(yaml.SafeDumper):
    """Writes repeated parts out and texts of many lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _block)


def manifests() -> dict[str, str]:
    """The text of each file."""
    cluster = yaml.safe_load((_HERE / "raycluster.yaml").read_text())
    serve = yaml.safe_load((_HERE.parent / "serve" / "config.cluster.yaml").read_text())
    for application in serve["applications"]:
        del application["runtime_env"]["working_dir"]  # the image has the code
    tracking_uri = serve["applications"][0]["runtime_env"]["env_vars"]["MLFLOW_TRACKING_URI"]
    runtime_env = {"env_vars": {"MLFLOW_TRACKING_URI": tracking_uri}}
    job = {
        "entrypoint": _JOB,
        "runtimeEnvYAML": yaml.dump(runtime_env, Dumper=_Dumper),
        "submissionMode": "K8sJobMode",
        "backoffLimit": 2,  # each on a new cluster; a run that failed resumes where it was
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": cluster["spec"],
    }
    service = {
        "serveConfigV2": yaml.dump(serve, Dumper=_Dumper, sort_keys=False),
        "rayClusterConfig": cluster["spec"],
    }
    nights = {
        "schedule": "0 3 * * *",
        "timeZone": "Etc/UTC",
        "suspend": False,
        "jobTemplate": {**job, "activeDeadlineSeconds": 43200},
    }
    return {
        "rayjob.yaml": _JOB_NOTE + _manifest("RayJob", "reembed-articles", job),
        "rayservice.yaml": _SERVICE_NOTE + _manifest("RayService", "polyrank-service", service),
        "../jobs/schedules/raycronjob.yaml": _CRON_NOTE
        + _manifest("RayCronJob", "reembed-articles", nights),
    }


def _manifest(kind: str, name: str, spec: dict[str, Any]) -> str:
    body = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return _MADE + yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=1000)


if __name__ == "__main__":
    for name, text in manifests().items():
        (_HERE / name).write_text(text)
