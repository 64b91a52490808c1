// Builders of elements. Text is never parsed as HTML, so that a run's text cannot inject markup.
export function h(tag, attributes = {}, ...children) {
  const element = tag === "svg" || tag === "rect" || tag === "line" || tag === "text" || tag === "g" || tag === "title"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}
function add(element, children) {
  for (const child of children) {
    if (child == null || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.append(child);
  }
}
export function replace(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

// A report has no server. Its page contains the answers.
const told = document.getElementById("answers");
const answers = told && JSON.parse(told.textContent);
export const isReport = Boolean(answers);

export async function ask(path, params) {
  if (answers) {
    const found = answers[params?.id == null ? path : `${path}?id=${params.id}`];
    if (!found) throw new Error("This report does not contain the requested page. Open the run in the dashboard.");
    return found;
  }
  const query = params ? `?${new URLSearchParams(params)}` : "";
  const answer = await fetch(path + query, { headers: { accept: "application/json" } });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || found.detail || `The server answered with status ${answer.status}.`);
  return found;
}

export async function act(path, body) {
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || (typeof found.detail === "string" ? found.detail : `The server answered with status ${answer.status}.`));
  return found;
}

// Control characters and invisible characters are replaced by visible symbols.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) => String.fromCharCode(c === "\u007f" ? 0x2421 : 0x2400 + c.charCodeAt(0)))
    .replace(/[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `[U+${c.charCodeAt(0).toString(16).padStart(4, "0").toUpperCase()}]`);
}

export const counted = (num, one, many = `${one}s`) => `${num.toLocaleString("en")} ${num === 1 ? one : many}`;
export const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`);
export function short(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  const units = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];
  for (const [limit, unit] of units) if (Math.abs(value) >= limit) return `${Number((value / (unit === "k" ? 1e3 : limit)).toPrecision(3))}${unit}`;
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(digits)));
}
export function duration(seconds) {
  const units = [[172_800, 86_400, "days"], [7_200, 3_600, "h"], [120, 60, "min"]];
  for (const [limit, size, unit] of units) if (seconds >= limit) return `${short(seconds / size)} ${unit}`;
  return `${short(seconds, 2)} s`;
}
export const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const COLORS = ["c1", "c3", "c4", "c5", "c6", "c7", "c8", "c2"];

export function notes(problems) {
  if (!problems?.length) return null;
  return h("div", { class: "notes", role: "note" }, h("strong", {}, "Some files could not be read"), h("ul", {}, problems.map((text) => h("li", {}, visible(text)))));
}
export function table(head, rows) {
  // On a phone each row is a card, and each cell shows the name of its column.
  for (const row of rows) [...row.children].forEach((cell, i) => { if (i) cell.dataset.label = head[i]?.title ?? head[i] ?? ""; });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col", class: each.right ? "r" : null }, each.title ?? each)))), h("tbody", {}, rows)));
}
export function facts(entries) {
  return h("dl", { class: "facts" }, entries.filter(([, value]) => value != null && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
