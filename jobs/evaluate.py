"""Measures rankers: quality with intervals, and speed; beside chance, TF-IDF and BM25."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from jobs import cluster, program
from pipeline import cost, storage
from pipeline.artifact import Artifact, corpora_of, corpora_read_for, open_artifact
from pipeline.config import NOT_IDENTITY, BadInput, require, to_dict
from pipeline.engine.actors import HERE, Actors
from pipeline.engine.resources import best_device, precision_of_tasks
from pipeline.evaluation import least_score, protocols
from pipeline.evaluation.protocols import PROTOCOLS, Protocol
from pipeline.evaluation.questions import (
    CandidateSource,
    Questions,
    questions,
    train_contexts,
    train_responses,
)
from pipeline.evaluation.results import Measurement, ScorerResult, compare_all
from pipeline.models import sources
from pipeline.models.precision import Precision, Resolved, resolve_precision
from pipeline.registry import model_uri

Files = dict[str, tuple[str, bytes]]
"""By the name in MLflow: (the user's URI or path, "" for none; the contents)."""
KnownContexts = Mapping[str, Sequence[Sequence[str]]]
"""By the response."""
AttachFiles = Callable[[Mapping[str, bytes]], None]
Models = dict[str, tuple[Artifact, Any]]
"""By the name of the model's row: the files, and the Ranker that is loaded of them. It is `Any`, because the
parser of options would import torch for its type."""

_MAX_CROSS_CANDIDATES = 1000
_ERRORS = 100
_FEW_QUESTIONS = 100
_MANY_KNOWN = 0.05
_ERRORS_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """Ranks each example's candidates and prints R@k/C, MRR and milliseconds, with 95 % intervals.

    Candidates are shuffled, and ties count against the scorer.
    """

    ALIASES = MappingProxyType({"candidates": "candidates_per_question"})
    model: tuple[str, ...]
    """Rankers (of jobs.finetune), or models:/name@alias of MLflow's registry; each is a row of the table."""
    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    together: bool = False
    """Add a row for the mean of the models' scores."""
    split: Literal["train", "valid", "test"] = "valid"
    """The split whose examples are ranked."""
    protocol: protocols.Name | Literal["auto"] = "auto"
    """Sets --source, --candidates-per-question and --recall-at, unless you do: convai2 (given, 20), dstc7
    (given, 100), ubuntu (given, 10), wikipedia (others, 10,001), polyai (blocks, 100), labels (sampled, all
    of the split; R@1 is the accuracy), pairs (corpus, all). auto: the protocol of the corpus' format."""
    source: CandidateSource | Literal["protocol"] = "protocol"
    """The candidates beside the right response. given: those of the example; sampled: random responses of the
    split; corpus: responses of all splits; blocks: the other responses of a block of C random examples;
    others: the texts of the corpus' others/. protocol: as --protocol says."""
    candidates_per_question: int = 0
    """C: candidates of an example, the right one among them; `--candidates` means the same. 0: the
    protocol's number. If the split is smaller, blocks and sampled then take all that it has."""
    recall_at: tuple[int, ...] = ()
    """The k of R@k/C; none: the protocol's."""
    max_examples: int = 100_000
    """Rank at most this many examples, drawn at random."""
    baselines: bool = True
    """Rows for chance, TF-IDF and BM25 (weights from the train split). Where the question is asked among
    all texts of the corpus, also for a published sentence encoder that a model started from."""
    known_contexts: bool = False
    """Candidates have the vectors that jobs.embed_pool gives them with --embed.context-column, from the
    contexts of train/. For bi and convert, on valid and test."""
    slow: bool = False
    """Rank with cross-encoders, too, if a question has more than 1,000 candidates."""
    latency_queries: int = 50
    """Time this many questions, one at a time; 0: none."""
    json: str = field(default="", metadata=program.OUTPUT_FILE)
    """Write the table to this file too."""
    plot: str = field(default="", metadata=program.OUTPUT_FILE)
    """Draw R@1 against milliseconds into this PNG; empty: beside --json, if there is one."""
    errors: str = field(default="", metadata=program.OUTPUT_FILE)
    """Write each model's 100 worst-ranked examples to this file (JSON lines), and print three."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print the questions and the hours, measured on this machine, and write nothing."""
    precision: Precision = "auto"
    """The precision that encoders compute in; auto: bf16 where the hardware multiplies it. Scores differ
    a little."""
    resources: Actors = field(default=HERE, metadata=NOT_IDENTITY)
    """The hardware that models run on; by default this process alone, without a cluster."""
    seed: int = 0
    """Seed of the draws and of the order of candidates."""

    def __post_init__(self) -> None:
        require(self.candidates_per_question == 0 or self.candidates_per_question >= 2,
                "candidates_per_question", self.candidates_per_question, ">= 2")  # fmt: skip
        require(self.max_examples >= 1, "max_examples", self.max_examples, ">= 1")
        require(all(k >= 1 for k in self.recall_at), "recall_at", self.recall_at, "numbers >= 1")
        for name in ("latency_queries", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        require(not self.together or len(self.model) > 1, "together", True,
                "false for one model alone")  # fmt: skip
        require(not self.known_contexts or self.split != "train", "split", self.split,
                "valid or test with --known-contexts: those of train/ are known")  # fmt: skip
        require(not self.known_contexts or not self.together, "together", True,
                "false with --known-contexts")  # fmt: skip
        require(not self.plot or self.latency_queries > 0, "latency_queries", 0, ">= 1 for --plot")

    def rules(self, corpus: Artifact) -> Protocol:
        """The protocol, with what is set by hand."""
        name = protocols.of_corpus(corpus) if self.protocol == "auto" else self.protocol
        preset = PROTOCOLS[name]
        source = preset.source if self.source == "protocol" else self.source
        candidates = self.candidates_per_question or preset.candidates
        return Protocol(source, candidates, self.recall_at or preset.recall_at)


def run(config: Config) -> program.Summary:
    """Asks baselines and models the same questions: rows of a table, files, and an MLflow run per model."""
    corpus = open_artifact(config.corpus, "corpus")
    artifacts = [open_artifact(model_uri(uri), "ranker") for uri in config.model]
    fingerprints = [model.fingerprint for model in artifacts]
    require(len(set(fingerprints)) == len(fingerprints), "model", config.model, "each model once")
    measure = measurement(config, corpus)
    question_set = measure.questions
    models = models_by_name(artifacts)
    known = _known_contexts(config, corpus, models)
    skipped = _slow_models(config, models, question_set.candidates)
    timed_models = {name: model for name, model in models.items() if name not in skipped}
    if config.dry_run:
        return _dry_run(config, question_set, timed_models)

    from pipeline import tracking
    from pipeline.evaluation import report
    from pipeline.models.truncation import truncation

    if timed_models:
        tracking.connect()  # refuses a server that is away before the work

    baselines = _baselines(corpus, measure, config) if config.baselines else []
    if config.baselines and measure.protocol.source == "corpus":
        baselines += _untrained_baselines(artifacts, measure, config, known)
    with nullcontext() if config.resources == HERE else cluster.session():
        precision = _precision(config)
        model_results, attach_to_runs = _ask_models(
            timed_models, corpus, measure, config, precision, baselines, known
        )
    results, comparisons = baselines + model_results, compare_all(model_results, config.seed)
    least_scores = _least_scores(model_results, measure.protocol)
    summary: program.Summary = {
        "examples": len(question_set),
        "corpus": corpus.uri,
        "split": config.split,
        **asdict(measure.protocol),
        "shorter": question_set.shorter_count(),
        "unanswerable": question_set.unanswerable_count(),
        "left_out": dict(question_set.left_out),
        "precision": precision,
        "models": {model.uri: model.fingerprint for model in artifacts},
        "skipped": skipped,
        **report.as_json(results, comparisons),
        "least_scores": {name: least._asdict() for name, least in least_scores.items()},
    }
    notes = [
        *_notes(question_set, measure.protocol, config, corpus, known),
        *(_trained_on(models, corpus) if config.split == "train" else []),
        f"models compute in {precision}",
        *(
            f"{name}: {line}"
            for name, (_, ranker) in timed_models.items()
            if (line := truncation(ranker, question_set.contexts, question_set.texts))
        ),
        *(f"{name}: {least}" for name, least in least_scores.items()),
    ]
    table = "\n".join([report.markdown(results, comparisons), "", *notes])
    print(table)
    for name, reason in skipped.items():
        print(f"{name}: skipped: {reason}")
    if unanswerable := question_set.unanswerable_count():
        print(f"{unanswerable:,} of {len(question_set):,} questions have a wrong candidate with the right "
              "one's text, but for white space: nobody can answer them")  # fmt: skip
    files: Files = {
        "table.md": ("", table.encode()),
        "table.json": (config.json, json.dumps(summary, indent=1).encode()),
    }
    if config.latency_queries:
        default = config.json and config.json.removesuffix(".json") + ".png"
        files["table.png"] = (config.plot or default, report.plot(results))
    if config.errors:
        files["errors.jsonl"] = (config.errors, _worst_errors(model_results, question_set))
    for uri, data in files.values():
        if uri:
            storage.write_bytes(uri, data)
    for attach in attach_to_runs:
        attach({name: data for name, (_, data) in files.items()})
    return summary


def _known_contexts(config: Config, corpus: Artifact, models: Models) -> KnownContexts:
    """Those of --known-contexts. Raises BadInput for a model whose contexts have several vectors."""
    if not config.known_contexts:
        return {}
    for _, ranker in models.values():
        ranker.config.require_one_vector("known_contexts")
    return train_contexts(corpus)


def _baselines(corpus: Artifact, measure: Measurement, config: Config) -> list[ScorerResult]:
    """The rows of the methods that know no model."""
    from pipeline.evaluation.baselines import BM25, Chance, TfIdf, known_texts

    asked = measure.questions
    texts = known_texts(corpus) or [asked.texts[place] for place in asked.right_places()]
    return [
        measure.of("chance", lambda: Chance(config.seed), timed=False),
        measure.of("tf-idf", lambda: TfIdf.fit(texts)),
        measure.of("bm25", lambda: BM25.fit(texts)),
    ]


def _untrained_baselines(
    models: Sequence[Artifact], measure: Measurement, config: Config, known: KnownContexts
) -> list[ScorerResult]:
    """The published sentence encoders that models started from: what training has gained or lost."""
    from pipeline.classification import encoder as text_encoder
    from pipeline.classification.settings import EncodeConfig
    from pipeline.evaluation.ranking import RankerScorer

    settings = EncodeConfig(precision=config.precision)
    results = dict[str, ScorerResult]()
    for model in models:
        start = model.manifest["inputs"].get("encoder", {})
        if start.get("kind") != "external" or start["fingerprint"] in results:
            continue
        try:
            source, found = sources.open_encoder(start["uri"])
            folder = source.local()
            is_same = found["fingerprint"] == start["fingerprint"]
            if not is_same or not (folder / sources.SENTENCE_TRANSFORMERS).exists():
                continue
            encoder = text_encoder.load(folder, settings, best_device())
        # It is removed, a relative path of another folder, or its pooling is none of ours.
        except BadInput:
            continue
        name = f"untrained {storage.name_of(start['uri'])}"
        make_scorer = functools.partial(RankerScorer, encoder.ranker, known_contexts=known)
        results[start["fingerprint"]] = measure.of(name, make_scorer)
    return list(results.values())


def _ask_models(
    models: Models,
    corpus: Artifact,
    measure: Measurement,
    config: Config,
    precision: Resolved,
    baselines: Sequence[ScorerResult],
    known: KnownContexts,
) -> tuple[list[ScorerResult], list[AttachFiles]]:
    """A row per model, with `--together` one more of their mean. Each model has an MLflow run, which takes
    the baselines' numbers, too, and files later."""
    from pipeline import tracking
    from pipeline.evaluation.ranking import MeanScorer

    results, attach_to_runs = list[ScorerResult](), list[AttachFiles]()
    settings = {**to_dict(config), "precision": precision}
    makers = _scorer_makers(models, config.resources, precision, known)
    for name, (model, _) in models.items():
        results.append(measure.of(name, makers[name], actors=config.resources))
        inputs = {"model": model, "corpus": corpus}
        with tracking.start_without_artifact(
            "evaluate", storage.name_of(model.uri), inputs, settings
        ) as run:
            numbers = results[-1].numbers()
            for baseline in baselines:
                row = baseline.numbers().items()
                numbers |= {f"{baseline.name}/{k}": number for k, number in row}
            run.log(numbers, wait=True)
        tracking.note_quality(model, corpus, results[-1].numbers())
        attach_to_runs.append(run.attach)
    if config.together:
        make_mean = functools.partial(MeanScorer, list(makers.values()))
        results.append(measure.of(" + ".join(models), make_mean, actors=config.resources))
    return results, attach_to_runs


def _scorer_makers(
    models: Models, resources: Actors, precision: Resolved, known: KnownContexts
) -> dict[str, Callable[[], Any]]:
    """Makes a model's scorer. Here it has the weights that are loaded; a task on a cluster loads its own."""
    from pipeline.evaluation import ranking

    if resources != HERE:
        return {
            name: functools.partial(ranking.scorer, model, "", precision, known)
            for name, (model, _) in models.items()
        }
    return {
        name: functools.cache(functools.partial(ranking.scorer, ranker, name, precision, known))
        for name, (_, ranker) in models.items()
    }


def _notes(
    question_set: Questions,
    protocol: Protocol,
    config: Config,
    corpus: Artifact,
    known: KnownContexts,
) -> list[str]:
    """What a reader of the table has to know of its questions."""
    left_out, asked = question_set.left_out, len(question_set)
    reasons = "".join(f"; {count:,} are not: {reason}" for reason, count in left_out.items())
    of_all = f"{asked:,} of the {asked + sum(left_out.values()):,} examples"
    notes = [f"{of_all} of {config.split}/ are asked{reasons}"]
    if protocol.source == "corpus" and config.split != "train":
        trained = train_responses(corpus)
        count = sum(question_set.texts[place] in trained for place in question_set.right_places())
        if count > _MANY_KNOWN * asked:
            notes.append(f"{count:,} of the {asked:,} right answers also stand in train/: their questions "
                         "are new, but the answers are not")  # fmt: skip
    several = question_set.several_right_count() if protocol.source in ("sampled", "corpus") else 0
    if several:
        notes.append(f"{several:,} questions have several right answers, of which each counts alone: the "
                     "others are wrong ones then; evaluate_search takes several")  # fmt: skip
    if asked < _FEW_QUESTIONS:
        notes.append(f"fewer than {_FEW_QUESTIONS} questions say little: the intervals are wide")
    if shorter := question_set.shorter_count():
        notes.append(f"questions with fewer than {protocol.candidates:,} candidates: {shorter:,}")
    if protocol.candidates < (full_count := config.rules(corpus).candidates) != protocols.ALL:
        each = f"{protocol.candidates:,} candidates each"
        notes.append(f"{each}, not {full_count:,}: {config.split}/ has no more")
    if known:
        count = sum(text in known for text in question_set.texts)
        of_all = f"{count:,} of {len(question_set.texts):,} candidates"
        others = "; tf-idf and bm25 read their texts alone" if config.baselines else ""
        notes.append(f"{of_all} are found by their contexts in train/, too{others}")
    return notes


def _trained_on(models: Models, corpus: Artifact) -> list[str]:
    """A line for each model that has learnt from examples of train/."""
    paths = set(corpus.paths("train/", ".parquet"))
    return [
        f"{name} was trained on examples of train/: new questions get fewer right answers"
        for name, (model, _) in models.items()
        if corpora_read_for(model) & corpora_of(corpus)
        and not paths <= set(model.manifest.get("held_out", ()))
    ]


def _least_scores(
    results: Sequence[ScorerResult], protocol: Protocol
) -> dict[str, least_score.LeastScore]:
    """Where a question is asked among all texts, as in a service: which first answers to leave out."""
    if protocol.source != "corpus":
        return {}
    found = {result.name: least_score.least_score(result.ranking) for result in results}
    return {name: least for name, least in found.items() if least}


def _worst_errors(results: Sequence[ScorerResult], question_set: Questions) -> bytes:
    """JSON lines of each row's worst answers; the first of them are printed."""
    from pipeline.evaluation.report import answer_text, json_lines, worst_answers

    worst_records = [worst_answers(result, question_set, _ERRORS) for result in results]
    for records in worst_records:
        print("", *map(answer_text, records[:_ERRORS_SHOWN]), sep="\n")
    return json_lines(worst_records)


def _dry_run(config: Config, question_set: Questions, models: Models) -> program.Summary:
    from pipeline.evaluation.ranking import estimate, scorer

    precision = _precision(config)
    scorers = {name: scorer(ranker, "", precision) for name, (_, ranker) in models.items()}
    details = {"candidates": question_set.candidates}
    return cost.show("evaluate", estimate(question_set, scorers), details)


def measurement(config: Config, corpus: Artifact) -> Measurement:
    """The questions for every model, and the rules of the count."""
    rules = config.rules(corpus)
    may_be_fewer = config.candidates_per_question == 0
    draw = (rules.source, rules.candidates, config.max_examples, config.seed, may_be_fewer)
    question_set = questions(corpus, config.split, *draw)
    rules = replace(rules, candidates=question_set.candidates)
    return Measurement(question_set, rules, config.latency_queries, config.seed)


def _precision(config: Config) -> Resolved:
    """The precision that the models compute in, on their hardware."""
    if config.resources == HERE:
        return resolve_precision(config.precision, best_device())
    return precision_of_tasks(config.precision, config.resources.gpu)


def _slow_models(config: Config, models: Models, candidates: int) -> dict[str, str]:
    """The models to skip, with the reason. Raises BadInput if these are all models, or with --together."""
    if config.slow or candidates <= _MAX_CROSS_CANDIDATES:
        return {}
    reason = f"a cross-encoder reads {candidates:,} pairs for each question; --slow true allows it"
    slow = {name: reason for name, (_, ranker) in models.items() if not ranker.config.has_vectors}
    if len(slow) == len(models):
        raise BadInput(f"--model {' '.join(slow)}: {reason}")
    require(not (config.together and slow), "together", True,
            f"false: {'; '.join(f'{name}: {reason}' for name in slow)}")  # fmt: skip
    return slow


def models_by_name(models: Sequence[Artifact]) -> Models:
    """Models by the name of their row: the architecture, the folder, or both with the fingerprint.

    All are loaded, so that a broken one fails before hours go into another one.
    """
    from pipeline.models.ranker import load_ranker

    loaded = [(model, load_ranker(model.local())) for model in models]
    names = [str(ranker.config.architecture) for _, ranker in loaded]
    folders = [storage.name_of(model.uri) for model in models]
    unique = [f"{name} {model.fingerprint[:8]}" for name, model in zip(names, models, strict=True)]
    for longer_names in (folders, unique):
        counts, both = Counter(names), zip(names, longer_names, strict=True)
        names = [name if counts[name] == 1 else longer for name, longer in both]
    return dict(zip(names, loaded, strict=True))


if __name__ == "__main__":
    program.main(Config, run, "evaluate")
