// What every page uses: elements, requests, the address, and the state that the frame keeps.
//   #/0/curves   #/0/trajectories?min_reward=1   #/0/one?id=g5/2&step=3&split=train   #/0/compare?a=…&b=…

// Control characters and characters that change the writing direction are shown as U+FFFD in every text and title. A letter keeps its
// first 30 marks, as in Unicode's stream-safe text (UAX 15), because a browser needs minutes to place thousands.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|(?<=\p{M}{30})\p{M}+/gu;
export const legible = (text) => (typeof text === "string" ? text.replace(UNSEEN, "\ufffd") : text);
const SPOKEN = ["title", "alt", "aria-label"];

// Whether a text changes its writing direction so often that it must be shown in memory order: the time that a browser needs to order
// two directions grows with the square of the changes. Right-to-left letters without another letter or digit between them are one piece.
const RIGHT_TO_LEFT = /(?:[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}][^\p{L}\p{N}]*)+/gu;
export const isWoven = (text) => text.length > 20_000 && (text.match(RIGHT_TO_LEFT)?.length ?? 0) > 15_000;

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, SPOKEN.includes(key) ? legible(value) : value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined && c !== false).map(legible));
  if (isWoven(children.filter((c) => typeof c === "string").join(""))) element.classList.add("as-written");
  return element;
}

// Replace the text of an element.
export const say = (element, text) => element.replaceChildren(legible(text));

export const el = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

// `last`: the address at which each tab was left, to restore its filters. `list`: the keys of the trajectories in the last table.
export const state = { runs: [], marked: [], list: [], page: null, last: {}, hasDesk: false };

// A query string without the empty values; a list repeats its name.
export function query(values) {
  const pairs = Object.entries(values).flatMap(([name, value]) => (Array.isArray(value) ? value.map((one) => [name, one]) : [[name, value]]));
  return new URLSearchParams(pairs.filter(([, v]) => v !== "" && v !== null && v !== undefined));
}

// In a report, the answers in its file by request; a request for a trajectory has its id, step and split. Null in the viewer.
export const kept = JSON.parse(document.getElementById("kept")?.textContent ?? "null");

export async function get(path, values = {}) {
  if (kept) {
    const name = [path, ...["id", "step", "split"].map((one) => values[one]).filter((one) => one !== undefined)].join(" ");
    if (name in kept) return kept[name];
    throw new Error("This is not part of the report; the viewer shows it: polyturn view RUN");
  }
  const params = query(values);
  return read(await fetch(`/api/${path}${params.size ? `?${params}` : ""}`));
}

export const post = async (path, body) => read(await fetch(`/api/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));

async function read(answer) {
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.detail ?? `${answer.status}`);
  return data;
}

// A trajectory, or its id with the error as `problem`, so that the other trajectories are still shown.
export const reading = (run, { id, step, split }) => get(`runs/${run}/trajectory`, { id, step, split }).catch((problem) => ({ id: id ?? "", step, problem: problem.message, messages: [] }));

export function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [run = "0", page = ""] = path.split("/");
  return { run: Number(run) || 0, page: page || (state.runs.length > 1 ? "runs" : "curves"), values: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(page, values = {}, run = route().run) {
  const params = query(values);
  return `#/${run}/${page}${params.size ? `?${params}` : ""}`;
}

export function go(page, values = {}, { run = route().run, replace = false } = {}) {
  if (!replace) { location.hash = address(page, values, run); return; }
  history.replaceState(null, "", address(page, values, run));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

// Write values into the address without loading a page, so that a link shows what is on the screen.
export function remember(values) {
  const { run, page, values: before } = route();
  history.replaceState(null, "", address(page, { ...before, ...values }, run));
  if (`${run}/${page}` in state.last) state.last[`${run}/${page}`] = location.hash;
}

// Go from a trajectory back to the table as it was.
export function leave() {
  const { run, page } = route();
  if (["one", "compare", "why", "task"].includes(page)) { const list = kept ? "about" : "trajectories"; location.hash = state.last[`${run}/${list}`] ?? `#/${run}/${list}`; }
}

export const back = () => el("a", { href: "#", onclick: (event) => { event.preventDefault(); leave(); } }, "‹ back");

// The runs to show side by side: the page's run and the runs in its address, at most six.
export function together(run, values) {
  const beside = (values.with ?? "").split(",").filter(Boolean).map(Number).filter((i) => state.runs[i] && i !== run);
  return [run, ...beside].slice(0, 6);
}

export function besidePicker(run, page, shown) {
  if (state.runs.length < 2) return null;
  const picker = el("details", { class: "picker" }, el("summary", {}, `Compare runs: ${shown.length > 1 ? `${shown.length - 1} more` : "none"}`), ...state.runs.filter((r) => r.index !== run).map((r) =>
    el("label", { class: "check" }, el("input", { type: "checkbox", value: r.index, checked: shown.includes(r.index), onchange: () =>
      go(page, { ...route().values, with: [...picker.querySelectorAll("input:checked")].map((box) => box.value).join(",") }) }), r.name)));
  return picker;
}

export const cell = (value, isNumber) => el("td", { class: isNumber ? "number" : null }, value instanceof Node ? value : String((isNumber ? short(value) : value) ?? "–"));

// names: [[title, whether its column has numbers]]; rows: <tr>.
export const table = (label, names, rows) => el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, el("table", { class: "plain", "aria-label": label },
  el("thead", {}, el("tr", {}, ...names.map(([name, isNumber]) => el("th", { class: isNumber ? "number" : null, scope: "col" }, name)))), el("tbody", {}, ...rows)));

// The state of a run; for a run that died, the reason is in the title.
export function doing(info) {
  const words = info.state === "silent" ? `silent for ${lasting(info.silent_s)}` : info.state;
  return el("span", { class: info.state === "died" ? "bad" : info.state === "running" ? "good" : null, title: info.end || null }, words || "–");
}

// A duration in the largest unit that fits twice: 42 s, 3 min, 5 h, 2 days.
export function lasting(seconds) {
  const [size, unit] = [[86400, "days"], [3600, "h"], [60, "min"]].find(([one]) => seconds >= 2 * one) ?? [1, "s"];
  return `${Math.round(seconds / size)} ${unit}`;
}

export function short(value) {
  if (typeof value !== "number") return value ?? "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// A menu of values, which includes the value in the address even if the run lacks it. `all` is the value that selects all, or null if
// one value is required.
export function select(name, values, choices, label, all = "") {
  const chosen = values[name], known = chosen && chosen !== all && !choices.includes(chosen) ? [...choices, chosen] : choices;
  return el("label", {}, label, el("select", { name }, all === null ? null : el("option", { value: all, selected: chosen === all }, "all"), ...known.map((c) => el("option", { value: c, selected: chosen === c }, c))));
}

// A form that writes its fields into the address of a page: a menu takes effect at once, a typed value on Enter.
export function addressForm(page, ...fields) {
  const form = el("form", { class: "bar" }, ...fields);
  const apply = () => go(page, Object.fromEntries(new FormData(form)));
  form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
  form.addEventListener("change", (event) => { if (event.target.matches("select")) apply(); });
  return form;
}

export const PAGE_SIZE = 100;

// The range of the rows shown and their total number, with buttons for the rows before and after.
export function pager(page, values, total, what, ...more) {
  const offset = Number(values.offset ?? 0), turn = (to) => go(page, { ...values, offset: to || "" });
  const range = !total ? `no ${what} matches` : offset < total ? `${offset + 1}–${Math.min(offset + PAGE_SIZE, total)} of ${total}` : `there are only ${total}`;
  return el("div", { class: "pager" }, el("button", { type: "button", disabled: offset <= 0, onclick: () => turn(Math.max(0, Math.min(offset, total) - PAGE_SIZE)) }, "‹ before"),
    el("span", { role: "status" }, range), el("button", { type: "button", disabled: offset + PAGE_SIZE >= total, onclick: () => turn(offset + PAGE_SIZE) }, "after ›"), ...more);
}
