// Why a result has its score: the vectors that count, and the words that they attend to.

import { element, percent } from "./elements.js";

const STRONGEST_VECTORS = 8;
const STRONGEST_WORDS = 3;

/** Elements that show an explanation's tokens and vectors for a result's weights. */
export function heatMap(explanation, weights) {
  const reason = nothingToSee(explanation.vectors);
  if (reason) return [element("p", { class: "hint" }, reason)];
  const { tokens, vectors } = whole(explanation);
  const combined = tokens.map((_, t) =>
    vectors.reduce((sum, vector, m) => sum + weights[m] * vector[t], 0));
  const order = weights.map((_, m) => m).sort((a, b) => weights[b] - weights[a]);
  const rows = order.slice(0, STRONGEST_VECTORS).filter((m) => weights[m] > 0).map((m) =>
    element("tr", {},
      element("th", { scope: "row" }, `${m + 1}`),
      element("td", { class: "share" }, percent(weights[m])),
      element("td", { class: "seen" }, strip(tokens, vectors[m]), words(tokens, vectors[m]))));
  const isSingle = vectors.length === 1;
  return [
    element("h4", {}, isSingle ? "What the context's vector is made of" : "What counts for this result"),
    text(tokens, combined),
    element("p", { class: "words" }, "Most: ", words(tokens, combined)),
    ...(isSingle ? [] : [
      element("table", {},
        element("caption", {}, `The strongest ${rows.length} of ${vectors.length} vectors`),
        element("thead", {}, element("tr", {},
          element("th", { scope: "col" }, "Vector"), element("th", { scope: "col" }, "Weight"),
          element("th", { scope: "col" }, "Attends to"))),
        element("tbody", {}, ...rows)),
    ]),
  ];
}

/** The context, each token coloured by its weight. */
function text(tokens, weights) {
  const full = fullHeat(weights);
  return element("p", { class: "heat", role: "group", "aria-label": "The context, coloured by weight" },
    ...tokens.map((token, t) => {
      const mark = element("span", {
        class: isSpecial(t, tokens) ? "token special" : "token", title: percent(weights[t]),
      }, nameOf(token));
      mark.style.setProperty("--heat", Math.min(1, weights[t] / full).toFixed(3));
      // The space before a token stays uncoloured; a line break that is a token stands behind its name.
      const space = /^\s*/.exec(token)[0];
      return element("span", {}, ...(token.trim() ? [space, mark] : [mark, space]));
    }));
}

/** A cell for each token. */
function strip(tokens, weights) {
  const full = fullHeat(weights);
  return element("span", { class: "strip", "aria-hidden": "true" }, ...tokens.map((token, t) => {
    const cell = element("span", { title: `${nameOf(token)} ${percent(weights[t])}` });
    cell.style.setProperty("--heat", Math.min(1, weights[t] / full).toFixed(3));
    return cell;
  }));
}

/** The strongest words as a line. */
function words(tokens, weights) {
  const sorted = wordsOf(tokens, weights).sort((a, b) => b.weight - a.weight);
  const strongest = sorted.slice(0, STRONGEST_WORDS).filter((word) => word.weight >= 0.005);
  return element("span", {}, strongest.map((word) => `${word.text} ${percent(word.weight)}`).join(", "));
}

/** Merges the pieces of a word: a word begins after a space, and beside a sign that is no letter or digit. */
function wordsOf(tokens, weights) {
  const merged = [];
  let last = "";
  tokens.forEach((token, t) => {
    const isLetters = /^\p{L}|^\p{N}|^\p{M}/u.test(token) && /[\p{L}\p{N}]$/u.test(last);
    if (isLetters && !isSpecial(t, tokens)) {
      merged.at(-1).text += token;
      merged.at(-1).weight += weights[t];
    } else merged.push({ text: nameOf(token), weight: weights[t] });
    last = isSpecial(t, tokens) ? "" : token;
  });
  return merged;
}

/** A token's text; of one that is nothing but space a sign for it. */
const nameOf = (token) => token.trim() || (token.includes("\n") ? "↵" : "␣");

/** The explanation without empty tokens, the first bytes of a character, which the last one holds: it takes
 * their weights. */
function whole({ tokens, vectors }) {
  const ends = tokens.flatMap((token, t) => (token || t === tokens.length - 1 ? [t] : []));
  const merged = vectors.map((vector) => ends.map((end, place) =>
    vector.slice(place ? ends[place - 1] + 1 : 0, end + 1).reduce((sum, weight) => sum + weight)));
  return { tokens: ends.map((end) => tokens[end]), vectors: merged };
}

/** Why a picture of a context's only vector would say nothing; "": it says something. */
function nothingToSee([vector, ...others]) {
  if (others.length) return "";
  const [least, most] = [Math.min(...vector), Math.max(...vector)];
  if (most > 0.999) return "No picture: the context's vector is the output for its first token, which has read all of them.";
  if (most - least > 0.001) return "";
  return "No picture: the context's vector is the plain mean over its tokens, so that none counts more than another.";
}

/** The weight that has the full colour: the largest of the words (of all tokens [CLS] and [SEP] often have
 * most, and would leave the words pale), but four times the mean at least, so that a plain mean stays pale. */
const fullHeat = (weights) => Math.max(4 / weights.length, ...weights.slice(1, -1));

const isSpecial = (place, tokens) => place === 0 || place === tokens.length - 1;
