// Results of a run: evaluations, subsets, ends, dropped episodes, settings, and sample episodes.
import { h, counted, facts, percent, short, table, visible, isReport } from "./dom.js";
import { chart, bars } from "./charts.js";

const right = (value) => h("td", { class: "r" }, value ?? "–");
const interval = (each) => (each?.ci95 ? `${percent(each.success)} [${(100 * each.ci95[0]).toFixed(1)}, ${(100 * each.ci95[1]).toFixed(1)}]` : percent(each?.success));
const points = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`;

// A run that was continued after its end has several evaluations after training. The last one counts.
const AFTER = /^after-(\d+-)?model$/;

export function evaluationsCard(found) {
  const all = found.evaluations, report = found.report || {};
  const absent = Object.entries(report.absent || {}), failed = Object.entries(all).filter(([, each]) => each.failed);
  if (!Object.keys(all).length && !absent.length) return null;
  const ends = [all["before-model"], Object.entries(all).findLast(([name]) => AFTER.test(name))?.[1]].filter((each) => each?.num);
  const gain = report.gain;
  const isPartial = found.indexed < 1 && gain && (all["after-model"]?.num ?? 0) < gain.num_pairs;
  const verdict = !gain?.ci95 ? "" : gain.ci95[0] > 0 ? "" : gain.ci95[1] < 0 ? " – worse than before training" : " – no significant change";
  return h("section", { class: "card" }, h("h2", {}, "Held-out success ", h("span", { class: "dim small" }, "with 95 % intervals")),
    isPartial ? h("p", { class: "dim" }, `The rates below are those of ${percent(found.indexed)} of the journal. The rest is being read.`)
      : ends.length ? h("p", { class: "hero" }, ends.map((each, i) => [i ? h("span", { class: "dim" }, " → ") : null, h("span", { class: i === ends.length - 1 ? null : "dim" }, percent(each.success))])) : h("p", { class: "dim" }, "No held-out evaluation."),
    gain ? h("p", { class: gain.ci95 && gain.ci95[1] < 0 ? "bad" : gain.ci95 && gain.ci95[0] > 0 ? "good" : null }, `${points(gain.success)} points on the same ${counted(gain.num_pairs, "item")}`, gain.ci95 ? ` [${points(gain.ci95[0])}, ${points(gain.ci95[1])}]${verdict}` : null) : null,
    facts(Object.entries(all).map(([name, each]) => [name.replace(/-model$/, "").replace(/[-_]/g, " "), `${interval(each)} of ${each.num}`])),
    failed.length ? h("p", { class: "small dim" }, `Excluded, because they ended with an infrastructure failure: ${failed.map(([name, each]) => `${counted(each.failed, "episode")} of ${name}`).join(", ")}.`) : null,
    absent.length ? h("p", { class: "small dim" }, `Evaluations without a result: ${absent.map(([name, reason]) => `${name}: ${reason}`).join("; ")}.`) : null,
    curve(found));
}

// Held-out success over steps: before, during and after training, with its interval.
function curve(found) {
  const at = Object.entries(found.evaluations).map(([name, each]) => {
    const step = name === "before-model" ? 0 : AFTER.test(name) ? each.version : Number(/^step-(\d+)-model$/.exec(name)?.[1] ?? NaN);
    return { step, each };
  }).filter(({ step, each }) => !Number.isNaN(step) && each.num).sort((a, b) => a.step - b.step);
  if (!at.length) return null;
  const data = { step: at.map(({ step }) => step), "held-out": at.map(({ each }) => each.success), low: at.map(({ each }) => each.ci95[0]), high: at.map(({ each }) => each.ci95[1]) };
  return chart({ title: "Held-out success over steps", unit: "share", series: ["held-out"] }, data, { bands: { "held-out": ["low", "high"] } });
}

export function subsetsCard(found, run, link) {
  const evals = Object.entries(found.evaluations).filter(([name, each]) => /^(before|after)-/.test(name) && each.num);
  const names = [...new Set([...Object.keys(found.subsets), ...evals.flatMap(([, each]) => Object.keys(each.by_subset))])];
  if (!names.length) return null;
  const last = evals.findLast(([name]) => AFTER.test(name))?.[1] || evals.find(([name]) => name === "before-model")?.[1];
  const worth = (name) => last?.by_subset[name]?.success ?? found.subsets[name]?.success ?? 1;
  names.sort((a, b) => worth(a) - worth(b));
  const note = (name) => found.report?.notes?.[name] ? h("span", { class: "dim small" }, ` (${visible(found.report.notes[name])})`) : null;
  const parts = (name) => name.includes("/") ? { env: name.slice(0, name.indexOf("/")), subset: name.slice(name.indexOf("/") + 1) } : { subset: name };
  const look = (name) => isReport ? null : h("td", {}, ["best", "worst", "surprising"].map((sort, i) => [i ? " · " : "", h("a", { href: link("episodes", { run: run.name, ...parts(name), sort }) }, sort)]));
  return h("section", { class: "card" }, h("h2", {}, "By subset ", h("span", { class: "dim small" }, "the hardest first; success with 95 % intervals")),
    table(["subset", { title: "in training", right: true }, { title: "episodes", right: true }, ...evals.map(([name]) => ({ title: name.replace(/-model$/, "").replace(/[-_]/g, " "), right: true })), ...(isReport ? [] : ["links"])],
      names.map((name) => h("tr", {}, h("td", {}, visible(name), note(name)), right(interval(found.subsets[name])), right(short(found.subsets[name]?.num ?? 0)), evals.map(([, each]) => right(interval(each.by_subset[name]))), look(name)))));
}

export function endsCard(found) {
  const all = Object.entries(found.ends);
  return all.length ? h("section", { class: "card" }, h("h2", {}, "End reasons of episodes ", h("span", { class: "dim small" }, "in training")), bars(all.map(([name, num]) => [name.replace(/_/g, " "), num]))) : null;
}

export function cpuCard(found) {
  const roles = Object.entries(found.cpu).sort((a, b) => b[1] - a[1]);
  if (!roles.length) return null;
  const total = roles.reduce((sum, [, value]) => sum + value, 0), trained = found.ledger.trained;
  return h("section", { class: "card" }, h("h2", {}, "Processor time in seconds ", h("span", { class: "dim small" }, `${short(total)} in total${trained ? `, ${short(total / trained)} per trained episode` : ""}`)), bars(roles));
}

export function droppedCard(found) {
  const rows = (found.selection.rows || []).filter((each) => each.num > 0);
  if (!rows.length) return null;
  const dropped = rows.filter((each) => each.dropped_frac > 0).sort((a, b) => b.dropped_frac - a.dropped_frac);
  const total = rows.reduce((sum, each) => sum + each.num, 0);
  // Turns of trained episodes may be stale (learner.partial_episodes).
  const lengths = (found.selection.lengths || []).filter((each) => each.num > 0);
  const biased = (found.selection.comparisons || []).filter((each) => each.is_biased);
  const share = (some, all) => `${(100 * some / Math.max(1, all)).toFixed(1)}% of ${all}`;
  return h("section", { class: "card" }, h("h2", {}, "Dropped episodes"),
    biased.map((each) => h("p", { class: "bad small" }, `Long episodes of ${visible(each.env)} at horizon ${each.horizon} were dropped more often than short episodes: ${share(each.num_long_dropped, each.num_long)} against ${share(each.num_short_dropped, each.num_short)} (z = ${each.z.toFixed(1)}).`)),
    dropped.length ? table(["subset", ...["horizon", "turns", "episodes", "stale", "failed", "dropped"].map((title) => ({ title, right: true }))],
      dropped.slice(0, 12).map((each) => h("tr", {}, h("td", {}, visible(each.subset)), [each.horizon, each.turns, each.num, each.stale, each.failed, percent(each.dropped_frac)].map(right))))
      : h("p", { class: "dim" }, `None of ${total.toLocaleString("en")} episodes was dropped as stale or failed.`),
    dropped.length > 12 ? h("p", { class: "small dim" }, `${dropped.length - 12} more rows are in selection.json.`) : null,
    lengths.some((each) => each.dropped_frac > 0 || each.dropped_tokens_frac > 0) ? lengthTable(lengths) : null);
}

function lengthTable(lengths) {
  return table([...["sampled tokens", "episodes", "dropped", "tokens", "stale tokens", "dropped tokens"].map((title) => ({ title, right: true }))],
    lengths.map((each) => h("tr", {}, [each.tokens, each.num, percent(each.dropped_frac), each.sampled_tokens, each.stale_tokens, percent(each.dropped_tokens_frac)].map(right))));
}

export function settingsCard(found) {
  const report = found.report || {}, heldout = report.heldout, peak = report.peak_memory_bytes?.all_roles;
  const minutes = report.wall_s == null ? "" : report.wall_s < 120 ? `${short(report.wall_s)} s` : `${(report.wall_s / 60).toFixed(0)} min`;
  return h("section", { class: "card" }, h("h2", {}, "Settings and totals"), facts([...Object.entries(found.settings).map(([name, value]) => [name, visible(String(value))]), ["duration", minutes], ["peak memory", peak ? `${(peak / 2 ** 30).toFixed(2)} GiB` : ""],
    ...(heldout ? [["train items drawn", short(heldout.num_train_items_drawn)], ["held-out items", short(heldout.num_test_items)], ["items in both", heldout.num_shared_item_ids], ...(heldout.num_pruned_files ? [["pruned journal files, not counted", heldout.num_pruned_files]] : [])] : [])]));
}

// Sample episodes for a report, which has no server to list and filter all episodes.
export function samplesCard(run, rows, link) {
  return h("section", { class: "card" }, h("h1", {}, "Sample episodes ", h("span", { class: "dim small" }, "best, worst and most surprising of each subset, the hardest subset first")),
    rows.length ? table(["subset", "why", "episode", { title: "reward", right: true }, { title: "turns", right: true }, "ended", "outcome"], rows.map((row) => h("tr", {}, h("td", {}, visible(row.subset)), h("td", {}, row.why), h("td", {}, h("a", { href: link("episode", { run: run.name, id: row.id }) }, visible(row.id))),
      h("td", { class: `r ${row.success ? "good" : "bad"}` }, short(row.reward)), right(row.turns), h("td", {}, row.end.replace(/_/g, " ")), h("td", {}, row.outcome.replace(/_/g, " ")))))
      : h("p", { class: "dim" }, "No episode is complete."));
}

export function pooledCard(found) {
  const pools = found.evaluations.filter((each) => Object.keys(each.scores).length);
  const names = [...new Set(pools.flatMap((each) => Object.keys(each.scores)))];
  return names.length ? h("section", { class: "card" }, h("h2", {}, "Held-out success ", h("span", { class: "dim small" }, "mean over seeds with 95 % intervals: Student's t over several seeds; a single seed has the interval over its episodes")),
    table(["runs", ...names.map((title) => ({ title: title.replace(/-model$/, "").replace(/[-_]/g, " "), right: true }))], pools.map((each) => h("tr", {}, h("td", { class: "wrap" }, visible(each.runs.join(", "))), names.map((name) => right(each.scores[name] ? `${interval(each.scores[name])} of ${each.scores[name].num}` : null)))))) : null;
}
