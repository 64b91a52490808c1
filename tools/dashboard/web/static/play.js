// Play: a person or a policy acts in an environment, one action at a time; with its pictures.
import { h, act, ask, facts, replace, short, visible } from "./dom.js";

// --- pictures ------------------------------------------------------------------------------------

const SIGNS = { "#": ["wall", "dim"], ".": ["free", "card"], "G": ["goal", "c4"], "@": ["agent", "c1"] };

export function picture(drawn) {
  if (drawn == null) return h("p", { class: "dim small" }, "This environment has no pictures.");
  if (typeof drawn === "string") {
    return /^data:image\/(png|jpeg);base64,/.test(drawn) ? h("img", { class: "drawn", src: drawn, alt: "Current picture of the environment" })
      : h("details", {}, h("summary", {}, "Full state as text, with hidden answers"), h("pre", { tabindex: "0" }, visible(drawn)));
  }
  if (drawn.map) return grid(drawn.map);
  if (drawn.tree) return crafting(drawn);
  return h("div", {}, (drawn.parts || []).map(([title, text]) => [h("h3", { class: "small" }, title), h("p", { class: "text" }, visible(text))]));
}

function grid(rows) {
  const size = 22, width = Math.max(...rows.map((row) => row.length));
  const cells = rows.flatMap((row, y) => [...row].map((sign, x) => {
    const [word, color] = SIGNS[sign] || ["object", "c3"];
    return h("rect", { x: x * size, y: y * size, width: size - 1, height: size - 1, rx: sign === "@" ? size / 2 : 2, style: { fill: `var(--${color})` } }, h("title", {}, word));
  }));
  return h("svg", { class: "drawn", viewBox: `0 0 ${width * size} ${rows.length * size}`, role: "img", "aria-label": `Map of ${width} by ${rows.length} cells; the agent is round, the goal green` }, cells);
}

function crafting({ tree, held }) {
  const node = (each) => h("li", {}, h("span", { class: each.held >= each.count ? "good" : "" }, `${each.held >= each.count ? "✓ " : ""}${each.count} ${visible(each.name)}`), each.held && each.held < each.count ? h("span", { class: "dim" }, ` (${each.held} held)`) : null, each.parts.length ? h("ul", {}, each.parts.map(node)) : null);
  return h("div", {}, h("h3", { class: "small" }, "Goal and its ingredients"), h("ul", { class: "tree" }, node(tree)), h("h3", { class: "small" }, "Inventory"),
    h("p", {}, Object.entries(held).map(([name, count]) => h("span", { class: "chip" }, `${count} ${visible(name)}`)), Object.keys(held).length ? null : h("span", { class: "dim" }, "nothing")));
}

// --- play ----------------------------------------------------------------------------------------

let seat = "";  // id of the open episode
function leave() {
  if (!seat) return;
  const body = new Blob([JSON.stringify({ id: seat })], { type: "application/json" });
  seat = "";
  navigator.sendBeacon("api/play/close", body);
}
addEventListener("pagehide", leave);
addEventListener("hashchange", () => { if (!location.hash.startsWith("#play")) leave(); });

const FIELDS = [["url", "address of an OpenAI-compatible API, up to /v1", "url"], ["model", "model", "text"], ["key", "API key (optional)", "password"]];
const remembered = { url: "", model: "", key: "" };

export async function playView({ run, params, link, isUpdate }) {
  if (isUpdate && document.querySelector(".play")) return null;
  const status = h("p", { class: "dim", role: "status" }, "Starting the environments…");
  const place = h("div", { class: "play" }, h("section", { class: "card" }, h("h1", {}, "Play"), status));
  fill(place, { run, params, link }).catch((error) => { status.textContent = ""; status.append(h("span", { class: "bad" }, String(error.message || error))); });
  return place;
}

async function fill(place, { run, params, link }) {
  const found = await ask("api/play/environments");
  const env = found[params.get("env")] ? params.get("env") : Object.keys(found)[0];
  const subsets = found[env].subsets, subset = subsets[params.get("subset")] ? params.get("subset") : Object.keys(subsets)[0];
  const sizes = { train: subsets[subset].num_train, validation: subsets[subset].num_validation ?? 0, test: subsets[subset].num_test };
  const split = sizes[params.get("split")] ? params.get("split") : sizes.train ? "train" : "test";
  const index = Math.max(0, Math.min(sizes[split] - 1, Number(params.get("index")) || 0));
  const go = (changes) => { location.hash = link("play", { run: run?.name, env, subset, split, index, ...changes }); };
  const select = (name, values, value, changes) => h("label", {}, name, h("select", { name, onchange: (event) => go({ ...changes, [name]: event.target.value }) }, values.map((each) => h("option", { value: each, selected: each === value }, each))));
  const game = h("div", { class: "game" });
  const say = (error) => replace(game, h("div", { class: "notes", role: "alert" }, visible(String(error.message || error))));
  const begin = async (event) => {
    event.preventDefault();
    leave();
    try { const first = await act("api/play/open", { env, item: `${subset}-${split}-${index}`, run: run?.kind === "run" ? run.name : "" }); seat = first.id; board(game, first, subsets[subset], run); }
    catch (error) { say(error); }
  };
  replace(place, h("section", { class: "card" }, h("h1", {}, "Play"), h("p", { class: "dim small" }, "Play an episode by hand, or let a policy choose actions. The episode is not written to a run."),
    h("form", { class: "filters", onsubmit: begin },
      select("env", Object.keys(found), env, { subset: "", split: "", index: "" }), select("subset", Object.keys(subsets), subset, { split: "", index: "" }),
      select("split", Object.keys(sizes).filter((each) => sizes[each]), split, { index: "" }),
      h("label", {}, `item, 0 to ${sizes[split] - 1}`, h("input", { name: "index", type: "number", min: 0, max: sizes[split] - 1, value: index, onchange: (event) => go({ index: event.target.value }) })),
      h("button", { type: "submit", class: "main" }, "Start"))), game);
}

function board(game, first, spec, run) {
  const log = h("ol", { class: "log", "aria-label": "Conversation", tabindex: "0" });
  const facts_ = h("div", {}), view = h("section", { class: "card" }), controls = h("section", { class: "card" });
  const tell = (kind, text) => { log.append(h("li", { class: kind }, h("span", { class: "dim small" }, kind), h("p", { class: "text", dir: "auto" }, visible(text)))); log.scrollTop = log.scrollHeight; };
  const problem = h("p", { class: "bad", role: "alert" });
  let busy = false;
  const waiting = h("p", { class: "dim small", role: "status" });
  const move = async (work, what = "Waiting") => {
    if (busy) return;
    busy = true;
    game.setAttribute("aria-busy", "true");
    problem.textContent = "";
    const since = Date.now(), clock = setInterval(() => { const s = Math.round((Date.now() - since) / 1000); if (s > 1) waiting.textContent = `${what}: ${s} s`; }, 500);
    try { show(await work()); } catch (error) { problem.textContent = visible(String(error.message || error)); }
    finally { busy = false; clearInterval(clock); waiting.textContent = ""; game.removeAttribute("aria-busy"); }
  };
  const step = (action) => move(() => act("api/play/step", { id: first.id, action }));
  function show(told) {
    if (told.action != null) tell("action", told.action);
    tell("observation", told.observation);
    replace(facts_, facts([["Turn", `${told.turn} of ${spec.max_turns}`], ["Reward", short(told.reward)], ["Action", told.valid === false ? "invalid, not executed" : told.valid ? "executed" : ""], ["Episode", told.done ? (told.success ? "solved" : "ended, not solved") : "in progress"], ["Action by", told.by ? visible(told.by) : ""]]));
    replace(view, h("h2", {}, "Picture"), picture(told.picture));
    const input = h("input", { name: "action", "aria-label": "Action", placeholder: "action", autocomplete: "off", style: { flex: "1 1 200px" } });
    const fields = FIELDS.map(([name, text, type]) => h("label", {}, text, h("input", { type, value: remembered[name], autocomplete: "off", onchange: (event) => { remembered[name] = event.target.value; } })));
    replace(controls, facts_, problem, waiting, told.done ? h("p", { class: "dim" }, "The episode has ended. Start another episode above.") : [
      h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); if (input.value.trim()) step(input.value); } }, input, h("button", { type: "submit" }, "Act")),
      told.actions.length ? h("div", { class: "choices", role: "group", "aria-label": "Valid actions" }, told.actions.map((each) => h("button", { type: "button", onclick: () => step(each) }, visible(each)))) : h("p", { class: "dim small" }, "This environment does not list its valid actions."),
      told.num_actions > told.actions.length ? h("p", { class: "dim small" }, `and ${told.num_actions - told.actions.length} more actions`) : null,
      run?.kind === "run" ? h("p", {}, h("button", { type: "button", onclick: () => move(() => act("api/play/ask", { id: first.id, run: run.name }), `Waiting for the policy of ${run.name} (the start of an engine takes half a minute or more)`) }, `Let the policy of ${run.name} act`)) : null,
      h("details", { open: Boolean(remembered.url) }, h("summary", {}, "Let the policy of another server act"), h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); move(() => act("api/play/ask", { id: first.id, ...remembered })); } }, fields, h("button", { type: "submit" }, "Request one action")))]);
    if (!told.done && !matchMedia("(pointer: coarse)").matches) input.focus({ preventScroll: true });
  }
  if (first.instruction) tell("instruction", first.instruction);
  replace(game, h("div", { class: "sides" }, h("div", {}, controls, view), h("section", { class: "card" }, h("h2", {}, "Conversation"), log)));
  show(first);
}

// --- the pictures of a recorded episode ----------------------------------------------------------

export function replayPictures(run, id) {
  const place = h("div", {}), button = h("button", { type: "button", onclick: load }, "Show pictures of the environment");
  let found = null, turn = 0;
  async function load() {
    button.disabled = true;
    button.textContent = "Replaying the episode…";
    try { found = await ask(`api/run/${encodeURIComponent(run.name)}/pictures`, { id }); button.remove(); }
    catch (error) { found = { pictures: [], problem: String(error.message || error) }; button.disabled = false; button.textContent = "Try again"; }
    show(turn);
  }
  function show(next) {
    turn = next;
    if (!found) return;
    const drawn = found.pictures[turn];
    replace(place, drawn === undefined ? null : [h("p", { class: "dim small" }, turn ? `after ${turn} ${turn === 1 ? "action" : "actions"}` : "before the first action"), picture(drawn)],
      found.problem && drawn === undefined ? h("p", { class: "notes", role: "note" }, `This turn has no picture: ${visible(found.problem)}`) : null);
  }
  return { element: h("section", { class: "card env" }, h("h2", {}, "Environment"), button, place), show };
}
