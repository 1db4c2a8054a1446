// Elements without a framework. Texts are never read as HTML.

/** `element("p", {class: "hint"}, "text", child)`; `on…` are listeners, null leaves an attribute out. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A button that looks like text; `name` says to screen readers what it does. */
export const quietButton = (text, name, onclick) =>
  element("button", { type: "button", class: "quiet", "aria-label": name, onclick }, text);

/** "4.2 %"; its spaces do not break. */
export function percent(share) {
  if (share > 0 && share < 0.0005) return "<\u00a00.1\u00a0%";
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}\u00a0%`;
}
