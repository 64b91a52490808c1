// Charts of series over steps, drawn by uPlot. Dashed lines mark changes of the horizon.
import { h, short, cssColor, COLORS } from "./dom.js";

// Names of series in legends. The metric is in the tooltip. Other series have the metric's own name.
const LABELS = {
  "reward/success": "all tasks", "episodes/truncated_frac": "truncated", "episodes/context_full_frac": "context full", "episodes/turns_mean": "turns", "episodes/invalid_frac": "share of invalid actions",
  "distance/value": "bound", "distance/mean": "mean of the episodes", "offpolicy/ess_frac": "effective sample size", "offpolicy/lag_mean": "mean", "offpolicy/lag_max": "maximum",
  "actor/tokens_per_s": "actors", "train/tokens_per_s": "learner", "wait/batch_s": "wait for a batch", "train/step_s": "training", "publish/total_s": "publishing",
  "episodes/generate_s_mean": "engine", "episodes/env_s_mean": "environment", "episodes/wall_s_mean": "whole episode", "policy/clipped_frac": "clipped", "policy/masked_frac": "masked",
};
const tail = (name) => name.replace(/^[^/]*\//, "");
const label = (name, lines) => (lines.filter((each) => tail(each) === tail(name)).length > 1 ? name.replace("/", " ") : tail(name)).replaceAll("_", " ");

const STEPS = [1, 2, 5].flatMap((digit) => [...Array(9).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);

// `bands` has, for the name of a series, the two columns of its interval.
export function chart(spec, data, { marks = [], labels = null, bands = {} } = {}) {
  const lines = spec.series.filter((name) => data[name]);
  const legend = h("ul", { class: "legend" });
  const place = h("div", { class: "chart", role: "img", "aria-label": `${spec.title} over steps` });
  const show = (index) => legend.replaceChildren(...lines.map((name, i) => {
    const column = data[name];
    const at = index ?? column.findLastIndex((value) => value != null);
    const [low, high] = (bands[name] ?? []).map((edge) => data[edge][at]);
    const interval = low != null && high != null ? ` [${short(low)}, ${short(high)}]` : "";
    return h("li", { title: name, style: { "--c": `var(--${COLORS[i % COLORS.length]})` } }, h("i"), `${labels?.[name] ?? LABELS[name] ?? label(name, lines)} `, h("b", {}, short(column[at])), interval);
  }));
  const card = h("section", { class: "card" }, h("h2", {}, spec.title, spec.unit ? h("span", { class: "dim small" }, ` ${spec.unit}`) : null), place, legend);
  show(null);
  // The width is known once the card is on the page.
  requestAnimationFrame(() => draw(place, data, lines, marks, spec, show, bands));
  return card;
}

function draw(place, data, lines, marks, spec, show, bands) {
  if (!place.isConnected) return;
  const ink = cssColor("dim"), line = cssColor("line"), mark = cssColor("c5");
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 }, font: "11px system-ui" };
  const edges = lines.flatMap((name, i) => (bands[name] ?? []).map((edge) => ({ edge, color: cssColor(COLORS[i % COLORS.length]) })));
  const columnOf = (edge) => 1 + lines.length + edges.findIndex((each) => each.edge === edge);
  const options = {
    width: Math.max(200, place.clientWidth), height: 190, legend: { show: false }, scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: range(spec.unit === "share") } },
    cursor: { points: { size: 6 }, drag: { x: true, y: false } },
    axes: [{ ...axis, size: 30, space: 50, incrs: STEPS }, { ...axis, size: 46, values: (_, values) => values.map((v) => short(v)) }],
    series: [{},
      ...lines.map((name, i) => {
        const color = cssColor(COLORS[i % COLORS.length]), count = data[name].filter((value) => value != null).length;
        return { label: name, stroke: color, width: 1.8, spanGaps: true, points: { show: count < 40, size: count > 1 ? 5 : 9, fill: color } };
      }),
      ...edges.map(({ edge }) => ({ label: edge, width: 0, spanGaps: true, points: { show: false } }))],
    bands: lines.filter((name) => bands[name]).map((name) => {
      const [low, high] = bands[name];
      return { series: [columnOf(high), columnOf(low)], fill: `${edges.find((each) => each.edge === low).color}33` };
    }),
    hooks: {
      setCursor: [(plot) => show(plot.cursor.idx)],
      draw: [(plot) => drawMarks(plot, marks, mark)],
    },
  };
  const plot = new window.uPlot(options, [data.step, ...lines.map((name) => data[name]), ...edges.map(({ edge }) => data[edge])], place);
  new ResizeObserver(() => { if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: 190 }); }).observe(place);
}

function range(isShare) {
  return (_, low, high) => {
    if (low == null) return [0, 1];
    if (isShare && low >= 0 && high <= 1) return [0, Math.max(0.1, Math.min(1, high * 1.15))];
    const pad = (high - low || Math.abs(high) || 1) * 0.12;
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  };
}

function drawMarks(plot, marks, color) {
  const context = plot.ctx, ratio = devicePixelRatio || 1;
  context.save();
  context.strokeStyle = context.fillStyle = color;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.setLineDash([4 * ratio, 4 * ratio]);
  context.font = `${11 * ratio}px system-ui`;
  for (const { step, horizon } of marks) {
    const x = plot.valToPos(step, "x", true);
    if (x < plot.bbox.left - 1 || x > plot.bbox.left + plot.bbox.width) continue;
    context.beginPath();
    context.moveTo(x, plot.bbox.top);
    context.lineTo(x, plot.bbox.top + plot.bbox.height);
    context.stroke();
    context.fillText(`horizon ${horizon}`, x + 4 * ratio, plot.bbox.top + 11 * ratio);
  }
  context.restore();
}

export function bars(entries) {
  const total = entries.reduce((sum, [, value]) => sum + value, 0) || 1;
  const top = Math.max(...entries.map(([, value]) => value), 1e-9);
  return h("div", { class: "bars" }, entries.map(([name, value]) => h("div", {}, h("span", {}, name), h("span", { class: "b", style: { width: `${100 * value / top}%` } }), h("span", { class: "num dim" }, `${(100 * value / total).toFixed(1)}%`))));
}
