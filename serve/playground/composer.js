// The left side: a dialogue or a query, and what is ranked for it.

import { poolOptions } from "./column.js";
import { byId, element, quietButton } from "./elements.js";

const SPEAKERS = ["A", "B"];

export class Composer {
  #turns = [];
  #edited = null; // the place of the turn that is being edited
  #onChange;

  /** `onChange(now)` is called when there is something else to ask; now: do not wait for more. */
  constructor(onChange) {
    this.#onChange = onChange;
    byId("draft").addEventListener("keydown", (event) => this.#onDraftKey(event));
    byId("query").addEventListener("keydown", (event) => {
      if (isPlainEnter(event)) {
        event.preventDefault();
        onChange(true);
      }
    });
    for (const id of ["draft", "query", "own"]) {
      byId(id).addEventListener("input", () => onChange(false));
    }
    for (const id of ["pool", "top-k"]) byId(id).addEventListener("change", () => onChange(true));
    for (const radio of document.querySelectorAll("input[type=radio]")) {
      radio.addEventListener("change", () => {
        this.#showParts();
        onChange(true);
      });
    }
    this.#showParts(); // browsers keep what was chosen before a reload
  }

  get isDialogue() {
    return chosen("context") === "dialogue";
  }

  /** What to send to /rank; null while there is nothing to ask. */
  question() {
    const texts = this.isDialogue ? [...this.#turns, byId("draft").value] : [byId("query").value];
    const context = texts.map((text) => text.trim()).filter(Boolean);
    const question = { context, top_k: Number(byId("top-k").value) };
    if (chosen("candidates") === "pool") question.pool = byId("pool").value;
    else question.candidates = byId("own").value.split("\n").map((line) => line.trim()).filter(Boolean);
    const hasCandidates = question.pool || question.candidates?.length;
    return context.length && hasCandidates ? question : null;
  }

  /** `pools`: a map from names to numbers of candidates. */
  setPools(pools) {
    const select = byId("pool");
    const selected = select.value;
    const options = poolOptions(pools);
    select.replaceChildren(...options);
    if (pools.has(selected)) select.value = selected;
    const radio = document.querySelector("input[name=candidates][value=pool]");
    radio.disabled = !options.length;
    if (!options.length && radio.checked) {
      document.querySelector("input[name=candidates][value=own]").checked = true;
    }
    this.#showParts();
  }

  /** Takes a reply into the dialogue, after what is being typed. */
  addReply(text) {
    const draft = byId("draft");
    for (const turn of [draft.value, text]) if (turn.trim()) this.#turns.push(turn.trim());
    draft.value = "";
    this.#render();
    draft.focus();
    this.#onChange(true);
  }

  #onDraftKey(event) {
    const draft = event.target;
    if (isPlainEnter(event)) {
      event.preventDefault();
      if (draft.value.trim()) this.addReply("");
    } else if (event.key === "ArrowUp" && !draft.value && this.#turns.length) {
      event.preventDefault();
      this.#edit(this.#turns.length - 1);
    }
  }

  #edit(place) {
    this.#edited = place;
    this.#render();
    const field = byId("turns").querySelector("textarea");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  /** Ends an edit; the focus stays where the turn is. */
  #save(place, text) {
    if (this.#edited === null) return; // the field is left because it goes
    this.#edited = null;
    if (!text.trim()) return this.#remove(place);
    const isNew = this.#turns[place] !== text.trim();
    this.#turns[place] = text.trim();
    this.#render();
    byId("turns").children[place].querySelector("button").focus();
    if (isNew) this.#onChange(true);
  }

  #remove(place) {
    this.#turns.splice(place, 1);
    this.#edited = null;
    this.#render();
    const neighbour = byId("turns").children[Math.min(place, this.#turns.length - 1)];
    (neighbour?.querySelector("button:last-child") ?? byId("draft")).focus();
    this.#onChange(true);
  }

  #render() {
    byId("turns").replaceChildren(...this.#turns.map((text, place) => this.#turn(text, place)));
    byId("speaker").textContent = speakerOf(this.#turns.length);
  }

  #turn(text, place) {
    const speaker = speakerOf(place);
    const number = place + 1;
    const item = element("li", { class: `turn ${speaker.toLowerCase()}` },
      element("span", { class: "speaker", "aria-label": `Speaker ${speaker}` }, speaker));
    if (place === this.#edited) {
      const field = element("textarea", {
        "aria-label": `Turn ${number}, speaker ${speaker}`, rows: 2,
        onkeydown: (event) => {
          if (isPlainEnter(event)) {
            event.preventDefault();
            this.#save(place, field.value);
          } else if (event.key === "Escape") this.#save(place, text);
        },
        onblur: () => this.#save(place, field.value),
      });
      field.value = text;
      item.append(field);
      return item;
    }
    item.append(
      element("p", {}, text),
      quietButton("Edit", `Edit turn ${number}`, () => this.#edit(place)),
      quietButton("Delete", `Delete turn ${number}`, () => this.#remove(place)));
    return item;
  }

  #showParts() {
    byId("dialogue").hidden = !this.isDialogue;
    byId("query-part").hidden = this.isDialogue;
    byId("pool-part").hidden = chosen("candidates") !== "pool";
    byId("own-part").hidden = chosen("candidates") === "pool";
  }
}

const speakerOf = (place) => SPEAKERS[place % SPEAKERS.length];

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

/** Enter that does not end the input of a character (IME) or break a line. */
const isPlainEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
