"""The latency of a service, the cost of HTTP, and the effect of overload.

The service is one that is already there (`--url`), or Ray Serve on this machine with its proxy and one
replica of one core. Each ratio is of two sides that were measured in turn, in one run. The clients run where
the command runs: of a service on this machine they take a share of the cores.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
from matplotlib.figure import Figure

from jobs.benchmark import Config
from jobs.benchmarks.inputs import embed, read_contexts, read_texts
from jobs.benchmarks.measure import BenchmarkRow, attempt, run_job, take_turns
from jobs.benchmarks.serving import services
from jobs.benchmarks.serving.load import LoadResult, clients, one_client, poisson
from jobs.benchmarks.serving.peers import Peer, converted, peers
from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from serve.app import Args
from serve.http.bearer_tokens import HASHES
from serve.limits import Limits

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of clients."""
_POOL = "candidates"
_TOP_K = 10
_CLIENTS = 32
_SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)  # of saturation, where the load is measured
_IN_PROXIES = "RAY_SERVE_ENABLE_HA_PROXY"


@dataclass(frozen=True)
class Size:
    """The amount and the duration of a load."""

    candidates: int
    questions: int
    """Different ones."""
    seconds: float
    """Duration of each side in each round."""
    rounds: int
    steady_s: float
    """At 70 % of saturation."""
    overload_s: float


SIZES = {
    "small": Size(100_000, 500, 8.0, 3, 30.0, 60.0),
    "full": Size(100_000, 2_000, 10.0, 5, 300.0, 60.0),
}


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """Measures the service at the URL, or starts one. A picture is written to `work`."""
    size, work = SIZES[config.size], work / "serve"
    work.mkdir(parents=True, exist_ok=True)
    corpora = [open_artifact(uri, "corpus") for uri in config.corpus]
    contexts = read_contexts(corpora[0], size.questions)
    if config.url:
        url = config.url.rstrip("/")
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()
        except (OSError, ValueError) as error:
            raise BadInput(
                f"--url {config.url}: {error}; allowed: the address of a service"
            ) from None
        service = Service(contexts, config.pool, size, work, lambda: nullcontext(url))
        require_answers(clients(f"{url}/rank", service.bodies, 1, 0.1))
        for step in config.steps:
            yield from getattr(service, step)()
        return
    turns, rng = read_texts(corpora, size.candidates), random.Random(0)
    candidates = dict.fromkeys(turns)
    while len(candidates) < size.candidates:  # two turns make one more
        candidates[f"{rng.choice(turns)} {rng.choice(turns)}"] = None
    model = open_artifact(config.model, "ranker")
    pools = work / "pools" / model.fingerprint
    embed(model.uri, {f"c{n:07d}": text for n, text in enumerate(candidates)}, pools, _POOL)
    args = Args(model=model.uri, pools=[str(pools / _POOL)], name="rank")
    with services.session() as port:
        running = functools.partial(services.ranking, port, args)
        texts = list(candidates)
        own = _OwnService(contexts, _POOL, size, work, running, port, args, config.encoder, texts)
        for step in config.steps:
            yield from attempt(f"serve.{step}", getattr(own, step)())
    if "overhead" in config.steps and not os.environ.get(_IN_PROXIES):
        yield from attempt("serve.rank_100k.overhead_haproxy_ms", _with_haproxy(config, work))


@dataclass(frozen=True)
class Service:
    """The parts that need no more than a service's URL."""

    contexts: list[list[str]]
    pool: str
    size: Size
    work: Path
    running: Callable[[], AbstractContextManager[str]]
    """The URL of the service, as long as it is needed."""

    @functools.cached_property
    def bodies(self) -> list[bytes]:
        common = {"pool": self.pool, "top_k": _TOP_K}
        return [json.dumps({"context": context, **common}).encode() for context in self.contexts]

    @functools.cached_property
    def saturation(self) -> float:
        with self.running() as url:
            return self.saturate(url)

    def saturate(self, url: str) -> float:
        """Answers a second to clients who always ask."""
        result = clients(f"{url}/rank", self.bodies, _CLIENTS, self.size.seconds)
        require_answers(result, (200, 429))
        return result.per_s(self.size.seconds / 4, self.size.seconds)

    def clients(self) -> Iterator[BenchmarkRow]:
        """Clients who always ask: p50 and answers a second for each number of `COUNTS`.

        Beyond saturation twice as many clients wait twice as long, at the same rate of answers. The first
        quarter of the time does not count. Refusals (429) are counted and have no part in the latency.
        """
        rates, p50, end_s, refused = list[str](), 0.0, self.size.seconds, 0
        with self.running() as url:
            for count in COUNTS:
                result = clients(f"{url}/rank", self.bodies, count, end_s)
                rates.append(f"{result.per_s(end_s / 4, end_s):.1f}")
                p50 = result.successes(end_s / 4).ms(50)
                refused += result.statuses().get("429", 0)
        counts, were = ", ".join(map(str, COUNTS)), "was" if refused < 2 else "were"
        answers = f"Answers a second with {counts} clients: {', '.join(rates)}"
        note = f"{answers}. {refused or 'None'} {were} refused."
        unit = f"ms (p50) with {COUNTS[-1]} clients"
        yield BenchmarkRow.alone("serve.by_clients", p50, unit, note)

    def load(self) -> Iterator[BenchmarkRow]:
        """Latency at shares of saturation, on a Poisson clock; minutes at 70 %; three times too much."""
        size, saturation, curve = self.size, self.saturation, list[dict[str, float]]()
        with self.running() as url:

            def send(share: float, seconds: float) -> LoadResult:
                result = poisson(f"{url}/rank", self.bodies, share * saturation, seconds)
                require_answers(result, (200, 429))
                return result

            for share in _SHARES:
                answered, per_s = send(share, size.seconds).successes(), share * saturation
                curve.append({"per_s": per_s, "p50": answered.ms(50), "p99": answered.ms(99)})
            steady, overload = send(0.7, size.steady_s), send(3, size.overload_s)
        _picture(curve, self.work / "load.png")
        note = f"{size.steady_s:.0f} s at {0.7 * saturation:.1f} requests/s."
        name, ratio = "serve.load.70_percent.p99_over_p50", steady.ms(99) / steady.ms(50)
        yield BenchmarkRow.alone(name, ratio, "times", note)
        refused = overload.select(overload.status == 429)
        goodput = overload.per_s(size.overload_s / 5, size.overload_s)
        note = f"{3 * saturation:.0f} requests/s for {size.overload_s:.0f} s."
        if len(refused.status):
            times = f"{refused.ms(50):.1f} ms in the median and {refused.ms(99):.0f} ms at p99"
            note += f" A refusal took {times}."
        name, unit = "serve.load.300_percent.goodput", "rankings/s"
        yield BenchmarkRow.beside(name, goodput, saturation, unit, note)


@dataclass(frozen=True)
class _OwnService(Service):
    """All parts: the service is started for them."""

    port: int
    args: Args
    encoder: str
    """Of the peers of rerank and embed; "": these are not measured."""
    texts: list[str]
    """Of the pool."""

    def overhead(self) -> Iterator[BenchmarkRow]:
        """One request at a time: the service, the same work in a process, and a deployment that does none.

        Each question goes to all three before the next one: between two requests to a service its model
        leaves the processor's cache.
        """
        seconds = list[tuple[float, float, float]]()
        with (
            services.ranking(self.port, self.args) as url,
            services.deployment(self.port, "noop", services.Noop.bind()) as noop,  # type: ignore[attr-defined]
            services.in_process(self.args, _POOL, _TOP_K) as process,
            one_client(f"{url}/rank") as ask_service,
            one_client(f"{noop}/") as ask_noop,
        ):
            end = time.perf_counter() + 3 * self.size.rounds * self.size.seconds
            for body, context in itertools.cycle(zip(self.bodies, self.contexts, strict=True)):
                if time.perf_counter() > end:
                    break
                in_process = functools.partial(process.time_once.remote, context)
                seconds.append((ask_service(body), ray.get(in_process()), ask_noop(body)))
        service_ms, process_ms, noop_ms = (1e3 * np.median(seconds, axis=0)).tolist()
        note = (
            f"{self.size.candidates:,} candidates, {len(seconds):,} requests: {service_ms:.1f} ms, "
            f"in process {process_ms:.1f} ms, an empty deployment {noop_ms:.1f} ms."
        )
        name = "overhead_haproxy_ms" if os.environ.get(_IN_PROXIES) else "overhead_ms"
        overhead = service_ms - process_ms
        yield BenchmarkRow.alone(f"serve.rank_100k.{name}", overhead, "ms", note, peer=noop_ms)

    def fairness(self) -> Iterator[BenchmarkRow]:
        """A client of 5 requests a second, alone, beside one that asks at twice the service's capacity with
        short deadlines, and beside one that sends the heaviest lists. Each has its token."""
        hashes = [hashlib.sha256(name.encode()).hexdigest() for name in ("few", "many")]
        variables = {"env_vars": {HASHES: ",".join(hashes)}}
        many = {"authorization": "Bearer many"}
        heavy = [{"context": self.contexts[0], "pool": _POOL, "top_k": 1000}] * Limits().requests
        seconds = self.size.seconds * self.size.rounds
        rate = 2 * self.saturation  # of a service that is there for that alone
        options = {"num_cpus": 1, "runtime_env": variables}
        with services.ranking(self.port, self.args, ray_actor_options=options) as url:
            ask = functools.partial(poisson, f"{url}/rank", seconds=seconds)

            def ask_few() -> LoadResult:
                few = {"authorization": "Bearer few"}
                return ask(self.bodies, per_s=5.0, headers=few).successes()

            in_a_hurry, list_of_heavy = {**many, "x-timeout-ms": "500"}, json.dumps(heavy).encode()
            alone = ask_few()
            beside_many, _ = services.run_together(
                ask_few, lambda: ask(self.bodies, per_s=rate, headers=in_a_hurry)
            )
            beside_heavy, lists = services.run_together(
                ask_few, lambda: ask([list_of_heavy], per_s=4.0, headers=many)
            )
        answered = f"{len(lists.successes().status)} of {len(lists.status)}"
        in_time = f"4 lists/s, of which {answered} are answered in time"
        for row, percentile, beside, other in (
            ("serve.fairness.p50_over_alone", 50, beside_many, f"{rate:.0f} requests/s"),
            ("serve.heavy.p99_over_alone", 99, beside_heavy, in_time),
        ):
            ms_alone, ms = alone.ms(percentile), beside.ms(percentile)
            note = f"{ms_alone:.0f} ms alone, {ms:.0f} ms beside {other}."
            yield BenchmarkRow.alone(row, ms / ms_alone, "times", note)

    def throughput(self) -> Iterator[BenchmarkRow]:
        """Clients who always ask: the service, a process without HTTP, and a service without batches."""
        size, limits = self.size, Limits(batch_rows=1)
        unbatched_args = self.args.model_copy(update={"name": "apart", "limits": limits})
        with (
            services.ranking(self.port, self.args) as url,
            services.ranking(self.port, unbatched_args) as url_apart,
            services.in_process(self.args, _POOL, _TOP_K) as process,
        ):
            ways: dict[str, Callable[[], float]] = {
                "batched": lambda: self.saturate(url),
                "apart": lambda: self.saturate(url_apart),
                "process": lambda: ray.get(process.batch_rate.remote(self.contexts, size.seconds)),
            }
            rates = take_turns(ways, size.rounds)
        batched, apart, in_process = (float(np.median(values)) for values in rates.values())
        note = f"{size.candidates:,} candidates, {size.rounds} rounds of {size.seconds:.0f} s."
        peers = {"saturation_vs_in_process": in_process, "batching_gain_32_clients": apart}
        for name, peer in peers.items():
            yield BenchmarkRow.beside(f"serve.{name}", batched, peer, "rankings/s", note)

    def _beside_peers(self, task: str) -> Iterator[BenchmarkRow]:
        """32 clients; both sides may use both cores."""
        cores, seconds = os.cpu_count() or 1, self.size.seconds
        peer_model, ranker = converted(task, self.encoder, self.work)
        rng = random.Random(0)
        text_lists = [rng.sample(self.texts, 17 if task == "rerank" else 8) for _ in range(500)]

        def rate(url: str, peer: Peer) -> float:
            bodies = list(map(peer.body, text_lists))
            result = clients(f"{url}/{peer.path}", bodies, _CLIENTS, seconds)
            require_answers(result)
            return result.per_s(seconds / 4, seconds)

        # The other sides refuse nothing: 32 requests of 16 pairs are some 2 s of work.
        args = Args(model=ranker, name=task, limits=Limits(waiting_s=60.0))
        tei = Peer("plain_fastapi", task, peer_model)  # whose requests our service takes, too
        texts_each = len(text_lists[0]) - (task == "rerank")
        note = f"{texts_each} texts a request, {_CLIENTS} clients, {cores} threads on each side."
        with services.ranking(self.port, args, ray_actor_options={"num_cpus": cores}) as our_url:
            for peer in peers(task, peer_model):
                with services.other(peer.command_at, cpus=cores) as peer_url:
                    sides = ((our_url, tei), (peer_url, peer))
                    ways = {side: functools.partial(rate, *side) for side in sides}
                    rates = take_turns(ways, self.size.rounds)
                ours, theirs = (float(np.median(values)) for values in rates.values())
                name = f"serve.{task}.vs_{peer.name}"
                yield BenchmarkRow.beside(name, ours, theirs, "requests/s", note)

    rerank = functools.partialmethod(_beside_peers, "rerank")
    embed = functools.partialmethod(_beside_peers, "embed")


def _picture(curve: Sequence[Mapping[str, float]], file: Path) -> None:
    """Latency by requests a second."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    per_s = [point["per_s"] for point in curve]
    for name in ("p50", "p99"):
        axes.plot(per_s, [point[name] for point in curve], "o-", markersize=3, label=name)
    axes.set(xlabel="requests/s", ylabel="ms", ylim=(0, None), title="Latency by load")
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=130)


def require_answers(result: LoadResult, allowed_statuses: Sequence[int] = (200,)) -> None:
    """Raises BadInput: figures of a service that fails mean nothing."""
    if not len(result.status) or not np.isin(result.status, allowed_statuses).all():
        raise BadInput(f"the service answered {result.statuses()}; allowed: {allowed_statuses}")


def _with_haproxy(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """The overhead again, where Serve's proxies are HAProxy: it is chosen when Ray is imported."""
    file = work / "haproxy.json"
    run_job("benchmark", "serve", "--size", config.size, "--model", config.model, "--corpus", *config.corpus,
            "--only", "overhead", "--work", work.parent, "--json", file, **{_IN_PROXIES: "1"})  # fmt: skip
    [row] = json.loads(file.read_text())
    del row["source"]
    yield BenchmarkRow(**row)
