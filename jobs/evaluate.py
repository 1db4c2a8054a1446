"""Measures rankers: quality with intervals, and speed; beside chance, TF-IDF and BM25."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from jobs import cluster, program
from pipeline import cost, storage
from pipeline.actors import HERE, Actors
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, BadInput, require, to_dict
from pipeline.evaluation import none, protocols
from pipeline.evaluation.protocols import PROTOCOLS, Protocol
from pipeline.evaluation.questions import CandidateSource, Questions, questions
from pipeline.evaluation.results import Measurement, Result, compare_all
from pipeline.models import sources
from pipeline.models.precision import Precision, Resolved, resolve_precision
from pipeline.models.settings import RankerConfig
from pipeline.resources import best_device, precision_of_tasks

_MAX_CROSS_CANDIDATES = 1000
_ERRORS = 100
_FEW_QUESTIONS = 100
_ERRORS_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """Ranks each example's candidates and prints R@k/C, MRR and milliseconds, with 95 % intervals.

    Candidates are shuffled, and ties count against the scorer.
    """

    ALIASES = MappingProxyType({"candidates": "candidates_per_question"})
    model: tuple[str, ...]
    """Rankers (of jobs.finetune); each is a row of the table."""
    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    together: bool = False
    """One more row: the mean of the models' scores."""
    split: Literal["train", "valid", "test"] = "valid"
    """Which part of it."""
    protocol: protocols.Name = "convai2"
    """Whose source, candidates and recall_at hold where they are not set: convai2: given, 20; dstc7:
    given, 100; ubuntu: given, 10; wikipedia: others, 10,001; polyai: blocks, 100; labels: sampled, all
    that the split has. Pairs of your own: polyai. Texts and their labels: labels, where R@1 is the
    accuracy."""
    source: CandidateSource | Literal["protocol"] = "protocol"
    """given: the corpus' own candidates; sampled: the response among other responses; blocks: the
    responses of a block of C random examples; others: the response among the corpus' others/."""
    candidates_per_question: int = 0
    """C: candidates of an example, the right one among them; `--candidates` means the same. 0: the
    protocol's, or, of blocks and sampled, as many as a smaller split has."""
    recall_at: tuple[int, ...] = ()
    """The k of R@k/C; none: the protocol's."""
    max_examples: int = 100_000
    """At most so many, drawn at random."""
    baselines: bool = True
    """Rows for chance, TF-IDF and BM25 (weights from the train split)."""
    mapped: str = ""
    """A frozen encoder, any that jobs.classify_intents takes, for two more baselines: the cosine of its
    vectors (sim), and the same with a linear map that 10,000 examples of the train split train (map)."""
    none: Literal["ranked", "threshold"] = "ranked"
    """DSTC7's sub-task 4, the score of NONE. ranked: the model's own, as for any candidate; threshold:
    the one that gives the highest R@1 on the valid split."""
    slow: bool = False
    """Cross-encoders too where a question has more than 1,000 candidates."""
    latency_queries: int = 50
    """Questions that are timed, one at a time; 0: none."""
    json: str = ""
    """Write the table to this file too."""
    plot: str = ""
    """Draw R@1 against milliseconds into this PNG; empty: beside --json, if there is one."""
    errors: str = ""
    """Write each model's 100 worst-ranked examples to this file (JSON lines), and print three."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print the questions and the hours, measured on this machine, and write nothing."""
    precision: Precision = "auto"
    """What encoders compute in; auto: bf16 where the hardware multiplies it. Scores differ a little."""
    resources: Actors = field(default=HERE, metadata=NOT_IDENTITY)
    """What models run on; by default in this process, without a cluster."""
    seed: int = 0
    """Of the draws and of the candidates' order."""

    def __post_init__(self) -> None:
        require(self.candidates_per_question == 0 or self.candidates_per_question >= 2,
                "candidates_per_question", self.candidates_per_question, ">= 2")  # fmt: skip
        require(self.max_examples >= 1, "max_examples", self.max_examples, ">= 1")
        require(all(k >= 1 for k in self.recall_at), "recall_at", self.recall_at, "numbers >= 1")
        for name in ("latency_queries", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        require(not self.together or len(self.model) > 1, "together", True,
                "false for one model alone")  # fmt: skip
        require(
            self.baselines or not self.mapped, "mapped", self.mapped, "none, with --baselines false"
        )
        require(self.none != "threshold" or self.split != "valid", "split", self.split,
                "test or train with --none threshold, which is chosen on valid")  # fmt: skip
        require(not self.plot or self.latency_queries > 0, "latency_queries", 0, ">= 1 for --plot")

    def rules(self) -> Protocol:
        """The protocol, with what is set by hand."""
        preset = PROTOCOLS[self.protocol]
        source = preset.source if self.source == "protocol" else self.source
        return Protocol(
            source,
            self.candidates_per_question or preset.candidates,
            self.recall_at or preset.recall_at,
        )


def run(config: Config) -> program.Summary:
    rules = config.rules()
    corpus = open_artifact(config.corpus, "corpus")
    artifacts = [open_artifact(uri, "ranker") for uri in config.model]
    fingerprints = [model.fingerprint for model in artifacts]
    require(len(set(fingerprints)) == len(fingerprints), "model", config.model, "each model once")
    encoder = sources.open_text_encoder(config.mapped) if config.mapped else None
    require(encoder is None or corpus.rows("train/") > 0, "mapped", config.mapped, "none, with a corpus "
            "that has no train split")  # fmt: skip
    measure = measurement(config, corpus)

    from pipeline import tracking
    from pipeline.evaluation import errors, report
    from pipeline.evaluation.baselines import BM25, Chance, TfIdf, known_texts
    from pipeline.evaluation.ranking import Scorer, load_mean_scorer, load_scorer

    models = _models_by_name(artifacts)
    skipped = {} if config.slow else _slow_models(models, measure.asked.candidates)
    require(not (config.together and skipped), "together", True,
            f"false: {'; '.join(f'{name}: {why}' for name, why in skipped.items())}")  # fmt: skip
    question_set, wanted_candidates = measure.asked, rules.candidates
    rules = measure.protocol
    asked_models = {name: model for name, (model, _) in models.items() if name not in skipped}
    if config.dry_run:
        return _dry_run(config, question_set, {name: models[name] for name in asked_models})
    results, model_results, runs = list[Result](), list[Result](), list[tracking.Run]()
    if config.baselines:
        corpus_texts = known_texts(corpus) or [
            question_set.texts[place] for place in question_set.right()
        ]
        results = [
            measure.of("chance", lambda: Chance(config.seed), timed=False),
            measure.of("tf-idf", lambda: TfIdf.fit(corpus_texts)),
            measure.of("bm25", lambda: BM25.fit(corpus_texts)),
        ]
    if encoder is not None:
        results += _mapped_baselines(encoder[0], corpus, measure, config)
    in_process = config.resources == HERE
    with nullcontext() if in_process else cluster.session():
        precision = _precision(config)
        settings = {**to_dict(config), "precision": precision}
        for name, model in asked_models.items():
            make_scorer: Callable[[], Scorer] = functools.partial(
                load_scorer, model, name if in_process else "", precision
            )
            model_results.append(measure.of(name, make_scorer, actors=config.resources))
            with tracking.start_evaluation(model, corpus, settings) as tracked:
                numbers = model_results[-1].numbers()
                for baseline in results:
                    row = baseline.numbers().items()
                    numbers |= {f"{baseline.name}/{k}": number for k, number in row}
                tracked.log(numbers, wait=True)
            runs.append(tracked)
        if config.together:
            name = " + ".join(asked_models)
            make_scorer = functools.partial(
                load_mean_scorer, list(asked_models.values()), precision
            )
            model_results.append(measure.of(name, make_scorer, actors=config.resources))
    results += model_results
    comparisons = compare_all(model_results, config.seed)
    summary: program.Summary = {
        "examples": len(question_set),
        "corpus": corpus.uri,
        "split": config.split,
        **asdict(rules),
        "unanswerable": question_set.unanswerable(),
        "left_out": dict(question_set.left_out),
        "precision": precision,
        "models": {model.uri: model.fingerprint for model, _ in models.values()},
        "mapped": encoder[1] if encoder else None,
        "skipped": skipped,
        **report.as_json(results, comparisons),
    }
    example_count = len(question_set) + sum(question_set.left_out.values())
    notes = [
        f"{len(question_set):,} of the {example_count:,} examples of {config.split}/ are asked"
        f"{_left_out_note(question_set.left_out)}",
        f"models compute in {precision}",
    ]
    if len(question_set) < _FEW_QUESTIONS:
        notes.append(
            f"fewer than {_FEW_QUESTIONS} questions say little: the intervals are too narrow"
        )
    if rules.candidates < wanted_candidates != protocols.ALL:
        notes.append(
            f"{rules.candidates:,} candidates each, not {wanted_candidates:,}: {config.split}/ has no more"
        )
    text = "\n".join([report.markdown(results, comparisons), "", *notes])
    print(text)
    for name, reason in skipped.items():
        print(f"{name}: skipped: {reason}")
    if unanswerable := question_set.unanswerable():
        print(f"{unanswerable:,} of {len(question_set):,} questions have a wrong candidate with the right "
              "one's text: nobody can answer them")  # fmt: skip
    # Files by name: (the user's path, "" for none; the contents).
    files = {
        "table.md": ("", text.encode()),
        "table.json": (config.json, json.dumps(summary, indent=1).encode()),
    }
    if config.latency_queries:
        default_plot = config.json and config.json.removesuffix(".json") + ".png"
        files["table.png"] = (config.plot or default_plot, report.plot(results))
    if config.errors:
        worst_records = [errors.worst(result, question_set, _ERRORS) for result in model_results]
        files["errors.jsonl"] = (config.errors, errors.lines(worst_records))
        for records in worst_records:
            print("", *map(errors.shown, records[:_ERRORS_SHOWN]), sep="\n")
    for run in runs:
        run.attach({name: data for name, (_, data) in files.items()})
    for uri, data in files.values():
        if uri:
            storage.write_bytes(uri, data)
    return summary


def _dry_run(
    config: Config, question_set: Questions, models: Mapping[str, tuple[Artifact, RankerConfig]]
) -> program.Summary:
    from pipeline.evaluation.estimate import AskedModel, estimate
    from pipeline.evaluation.ranking import load_scorer

    precision = _precision(config)
    asked_models = {
        name: AskedModel(functools.partial(load_scorer, model, "", precision), settings.has_vectors)
        for name, (model, settings) in models.items()
    }
    return cost.show(
        "evaluate", estimate(question_set, asked_models), {"candidates": question_set.candidates}
    )


def measurement(config: Config, corpus: Artifact) -> Measurement:
    """The questions for every model, and the rules of the count."""
    rules = config.rules()
    may_be_fewer = config.candidates_per_question == 0
    draw = (rules.source, rules.candidates, config.max_examples, config.seed, may_be_fewer)
    question_set = questions(corpus, config.split, *draw)
    rules = replace(rules, candidates=question_set.candidates)
    calibration = None
    if config.none == "threshold":
        none.require_none(question_set, "--none threshold")
        calibration = questions(corpus, "valid", *draw)
    return Measurement(question_set, rules, calibration, config.latency_queries, config.seed)


def _mapped_baselines(
    source: sources.Source, corpus: Artifact, measure: Measurement, config: Config
) -> list[Result]:
    """PolyAI's two baselines on a frozen encoder, in this process."""
    from pipeline.classification import encoder as text_encoder
    from pipeline.classification.settings import EncodeConfig
    from pipeline.evaluation import mapped

    settings = EncodeConfig(precision=config.precision)
    encoder = text_encoder.load(source.local(), settings, best_device())
    contexts, responses = mapped.train_pairs(corpus, config.seed)
    context_vectors_ND = mapped.unit_vectors(encoder, contexts)
    response_vectors_ND = mapped.unit_vectors(encoder, responses)
    map_DD = mapped.fit_map(context_vectors_ND, response_vectors_ND, seed=config.seed)
    name = storage.name_of(config.mapped)
    return [
        measure.of(f"sim {name}", lambda: mapped.Mapped(encoder)),
        measure.of(f"map {name}", lambda: mapped.Mapped(encoder, map_DD)),
    ]


def _precision(config: Config) -> Resolved:
    """The precision that the models compute in, on their hardware."""
    if config.resources == HERE:
        return resolve_precision(config.precision, best_device())
    return precision_of_tasks(config.precision, config.resources.gpu)


def _left_out_note(left_out: Mapping[str, int]) -> str:
    return "".join(f"; {count:,} are not: {reason}" for reason, count in left_out.items())


def _slow_models(
    models: Mapping[str, tuple[Artifact, RankerConfig]], candidates: int
) -> dict[str, str]:
    """The models to skip, with the reason. Raises BadInput if these are all models."""
    if candidates <= _MAX_CROSS_CANDIDATES:
        return {}
    reason = f"a cross-encoder reads {candidates:,} pairs for each question; --slow true allows it"
    slow = {name: reason for name, (_, model) in models.items() if not model.has_vectors}
    if len(slow) == len(models):
        raise BadInput(f"--model {' '.join(slow)}: {reason}")
    return slow


def _models_by_name(models: Sequence[Artifact]) -> dict[str, tuple[Artifact, RankerConfig]]:
    """Models by the name of their row: the architecture, the folder, or both with the fingerprint."""
    from pipeline.models.ranker import load_ranker

    # Loads each model once, so that a broken one fails before hours go into another one.
    loaded = [(model, load_ranker(model.local()).config) for model in models]
    names = [str(settings.architecture) for _, settings in loaded]
    folders = [storage.name_of(model.uri) for model, _ in loaded]
    fingerprinted = [
        f"{settings.architecture} {model.fingerprint[:8]}" for model, settings in loaded
    ]
    for longer_names in (folders, fingerprinted):
        counts = Counter(names)
        names = [
            name if counts[name] == 1 else longer_name
            for name, longer_name in zip(names, longer_names, strict=True)
        ]
    return dict(zip(names, loaded, strict=True))


if __name__ == "__main__":
    program.main(Config, run, "evaluate")
