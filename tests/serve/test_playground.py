"""The page at `/`, in a real browser over a real service; and what `explain` adds to an answer."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest
import torch
from fastapi.testclient import TestClient

from jobs import embed_pool
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.pools.pool import make_current
from serve import known_contexts
from serve.http import api
from serve.http.bearer_tokens import BearerTokens
from serve.service import Service

from . import browser as browsers
from .conftest import Asking, ask, error_of, hash_of, serving

CONTEXT = ["hi , what do you do ?", "i paint"]
TEXTS = ["tea", "i sail on the harbour", "no", "a nurse", "tea"]
TOKEN = "let me in"


# explain


def test_without_results_there_is_nothing_to_explain(client):
    question = {"context": CONTEXT, "pool": "replies", "allow": ["none"], "explain": True}
    answer = client.post("/rank", json=question).json()
    assert (answer["results"], answer["explanation"]) == ([], None)


def test_of_a_list_of_questions_each_is_explained_or_not(client):
    question = {"context": CONTEXT, "candidates": TEXTS}
    plain, explained = client.post("/rank", json=[question, {**question, "explain": True}]).json()
    assert plain["explanation"] is None and explained["explanation"] is not None


def test_a_cross_encoder_has_nothing_to_explain(tiny_ranker, asking):
    client = TestClient(api.create_app(asking(tiny_ranker("cross")).service))
    question = {"context": CONTEXT, "candidates": TEXTS, "explain": True}
    error = error_of(client.post("/rank", json=question))
    assert (error["code"], error["field"]) == ("invalid_request", "explain")
    assert client.post("/rank", json={**question, "explain": False}).status_code == 200


# Known contexts

ANSWERS = {
    "a1": ("You find it in your inbox.", [["where is my bill ?"], ["i lost the invoice"]]),
    "a2": ("In the settings.", [["i forgot my password"]]),
    "a3": ("Nobody has asked this.", []),
}


@pytest.fixture(scope="module")
def faq(tiny_ranker, publish_pool, asking, tmp_path_factory) -> Asking:
    """A service over answers, as jobs.embed_pool makes them with `--embed.context-column`."""
    model = tiny_ranker("bi")
    ranker, pools = load_ranker(model.local()), tmp_path_factory.mktemp("pools")
    config = embed_pool.Config(model=model.uri, candidates=(), pools=str(pools), name="faq")
    texts, contexts = zip(*ANSWERS.values(), strict=True)
    vectors = inference.candidate_vectors(ranker, texts)
    turned = inference.toward_contexts(ranker, vectors, contexts).numpy()
    columns = {"id": list(ANSWERS), "text": texts, "content_hash": texts,
               "known_contexts": list(map(json.dumps, contexts))}  # fmt: skip
    publish_pool(pools / "faq" / "v-1", pa.table(columns), turned, config=config, model=model)
    make_current(str(pools), "faq", "v-1")
    asked = asking(model, str(pools / "faq"))
    asked.engine.encode_known_contexts()
    asked.engine.known_contexts["faq"]._thread.join()
    return asked


def known_in(client: TestClient, question: str) -> dict[str, list[str] | None]:
    answer = client.post("/rank", json={"context": question, "pool": "faq"}).json()
    return {result["id"]: result["known_context"] for result in answer["results"]}


def test_each_result_names_its_known_question_that_is_nearest(faq):
    client = TestClient(api.create_app(faq.service))
    for question in ("where is my bill ?", "i lost the invoice"):
        assert known_in(client, question) == {
            "a1": [question], "a2": ["i forgot my password"], "a3": None,
        }  # fmt: skip
    vectors, _ = inference.context_vectors(faq.engine.ranker, [["a new one"], *ANSWERS["a1"][1]])
    question_D, *known = torch.nn.functional.normalize(vectors[:, 0])
    nearest = int(np.argmax([float(question_D @ vector_D) for vector_D in known]))
    assert known_in(client, "a new one")["a1"] == ANSWERS["a1"][1][nearest]


def test_questions_are_encoded_from_the_start_on_and_not_beside_the_rehearsal(faq):
    (pool,) = (served.pool for served in faq.engine.local_pools)
    contexts = known_contexts.KnownContexts.of(pool, faq.engine.ranker)
    vectors, _ = inference.context_vectors(faq.engine.ranker, [["where is my bill ?"]])
    question_D, places = vectors[0, 0], range(len(pool))
    assert contexts.nearest(question_D, places) == [None] * len(pool)
    contexts.start()
    contexts._thread.join()
    assert ["where is my bill ?"] in contexts.nearest(question_D, places)


def test_a_pool_without_known_questions_names_none(client):
    question = {"context": CONTEXT, "pool": "replies"}
    results = client.post("/rank", json=question).json()["results"]
    assert {result["known_context"] for result in results} == {None}


def test_a_pool_with_too_many_known_questions_names_none(faq, monkeypatch):
    (pool,) = (served.pool for served in faq.engine.local_pools)
    assert known_contexts.KnownContexts.of(pool, faq.engine.ranker) is not None
    monkeypatch.setattr(known_contexts, "MOST", 2)
    assert known_contexts.KnownContexts.of(pool, faq.engine.ranker) is None


# The files


def test_the_page_and_its_files_are_served(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == "default-src 'self'; connect-src *"
    for name, media in (("main.js", "text/javascript"), ("style.css", "text/css"),
                        ("icon.svg", "image/svg+xml")):  # fmt: skip
        found = client.get(f"/playground/{name}")
        assert (found.status_code, found.headers["content-type"].partition(";")[0]) == (200, media)
        assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["__init__.py", "nothing.js", "..%2Fapi.py", "screenshot.png"])
def test_other_files_are_not_served(client, name):
    assert error_of(client.get(f"/playground/{name}"), 404)["code"] == "not_found"


def test_pages_that_load_scripts_from_elsewhere_are_off(client):
    assert [client.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]
    assert client.get("/openapi.json").status_code == 200


def test_the_page_can_be_left_out(asking, tiny_ranker):
    service = asking(tiny_ranker("bi")).service
    for opens in ("dialogue", "query"):
        page = TestClient(api.create_app(service, playground_opens=opens)).get("/").text
        chosen = re.findall(r'name="context" value="(\w+)" checked', page)
        assert chosen == [opens]
    client = TestClient(api.create_app(service, playground_opens="none"))
    assert client.get("/").status_code == 405  # a format of Hugging Face has POST there
    assert client.get("/playground/main.js").status_code == 404


# In a browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[browsers.Page]:
    """One for all tests: a tab starts a process."""
    path = browsers.find()
    if path is None:
        pytest.skip("no Chromium is installed")
    with browsers.chromium(path, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.page()


@pytest.fixture(scope="module")
def port(poly) -> Iterator[int]:
    with serving(api.create_app(poly.service)) as port:
        yield port


POOL_IS_THERE = "document.querySelector('#pool').value === 'replies'"


def opened(tab: browsers.Page, port: int, is_loaded: str = POOL_IS_THERE) -> browsers.Page:
    """The page as in a new tab, when it is loaded."""
    tab.renew()
    tab.open(f"http://127.0.0.1:{port}/")
    tab.until(is_loaded)
    return tab


@pytest.fixture
def page(tab, port) -> Iterator[browsers.Page]:
    """At the end nothing may have gone wrong unseen."""
    page = opened(tab, port)
    yield page
    assert page.complaints == []


RESULTS = "[...document.querySelectorAll('.result .text')].map((one) => one.textContent)"
SCORES = "[...document.querySelectorAll('.result .score')].map((one) => Number(one.title))"
HEAT = "document.querySelectorAll('.why:not([hidden]) .heat .token').length"
FOCUS = "document.activeElement"


def texts_are(page: browsers.Page, texts: list[str]) -> None:
    """Waits until these are the results, in this order."""
    page.until(
        f"JSON.stringify({RESULTS}) === {json.dumps(json.dumps(texts, separators=(',', ':')))}"
    )


def ranked(port: int, **question: Any) -> dict[str, Any]:
    """What the service itself answers."""
    status, answer = ask(port, "POST", "/rank", question)
    assert status == 200
    return answer


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [result["text"] for result in answer["results"]]


def test_a_dialogue_is_ranked_as_it_is_typed(page, port):
    page.type("hi , what do you do ?")
    first = ranked(port, context=["hi , what do you do ?"], pool="replies")
    texts_are(page, texts_of(first))
    page.press("Enter")
    page.type("i paint")
    second = ranked(port, context=CONTEXT, pool="replies")
    assert texts_of(second) != texts_of(first)
    texts_are(page, texts_of(second))
    expected = [result["score"] for result in second["results"]]
    assert page.run(SCORES) == pytest.approx(expected, rel=1e-5)
    said = page.text(".status")
    assert said.startswith("exact search: no other text scores higher") and said.endswith("ms")
    about = page.text(".about")
    assert about.startswith(f"model ranker {second['model'][:8]} · pool replies v-1 · fp32 on ")
    assert page.text(".kind") == "poly-encoder"
    assert page.text("#speaker") == "B"


def test_a_text_that_is_longer_than_the_model_reads_is_said_to_be_cut(page, port):
    page.type("hello")
    page.until("document.querySelector('.certified')")
    assert page.run("document.querySelector('.cut')") is None
    most = ask(port, "GET", "/info")[1]["limits"]["max_context_tokens"]
    page.type(" and hello" * most)
    page.until("document.querySelector('.cut')")
    assert page.text(".cut") == f"reads {most} tokens; a longer text is cut"


def test_with_a_second_stage_the_page_promises_no_more_than_the_certificate(
    tab, tiny_ranker, tiny_pool, asking
):
    model = tiny_ranker("poly")
    served = asking(model, tiny_pool(model), second_stage=tiny_ranker("cross").uri)
    with serving(api.create_app(served.service)) as port:
        page = opened(tab, port)
        page.type("hi , what do you do ?")
        page.until("document.querySelector('.certified')")
        said = page.text(".certified")
    assert said == "exact search: the second stage scored the exact best rows"


def test_turns_are_edited_and_deleted(page, port):
    for turn in ("one", "two", "three"):
        page.type(turn)
        page.press("Enter")
    page.click("#turns li:nth-child(2) button")  # Edit
    page.type("!")
    page.press("Enter")
    texts_are(page, texts_of(ranked(port, context=["one", "two!", "three"], pool="replies")))
    page.click("#turns li:first-child button:last-child")
    texts_are(page, texts_of(ranked(port, context=["two!", "three"], pool="replies")))
    assert page.each(".speaker") == ["A", "B"]


def test_a_result_shows_its_known_question(tab, faq):
    with serving(api.create_app(faq.service)) as port:
        page = opened(tab, port, "document.querySelector('#pool').value === 'faq'")
        page.type("i forgot my password")
        page.until(f"{RESULTS}.length === 3")
        shown = dict(zip(page.each(".text"), page.each(".known"), strict=True))
        assert shown["In the settings."] == "Nearest known question: i forgot my password"
        assert shown["Nobody has asked this."] == ""
        assert page.complaints == []


def test_a_query_and_own_candidates_are_ranked(page, port):
    page.click("input[value=query]")
    page.click("#query")
    page.type("a nurse")
    page.click("input[value=own]")
    page.click("#own")
    page.type("tea\n\ni sail")
    texts_are(page, texts_of(ranked(port, context="a nurse", candidates=["tea", "i sail"])))


def test_a_selected_result_shows_what_counts_for_it(page, port):
    page.type("i paint")
    answer = ranked(port, context=["i paint"], pool="replies", explain=True)
    texts_are(page, texts_of(answer))
    page.click(".result:nth-child(2) button")
    page.until(f"{HEAT} > 0")
    explained = answer["explanation"]
    assert page.run(HEAT) == len(explained["tokens"])
    weights = answer["results"][1]["weights"]
    combined = np.array(weights) @ np.array(explained["vectors"])
    shown = page.each(".heat .token", "title")
    percents = [float(title.rstrip("\N{NO-BREAK SPACE}%")) for title in shown]
    assert percents == pytest.approx(100 * combined, abs=0.51)
    first = page.text(".why tbody tr")
    assert first.startswith(str(int(np.argmax(weights)) + 1))
    assert len(page.each(".why tbody tr")) == len(weights)
    # It stays, and follows what is typed.
    page.click("#draft")
    page.press("End")
    page.type(" walls")
    page.until(f"{HEAT} === {len(explained['tokens']) + len(' walls')}")


HINT = "document.querySelector('.why:not([hidden]) .hint')?.textContent ?? ''"


@pytest.mark.parametrize(
    ("reduction", "reason"),
    [("mean", "No picture: the context's vector is the plain mean over its tokens, so that none"),
     ("first", "No picture: the context's vector is the output for its first token, which has")],
)  # fmt: skip
def test_a_vector_that_takes_no_more_of_one_token_has_no_picture(
    tab, tiny_ranker, asking, monkeypatch, reduction, reason
):
    served = asking(tiny_ranker("bi"))
    settings = replace(served.engine.ranker.config, reduction=reduction)
    monkeypatch.setattr(served.engine.ranker.dual, "config", settings, raising=False)
    with serving(api.create_app(served.service)) as port:
        page = opened(tab, port, "document.querySelector('.kind').textContent")
        assert page.text(".about").startswith("model ranker ")
        page.type("hello")
        page.click("#own")
        page.type("tea\ncoffee")
        page.until(f"{RESULTS}.length === 2")
        page.click(".result button")
        page.until(f"({HINT}).startsWith({json.dumps(reason)})")
        assert page.run(HEAT) == 0
        assert page.complaints == []


def test_every_token_of_the_heat_map_has_a_name(page):
    """Spaces and the line break between turns may be tokens, and the first bytes of a character are empty."""
    explanation = {
        "tokens": ["[CLS]", "ja", " ", "", "¿", "\n", "no", " [SEP]"],
        "vectors": [[0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.1, 0], [0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0, 0]],
    }
    page.run(f"""import("/playground/heat.js").then(({{heatMap}}) =>
        document.querySelector("#answers").replaceChildren(
            ...heatMap({json.dumps(explanation)}, [0.5, 0.5])))""")
    shown = page.each(".token")
    assert shown == ["[CLS]", "ja", "␣", "¿", "↵", "no", "[SEP]"]
    assert page.text(".heat") == "[CLS]ja␣ ¿↵\nno [SEP]"
    space = "\N{NO-BREAK SPACE}%"
    assert page.each(".token", "title")[3] == f"25{space}"
    assert page.each(".strip span", "title")[:7] == [
        f"{name} {share}{space}"
        for name, share in zip(shown, ("10", "10", "10", "30", "30", "10", "0.0"), strict=True)
    ]
    assert page.text(".words span") == f"␣ 30{space}, ¿ 25{space}, ↵ 20{space}"


def test_a_result_becomes_the_next_turn(page, port):
    page.type("hello")
    (best, *_) = texts_of(ranked(port, context=["hello"], pool="replies"))
    page.until(f"{RESULTS}[0] === {json.dumps(best)}")
    page.click(".result button")
    page.until("document.querySelector('.why button')")
    page.click(".why button")
    texts_are(page, texts_of(ranked(port, context=["hello", best], pool="replies")))


def test_the_keyboard_is_enough(page, port):
    """From the text to the results, into one and back; the focus is seen wherever it is."""
    assert page.run(f"{FOCUS}.id") == "draft"
    page.type("i paint")
    page.press("Enter")
    page.until(f"{RESULTS}.length === 10")
    for _ in range(30):
        page.press("Tab")
        assert page.run(f"{FOCUS}.matches(':focus-visible')")
        assert page.run(f"""(() => {{
            const near = {FOCUS}.closest('.choice label') ?? {FOCUS};
            return getComputedStyle(near).outlineStyle;
        }})()""") == "solid"  # fmt: skip
        if page.run(f"{FOCUS}.closest('.result') !== null"):
            break
    page.press("ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    page.until(f"{HEAT} > 0")
    assert page.run(f"{FOCUS}.getAttribute('aria-expanded')") == "true"
    assert page.run(f"{FOCUS}.querySelector('.rank').textContent") == "2"
    page.press("Escape")
    assert page.run(f"{FOCUS}.getAttribute('aria-expanded')") == "false"
    for _ in range(30):
        page.press("Shift+Tab")
        if page.run(f"{FOCUS}.id") == "draft":
            break
    page.press("ArrowUp")  # edits the last turn
    page.type(" walls")
    page.press("Enter")
    texts_are(page, texts_of(ranked(port, context=["i paint walls"], pool="replies")))


def test_everything_that_can_be_used_has_a_name(page):
    page.type("hello")
    page.press("Enter")
    page.until(f"{RESULTS}.length === 10")
    page.click("summary")
    page.click(".result button")
    page.until(f"{HEAT} > 0")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    used = {"button", "textbox", "combobox", "radio", "link", "listbox", "region"}
    named = [
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in used
    ]
    assert {"button", "textbox", "combobox", "radio", "link"} <= {role for role, _ in named}
    assert [role for role, name in named if not name.strip()] == []


def test_nothing_is_asked_of_other_hosts(page, port):
    page.type("hello")
    page.until(f"{RESULTS}.length === 10")
    assert {urlsplit(url).netloc for url in page.urls} == {f"127.0.0.1:{port}"}
    paths = {urlsplit(url).path for url in page.urls}
    assert paths >= {"/", "/playground/main.js", "/info", "/rank"}


def test_no_script_in_the_page_itself_runs(page):
    page.run("""document.head.append(Object.assign(document.createElement("script"),
                                              {textContent: "window.ran = true"}))""")  # fmt: skip
    assert page.run("window.ran") is None
    assert any("Content Security Policy" in one for one in page.complaints)
    page.complaints.clear()


def test_an_error_is_shown_in_one_line_with_its_code(page, port):
    page.until("document.querySelector('#pool option')")
    page.run("document.querySelector('#pool option').value = 'gone'")
    page.type("hello")
    page.until("!document.querySelector('.problem').hidden")
    assert page.text(".problem") == "unknown_pool pool: not served here; there are: replies"
    height = page.run("document.querySelector('.problem').clientHeight")
    assert height < 2 * page.run("parseFloat(getComputedStyle(document.body).lineHeight)")
    page.screen(390, 844)  # a phone: in as many lines as it takes
    for selector in (".problem", ".about"):
        assert page.run(f"""(() => {{
            const {{ scrollWidth, clientWidth, clientHeight, scrollHeight }} =
                document.querySelector({json.dumps(selector)});
            return [scrollWidth - clientWidth, scrollHeight - clientHeight];
        }})()""") == [0, 0]  # fmt: skip
    assert page.run("document.querySelector('.problem').clientHeight") > height
    assert page.run(RESULTS) == []
    page.run("document.querySelector('#pool option').value = 'replies'")
    page.type("!")
    page.until(f"{RESULTS}.length === 10 && document.querySelector('.problem').hidden")


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1600)])
def test_it_is_readable_in_light_and_dark_narrow_and_wide(page, scheme, width):
    page.prefer(scheme)
    page.screen(width, 900)
    page.type("a" * 60 + " is a word that does not fit")
    page.press("Enter")
    page.until(f"{RESULTS}.length === 10")
    page.click(".result button")
    page.until(f"{HEAT} > 0")
    assert page.run("document.documentElement.scrollWidth") == width
    page.run(CONTRAST)
    texts = ("body", ".text", ".about", ".certified", ".hint", ".heat .token", ".choice label")
    for selector in texts:
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        assert page.run(f"Math.min(...{every}.map(contrast))") >= 4.5, selector
    lightness = page.run("luminance(backgroundOf(document.body))")
    assert lightness > 0.8 if scheme == "light" else lightness < 0.05


CONTRAST = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
var backgroundOf = (one) => {
    canvas.clearRect(0, 0, 1, 1);
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
var luminance = (rgb) => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
var contrast = (one) => {
    const rgb = getComputedStyle(one).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const [low, high] = [luminance(rgb), luminance(backgroundOf(one))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
};
"""


def test_an_older_answer_never_replaces_a_newer_one(poly, tab):
    """The first question is held until the second has been shown."""
    inner = api.create_app(poly.service)
    held, release, finished = threading.Event(), threading.Event(), threading.Event()

    async def holding(scope: Any, receive: Any, send: Any) -> None:
        message = await receive() if scope["type"] == "http" else {}
        is_first = b'"a"' in message.get("body", b"")
        if is_first:
            held.set()
            await asyncio.to_thread(release.wait, 60)
        messages = iter([message])

        async def again() -> Any:
            return next(messages, None) or await receive()

        await inner(scope, again, send)
        if is_first:
            finished.set()

    with serving(holding) as port:
        page = opened(tab, port)
        page.type("a")
        assert held.wait(60)
        page.type(" nurse")
        newer = texts_of(ranked(port, context=["a nurse"], pool="replies"))
        texts_are(page, newer)
        release.set()
        assert finished.wait(60)
        assert page.run(RESULTS) == newer


def test_a_token_is_asked_for_and_kept_in_the_tab_only(poly, tab):
    with serving(api.create_app(poly.service, tokens=BearerTokens([hash_of(TOKEN)]))) as port:
        page = opened(tab, port, "document.querySelector('#services').open")
        assert page.text(".problem code") == "unauthorized"
        page.click("#token")
        page.type(TOKEN)
        page.press("Enter")
        page.until(POOL_IS_THERE)
        page.click("#draft")
        page.type("hello")
        page.until(f"{RESULTS}.length === 10")
        page.open(f"http://127.0.0.1:{port}/")  # the tab remembers
        page.until(POOL_IS_THERE)
        assert page.run("[localStorage.length, document.cookie, location.search]") == [0, "", ""]


def test_a_swap_is_noticed_and_a_candidate_model_named(tiny_ranker, tiny_pool, asking, tab):
    engines = []
    for architecture in ("poly", "bi"):
        model = tiny_ranker(architecture)
        engines.append(asking(model, tiny_pool(model)).engine)
    service, said = Service(lambda: engines[0], 60.0), {"candidate": ""}
    kind = "document.querySelector('.kind').textContent"
    with serving(api.create_app(service, state=lambda: said)) as port:
        page = opened(tab, port)
        assert page.run(kind) == "poly-encoder"
        engines.reverse()
        page.type("hello")
        page.until(f"{kind} === 'bi-encoder'")
        said["candidate"] = engines[1].model.fingerprint
        page.open(f"http://127.0.0.1:{port}/")
        page.until(POOL_IS_THERE)
        engines.reverse()
        page.type("hello")
        page.until("document.querySelector('.about').textContent.startsWith('candidate model')")
    service.close()


def test_models_stand_side_by_side(page, port, tiny_ranker, tiny_pool, asking):
    """Another service, which lets this page ask and has a token of its own."""
    model = tiny_ranker("bi")
    other = asking(model, tiny_pool(model, "other"), tiny_pool(model))
    seen: list[str] = []
    inner = api.create_app(other.service, tokens=BearerTokens([hash_of(TOKEN)]),
                           origins=[f"http://127.0.0.1:{port}"])  # fmt: skip

    async def listening(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        seen.append(headers.get(b"authorization", b"").decode())
        await inner(scope, receive, send)

    page.screen(1600, 900)
    page.type("hello")
    page.until(f"{RESULTS}.length === 10")
    with serving(listening) as other_port:
        page.click("summary")
        page.click("#base")
        page.type(f"http://127.0.0.1:{other_port}")
        page.click("#base-token")
        page.type(TOKEN)
        page.press("Enter")
        page.until(f"{RESULTS}.length === 20")
        first, second = (page.each(f".column:nth-child({place}) .text") for place in (1, 2))
        assert first == texts_of(ranked(port, context=["hello"], pool="replies"))
        assert second == [one.text for one in other.rank_pool(["hello"], "replies", 10)]
        tops = page.each(".column", "getBoundingClientRect().top")
        assert tops[0] == tops[1]
        # Each has the choice of its own pools, and follows the page's field to a pool of the same name.
        assert len(page.each("#pool option")) == 1
        pools = "document.querySelectorAll('.pools')"
        assert page.run(f"[{pools}[0].hidden, {pools}[1].hidden, {pools}[1].value]") == [
            True, False, "replies"
        ]  # fmt: skip
        about = "document.querySelectorAll('.about')[1].textContent"
        page.run(f"{pools}[1].value = 'other'; {pools}[1].dispatchEvent(new Event('change'))")
        page.until(f"{about}.includes('pool other v-1') && {RESULTS}.length === 20")
        page.click("#draft")
        page.type("!")
        page.until("document.querySelectorAll('[aria-busy]').length === 0")
        assert "pool other v-1" in page.run(about)
        assert set(seen) == {"", f"Bearer {TOKEN}"}  # "" before: CORS asks without
        page.click("#others button")
        page.until(f"{RESULTS}.length === 10")


def test_a_service_that_does_not_answer_is_said(page):
    page.click("summary")
    page.click("#base")
    page.type("http://127.0.0.1:9/")
    page.press("Enter")
    page.until("document.querySelectorAll('.column').length === 2")
    page.until("!document.querySelectorAll('.problem')[1].hidden")
    assert page.text(".problem code") == "unreachable"
    assert page.run("document.querySelector('#pool').value") == "replies"
    page.complaints.clear()  # the browser's own words about it
