// The page's frame: the choice of run, view and theme, and the server's change events.
import { h, ask, isReport, replace } from "./dom.js";
import { runView, fleetView, compareView } from "./views.js";
import { playView } from "./play.js";
import { episodesView, episodeView, groupView } from "./episodes.js";

const VIEWS = { run: runView, fleet: fleetView, episodes: episodesView, episode: episodeView, group: groupView, compare: compareView, play: playView };
const TABS = [["run", "Run"], ["fleet", "Fleet"], ["episodes", "Trajectories"], ["compare", "Compare"], ["play", "Play"]];
const UPDATE_MS = 5000;
const view = document.getElementById("view");
const last = new Map();  // the last state of each view, which restores its filters
let runs = [], shown = 0, updating = false;

// The address holds the whole state (#view?run=a&env=b), so that links and the back button work.
export function state() {
  const [name, query] = location.hash.slice(1).split("?");
  return { view: VIEWS[name] ? name : isReport && runs.length > 1 ? "compare" : "run", params: new URLSearchParams(query || "") };
}
export function link(name, params) {
  const all = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) if (value !== "" && value != null) all.set(key, value);
  return `#${name}?${all}`;
}

function currentRun(params) {
  const wanted = params.get("run");
  return runs.find((each) => each.name === wanted) || runs[0];
}

async function draw({ isUpdate = false } = {}) {
  if (isUpdate && updating) return;
  updating = true;
  const mine = ++shown;
  let { view: name, params } = state();
  try {
    runs = await ask("api/runs");
    if (mine !== shown) return;
    name = state().view;
    const run = currentRun(params);
    drawShell(name, params, run);
    if (!run) {
      replace(view, h("div", { class: "card" }, h("h1", {}, "No run yet"), h("p", { class: "dim" }, "Start a run with `python run.py`. It then appears on this page.")));
      return;
    }
    const isFile = run.kind !== "run" && ["run", "fleet", "compare"].includes(name);
    const make = isFile ? episodesView : VIEWS[name];
    const top = view.scrollTop;
    const content = await make({ run, runs, params, link, isUpdate });
    if (mine === shown && content) { replace(view, content); view.scrollTop = top; }
  } catch (error) {
    if (mine === shown && !isUpdate) replace(view, h("div", { class: "notes", role: "alert" }, String(error.message || error)));
  } finally { updating = false; }
}

function drawShell(name, params, run) {
  const select = document.getElementById("run");
  const names = runs.map((each) => each.name).join("\n");
  if (select.dataset.names !== names) {
    select.dataset.names = names;
    replace(select, runs.map((each) => h("option", { value: each.name }, each.name)));
  }
  if (run) select.value = run.name;
  const reading = document.getElementById("reading"), part = run && run.episodes && run.indexed < 1 ? run.indexed : null;
  reading.hidden = part == null;
  if (part != null) { reading.firstElementChild.value = part; reading.lastElementChild.textContent = `${Math.floor(100 * part)}% of the journal has been read${timeLeft(run.name, part)}`; }
  const active = name === "episode" || name === "group" ? "episodes" : name;
  const tabs = TABS.filter(([id]) => (run && run.kind !== "run" ? id === "episodes" : !(isReport && (id === "play" || (runs.length < 2 && id === "compare")))));
  if (name === active) last.set(name, { run: run?.name, hash: location.hash });
  const way = (id) => (id !== name && last.get(id)?.run === run?.name && last.get(id)?.hash) || link(id, { run: run?.name });
  replace(document.getElementById("nav"), tabs.map(([id, title]) =>
    h("a", { href: way(id), "aria-current": id === active ? "page" : null }, title)));
  selected = run;
  showConnection();
  document.title = `${run ? run.name + " · " : ""}Longstride`;
}

const read = new Map();  // run -> time and progress of the first observation of its indexing
function timeLeft(name, part) {
  if (!read.has(name)) read.set(name, [Date.now(), part]);
  const [since, first] = read.get(name), seconds = Math.round((Date.now() - since) / 1000 * (1 - part) / (part - first));
  return part > first && seconds > 2 ? `, ${seconds} s left` : "";
}

document.getElementById("run").addEventListener("change", (event) => {
  const { view: name } = state();
  const target = name === "episode" || name === "group" ? "episodes" : name;
  location.hash = link(target, { run: event.target.value });
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* private mode */ }
}
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* private mode */ }
setTheme(stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  draw();
});

window.addEventListener("hashchange", () => {
  const { name } = document.activeElement || {};  // the changed filter gets the focus again
  draw().then(() => {
    const again = name && [...view.querySelectorAll("[name]")].find((each) => each.name === name);
    (again || view).focus({ preventScroll: true });
    if (!again) scrollTo(0, 0);
  });
});
draw();

const chip = document.getElementById("live");
let connection = ["connecting", ""], selected = null;
function tell(text, css) { connection = [text, css]; showConnection(); }
// A run that has ended is not live, although the page is connected.
function showConnection() {
  const [text, css] = connection, isOver = selected?.kind === "run" && ["finished", "stopped"].includes(selected.state);
  chip.textContent = text === "live" && isOver ? selected.state : text;
  chip.className = `chip ${css}`;
}
if (isReport) tell("report", "");
else {
  const events = new EventSource("api/events");
  // A training run changes every second. Drawing the page that often would slow the run down.
  let waiting = false;
  const update = () => { waiting = false; if (!document.hidden) draw({ isUpdate: true }); };
  events.addEventListener("changed", () => { tell("live", "on"); if (!waiting) { waiting = true; setTimeout(update, runs.some((each) => each.indexed < 1 && each.episodes) ? 1000 : UPDATE_MS); } });
  document.addEventListener("visibilitychange", update);
  events.addEventListener("open", () => tell("live", "on"));
  events.addEventListener("error", () => tell("disconnected", "off"));
}
