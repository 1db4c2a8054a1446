"""The latency of a service, the cost of HTTP, and the effect of overload.

A real service: Ray Serve on this machine, its proxy, one replica of one core unless a part says otherwise.
Each ratio is of two sides that were measured in turn, in one run. The clients run here too, and take a share
of the cores.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from jobs.benchmark import Config
from jobs.benchmarks.inputs import embed, peer_models, read_questions_and_candidates
from jobs.benchmarks.measure import BenchmarkRow, read_rows
from jobs.benchmarks.serving import any_service, services
from jobs.benchmarks.serving.any_service import (
    CLIENTS,
    SIZES,
    TOP_K,
    AnyService,
    request_bodies,
    require_answers,
)
from jobs.benchmarks.serving.baselines import InProcess, Noop
from jobs.benchmarks.serving.load import Client, LoadResult, Step, clients, poisson
from jobs.benchmarks.serving.peers import Peer, peers
from pipeline.artifact import open_artifact
from pipeline.config import BadInput, require
from serve.app import Args
from serve.http.bearer_tokens import HASHES
from serve.limits import Limits

PARTS = ("overhead", "throughput", "clients", "load", "fairness", "rerank", "embed")
_PEERS = ("rerank", "embed")  # beside others' services
_POOL = "candidates"
_IN_PROXIES = "RAY_SERVE_ENABLE_HA_PROXY"


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    """Measures the service at the URL, or starts one. A picture is written to `work`."""
    work = work / "serve"
    work.mkdir(parents=True, exist_ok=True)
    if config.url:
        return any_service.measure(config, work)
    size, encoder = SIZES[config.size], "".join(config.encoder)
    model = open_artifact(config.model, "ranker")
    corpora = [open_artifact(uri, "corpus") for uri in config.corpus]
    selected = [p for p in PARTS if p in (config.only or PARTS) and (encoder or p not in _PEERS)]
    require(bool(encoder) or not {*_PEERS} & {*config.only}, "encoder", encoder,
            "one of sentence-transformers, for rerank and embed")  # fmt: skip
    contexts, texts = read_questions_and_candidates(corpora, size.questions, size.candidates)
    pools = work / "pools" / model.fingerprint
    embed(model.uri, {f"c{n:07d}": text for n, text in enumerate(texts)}, pools, _POOL)
    args = Args(model=model.uri, pools=[str(pools / _POOL)], name="rank")
    rows, bodies = list[BenchmarkRow](), request_bodies(contexts, _POOL)
    with services.session() as port:
        running = functools.partial(services.ranking, port, args)
        service = _OwnService(bodies, size, work, running, port, args, contexts)
        for part in selected:
            print(f"{part} …", flush=True)
            try:
                if part in _PEERS:
                    rows += service.beside_peers(part, encoder, texts)
                else:
                    rows += getattr(service, part)()
            except BadInput as problem:  # the other parts count nevertheless
                rows.append(
                    BenchmarkRow(f"serve.{part}", None, "", detail={"failed": str(problem)})
                )
    if "overhead" in selected and not os.environ.get(_IN_PROXIES):
        rows.append(_with_haproxy(config, work))
    return rows


@dataclass(frozen=True)
class _OwnService(AnyService):
    """All parts: the service is started for them."""

    port: int
    args: Args
    contexts: list[list[str]]

    def overhead(self) -> list[BenchmarkRow]:
        """One request at a time: the service, the same work in a process, and a deployment that does none.

        Each question goes to all three before the next one: between two requests to a service its model
        leaves the processor's cache.
        """
        service_seconds, process_seconds, noop_seconds = list[float](), list[float](), list[float]()
        with (
            services.ranking(self.port, self.args) as url,
            services.deployment(self.port, "noop", Noop.bind()) as noop,  # type: ignore[attr-defined]
            services.in_process(InProcess, self.args, _POOL, TOP_K) as process,
            closing(Client(f"{url}/rank")) as rank_client,
            closing(Client(f"{noop}/")) as noop_client,
        ):
            end = time.perf_counter() + 3 * self.size.rounds * self.size.seconds
            for body, context in itertools.cycle(zip(self.bodies, self.contexts, strict=True)):
                if time.perf_counter() > end:
                    break
                service_seconds.append(rank_client.ask(body))
                process_seconds.append(ray.get(process.time_once.remote(context)))
                noop_seconds.append(noop_client.ask(body))
        service_ms, process_ms, noop_ms = (
            1e3 * float(np.median(times))
            for times in (service_seconds, process_seconds, noop_seconds)
        )
        detail = {
            "p50 of the service, ms": round(service_ms, 2),
            "p50 in process, ms": round(process_ms, 2),
            "p50 of an empty deployment, ms": round(noop_ms, 2),
            "overhead over the empty deployment's": round((service_ms - process_ms) / noop_ms, 2),
            "note": f"{self.size.candidates:,} candidates, {len(service_seconds):,} requests.",
        }  # fmt: skip
        name = "overhead_haproxy_ms" if os.environ.get(_IN_PROXIES) else "overhead_ms"
        row, difference = f"serve.rank_100k.{name}", service_ms - process_ms
        return [BenchmarkRow(row, difference, "ms", peer=noop_ms, detail=detail)]

    def fairness(self) -> list[BenchmarkRow]:
        """A client of 5 requests a second, alone, beside one that asks at twice the service's capacity with
        short deadlines, and beside one that sends the heaviest lists. Each has its token."""
        hashes = [hashlib.sha256(name.encode()).hexdigest() for name in ("few", "many")]
        variables = {"env_vars": {HASHES: ",".join(hashes)}}
        options = {"num_cpus": 1, "runtime_env": variables}
        few = {"authorization": "Bearer few"}
        many = {"authorization": "Bearer many"}
        heavy = json.dumps(
            [{"context": self.contexts[0], "pool": _POOL, "top_k": 1000}] * Limits().requests
        ).encode()
        seconds = self.size.seconds * self.size.rounds
        rate = 2 * self.saturation  # of a service that is there for that alone
        with services.ranking(self.port, self.args, ray_actor_options=options) as url:

            def ask(
                bodies: Sequence[bytes], per_s: float, headers: Mapping[str, str]
            ) -> LoadResult:
                steps = [Step(seconds, per_s)]
                return poisson(f"{url}/rank", bodies, steps, headers=headers)

            def ask_few() -> LoadResult:
                return ask(self.bodies, 5.0, few).successes()

            in_a_hurry = {**many, "x-timeout-ms": "500"}
            alone = ask_few()
            beside_many, of_many = services.run_together(
                ask_few, lambda: ask(self.bodies, rate, in_a_hurry)
            )
            beside_heavy, of_heavy = services.run_together(ask_few, lambda: ask([heavy], 4.0, many))
        return [
            BenchmarkRow(
                row, beside.ms(percentile) / alone.ms(percentile), "times", detail={
                    "alone, ms (p50, p99)": [round(alone.ms(q), 1) for q in (50, 99)],
                    "beside, ms (p50, p99)": [round(beside.ms(q), 1) for q in (50, 99)],
                    "the other's statuses": other.statuses(), "note": note})
            for row, percentile, beside, other, note in (
                ("serve.fairness.p50_over_alone", 50, beside_many, of_many, f"Beside {rate:.0f} requests/s."),
                ("serve.heavy.p99_over_alone", 99, beside_heavy, of_heavy, "Beside 4 lists/s."))
        ]  # fmt: skip

    def throughput(self) -> list[BenchmarkRow]:
        """Clients who always ask: the service, a process without HTTP, and a service without batches."""
        unbatched_args = self.args.model_copy(
            update={"name": "apart", "limits": Limits(batch_rows=1)}
        )
        rates: dict[str, list[float]] = {side: [] for side in ("batched", "apart", "process")}
        with (
            services.ranking(self.port, self.args) as url,
            services.ranking(self.port, unbatched_args) as url_apart,
            services.in_process(InProcess, self.args, _POOL, TOP_K) as process,
        ):
            for _ in range(self.size.rounds):
                seconds = self.size.seconds
                rates["batched"].append(self.saturate(url))
                rates["apart"].append(self.saturate(url_apart))
                rates["process"].append(ray.get(process.batch_rate.remote(self.contexts, seconds)))
        batched_rate, unbatched_rate, process_rate = (
            float(np.median(values)) for values in rates.values()
        )
        rounds = {
            side: [round(rate, 1) for rate in side_rates] for side, side_rates in rates.items()
        }
        size = self.size
        about = f"{size.candidates:,} candidates, {size.rounds} rounds of {size.seconds:.0f} s."
        return [
            BenchmarkRow("serve.saturation_vs_in_process", batched_rate, "rankings/s", peer=process_rate,
                ratio=batched_rate / process_rate, detail={**rounds, "note": about}),
            BenchmarkRow("serve.batching_gain_32_clients", batched_rate, "rankings/s", peer=unbatched_rate,
                ratio=batched_rate / unbatched_rate, detail={"note": about}),
        ]  # fmt: skip

    def beside_peers(self, task: str, encoder: str, texts: Sequence[str]) -> list[BenchmarkRow]:
        """32 clients; both sides may use both cores."""
        cores = os.cpu_count() or 1
        peer_model, ranker = peer_models(task, encoder, self.work)
        rng = random.Random(0)
        text_lists = [rng.sample(list(texts), 17 if task == "rerank" else 8) for _ in range(500)]
        # The other sides refuse nothing: 32 requests of 16 pairs are some 2 s of work.
        args = Args(model=ranker, name=task, limits=Limits(waiting_s=60.0))
        rows = list[BenchmarkRow]()
        with services.ranking(self.port, args, ray_actor_options={"num_cpus": cores}) as our_url:
            for peer in peers(task, peer_model):
                rates: dict[str, list[float]] = {"ours": [], "theirs": []}
                # Our service takes the first peer's requests, which are TEI's.
                tei = Peer("plain_fastapi", task, peer_model)
                with services.other(peer.command_at, cpus=cores) as peer_url:
                    sides = {"ours": (our_url, tei), "theirs": (peer_url, peer)}
                    for _ in range(self.size.rounds):
                        for side, (url, asked) in sides.items():
                            bodies = list(map(asked.body, text_lists))
                            seconds = self.size.seconds
                            result = clients(f"{url}/{asked.path}", bodies, CLIENTS, seconds)
                            require_answers(result)
                            rates[side].append(result.per_s(seconds / 4, seconds))
                our_rate, peer_rate = (float(np.median(rates[side])) for side in sides)
                rows.append(BenchmarkRow(f"serve.{task}.vs_{peer.name}", our_rate, "requests/s",
                    peer=peer_rate, ratio=our_rate / peer_rate, detail={
                        "note": f"{len(text_lists[0]) - (task == 'rerank')} texts a request, "
                                f"{CLIENTS} clients, {cores} threads on each side."}))  # fmt: skip
        return rows


def _with_haproxy(config: Config, work: Path) -> BenchmarkRow:
    """The overhead again, where Serve's proxies are HAProxy: it is chosen when Ray is imported."""
    file = work / "haproxy.json"
    command = [sys.executable, "-m", "jobs.benchmark", "serve", "--size", config.size, "--model",
               config.model, "--corpus", *config.corpus, "--only", "overhead", "--work", str(work.parent),
               "--json", str(file)]  # fmt: skip
    subprocess.run(command, env={**os.environ, _IN_PROXIES: "1"}, check=False, capture_output=True)
    if not file.exists():
        name = "serve.rank_100k.overhead_haproxy_ms"
        return BenchmarkRow(name, None, "ms", detail={"failed": " ".join(command)})
    (row,) = read_rows(file)
    file.unlink()
    return row
