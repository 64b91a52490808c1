// Trajectories: the list with its filters, the replay of one episode, and a group side by side.
import { h, ask, counted, facts, isReport, notes, percent, replace, short, table, visible, cssColor } from "./dom.js";
import { samplesCard } from "./results.js";
import { replayPictures } from "./play.js";

const api = (run, what = "") => `api/run/${encodeURIComponent(run.name)}${what}`;
const PAGE = 50, MAX_TOKENS = 3000;
const FACETS = ["env", "subset", "kind", "outcome", "cause", "end", "horizon"];
const NUMBERS = [["min_reward", "reward from"], ["max_reward", "reward to"], ["min_turns", "turns from"], ["max_turns", "turns to"], ["min_version", "version from"], ["max_version", "version to"]];
const SORTS = ["newest", "oldest", "best", "worst", "longest", "most_tokens", "slowest", "surprising"];

export async function episodesView({ run, params, link, isUpdate }) {
  if (isUpdate && document.activeElement?.closest?.(".filters")) return null;  // a filter has focus
  const wanted = Object.fromEntries([...params].filter(([key]) => key !== "run"));
  const start = Number(wanted.start || 0);
  const found = await ask(api(run, "/episodes"), { ...wanted, start, num: PAGE });
  if (isReport) return [notes(run.problems), samplesCard(run, found.rows, link)];
  const go = (changes) => { location.hash = link("episodes", { run: run.name, ...wanted, start: "", ...changes }); };
  const select = (name, values, any) => h("label", {}, name.replace("_", " "), h("select", { name, onchange: (event) => go({ [name]: event.target.value }) },
    any ? h("option", { value: "" }, "any") : null,
    values.map(([value, text]) => h("option", { value, selected: value === (wanted[name] ?? (name === "sort" ? "newest" : "")) }, text))));
  const input = (name, text, type) => h("label", {}, text, h("input", { name, type, value: wanted[name] ?? "", step: "any", onchange: (event) => go({ [name]: event.target.value }) }));
  const facet = (name) => {
    const counts = Object.entries(found.facets[name] || {}).filter(([value]) => value !== "");
    if (wanted[name] && !counts.some(([value]) => value === wanted[name])) counts.push([wanted[name], 0]);
    return counts.length ? select(name, counts.map(([value, num]) => [value, `${value.replace("_", " ")} (${num})`]), true) : null;
  };
  const end = Math.min(found.total, start + PAGE);
  return [
    notes(run.problems),
    h("section", { class: "card" },
      h("h1", {}, "Trajectories"),
      h("details", { open: innerWidth > 560 || Object.keys(wanted).length > 0 }, h("summary", {}, "Filters"), h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
        input("text", "item or episode", "search"), select("sort", SORTS.map((each) => [each, each.replace("_", " ")]), false),
        select("success", [["1", "solved"], ["0", "not solved"]], true), FACETS.map(facet), NUMBERS.map(([name, text]) => input(name, text, "number")),
        ["item", "group"].filter((name) => wanted[name]).map((name) => input(name, name, "search")))),
      h("div", { class: "row" }, h("span", { class: "num", "aria-live": "polite" }, found.total ? `${(start + 1).toLocaleString("en")} to ${end.toLocaleString("en")} of ${found.total.toLocaleString("en")}` : "no episode matches"),
        found.indexed < 1 ? h("span", { class: "chip" }, `${percent(found.indexed)} of the journal read`) : null,
        h("button", { type: "button", disabled: start <= 0, onclick: () => go({ start: Math.max(0, start - PAGE) || "" }) }, "← newer"),
        h("button", { type: "button", disabled: end >= found.total, onclick: () => go({ start: start + PAGE }) }, "older →"),
        h("button", { type: "button", onclick: () => { location.hash = link("episodes", { run: run.name }); } }, "clear filters")),
      found.rows.length ? table(["episode", "item", { title: "reward", right: true }, { title: "turns", right: true }, { title: "versions", right: true }, "ended", "outcome", { title: "tokens", right: true }, { title: "horizon", right: true }],
        found.rows.map((row) => line(row, run, link))) : null,
      found.absent?.length ? [h("h2", {}, "Episodes with an outcome but without a trajectory"), table(["episode", "cause"], found.absent.map((each) => h("tr", {}, h("td", {}, visible(each.id)), h("td", { class: "wrap" }, visible(each.cause)))))] : null),
  ];
}

function line(row, run, link) {
  const href = link("episode", { run: run.name, id: row.id });
  const versions = row.first_version === row.last_version ? row.first_version : `${row.first_version}–${row.last_version}`;
  return h("tr", { class: "open", onclick: (event) => { if (!event.target.closest("a")) location.hash = href; } },
    h("td", {}, h("a", { href }, visible(row.id))), h("td", {}, visible(row.item || row.env)), h("td", { class: `r ${row.success ? "good" : "bad"}` }, short(row.reward)), h("td", { class: "r" }, row.turns), h("td", { class: "r" }, row.kind === "conversation" ? "–" : versions),
    h("td", {}, row.end.replace("_", " ")), h("td", {}, row.outcome.replace("_", " "), row.cause ? h("span", { class: "dim" }, ` ${visible(row.cause).slice(0, 60)}`) : null), h("td", { class: "r" }, short(row.tokens)), h("td", { class: "r" }, row.horizon || "–"));
}

// --- colours of tokens ---------------------------------------------------------------------------

const MODES = [["probability", "Probability"], ["version", "Version"], ["advantage", "Advantage"], ["none", "Plain"]];
const isDark = () => document.documentElement.dataset.theme === "dark";
function shade(hue, strength) { return `hsl(${hue} 75% ${isDark() ? 45 : 55}% / ${(0.08 + 0.5 * strength).toFixed(3)})`; }
function colorOf(mode, logprob, version, first, advantage) {
  if (mode === "probability") return shade(120 * Math.exp(Math.min(0, logprob)), 1 - 0.75 * Math.exp(Math.min(0, logprob)));
  if (mode === "version") return shade((210 + 67 * (version - first)) % 360, 0.5);
  if (mode === "advantage") return advantage ? shade(advantage > 0 ? 130 : 5, Math.min(1, Math.abs(advantage))) : "transparent";
  return "transparent";
}
function* tokens(segment) {
  const runs = segment.versions || [];
  let run = 0, left = runs[0]?.[1] ?? Infinity;
  for (let i = 0; i < segment.texts.length; i++) {
    if (left === 0) { run++; left = runs[run]?.[1] ?? Infinity; yield { i, version: runs[run]?.[0], isEdge: true }; } else yield { i, version: runs[run]?.[0], isEdge: false };
    left--;
  }
}
function body(segment, mode, context, from = 0) {
  const text = h("p", { class: "text", dir: "auto" });
  if (!segment.logprobs) {  // not sampled by the policy
    const whole = visible(segment.texts.slice(0, 4 * MAX_TOKENS).join(""));
    text.append(whole);
    if (segment.texts.length > 4 * MAX_TOKENS) text.append(` … ${segment.texts.length - 4 * MAX_TOKENS} more tokens`);
    return text;
  }
  let shownTokens = 0;
  for (const { i, version, isEdge } of tokens(segment)) {
    if (i < from) continue;
    if (shownTokens++ >= MAX_TOKENS) {
      const more = h("button", { type: "button", onclick: () => more.replaceWith(body(segment, mode, context, i)) }, `show ${segment.texts.length - i} more tokens`);
      text.append(" ", more);
      break;
    }
    const logprob = segment.logprobs?.[i] ?? 0;
    const changed = version !== context.version && context.version != null && version != null;
    const span = h("span", { "data-t": i, class: isEdge || (i === 0 && changed) ? "edge" : null, "data-v": version,
      title: version == null ? null : `p ${Math.exp(logprob).toPrecision(3)} · version ${version}${context.advantage == null ? "" : ` · advantage ${short(context.advantage)}`}` }, visible(segment.texts[i]));
    if (version != null) span.style.background = colorOf(mode, logprob, version, context.first, context.advantage);
    text.append(span);
    if (version != null) context.version = version;
  }
  return text;
}
function turn(segment, mode, context) {
  const name = segment.kind[0].toUpperCase() + segment.kind.slice(1);
  const versions = (segment.versions || []).map(([version]) => version);
  return h("article", { class: `turn ${segment.kind} ${segment.logprobs ? "" : "masked"} ${segment.invalid ? "invalid" : ""}` },
    h("h3", {}, h("span", {}, segment.kind === "prompt" ? name : `${name} ${segment.turn + 1}`), h("span", {}, counted(segment.texts.length, "token")),
      versions.length ? h("span", {}, `version ${versions.join(" → ")}`) : null, segment.invalid ? h("span", { class: "bad" }, "invalid action") : null,
      segment.score != null ? h("span", {}, `score ${short(segment.score)}`) : null),
    body(segment, mode, context));
}

// --- one episode ---------------------------------------------------------------------------------

export async function episodeView({ run, params, link, isUpdate }) {
  if (isUpdate && document.querySelector(".replay")) return null;  // a trajectory never changes
  const id = params.get("id");
  const found = await ask(api(run, "/episode"), { id });
  const segments = found.segments, last = segments.length;
  let mode = params.get("color") || "probability", at = last;
  const context = () => ({ version: null, first: found.first_version, advantage: found.advantage });
  const list = h("div", { class: "replay" });
  const slider = h("input", { type: "range", min: 1, max: last, value: last, "aria-label": "Part of the episode", style: { flex: "1 1 160px" }, oninput: () => show(Number(slider.value)) });
  const position = h("span", { class: "num dim small", "aria-live": "polite" });
  const map = h("canvas", { class: "map", role: "img", "aria-label": "Map of all tokens in their colours; masked tokens are pale" });
  const pictures = run.kind === "run" && !isReport ? replayPictures(run, found.id) : null;
  function show(next) {
    at = Math.max(1, Math.min(last, next));
    slider.value = at;
    position.textContent = `part ${at} of ${last}`;
    pictures?.show(segments.slice(0, at).filter((each) => each.kind === "action").length);
    [...list.children].forEach((each, i) => { each.classList.toggle("later", i >= at); each.classList.toggle("now", i === at - 1 && at < last); });
  }
  function draw() { const shared = context(); replace(list, segments.map((each) => turn(each, mode, shared))); show(at); requestAnimationFrame(() => drawMap(map, segments, mode, found)); }
  const buttons = h("div", { class: "row", role: "group", "aria-label": "Colour of the tokens" }, MODES.filter(([value]) => value !== "advantage" || found.advantage != null).map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === mode), onclick: (event) => { mode = value; for (const each of buttons.children) each.setAttribute("aria-pressed", String(each === event.target)); draw(); } }, text)));
  const step = (by) => show(at + by);
  document.onkeydown = (event) => {
    if (!list.isConnected) { document.onkeydown = null; return; }
    if (event.target.closest?.("input,select,textarea") || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowRight" || event.key === "j") step(1);
    else if (event.key === "ArrowLeft" || event.key === "k") step(-1);
    else return;
    event.preventDefault();
    list.children[at - 1]?.scrollIntoView({ block: "nearest" });
  };
  map.addEventListener("click", (event) => {
    const total = segments.reduce((sum, each) => sum + each.texts.length, 0);
    const token = event.offsetX / map.clientWidth * total;
    const index = segments.findIndex((each) => token < each.start + each.texts.length);
    show(last);
    list.children[Math.max(0, index)]?.scrollIntoView({ block: "start", behavior: "smooth" });
  });
  draw();
  return [
    notes(found.problems),
    h("section", { class: "card" },
      h("h1", {}, visible(found.id), " ", h("span", { class: `chip ${found.success ? "on" : "off"}` }, found.success ? "solved" : "not solved")),
      h("p", { class: "dim small" }, [found.env, found.item].filter(Boolean).map(visible).join(" · "), isReport ? null : [" · ", h("a", { href: link("episodes", { run: run.name, item: found.item }) }, "all episodes of this item")],
        found.group && !isReport ? [" · ", found.kind === "eval" ? h("a", { href: link("episodes", { run: run.name, group: found.group }) }, "all episodes of this evaluation") : h("a", { href: link("group", { run: run.name, id: found.group }) }, "compare the episodes of this group")] : null),
      facts([["Reward", short(found.reward)], ["Group reward", found.group_reward == null ? "" : short(found.group_reward)], ["Advantage", found.advantage == null ? "" : short(found.advantage)], ["Turns", `${found.turns}${found.horizon ? ` of ${found.horizon}` : ""}`], ["Ended", found.end.replace("_", " ")],
        ["Outcome", found.outcome.replace("_", " ") + (found.cause ? `: ${visible(found.cause)}` : "")], ["Trained in step", found.trained_at >= 0 ? found.trained_at : ""], ["Invalid actions", found.invalid ? `${found.invalid}, first in turn ${segments.find((each) => each.invalid)?.turn + 1}` : 0], ["Tokens", short(found.tokens)],
        ["Time in the engine", found.wall_s ? `${short(found.generate_s)} s` : ""], ["Time in the environment", found.wall_s ? `${short(found.env_s)} s` : ""]])),
    h("section", { class: "card" }, buttons, map, h("div", { class: "row" }, h("button", { type: "button", onclick: () => step(-1), "aria-label": "Previous part" }, "←"), slider, h("button", { type: "button", onclick: () => step(1), "aria-label": "Next part" }, "→"), h("button", { type: "button", onclick: () => show(1) }, "first part"), h("button", { type: "button", onclick: () => show(last) }, "all parts"), position)),
    pictures ? h("div", { class: "sides" }, list, pictures.element) : list,
  ];
}

function drawMap(canvas, segments, mode, found) {
  if (!canvas.isConnected) return;
  const ratio = devicePixelRatio || 1, width = canvas.width = Math.round(canvas.clientWidth * ratio), height = canvas.height = Math.round(34 * ratio);
  const context = canvas.getContext("2d"), total = segments.reduce((sum, each) => sum + each.texts.length, 0) || 1;
  context.fillStyle = cssColor("line");
  context.fillRect(0, 0, width, height);
  let before = null;
  for (const segment of segments) {
    if (!segment.logprobs) continue;
    for (const { i, version } of tokens(segment)) {
      const x = width * (segment.start + i) / total, size = Math.max(1, width / total);
      context.fillStyle = cssColorOnce("card");
      context.fillRect(x, 0, size, height);
      context.fillStyle = mode === "none" ? cssColorOnce("c1") : colorOf(mode, segment.logprobs?.[i] ?? 0, version ?? 0, found.first_version, found.advantage);
      context.fillRect(x, 0, size, height);
      if (before != null && version !== before) { context.fillStyle = cssColorOnce("c5"); context.fillRect(x, 0, 2 * ratio, height); }
      before = version;
    }
  }
}
const known = { theme: "", colors: {} };
function cssColorOnce(name) {
  const theme = document.documentElement.dataset.theme;
  if (known.theme !== theme) { known.theme = theme; known.colors = {}; }
  return (known.colors[name] ??= cssColor(name));
}

export async function groupView({ run, params, link, isUpdate }) {
  if (isUpdate && document.querySelector(".members")) return null;
  const found = await ask(api(run, "/group"), { id: params.get("id") });
  return [
    h("section", { class: "card" }, h("h1", {}, `Group ${visible(found.group)}`), h("p", { class: "dim small" }, found.members[0].kind === "eval" ? `${counted(found.members.length, "episode")} of an evaluation, one for each item` : `${counted(found.members.length, "member")} of ${visible(found.members[0].item)}. The advantage is the amount by which a member is better than its baseline.`)),
    h("div", { class: "members", tabindex: "0", role: "region", "aria-label": "Members of the group" }, found.members.map((each) => {
      const shared = { version: null, first: each.first_version, advantage: each.advantage };
      return h("section", { class: "card" },
        h("h2", {}, h("a", { href: link("episode", { run: run.name, id: each.id }) }, visible(each.id))),
        facts([["Reward", short(each.reward)], ["Group reward", each.group_reward == null ? "" : short(each.group_reward)], ["Advantage", each.advantage == null ? "" : short(each.advantage)], ["Turns", each.turns], ["Outcome", each.outcome.replace("_", " ")]]),
        each.problem ? h("p", { class: "bad small" }, visible(each.problem)) : null,
        h("p", { class: "small dim" }, each.kind === "eval" ? visible(each.item) : each.differs ? `first difference from the first member: turn ${each.differs.turn + 1}, token ${each.differs.token}: “${visible(each.differs.this).slice(0, 40)}”` : "first member, or identical to it"),
        each.segments.map((segment) => turn(segment, "probability", shared)));
    })),
  ];
}
