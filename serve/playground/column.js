// The results of one service.

import { element } from "./elements.js";
import { heatMap } from "./heat.js";

const KINDS = { bi: "bi-encoder", poly: "poly-encoder", cross: "cross-encoder" };
const NARROWEST_BAR = 0.04;
const score = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const milliseconds = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export class Column {
  info = null;
  #question = null;
  #answer = null;
  #selected = null; // key of the result whose explanation is open
  #items = new Map();
  #pagePool = null; // the pool that the page chose last
  #page;

  /** `page.onReply(text)` takes a result into the dialogue, where `page.canReply()`; `page.onInfo()` is called
   * when the pools are known. */
  constructor(service, page) {
    this.service = service;
    this.#page = page;
    this.kind = element("span", { class: "kind" });
    this.about = element("p", { class: "about" });
    this.pools = element("select", { class: "pools", "aria-label": `Pool of ${service.name}`, hidden: "",
      onchange: () => this.ask(this.#question) });
    this.status = element("p", { class: "status", role: "status" });
    this.problem = element("p", { class: "problem", role: "alert", hidden: "" });
    this.list = element("ol", { class: "results", "aria-label": `Results of ${service.name}`,
      onkeydown: (event) => this.#onKey(event) });
    this.element = element("section", { class: "column card", "aria-label": service.name },
      element("header", {}, element("h2", { title: service.base }, service.name), this.kind),
      this.about, this.pools, this.status, this.problem, this.list);
    this.#say();
  }

  /** Loads the service's info; returns the problem, or null. */
  async loadInfo() {
    let infoProblem = null;
    try {
      this.info = await this.service.info();
      this.problem.hidden = true;
    } catch (problem) {
      infoProblem = problem;
      this.info = null;
      this.#fail(problem);
    }
    this.kind.textContent = KINDS[this.info?.model.architecture] ?? "";
    const chosen = this.pools.value;
    this.pools.replaceChildren(...poolOptions(this.poolNames));
    if (this.poolNames.has(chosen)) this.pools.value = chosen;
    this.pools.hidden = this.service.isHome || this.poolNames.size < 2; // the page's own field has its pools
    this.#sayAbout();
    this.#page.onInfo();
    return infoProblem;
  }

  /** Ranks; null clears. An older answer never replaces a newer one. */
  async ask(question) {
    this.#question = question;
    if (!question) {
      this.service.forget();
      this.#answer = null;
      this.problem.hidden = this.info !== null;
      this.#show();
      return;
    }
    this.element.setAttribute("aria-busy", "true");
    try {
      const explain = this.#selected !== null && this.#hasVectors;
      const asked = { ...question, ...this.#poolOf(question) };
      const ranking = await this.service.rank(explain ? { ...asked, explain } : asked);
      if (!ranking) return;
      this.problem.hidden = true;
      this.#answer = { ...ranking.answer, round: ranking.milliseconds };
      const { model } = ranking.answer;
      if (this.info && ![this.info.model.fingerprint, this.info.candidate].includes(model)) this.loadInfo();
    } catch (problem) {
      this.#answer = null;
      this.#fail(problem);
    }
    this.#show();
  }

  /** A map from the names of the service's pools to their numbers of candidates. */
  get poolNames() {
    return new Map(this.info?.pools.map((pool) => [pool.name, pool.candidates]));
  }

  /** Another service may have pools of other names: it is asked for its own, until the page names one of them. */
  #poolOf({ pool }) {
    if (!pool || this.service.isHome || !this.poolNames.size) return {};
    if (pool !== this.#pagePool && this.poolNames.has(pool)) this.pools.value = pool;
    this.#pagePool = pool;
    return { pool: this.pools.value };
  }

  get #hasVectors() {
    return this.info?.model.architecture !== "cross";
  }

  #fail(problem) {
    const line = `${problem.code}: ${problem.message}`;
    this.problem.replaceChildren(element("code", {}, problem.code), ` ${problem.message}`);
    this.problem.title = line;
    this.problem.hidden = false;
  }

  #show() {
    this.element.removeAttribute("aria-busy");
    this.#say();
    this.#sayAbout();
    const results = this.#answer?.results ?? [];
    const scores = results.map((result) => result.score);
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    const keys = results.map(keyOf);
    if (!keys.includes(this.#selected)) this.#selected = null;
    const focused = document.activeElement;
    for (const [key, item] of this.#items) if (!keys.includes(key)) item.element.remove();
    const items = new Map();
    results.forEach((result, place) => {
      const item = this.#items.get(keys[place]) ?? this.#item(keys[place]);
      const share = high > low ? (result.score - low) / (high - low) : 1;
      item.update(result, place, NARROWEST_BAR + (1 - NARROWEST_BAR) * share);
      items.set(keys[place], item);
      const current = this.list.children[place];
      if (current !== item.element) this.list.insertBefore(item.element, current ?? null);
    });
    if (this.list.contains(focused)) focused.focus(); // an element that is moved loses the focus
    this.#items = items;
    this.#showWhy();
  }

  /** Shows the certificate and the time of the answer. */
  #say() {
    const answer = this.#answer;
    if (!answer) {
      const text = this.#question || !this.problem.hidden ? "" : "Type a turn or a query to see what is ranked.";
      this.status.replaceChildren(text);
      return;
    }
    const proved = answer.second_stage
      ? "the second stage scored the exact best rows"
      : "no other text scores higher";
    this.status.replaceChildren(
      answer.certified
        ? element("span", { class: "certified" }, `exact search: ${proved}`)
        : element("span", {}, "approximate search: a better one may be missing"),
      ...(answer.context_tokens >= (this.info?.limits.max_context_tokens ?? Infinity)
        ? [element("span", { class: "cut" }, `reads ${answer.context_tokens} tokens; a longer text is cut`)] : []),
      element("span", { class: "time", title: `${milliseconds.format(answer.round)} ms with the way there and back` },
        `${milliseconds.format(answer.milliseconds)} ms`));
  }

  /** Names the model and the pool of the answer; before it, what the service has. */
  #sayAbout() {
    const { info } = this;
    const model = this.#answer?.model ?? info?.model.fingerprint;
    const pool = this.#answer?.pool;
    const isCandidate = model && model === info?.candidate;
    const names = [...this.poolNames.keys()];
    const parts = [
      model && (isCandidate ? ["candidate model", model.slice(0, 8)] : ["model", info?.model.name, model.slice(0, 8)]),
      info?.second_stage && ["second stage", info.second_stage.slice(0, 8)],
      pool && ["pool", pool.name, pool.version],
      !this.#answer && names.length && [names.length > 1 ? "pools" : "pool", names.join(", ")],
      info && [info.precision, "on", info.device],
    ];
    const texts = parts.filter(Boolean).map((part) => part.filter(Boolean).join(" "));
    // A line breaks between two parts, and behind the dot.
    this.about.replaceChildren(...texts.flatMap((text, place) =>
      place < texts.length - 1 ? [element("span", {}, `${text} ·`), " "] : [element("span", {}, text)]));
    this.about.title = model ? `fingerprint ${model}` : "";
  }

  #item(key) {
    const id = `result-${nextId++}`;
    const parts = Object.fromEntries(["rank", "text", "score", "known", "bar"].map((name) =>
      [name, element("span", { class: name })]));
    const why = element("div", { class: "why", id: `${id}-why`, role: "region", "aria-label": "Explanation", hidden: "" });
    const button = element("button", {
      type: "button", "aria-expanded": "false", "aria-controls": why.id,
      onclick: () => this.#select(this.#selected === key ? null : key),
    }, parts.rank, parts.text, parts.score, parts.known, parts.bar);
    const update = (result, place, share) => {
      parts.rank.textContent = place + 1;
      parts.text.textContent = result.text;
      parts.score.textContent = score.format(result.score);
      parts.score.title = result.score;
      parts.known.textContent = result.known_context ? `Nearest known question: ${result.known_context.join(" / ")}` : "";
      parts.bar.style.setProperty("--share", share.toFixed(4));
    };
    return { element: element("li", { class: "result" }, button, why), button, why, update };
  }

  #select(key) {
    this.#selected = key;
    const isExplained = key === null || !this.#hasVectors || this.#answer?.explanation;
    this.#showWhy();
    if (!isExplained && this.#question) this.ask(this.#question);
  }

  #showWhy() {
    for (const [key, item] of this.#items) {
      const open = key === this.#selected;
      item.button.setAttribute("aria-expanded", open);
      item.why.hidden = !open;
      item.why.replaceChildren(...(open ? this.#why(key) : []));
    }
  }

  #why(key) {
    const { results, explanation } = this.#answer;
    const result = results.find((candidate) => keyOf(candidate) === key);
    const facts = Object.entries(result.columns ?? {}).map(([name, value]) => `${name}: ${value}`);
    if (this.#answer.pool) facts.unshift(`id: ${result.id}`);
    let content = [element("p", { class: "hint" }, "…")];
    if (!this.#hasVectors) {
      content = [element("p", { class: "hint" },
        "A cross-encoder reads context and result together; it has no vectors to show.")];
    } else if (explanation && result.weights) content = heatMap(explanation, result.weights);
    return [
      ...content,
      element("footer", {},
        element("span", { class: "facts" }, facts.join(" · ")),
        ...(this.#page.canReply() ? [element("button", {
          type: "button", class: "small", onclick: () => this.#page.onReply(result.text),
        }, "Use as next turn")] : [])),
    ];
  }

  #onKey(event) {
    const buttons = [...this.#items.values()].map((item) => item.button);
    const place = buttons.indexOf(document.activeElement);
    if (event.key === "Escape" && this.#selected !== null) {
      const { button } = this.#items.get(this.#selected);
      this.#select(null);
      button.focus();
    } else if (place >= 0) {
      const next = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
      if (next === undefined) return;
      buttons[Math.max(0, Math.min(next, buttons.length - 1))].focus();
    } else return;
    event.preventDefault();
  }
}

let nextId = 0;

/** An option for each pool of such a map. */
export const poolOptions = (pools) => [...pools].map(([name, count]) =>
  element("option", { value: name }, `${name} · ${count.toLocaleString("en")} texts`));

const keyOf = (result) => `${result.id}\n${result.text}`;
