// One polyrank service, as the page asks it.

/** A refusal of a service or of the network: a code for programs and a line for people. */
export class Problem extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

export class Service {
  #controller = new AbortController();

  /** `base`: an absolute URL with a slash at its end. */
  constructor(base, token = "") {
    this.base = base;
    this.token = token;
  }

  get isHome() {
    return this.base === HOME;
  }

  get name() {
    return this.isHome ? "This service" : this.base.replace(/^https?:\/\/|\/$/g, "");
  }

  info() {
    return this.#ask("info", {});
  }

  /** {answer, milliseconds}, or null where a later question was asked since. */
  async rank(question) {
    this.forget();
    this.#controller = new AbortController();
    const { signal } = this.#controller;
    const began = performance.now();
    try {
      const answer = await this.#ask("rank", {
        method: "POST",
        body: JSON.stringify(question),
        signal,
      });
      const milliseconds = performance.now() - began;
      return signal.aborted ? null : { answer, milliseconds };
    } catch (problem) {
      if (signal.aborted) return null;
      throw problem;
    }
  }

  /** Cancels the question before. */
  forget() {
    this.#controller.abort();
  }

  async #ask(path, options) {
    const headers = options.body ? { "content-type": "application/json" } : {};
    if (this.token) headers.authorization = `Bearer ${this.token}`;
    let response;
    let body;
    try {
      response = await fetch(new URL(path, this.base), {
        ...options, headers, credentials: "omit", cache: "no-store",
      });
      body = await response.json();
    } catch {
      if (response) throw new Problem(`http_${response.status}`, "the answer is not JSON");
      throw new Problem("unreachable", `${new URL(this.base).host} does not answer, or does not let this page ask`);
    }
    if (!response.ok) {
      const { code = `http_${response.status}`, message = "" } = body?.error ?? {};
      throw new Problem(code, message);
    }
    return body;
  }
}

export const HOME = new URL(".", location.href).href;

/** The base URL in a text; null if the text is no URL. */
export function baseOf(text) {
  try {
    const url = new URL(text.trim());
    if (!/^https?:$/.test(url.protocol)) return null;
    return url.origin + url.pathname.replace(/\/*$/, "/");
  } catch {
    return null;
  }
}
