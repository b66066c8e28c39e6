// The frame: which page the address names, the runs, what is polled while a run goes on, the keyboard.
//   #/0/curves   #/0/trajectories?min_reward=1   #/0/one?id=g5/2&step=3&split=train   #/0/compare?a=…&b=…

import { curves, trajectories, groups, timelinePage, one, compare, about } from "/static/pages.js";

export const el = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return element;
};

export async function get(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  const answer = await fetch(`/api/${path}${query.size ? `?${query}` : ""}`);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.detail ?? `${answer.status}`);
  return data;
}

const TABS = [["curves", "Curves"], ["trajectories", "Trajectories"], ["groups", "Groups"], ["timeline", "Timeline"], ["about", "Run"]];
const PAGES = { curves, trajectories, groups, timeline: timelinePage, one, compare, about };
// `last` holds the address at which each tab was left, so that its filters are there again; `list` is the table as it was last read.
export const state = { runs: [], marked: [], list: [], page: null, last: {} };
const main = document.getElementById("main");

export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [run = "0", page = "curves"] = path.split("/");
  return { run: Number(run) || 0, page: page || "curves", values: Object.fromEntries(new URLSearchParams(query)) };
}

export function go(page, values = {}, { run = place().run, replace = false } = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  const hash = `#/${run}/${page}${query.size ? `?${query}` : ""}`;
  if (replace) { history.replaceState(null, "", hash); return show(); }
  location.hash = hash;
}

// The run's problems, above every page and as new as the last answer.
const problems = el("div");
function drawProblems(info) {
  problems.replaceChildren(...(info?.problems.length ? [el("div", { class: "problem", role: "alert" }, info.problems.join("\n"))] : []));
}

async function show() {
  const { run, page, values } = place();
  const shown = PAGES[page] ? page : "curves";
  const current = ["one", "compare"].includes(shown) ? "trajectories" : shown;
  if (shown === current) state.last[`${run}/${shown}`] = location.hash;
  document.getElementById("tabs").replaceChildren(...TABS.map(([name, label]) =>
    el("a", { href: (name !== shown && state.last[`${run}/${name}`]) || `#/${run}/${name}`, "aria-current": name === current ? "page" : null }, label)));
  document.getElementById("run").value = String(run);
  const info = state.runs[run];
  drawProblems(info);
  if (!info) { main.replaceChildren(el("p", { class: "problem", role: "alert" }, `There is no run ${run}.`)); return; }
  document.title = `${info.name} – polyturn`;
  const asked = location.hash;
  try {
    const built = await PAGES[shown](run, values, info);
    if (location.hash !== asked) return;
    state.page?.leave?.();
    state.page = Object.assign(built, { of: `${run}/${shown}` });
    main.replaceChildren(problems, built.element);
    built.ready?.();
  } catch (problem) {
    const alert = el("div", { class: "problem", role: "alert" }, problem.message);
    main.querySelector(".refused")?.remove();
    // A filter that cannot be understood leaves the form in which it is corrected.
    if (state.page?.of === `${run}/${shown}` && main.querySelector("form")) { alert.classList.add("refused"); main.prepend(alert); return; }
    state.page = null;
    main.replaceChildren(problems, alert, el("p", {}, el("a", { href: `#/${run}/${current}` }, "Back to all")));
  }
}

// Build the page again where the run has gone on: the row in focus and the place on the screen stay, and nothing that is being typed is lost.
async function follow() {
  const page = state.page, hash = location.hash;
  if (page?.update) return page.update();
  if (!page?.follows) return;
  const isTyped = [...main.querySelectorAll("form input")].some((x) => x === document.activeElement || (x.type === "checkbox" ? x.checked !== x.defaultChecked : x.value !== x.defaultValue));
  if (isTyped) return;
  const { run, page: name, values } = place();
  const built = await PAGES[name](run, values, state.runs[run]);
  if (location.hash !== hash || state.page !== page) return;
  const row = document.activeElement?.closest("tr[data-key]")?.dataset.key, [x, y] = [scrollX, scrollY];
  state.page = Object.assign(built, { of: page.of });
  main.replaceChildren(problems, built.element);
  scrollTo(x, y);
  const again = row && [...main.querySelectorAll("tr[data-key]")].find((tr) => tr.dataset.key === row);
  if (again) { main.querySelectorAll("tr[data-key]").forEach((tr) => (tr.tabIndex = -1)); again.tabIndex = 0; again.focus({ preventScroll: true }); }
}

function drawRuns() {
  const choice = document.getElementById("run");
  if (choice.options.length !== state.runs.length) {
    choice.replaceChildren(...state.runs.map((r) => el("option", { value: r.index }, r.name)));
    choice.value = String(place().run);
  }
}

async function poll() {
  const live = document.getElementById("live");
  const size = (runs) => JSON.stringify(runs.map((r) => [r.num_trajectories, r.num_metrics, r.problems]));
  try {
    const before = size(state.runs);
    state.runs = await get("runs");
    drawRuns();
    const info = state.runs[place().run];
    drawProblems(info);
    if (before !== size(state.runs)) await follow();
    live.textContent = info ? `step ${info.last_step ?? "–"} · ${info.num_trajectories} trajectories · read at ${new Date().toLocaleTimeString()}` : "";
  } catch (problem) {
    live.textContent = problem instanceof TypeError ? "the viewer has stopped" : problem.message;
  }
  setTimeout(poll, 3000);
}

// From a trajectory back to the table as it was.
export function leave() {
  const { run, page } = place();
  if (["one", "compare"].includes(page)) location.hash = state.last[`${run}/trajectories`] ?? `#/${run}/trajectories`;
}

function keyboard(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || document.getElementById("help").open) return;
  if (event.key === "?") { document.getElementById("help").showModal(); return; }
  if (/^[1-5]$/.test(event.key)) { document.querySelectorAll("#tabs a")[Number(event.key) - 1].click(); return; }
  if (event.key === "/") { const box = main.querySelector("input[type=search]"); if (box) { event.preventDefault(); box.focus(); } return; }
  if (event.key === "Escape") { leave(); return; }
  if (state.page?.key?.(event)) event.preventDefault();
}

function theme(choice) {
  if (choice) document.documentElement.dataset.theme = choice; else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("theme", choice ?? ""); } catch { /* private windows keep nothing */ }
}

async function start() {
  let kept = "";
  try { kept = localStorage.getItem("theme") ?? ""; } catch { /* private windows keep nothing */ }
  if (kept) theme(kept);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(dark ? "light" : "dark");
  });
  document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
  const choice = document.getElementById("run");
  choice.addEventListener("change", () => go(["one", "compare"].includes(place().page) ? "trajectories" : place().page, {}, { run: Number(choice.value) }));
  document.addEventListener("keydown", keyboard);
  window.addEventListener("hashchange", show);
  try { state.runs = await get("runs"); } catch (problem) { main.replaceChildren(el("div", { class: "problem", role: "alert" }, problem.message)); return; }
  drawRuns();
  await show();
  await poll();
}

start();
