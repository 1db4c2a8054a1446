"""Which options of each job are part of its identity, so that a change of them makes another job."""

from __future__ import annotations

import importlib
from dataclasses import MISSING, fields
from typing import Any

import pytest

from jobs import finetune, prepare_corpus
from jobs.__main__ import VERBS
from pipeline.config import flatten, identity, to_dict
from pipeline.training.settings import FinetuneConfig


def group(name: str, options: str) -> set[str]:
    return {f"{name}.{option}" for option in options.split()}


ACTORS = group("resources", "actors max_actors cpus_per_actor gpu")
WORKERS = group("resources", "workers min_workers cpus_per_worker gpu shard_weights max_restarts")
READING = group("reading", "truncated max_malformed_share files_at_once")
GATE = group("gate", "sample min_cosine canaries canary_texts top_k min_recall")
GATE |= group("gate", "max_removed_share max_changed_share")
LOOP = group("loop", "checkpoint_every_steps checkpoint_every_minutes log_every_steps")
LOOP |= group("loop", "keep_checkpoints max_skipped_steps")
# Options of later versions, without which rankers of earlier ones are still known.
LATER = {"continue_from", "guide"} | group("finetune.guide", "margin max_share")
LATER |= group("finetune", "lora_rank lora_alpha")
EXCLUDED = {
    "clean_corpus": {"output", "dry_run"},
    "convert_model": {"output"},
    "embed_pool": {"pools", "dry_run", "publish_only", "keep", "keep_days", "lock_expires_s", "redact",
                   "embed.repeated_ids"}
    | GATE | READING | ACTORS,
    "evaluate": {"dry_run", "json", "plot", "errors"} | ACTORS,
    "finetune": {"output", "register_as", "dry_run", "keep_training_state"} | LOOP | WORKERS | LATER,
    "prepare_corpus": {"output", "expect", "dry_run"} | READING,  # and the options of other formats
    "pretrain": {"output", "dry_run", "keep_training_state", "pretrain.steps"} | LOOP | WORKERS,
    "score_candidates": {"output", "dry_run"} | ACTORS,
    "train_tokenizer": {"output", "dry_run"},
}  # fmt: skip


def config_of(verb: str) -> Any:
    """The job's configuration; what has no default is a text, or a list of one."""
    config_class = importlib.import_module(f"jobs.{verb}").Config
    required = {
        field.name: ("text",) if str(field.type).startswith("tuple") else "text"
        for field in fields(config_class)
        if field.default is MISSING and field.default_factory is MISSING
    }
    if verb == "prepare_corpus":
        required["format"] = "convai2"
    return config_class(**required)


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_job_writes_is_marked(verb):
    config_class = importlib.import_module(f"jobs.{verb}").Config
    for field in fields(config_class):
        if field.name in ("output", "json", "html", "plot", "errors", "work"):
            assert field.metadata["output"], field.name


@pytest.mark.parametrize("verb", EXCLUDED)
def test_these_options_and_no_others_leave_a_job_the_same(verb):
    config = config_of(verb)
    options, identifying = flatten(to_dict(config)), identity(config)
    excluded = options.keys() - identifying.keys()
    if verb == "prepare_corpus":
        others = prepare_corpus.FORMATS.keys() - {config.format}
        excluded = {option for option in excluded if option.partition(".")[0] not in others}
    assert excluded == EXCLUDED[verb]
    assert identifying == {name: options[name] for name in identifying}


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"guide": "g"}, {"guide", "finetune.guide.margin", "finetune.guide.max_share"}),
        ({"finetune": FinetuneConfig(lora_rank=4)}, group("finetune", "lora_rank lora_alpha")),
    ],
)
def test_options_of_later_versions_count_where_they_are_set(options, counted):
    config = finetune.Config(corpus="c", encoder="e", output="o", **options)
    assert LATER & identity(config).keys() == counted


def test_options_of_a_format_count_for_it_alone():
    config = prepare_corpus.Config(format="dstc7", input=("i",), output="o")
    groups = {name.partition(".")[0] for name in identity(config) if "." in name}
    assert groups == {"dstc7"}
