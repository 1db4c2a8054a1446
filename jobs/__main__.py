"""`polyrank <verb> …`, the same as `python -m jobs.<verb> …`: one command for all jobs.

`polyrank --help` takes each line from the job's own help and imports no job, so it comes at once.
"""

from __future__ import annotations

import ast
import difflib
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jobs import program
from jobs.program import main as run_job

VERBS = (
    # from a table to a service
    "faq",
    # corpora
    "generate_dump", "prepare_corpus", "inspect", "clean_corpus",
    # models
    "train_tokenizer", "tokenize_corpus", "pretrain", "finetune", "score_candidates", "evaluate",
    "evaluate_search", "classify_intents", "convert_model",
    # pools, and what follows them
    "embed_pool", "search", "promote", "serve", "deploy",
    # clusters, and everything at once
    "submit", "workflow", "benchmark", "demo", "cluster_demo",
)  # fmt: skip
"""The whole path first, then its verbs in their order."""


def main() -> None:
    """Runs the verb on the command line and exits."""
    command = "python -m jobs" if Path(sys.argv[0]).name == "__main__.py" else "polyrank"
    word, *arguments = sys.argv[1:] or ["--help"]
    if word in ("--help", "-h", "help"):
        _print(_help_text(command))
    elif word == "--version":
        _print(f"polyrank {_version()}")
    elif (verb := word.replace("-", "_")) in VERBS:
        program.command_of_verb = f"{command} {{}}"
        sys.argv = [f"{command} {verb}", *arguments]
        job = import_module(f"jobs.{verb}")
        run_job(job.Config, job.run, verb)
    else:
        nearest = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        print(f"{command}: {word!r} is no verb; {hint}{command} --help lists them", file=sys.stderr)
        sys.exit(2)


def _print(text: str) -> None:
    if not program.say(text, sys.stdout):
        sys.exit(program.SIGPIPE)


def first_sentence(verb: str) -> str:
    """The first sentence of a job's help: of the docstring of its Config."""
    tree = ast.parse((Path(__file__).parent / f"{verb}.py").read_text(encoding="utf-8"))
    (config,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config")
    text = " ".join((ast.get_docstring(config) or "").split())
    return text.partition(". ")[0].removesuffix(".")


def _help_text(command: str) -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {first_sentence(verb)}" for verb in VERBS]
    return "\n".join(
        [
            f"usage: {command} VERB [--option value …]",
            "",
            "Trains, re-embeds and serves rankers of texts. Each verb reads URIs and writes one:",
            "",
            *lines,
            "",
            f"{command} VERB --help lists a verb's options.",
        ]
    )


def _version() -> str:
    try:
        return version("polyrank")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
