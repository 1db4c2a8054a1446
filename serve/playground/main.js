// The page: what is typed on the left goes to every service, whose results stand side by side.

import { Column } from "./column.js";
import { Composer } from "./composer.js";
import { byId, element, quietButton } from "./elements.js";
import { HOME, Service, baseOf } from "./service.js";

const PAUSE_MS = 120; // in typing, before the services are asked
const STORED = "polyrank.services"; // [{base, token}], of this tab only

const columns = [];
let timer = 0;

const composer = new Composer((now) => {
  clearTimeout(timer);
  timer = setTimeout(ask, now ? 0 : PAUSE_MS);
});

function ask() {
  const question = composer.question();
  for (const column of columns) column.ask(question);
}

function add(base, token) {
  const column = new Column(new Service(base, token), {
    canReply: () => composer.isDialogue,
    onReply: (text) => composer.addReply(text),
    onInfo: () => {
      const loaded = columns.find((other) => other.info); // this service, unless it is away
      if (loaded) composer.setPools(loaded.poolNames);
    },
  });
  columns.push(column);
  byId("answers").append(column.element);
  return load(column);
}

async function load(column) {
  const problem = await column.loadInfo();
  if (!problem) column.ask(composer.question());
  else if (problem.code === "unauthorized" && column.service.isHome) byId("services").open = true;
}

function store() {
  const services = columns.map(({ service: { base, token } }) => ({ base, token }));
  sessionStorage.setItem(STORED, JSON.stringify(services));
  const otherColumns = columns.filter((column) => !column.service.isHome);
  byId("others").replaceChildren(...otherColumns.map((column) =>
    element("li", {}, element("span", {}, column.service.name),
      quietButton("Remove", `Remove ${column.service.name}`, () => remove(column)))));
}

function remove(column) {
  column.service.forget();
  column.element.remove();
  columns.splice(columns.indexOf(column), 1);
  store();
  byId("base").focus();
}

byId("token").addEventListener("change", (event) => {
  columns[0].service.token = event.target.value.trim();
  store();
  load(columns[0]);
});

byId("base").addEventListener("input", (event) => event.target.setCustomValidity(""));

byId("add-service").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("base");
  const base = baseOf(field.value);
  const isThere = columns.some((column) => column.service.base === base);
  if (!base || isThere) {
    field.setCustomValidity(isThere ? "This service is there already." : "A URL that begins with http:// or https://");
    field.reportValidity();
    return;
  }
  add(base, byId("base-token").value.trim());
  store();
  event.target.reset();
});

const services = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
const home = services.find((service) => service.base === HOME);
byId("token").value = home?.token ?? "";
add(HOME, home?.token);
for (const { base, token } of services) if (base !== HOME) add(base, token);
store();
