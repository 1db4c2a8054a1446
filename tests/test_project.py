"""The files around the code: they say what is there, and what they say works."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest
import ray.autoscaler
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ray._private import ray_constants
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from jobs import packages, workflow
from jobs.benchmarks.paper import recipe as recipe_of
from pipeline.config import BadInput, flatten, identity, parse, to_dict

from .manifests import rendered

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TARGET_OF_RUFF = SETTINGS["project"], SETTINGS["tool"]["ruff"]["target-version"]
MAKEFILE = (ROOT / "Makefile").read_text()
VERBS = sorted(
    file.stem for file in (ROOT / "jobs").glob("*.py") if "program.main(" in file.read_text()
)
RECIPES = sorted((ROOT / "jobs" / "configs").rglob("*.yaml"))
KINDS = ("bi", "poly", "cross")


def config_of(verb: str) -> type:
    return import_module(f"jobs.{verb}").Config


# The command line


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_every_option_with_its_meaning(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(config_of(verb), ["--help", "all"], f"python -m jobs.{verb}")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m jobs.{verb} ")
    passed_on = getattr(config_of(verb), "AFTER_DASHES", "")
    for name in config_of(verb).__dataclass_fields__:
        assert name == passed_on or f"--{name.replace('_', '-')}" in text
    for option in re.split(r"\n  (?=--)", text)[1:]:
        name, meaning, *_ = [*re.split(r"\n {6}(?=\S)", option), ""]
        assert meaning.strip(), f"{name} has no meaning"
    assert "null|" not in text  # the choices of a union
    if verb == "evaluate":
        line = "--source given|sampled|corpus|blocks|others|protocol (default: protocol)"
        assert f"\n  {line}\n" in text


def test_a_later_config_wins_and_leaves_what_it_does_not_name(tmp_path):
    (tmp_path / "a.yaml").write_text("ranker: {architecture: poly, m: 8}\nloop: {seed: 1}\n")
    (tmp_path / "b.yaml").write_text("ranker: {max_context_tokens: 99}\nloop: {seed: 2}\n")
    required = ["--corpus", "c", "--encoder", "e", "--output", "o"]
    one, other = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    for files in (["--config", one, other], ["--config", one, "--config", other]):
        argv = ["--loop.log-every-steps", "7", *files, *required]
        config = parse(config_of("finetune"), argv, "t")
        assert (config.ranker.m, config.ranker.max_context_tokens) == (8, 99)
        assert (config.loop.seed, config.loop.log_every_steps) == (2, 7)
    swapped = parse(config_of("finetune"), ["--config", other, one, *required], "t")
    assert (swapped.ranker.m, swapped.loop.seed) == (8, 1)


def fields_of(config_class: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The name, the type and the metadata of each option and group."""
    hints = get_type_hints(config_class)
    for each in dataclasses.fields(config_class):
        hint, name = hints[each.name], prefix + each.name
        yield name, hint, each.metadata
        for group in filter(dataclasses.is_dataclass, (hint, *get_args(hint))):
            yield from fields_of(group, f"{name}.")


def test_what_an_option_is_read_with_are_options_and_values_of_a_job():
    """Jobs share groups: loop.head_lr_factor names ranker.architecture, which jobs.pretrain has not."""
    fields = [field for verb in VERBS for field in fields_of(config_of(verb))]
    for name, _, metadata in fields:
        for condition in metadata.get("conditions", ()):
            for option, values in condition.items():
                types = [hint for other, hint, _ in fields if other == option]
                if not types:  # an option of another job that has these settings, too
                    continue
                choices = [choice for hint in types for choice in get_args(hint)]
                assert isinstance(values, tuple) and types, name
                assert all(value in choices or type(value) in types for value in values), name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_is_a_config_of_its_job(recipe):
    verb = "pretrain" if recipe.parent.name == "pretrain" else "finetune"
    required = ["--corpus", "c", "--output", "o"]
    required += ["--encoder", "e"] if verb == "finetune" else []
    config = parse(config_of(verb), ["--config", str(recipe), *required], "test")
    written = yaml.safe_load(recipe.read_text())
    assert_has(config, written)


def assert_has(config, written):
    for name, value in written.items():
        if isinstance(value, dict):
            assert_has(getattr(config, name), value)
        else:
            assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


def test_every_recipe_is_used_or_documented():
    demo = (ROOT / "jobs" / "demo.py").read_text()
    assert "pretrain/tiny-cpu" in demo
    page = (ROOT / "pipeline" / "training" / "PRETRAINING.md").read_text()
    for recipe in (r for r in RECIPES if r.parent.name == "pretrain"):
        assert f"`{recipe.stem}`" in page
    demos = {f"demo-{name}.yaml" for name in (*KINDS, "articles")}
    used = {Path(file) for key in RANKERS for file in recipe_of(*key)[1:]}
    names = (*demos, "finetune/pairs.yaml")
    finetuning = {ROOT / "jobs" / "configs" / name for name in names} | used
    assert "configs/finetune/pairs.yaml" in (ROOT / "README.md").read_text()
    page = (ROOT / "pipeline" / "models" / "convert_rt" / "README.md").read_text()
    convert = {r for r in RECIPES if r.stem.startswith("convert_")}
    assert all(f"`{recipe.stem}`" in page for recipe in convert)
    assert {r for r in RECIPES if r.parent.name != "pretrain"} == finetuning | convert


# What is not the job's default, of each task and size: (context tokens, candidate tokens), and of each kind
# (batch, negatives, validation examples).
LARGE = {"bi": (256, 15, 8000), "poly": (256, 15, 8000), "cross": (16, 15, 8000)}
SMALL = {"bi": (64, 15, 200), "poly": (64, 15, 200), "cross": (16, 7, 100)}
RECIPES_OF = {
    ("convai2", "full"): ((362, 72), {**LARGE, "bi": (512, 15, 8000), "cross": (16, 19, 2500)}),
    ("dstc7", "full"): ((362, 72), LARGE),
    ("ubuntu", "full"): ((362, 72), LARGE),
    ("wikipedia", "full"): ((96, 256), LARGE),
    ("convai2", "small"): ((360, 72), SMALL),
    ("dstc7", "small"): ((128, 48), {**SMALL, "cross": (16, 7, 30)}),
    ("ubuntu", "small"): ((128, 48), SMALL),
    ("wikipedia", "small"): ((96, 256), {"bi": (32, 15, 200), "poly": (32, 15, 200), "cross": (8, 3, 60)}),
}  # fmt: skip
RANKERS = {
    (task, kind, size): (*lengths, *of_kind[kind])
    for (task, size), (lengths, of_kind) in RECIPES_OF.items() for kind in KINDS
}  # fmt: skip


@pytest.mark.parametrize("key", RANKERS, ids="-".join)
def test_the_settings_of_each_task_architecture_and_size(key, capsys):
    """Nothing but these fields differs from the defaults of jobs.finetune, and each of them is read."""
    _, kind, size = key
    required = ["--corpus", "c", "--encoder", "e", "--output", "o"]
    read = functools.partial(parse, config_of("finetune"), prog="test")
    found = flatten(to_dict(read([*recipe_of(*key), *required])))
    expected = flatten(to_dict(read(["--ranker.architecture", kind, *required])))
    lengths, others = RANKERS[key][:2], RANKERS[key][2:]
    names = ("max_context_tokens", "max_candidate_tokens")
    expected |= {f"ranker.{name}": value for name, value in zip(names, lengths, strict=True)}
    names = ("batch_examples", "negatives", "valid_examples")
    expected |= {f"finetune.{name}": value for name, value in zip(names, others, strict=True)}
    if size == "small":
        expected |= {"finetune.dropout": 0.0, "finetune.epochs": 1.0, "loop.log_every_steps": 5,
                     "loop.keep_weights": "last"}  # fmt: skip
    else:
        expected |= {
            "finetune.epochs": {"bi": 10.0, "poly": 8.0, "cross": 12.0}[kind],
            "finetune.chunk_examples": 0 if kind == "cross" else 64,
            "loop.warmup_steps": 1000.0 if kind == "cross" else 100.0,
            "loop.schedule": "plateau", "loop.optimizer": "adamax", "loop.weight_decay": 0.0,
            "loop.max_gradient_norm": 0.1, "resources.workers": 8, "resources.gpu": True,
        }  # fmt: skip
    assert found == expected
    assert capsys.readouterr().err == ""


def pretraining(name: str, *more: str):
    file = ROOT / "jobs" / "configs" / "pretrain" / f"{name}.yaml"
    argv = ["--config", str(file), "--corpus", "c", "--output", "o", *more]
    return parse(config_of("pretrain"), argv, "test")


@pytest.mark.parametrize("name", ["reddit-base", "wikipedia-base"])
def test_the_papers_pretraining(name):
    config = pretraining(name)
    assert (config.shape.layers, config.shape.width, config.shape.heads) == (12, 768, 12)
    assert config.shape.positions == 1024
    assert config.pretrain.lanes == config.resources.workers == 32
    assert config.pretrain.lane_tokens == 32_000
    assert (config.pretrain.objective, config.pretrain.masking) == ("alternate", "xlm")
    loop = config.loop
    assert (loop.schedule, loop.warmup_steps, loop.learning_rate) == ("inverse_sqrt", 4000, 2e-4)
    assert (loop.betas, loop.weight_decay) == ((0.9, 0.98), 0.0)
    on_8 = pretraining(name, "--resources.workers", "8")
    assert identity(on_8) == identity(config), "the same job on other hardware"


@pytest.mark.parametrize("name", ["reddit-base", "wikipedia-base", "modern-base"])
def test_lanes_are_shared_evenly_and_each_machine_may_die_more_than_once(name):
    """Ray Train counts the deaths over the whole run, and a run of 14 days on 32 machines has many."""
    config = pretraining(name)
    assert config.pretrain.lanes % config.resources.workers == 0 == config.pretrain.lanes % 8
    assert config.pretrain.longest_pair <= config.shape.positions
    assert config.resources.max_restarts > 2 * config.resources.workers


def test_recipes_are_found_outside_a_checkout_unless_there_is_another_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "jobs/configs/finetune/convert_pairs.yaml"
    argv = ["--config", name, "--corpus", "c", "--encoder", "e", "--output", "o"]
    assert parse(config_of("finetune"), argv, "test").ranker.architecture == "convert"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("ranker: {architecture: bi}\n")
    assert parse(config_of("finetune"), argv, "test").ranker.architecture == "bi"
    with pytest.raises(BadInput, match="does not exist"):
        parse(config_of("finetune"), ["--config", "jobs/configs/nope.yaml", *argv[2:]], "test")
    assert workflow.read_steps("jobs/workflows/faq.yaml")[-1].verb == "serve"


def test_an_installed_package_has_the_files_that_code_reads_and_its_types():
    data = SETTINGS["tool"]["setuptools"]["package-data"]
    folders = {package: ROOT / package.replace(".", "/") for package in data}
    installed = {
        file
        for package in data
        for pattern in data[package]
        for file in folders[package].glob(pattern)
    }
    files = {file for name, file in packages.files().items() if not name.endswith(".py")}
    assert files - installed == set()
    assert {ROOT / "pipeline" / "py.typed", ROOT / "serve" / "py.typed"} <= files


# The cluster


CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
ON_PREMISE = yaml.safe_load((ROOT / "cluster.onpremise.yaml").read_text())


def test_both_files_are_configs_of_ray_up():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    for config in (CLUSTER, ON_PREMISE):
        jsonschema.validate(config, schema)
        prepared = prepare_config(copy.deepcopy(config))
        validate_config(prepared)
    assert prepared["max_workers"] == len(ON_PREMISE["provider"]["worker_ips"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**CLUSTER, "max_worker": 3}, schema)


def start_line(config: Any, node: str) -> str:
    """How a head or a worker starts Ray."""
    (line,) = [line for line in config[f"{node}_start_ray_commands"] if "ray start" in line]
    return str(line)


def environment_of_ray(config: Any, node: str, home: Path) -> dict[str, str]:
    """What a started Ray finds in its environment: the line runs in a home with the mounted files, and a
    program that prints its environment stands in for Ray."""
    for remote, local in config["file_mounts"].items():
        if (ROOT / local).exists():
            mounted = home / Path(remote).relative_to("~")
            mounted.parent.mkdir(parents=True, exist_ok=True)
            mounted.symlink_to(ROOT / local)
    ray_program = home / "venv" / "bin" / "ray"
    ray_program.parent.mkdir(parents=True)
    ray_program.write_text("#!/bin/sh\nenv -0\n")
    ray_program.chmod(0o755)
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "RAY_HEAD_IP": "10.0.0.10"}
    printed = subprocess.run(["bash", "-c", start_line(config, node)], env=environment,
                             capture_output=True, text=True, check=True).stdout  # fmt: skip
    return dict(pair.split("=", 1) for pair in printed.split("\0") if pair)


@pytest.mark.parametrize("config", [CLUSTER, ON_PREMISE], ids=["aws", "onpremise"])
def test_nodes_get_the_lock_and_the_token_that_clients_need(config):
    mounts = config["file_mounts"]
    for name in ("requirements.lock", "torch.lock"):
        assert mounts[f"~/polyrank/{name}"] == name
        assert any(f"-r ~/polyrank/{name}" in command for command in config["setup_commands"])
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "--dashboard-host=127.0.0.1" in start_line(config, "head")


def test_the_head_of_own_machines_has_the_address_of_the_file_and_starts_all_workers(tmp_path):
    head_ip = ON_PREMISE["provider"]["head_ip"]
    assert f" --node-ip-address={head_ip} " in start_line(ON_PREMISE, "head")
    # Version 2 starts one.
    assert environment_of_ray(ON_PREMISE, "head", tmp_path)["RAY_enable_autoscaler_v2"] == "0"


@pytest.mark.parametrize("node", ["head", "worker"])
@pytest.mark.parametrize("config", [CLUSTER, ON_PREMISE], ids=["aws", "onpremise"])
def test_nodes_start_ray_with_tokens_and_haproxy(config, node, tmp_path):
    environment = environment_of_ray(config, node, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_serve_reads_its_variables_as_they_are_meant(tmp_path):
    """A proxy of a node asks the replicas of all nodes; else a full replica of its own node refuses what an
    idle one could answer."""
    script = (
        "from ray.serve._private import constants as c\n"
        "print(c.RAY_SERVE_ENABLE_HA_PROXY, c.RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING)"
    )
    environment = environment_of_ray(CLUSTER, "worker", tmp_path)
    printed = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path,
                             capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert printed == "True False\n"


def test_the_files_of_what_processes_print_do_not_grow_for_ever(tmp_path):
    """A replica prints a line for each request. Ray rotates these files only if a size is set."""
    name = "RAY_ROTATION_MAX_BYTES"
    script = f"import jobs, os; print(os.environ[{name!r}])"
    printed = subprocess.run([sys.executable, "-c", script], env={"PATH": os.environ["PATH"]}, cwd=ROOT,
                             capture_output=True, text=True, check=True).stdout  # fmt: skip
    on_nodes = environment_of_ray(CLUSTER, "worker", tmp_path)
    assert 0 < int(on_nodes[name]) == int(printed) <= 2**30


def pods() -> dict[str, Any]:
    """The pods of the base's cluster, by group."""
    spec = spec_of_cluster()
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {
        name: group["template"]["spec"]
        for name, group in (groups | {"head": spec["headGroupSpec"]}).items()
    }


def environment_of(pod: Any) -> dict[str, str]:
    (container,) = pod["containers"]
    return {pair["name"]: pair["value"] for pair in container["env"]}


def test_pods_start_ray_in_the_same_environment_as_nodes(tmp_path):
    """But for paths, which are those of the image, and the token, which KubeRay mounts."""
    on_nodes = environment_of_ray(CLUSTER, "worker", tmp_path)
    names = re.findall(r"^(\w+)=", (ROOT / "ray.env").read_text(), re.MULTILINE)
    expected = {name: on_nodes[name] for name in names if name != "RAY_AUTH_MODE"}
    expected |= {"POLYRANK_CACHE": "/scratch/cache"}
    of_pods = {"POLYRANK_CACHE_GIB", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"}
    for pod in pods().values():
        variables = environment_of(pod)
        assert {key: variables[key] for key in variables.keys() - of_pods} == expected


def test_copies_of_models_and_what_is_spilled_fit_into_the_volume_of_a_pod():
    """A pod sees the disk of its node, not the limit of its volume, and is evicted if it takes more."""
    for pod in pods().values():
        (scratch,) = (volume for volume in pod["volumes"] if volume["name"] == "scratch")
        limit = scratch["emptyDir"]["sizeLimit"]
        assert f"{2 * int(environment_of(pod)['POLYRANK_CACHE_GIB'])}Gi" == limit
    spec = spec_of_cluster()
    for group in (
        spec["headGroupSpec"],
        *spec["workerGroupSpecs"],
    ):  # a worker of Ray does not make it
        assert group["rayStartParams"]["object-spilling-directory"] == "/scratch"


def test_a_pod_that_is_deleted_ends_its_requests_first():
    """Ray drains the node at SIGTERM, for 30 s by default; Kubernetes' own grace period is as long."""
    served = yaml.safe_load((ROOT / "serve" / "config.cluster.yaml").read_text())
    ((ranker,),) = (application["deployments"] for application in served["applications"])
    name = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert hasattr(ray_constants, name)
    for pod in pods().values():
        drain_s, grace_s = int(environment_of(pod)[name]), pod["terminationGracePeriodSeconds"]
        # A new replica starts in the rest of the time; a spot node of AWS has 120 s.
        assert 2 * ranker["graceful_shutdown_timeout_s"] < drain_s < grace_s - 10 < 110


def test_nodes_have_an_image_a_role_and_resources_that_are_known_before_they_are_up():
    """Ray's own image is Ubuntu 18.04, without Python 3.11; its own role is the head's alone."""
    types = CLUSTER["available_node_types"]
    for name, about in types.items():
        node = about["node_config"]
        assert node["ImageId"].startswith("resolve:ssm:/aws/service/deeplearning/ami/"), name
        assert "ubuntu-22.04" in node["ImageId"]
        assert node["IamInstanceProfile"]["Name"].startswith("polyrank-")
        assert about["resources"]["CPU"] == (0 if name == "head" else 16)
        assert about.get("min_workers", 0) == 0
    assert types[CLUSTER["head_node_type"]]["max_workers"] == 0
    assert types["gpu"]["resources"]["GPU"] == 1


def test_nodes_on_aws_have_encrypted_disks_guarded_keys_and_no_more_rights_than_they_need():
    types = CLUSTER["available_node_types"]
    profiles = {name: about["node_config"]["IamInstanceProfile"] for name, about in types.items()}
    roles = {name: profile["Name"] for name, profile in profiles.items()}
    assert roles == {"head": "polyrank-head", "gpu": "polyrank-worker", "cpu": "polyrank-worker",
                     "serving": "polyrank-serving"}  # fmt: skip
    for about in types.values():
        node = about["node_config"]
        assert node["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert all(disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"])
    assert "EC2FullAccess" not in (ROOT / "cluster.yaml").read_text()


@pytest.mark.parametrize("command", [line for line in CLUSTER["setup_commands"]
                                     + CLUSTER["head_start_ray_commands"]
                                     + ON_PREMISE["setup_commands"]])  # fmt: skip
def test_the_commands_of_nodes_are_shell(command):
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0


# Kubernetes


OVERLAYS = {"service": "RayService", "job": "RayJob", "nightly": "RayCronJob"}
FOLDERS = ["base", *(f"overlays/{name}" for name in OVERLAYS)]


def of_kind(folder: str, kind: str) -> dict[str, Any]:
    """The resources that `kubectl apply -k` sends, by name."""
    return {name: each for (each_kind, name), each in rendered(folder).items() if each_kind == kind}


def spec_of_cluster() -> Any:
    (cluster,) = of_kind("base", "RayCluster").values()
    return cluster["spec"]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl, which has kustomize")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_makes_the_resources_that_these_tests_look_at(folder):
    command = ["kubectl", "kustomize", ROOT / "kuberay" / folder]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(printed)}
    assert made == rendered(folder)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_runs_on_the_pods_of_the_base_and_under_its_policies(overlay):
    made, base = rendered(f"overlays/{overlay}"), rendered("base")
    cluster = base.pop(("RayCluster", "polyrank"))
    (own,) = (made.pop(key) for key in list(made) if key[0] == OVERLAYS[overlay])
    assert made == base
    job = own["spec"].get("jobTemplate", own["spec"])
    assert job.get("rayClusterSpec", job.get("rayClusterConfig")) == cluster["spec"]


def test_the_overlay_of_the_service_has_the_config_of_a_cluster_but_its_code():
    (service,) = of_kind("overlays/service", "RayService").values()
    served = yaml.safe_load(service["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(served)
    expected = yaml.safe_load((ROOT / "serve" / "config.cluster.yaml").read_text())
    for application in expected["applications"]:
        del application["runtime_env"]["working_dir"]  # the image has the code
    assert served == expected


def test_the_overlays_of_a_job_and_of_every_night_run_the_same_command():
    (once,) = of_kind("overlays/job", "RayJob").values()
    (night,) = of_kind("overlays/nightly", "RayCronJob").values()
    expected = once["spec"] | {"activeDeadlineSeconds": 43200}
    assert night["spec"]["jobTemplate"] == expected
    program, *argv = shlex.split(once["spec"]["entrypoint"])[2:]
    parse(config_of(program.removeprefix("jobs.")), argv, "test")


UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_pods_are_nobody_special_and_the_policies_are_about_them():
    accounts = of_kind("base", "ServiceAccount")
    pods_of_base = pods()
    assert {pod["serviceAccountName"] for pod in pods_of_base.values()} == accounts.keys()
    for name, pod in pods_of_base.items():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"--uid {context['runAsUser']} " in (ROOT / "kuberay" / "Dockerfile").read_text()
        for container in pod["containers"]:
            assert container["securityContext"] == {**UNPRIVILEGED, "readOnlyRootFilesystem": True}
            written = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert written == {"/scratch", "/tmp", "/home/ray"}
        # Only the autoscaler, a container of the head, talks to Kubernetes.
        has_token = accounts[pod["serviceAccountName"]].get("automountServiceAccountToken", True)
        assert has_token == (name == "head")
    autoscaler = spec_of_cluster()["autoscalerOptions"]
    assert autoscaler["securityContext"] == UNPRIVILEGED
    others = {pod["serviceAccountName"] for name, pod in pods_of_base.items() if name != "serving"}
    assert pods_of_base["serving"]["serviceAccountName"] not in others
    (toleration,) = pods_of_base["gpu"]["tolerations"]
    assert (toleration["key"], toleration["operator"]) == ("nvidia.com/gpu", "Exists")
    (spread,) = pods_of_base["serving"]["topologySpreadConstraints"]
    serving = {"matchLabels": {"ray.io/group": "serving"}}
    assert spread["labelSelector"] == serving and spread["topologyKey"] == "kubernetes.io/hostname"
    budgets = {name: part["spec"] for name, part in of_kind("base", "PodDisruptionBudget").items()}
    # KubeRay's resources have no scale subresource, so a budget may only have a number of minAvailable.
    assert {budget["minAvailable"] for budget in budgets.values()} == {1}
    assert budgets["polyrank-serving"]["selector"] == serving
    (network,) = of_kind("base", "NetworkPolicy").values()
    ports = [
        [port["port"] for port in rule.get("ports", ())] for rule in network["spec"]["ingress"]
    ]
    # For Ray's pods all; the service and the dashboard; for the operator all; for Prometheus its own. Redis,
    # the GCS and Ray Client are for pods.
    assert ports == [[], [8000, 8265], [], [8080]]


def test_kubernetes_and_aws_have_the_same_groups_and_one_version():
    spec = spec_of_cluster()
    assert spec["rayVersion"] == ray.__version__
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    types = CLUSTER["available_node_types"]
    assert groups.keys() == types.keys() - {"head"}
    for name, group in groups.items():
        assert (group["minReplicas"], group["maxReplicas"]) == (0, types[name]["max_workers"])
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["authOptions"] == {"mode": "token", "secretName": "polyrank-auth"}
    image = f"registry.example.com/polyrank:{PROJECT['version']}"
    dockerfile = (ROOT / "kuberay" / "Dockerfile").read_text()
    cron_job = (ROOT / "jobs" / "schedules" / "cronjob.yaml").read_text()
    for text in (json.dumps(spec), dockerfile, cron_job):
        assert set(re.findall(r"registry\.example\.com/[\w:./]+\w", text)) == {image}
    copied = re.findall(r"^COPY (\w+) ", dockerfile, re.MULTILINE)
    assert {name for name in copied if (ROOT / name).is_dir()} == {"pipeline", "jobs", "serve"}


SINCE = {"secretName": "1.6", "timeZone": "1.7"}
"""KubeRay's version that first read a field, by its release notes. Later fields are here."""


def keys_of(value: Any) -> set[str]:
    """All keys, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_names_the_version_of_kuberay_that_its_fields_need(folder):
    text = "\n".join(file.read_text() for file in (ROOT / "kuberay" / folder).glob("*.yaml"))
    needed = max(SINCE[key] for key in keys_of(list(rendered(folder).values())) if key in SINCE)
    assert f"needs KubeRay {needed}" in " ".join(text.replace("\n#", "").split())


def test_the_service_and_the_cluster_have_names_and_head_services_of_their_own():
    """KubeRay makes the service <name>-head-svc for each."""
    (cluster,) = of_kind("base", "RayCluster")
    (service,) = of_kind("overlays/service", "RayService")
    assert cluster != service
    night = yaml.safe_load((ROOT / "jobs" / "schedules" / "cronjob.yaml").read_text())
    (container,) = night["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable for variable in container["env"]}
    address = environment["RAY_API_SERVER_ADDRESS"]["value"]
    assert address == f"http://{cluster}-head-svc:8265"
    secret = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    name = spec_of_cluster()["authOptions"]["secretName"]
    assert secret == {"name": name, "key": "auth_token"}
    made = f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}="
    assert made in (ROOT / "kuberay" / "base" / "kustomization.yaml").read_text()


def test_every_shipped_cluster_has_nodes_for_the_service():
    served = yaml.safe_load((ROOT / "serve" / "config.cluster.yaml").read_text())
    (application,) = served["applications"]
    (ranker,) = application["deployments"]
    options = ranker["ray_actor_options"]
    needed = {"CPU": options["num_cpus"], **options["resources"]}
    assert needed.keys() > {"CPU"}, "replicas run beside jobs"
    types = CLUSTER["available_node_types"]
    (on_aws,) = (name for name in types if needed.keys() <= types[name]["resources"].keys())
    groups = {group["groupName"]: group for group in spec_of_cluster()["workerGroupSpecs"]}
    on_kubernetes = groups[on_aws]["rayStartParams"]["resources"]
    on_premise = re.search(r"--resources='(.*?)'", ON_PREMISE["worker_start_ray_commands"][-1])
    offers = [json.loads(json.loads(on_kubernetes)), json.loads(on_premise[1])]
    offers.append(types[on_aws]["resources"])
    for name in options["resources"]:
        assert [offer[name] for offer in offers] == [16, 16, 16]


# Dependencies

LOCKED = re.compile(r"([\w.-]+)==([\w.!+-]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)\n")
TEXT_OF_LOCK = (ROOT / "requirements.lock").read_text()
TORCH = (ROOT / "torch.lock").read_text().splitlines()[-1]
LOCK = {
    canonicalize_name(name): version
    for name, version, _ in [*LOCKED.findall(TEXT_OF_LOCK), *LOCKED.findall(f"{TORCH}\n")]
}


def test_the_lock_pins_every_line_to_one_version_and_its_files():
    assert LOCKED.sub("", TEXT_OF_LOCK) == ""
    assert [name for name, _, hashes in LOCKED.findall(TEXT_OF_LOCK) if not hashes] == []
    assert TORCH == "torch==2.13.0"


@pytest.mark.parametrize(
    "line", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
)
def test_the_lock_has_every_dependency_in_a_version_that_is_allowed(line):
    requirement = Requirement(line)
    version = LOCK[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


# Versions of Python

PREFIX = "Programming Language :: Python :: "
VERSIONS = [line.removeprefix(PREFIX) for line in PROJECT["classifiers"] if PREFIX in line]


def test_the_versions_of_python_are_the_same_everywhere():
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.1")] == VERSIONS
    tried = re.search(r"^PYTHON \?= .* for minor in ([\d ]+);", MAKEFILE, re.MULTILINE)
    assert [f"3.{minor}" for minor in tried[1].split()] == VERSIONS
    assert f"Python {VERSIONS[0]} to {VERSIONS[-1]}" in (ROOT / "README.md").read_text()
    assert f"py{VERSIONS[0].replace('.', '')}" == TARGET_OF_RUFF


@pytest.mark.parametrize("version", VERSIONS)
def test_the_code_compiles_without_a_warning(version, tmp_path):
    """What can be proved of a version on a machine that has it, but not its packages."""
    in_pyenv = Path.home().glob(f".pyenv/versions/*/bin/python{version}")
    places = filter(None, [shutil.which(f"python{version}"), *map(str, in_pyenv)])
    runs = (
        each for each in places if not subprocess.call([each, "-c", ""], stderr=subprocess.DEVNULL)
    )
    if not (python := next(runs, None)):
        pytest.skip(f"no Python {version} here")
    command = [
        python,
        *["-W", "error", "-m", "compileall", "-q", "pipeline", "jobs", "serve", "tests"],
    ]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
