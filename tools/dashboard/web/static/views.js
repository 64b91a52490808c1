// The Run, Fleet and Compare views.
import { h, ask, counted, duration, facts, isReport, notes, percent, short, table, visible, COLORS } from "./dom.js";
import { chart, bars } from "./charts.js";
import { cpuCard, droppedCard, endsCard, evaluationsCard, pooledCard, settingsCard, subsetsCard } from "./results.js";

const api = (run, what = "") => `api/run/${encodeURIComponent(run.name)}${what}`;
const OUTCOMES = [["trained", "c4"], ["filtered", "c2"], ["stale", "c3"], ["failed", "c6"], ["in_flight", "c1"]];

export async function runView({ run, link }) {
  const [found, data] = await Promise.all([ask(api(run)), ask(api(run, "/metrics"))]);
  const steps = found.num_steps ? `step ${found.step} of ${found.num_steps} · ` : found.step ? `step ${found.step} · ` : "";
  const indexed = found.indexed < 1 ? ` · ${percent(found.indexed)} of the journal has been read` : "";
  return [
    notes(found.problems),
    h("section", { class: "card" },
      h("h1", {}, found.name, " ", h("span", { class: `chip ${found.state === "running" ? "on" : ""}` }, found.state)),
      h("p", { class: "dim small" }, `${steps}${counted(found.episodes, "episode")} in the journal${indexed}`),
      h("p", { class: "verdict" }, found.verdict.sentence),
      facts([["Success in training", percent(found.success)], ["Gate", found.gate?.replace(/^gate: /, "")]])),
    evaluationsCard(found),
    subsetsCard(found, run, link),
    ledger(found, run, link),
    data.step?.length ? h("div", { class: "grid" },
      found.charts.map((each) => chart(each, data, { marks: ["Success", "Truncation", "Turns and invalid actions"].includes(each.title) ? found.marks : [] })),
      Object.values(found.lags).some(Boolean) ? h("section", { class: "card" }, h("h2", {}, "Lag ", h("span", { class: "dim small" }, "trained tokens by lag in versions")), bars(Object.entries(found.lags).filter(([, n]) => n))) : null)
      : found.state === "finished" ? null : h("p", { class: "card dim" }, "No step is complete yet. The charts appear after the first step."),
    h("div", { class: "grid", style: { "margin-top": "14px" } }, endsCard(found), cpuCard(found)),
    h("div", { style: { "margin-top": "14px" } }, droppedCard(found), settingsCard(found)),
  ];
}

function ledger(found, run, link) {
  const book = found.ledger;
  if (book.issued == null) return null;
  const sum = OUTCOMES.reduce((total, [name]) => total + (book[name] || 0), 0);
  const causes = Object.entries(book.causes || {});
  return h("section", { class: "card", "aria-label": "Ledger" },
    h("h2", {}, "Ledger ", h("span", { class: `small ${sum === book.issued ? "good" : "bad"}` }, sum === book.issued ? "balanced" : `not balanced: the outcomes add up to ${sum}, not ${book.issued}`)),
    h("div", { class: "flow" },
      h("div", { class: "from" }, h("b", {}, short(book.issued)), h("span", { class: "dim small" }, "issued →")),
      h("div", { class: "boxes" }, OUTCOMES.map(([name, color]) => h(isReport ? "span" : "a", { href: isReport ? null : link("episodes", { run: run.name, outcome: name, kind: name === "failed" ? "" : "train" }), style: { "--c": `var(--${color})` } },
        h("b", {}, short(book[name] || 0)), h("span", { class: "dim small" }, name.replace("_", " ")))))),
    h("div", { class: "stack", "aria-hidden": "true" }, OUTCOMES.map(([name, color]) => h("i", { style: { "--c": `var(--${color})`, width: `${100 * (book[name] || 0) / Math.max(1, book.issued)}%` } }))),
    causes.length ? h("p", { class: "small dim" }, "Causes: ", causes.map(([name, num], i) => {
      const [outcome, cause] = name.split(/:(.*)/);
      return [i ? ", " : "", isReport ? `${cause} ${num}` : h("a", { href: link("episodes", { run: run.name, outcome, cause }) }, `${cause} ${num}`)];
    })) : null);
}

export async function fleetView({ run }) {
  const found = await ask(api(run, "/fleet"));
  const age = found.silent_s == null ? "the scheduler has not written its status" : `status written ${duration(Math.round(found.silent_s))} ago`;
  const state = (each) => found.state === "finished" ? "done" : each.gone || (each.is_dead ? "dead" : each.is_silent ? "silent" : each.waiting_for ? `waits for ${each.waiting_for}` : each.role === "envhub" ? "serves" : "busy");
  const work = (num, most) => most ? `${num ?? 0} of ${short(most)}` : num;
  const nodes = new Set(found.roles.map((each) => each.node).filter(Boolean)).size;
  return [
    h("section", { class: "card" }, h("h1", {}, "Fleet"), h("p", { class: "dim small" }, `${found.state} · ${counted(found.roles.length, "role")}${nodes ? ` on ${counted(nodes, "node")}` : ""} · ${age}`), found.gate ? h("p", {}, visible(`Gate: ${found.gate.replace(/^gate: /, "")}`)) : null,
      found.roles.length ? table(["role", "node", "state", { title: "version", right: true }, { title: "tokens/s", right: true }, { title: "in progress", right: true }, { title: "memory", right: true }, { title: "processor time", right: true }, { title: "restarts", right: true }, { title: "last heartbeat", right: true }],
        found.roles.map((each) => h("tr", {}, h("td", { class: "wrap" }, visible(String(each.name)), each.envs ? h("div", { class: "dim small", style: { "font-weight": "400" } }, visible(`${each.envs.join(", ")} at ${each.url}`)) : null), h("td", { class: "wrap" }, visible(each.node || "–")), h("td", { class: "wrap" }, visible(state(each))), right(each.version), right(short(each.tokens_per_s)), right(each.role === "envhub" ? work(each.num_sessions, each.max_sessions) : work(each.running, each.num_slots)), right(each.rss_bytes ? `${(each.rss_bytes / 2 ** 30).toFixed(1)} GiB` : "–"), right(each.cpu_s ? `${short(each.cpu_s)} s` : "–"), right(each.num_restarts || "–"), right(each.last_seen_s == null || found.state === "finished" ? "–" : `${duration(each.last_seen_s)} ago`))))
        : h("p", { class: "dim" }, "No role has sent a heartbeat yet.")),
    lanes(found.steps, found.parts, "Learner: time of each step by activity", "s"),
    lanes(found.steps, found.slots, "Actors: time of all slots by activity", ""),
    h("section", { class: "card" }, h("h2", {}, "Restarts and hangs"),
      found.restarts.length ? table(["time", "role", "exit", "restart", "last log line"], found.restarts.map((each) => h("tr", {}, h("td", {}, visible(each.at)), h("td", {}, visible(each.role)), h("td", {}, visible(each.exit)), h("td", {}, visible(each.number)), h("td", { class: "wrap" }, visible(each.last || "–"))))) : null,
      found.events.length ? h("pre", { tabindex: "0" }, visible(found.events.join("\n"))) : found.restarts.length ? null : h("p", { class: "dim" }, "The logs report none.")),
    found.stalls.length ? null : h("section", { class: "card" }, h("h2", {}, "Stall reports"), h("p", { class: "dim" }, "None. No role has stalled.")),
    found.stalls.map((each) => h("details", { class: "card" }, h("summary", {}, `Stall report ${visible(each.name)}`), h("pre", { tabindex: "0" }, visible(each.text)))),
  ];
}
const right = (value) => h("td", { class: "r" }, value ?? "–");

function lanes(steps, parts, title, unit) {
  const names = Object.keys(parts), num = steps.length;
  const sums = steps.map((_, i) => names.reduce((sum, name) => sum + parts[name][i], 0));
  // One long step must not flatten all others. The first step, for example, waits for the engine.
  const usual = [...sums].sort((a, b) => a - b)[Math.floor(0.9 * (num - 1))], top = Math.min(Math.max(...sums, 0), 2 * usual || Infinity), width = 1000, height = 150, slot = width / num;
  if (!num || !top) return null;
  const shown = (value) => unit ? `${short(value)} ${unit}` : percent(value);
  const rects = steps.map((step, i) => {
    let y = height;
    return names.map((name, k) => {
      const value = parts[name][i], size = Math.min(height * value / top, Math.max(0, y));
      y -= size;
      return h("rect", { x: i * slot, y, width: Math.max(1, slot - 1.5), height: size, style: { fill: `var(--${COLORS[k]})` } }, h("title", {}, `step ${step}: ${name} ${shown(value)}`));
    });
  });
  const mean = (name) => parts[name].reduce((sum, value) => sum + value, 0) / num;
  return h("section", { class: "card" }, h("h2", {}, `${title} `, h("span", { class: "dim small" }, `steps ${steps[0]} to ${steps[num - 1]}${unit ? `, up to ${shown(top)}` : ""}`)),
    h("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${names.map((name) => `${name} ${shown(mean(name))}`).join(", ")} on average`, style: { height: "150px" } }, rects),
    h("ul", { class: "legend" }, names.map((name, k) => h("li", { style: { "--c": `var(--${COLORS[k]})` } }, h("i"), `${name} `, h("b", {}, shown(mean(name)))))));
}

export async function compareView({ run, runs, params, link }) {
  const all = runs.filter((each) => each.kind === "run");
  const chosen = isReport ? all.map((each) => each.name) : (params.get("with") ?? all.slice(0, 2).map((each) => each.name).join(",")).split(",").filter((name) => all.some((each) => each.name === name));
  const toggle = (name) => chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name];
  const picker = isReport ? h("h1", {}, "Compare") : h("section", { class: "card" }, h("h1", {}, "Compare"), h("div", { class: "row" }, all.map((each) =>
    h("button", { type: "button", "aria-pressed": String(chosen.includes(each.name)), onclick: () => { location.hash = link("compare", { run: run.name, with: toggle(each.name).join(",") || "-" }); } }, each.name))));
  if (!chosen.length) return [picker, h("p", { class: "card dim" }, "Select the runs to compare.")];
  const found = await ask("api/compare", { runs: chosen.join(",") });
  const pools = found.pools.map((names) => ({ names, title: names.length > 1 ? `mean of ${names.length} seeds of ${names[0]}` : names[0] }));
  const keys = Object.entries(found.config);
  return [picker,
    pooledCard(found),
    h("div", { class: "grid" }, found.charts.map((each) => chart(...pooled(each, found.series, pools, found.quantiles)))),
    h("section", { class: "card", style: { "margin-top": "14px" } }, h("h2", {}, "Differences in the configuration"), keys.length ? table(["key", ...found.runs.map((each) => each.name)],
      keys.map(([key, values]) => h("tr", {}, h("td", {}, key), found.runs.map((each) => h("td", { class: "wrap" }, visible(values[each.name])))))) : h("p", { class: "dim" }, "The configurations differ in the run name only."))];
}

// One line for each pool: the mean over its seeds. The 95 % interval of several seeds is a band.
// `quantiles` are those of Student's t for 1, 2, ... degrees of freedom.
export function pooled(spec, series, pools, quantiles) {
  const name = spec.series[0];
  const steps = [...new Set(pools.flatMap((pool) => pool.names.flatMap((each) => series[each].step || [])))].sort((a, b) => a - b);
  const data = { step: steps }, labels = {}, bands = {};
  for (const { names, title } of pools) {
    const columns = names.map((each) => new Map((series[each].step || []).map((step, i) => [step, series[each][name]?.[i]])));
    const found = steps.map((step) => columns.map((column) => column.get(step)).filter((value) => value != null));
    const mean = found.map((values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    data[title] = mean;
    labels[title] = title;
    if (names.length < 2) continue;
    const half = found.map((values, i) => values.length < 2 ? null : quantiles[values.length - 2] * Math.sqrt(values.reduce((sum, v) => sum + (v - mean[i]) ** 2, 0) / (values.length - 1) / values.length));
    bands[title] = [[-1, "low"], [1, "high"]].map(([sign, word]) => {
      data[`${title} ${word}`] = mean.map((value, i) => value == null || half[i] == null ? null : value + sign * half[i]);
      return `${title} ${word}`;
    });
  }
  return [{ ...spec, series: Object.keys(labels), title: `${spec.title}: ${name}` }, data, { labels, bands }];
}
