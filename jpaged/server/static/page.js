// The page: puts its parts together.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Figures } from "./figures.js";
import { History } from "./history.js";
import { Monitor } from "./monitor.js";
import { KINDS, Pool, countKinds } from "./pool.js";
import { Requests } from "./requests.js";

const byId = (id) => document.getElementById(id);
const api = new Api();
const history = new History();
const figures = new Figures(byId("figures"));
const hint = byId("cell").textContent;

const pool = new Pool(byId("pool"), (sentence, keys) => {
  byId("cell").textContent = sentence ?? hint;
  requests.mark(keys);
});
const requests = new Requests(byId("requests"), byId("more"), (key) => pool.light(key));
const monitor = new Monitor(api, show, showTrouble);

const chat = new Chat(api, {
  log: byId("log"),
  error: byId("error"),
  ask: byId("ask"),
  prompt: byId("prompt"),
  send: byId("send"),
  stop: byId("stop"),
  clear: byId("clear"),
  model: byId("model"),
  system: byId("system"),
  temperature: byId("temperature"),
  maxTokens: byId("max-tokens"),
  answers: byId("answers"),
});

const counters = KINDS.map((kind) => {
  const item = document.createElement("li");
  const count = document.createElement("b");
  item.className = kind;
  item.append(count, ` ${kind}`);
  byId("legend").append(item);
  return count;
});

byId("colours").addEventListener("change", ({ target }) => {
  const byRequest = target.value === "request";
  byId("dots").hidden = !byRequest;
  pool.colour(byRequest);
});
byId("key").addEventListener("change", (event) => {
  api.key = event.target.value.trim();
  start();
});
start();

function start() {
  monitor.look();
  listModels();
}

// Told by the monitor if it fails: it asks the same server at the same moment.
async function listModels() {
  const models = await api.get("v1/models").catch(() => ({ data: [] }));
  byId("model").replaceChildren(...models.data.map(({ id }) => new Option(id)));
}

function show(state) {
  const { info } = state;
  const named = requests.named(state.requests, chat.answerId);
  pool.show(state.pages, named);
  requests.show(named);
  countKinds(state.pages).forEach((count, index) => (counters[index].textContent = count.toLocaleString("en")));
  const now = history.add(state, performance.now());
  figures.show(history.values, now);
  const pages = `${(info.num_pages - 1).toLocaleString("en")} pages of ${info.page_size} tokens`;
  byId("about").textContent = `${state.model} · ${pages} in ${info.dtype} · ${info.implementation} on ${info.device}`;
  if (!byId("model").length) listModels(); // the server was not there before
  tell(state.is_paused ? "paused" : "ready", "");
}

function showTrouble(error) {
  if (error.status === 401) byId("settings").open = true;
  const state = { 0: "out of reach", 401: "needs a key", 404: "not shown" }[error.status] ?? "not ready";
  tell(state, error.message);
}

function tell(state, trouble) {
  const health = byId("health");
  health.dataset.state = trouble ? "failed" : state;
  if (health.textContent !== state) health.textContent = state; // said once, not once a second
  const notice = byId("trouble");
  if (notice.textContent !== trouble) notice.textContent = trouble;
  notice.hidden = !trouble;
  byId("watch").classList.toggle("stale", Boolean(trouble));
}
