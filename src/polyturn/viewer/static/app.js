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
export const state = { runs: [], marked: [], list: [], page: null };
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

async function show() {
  const { run, page, values } = place();
  state.page?.leave?.();
  state.page = null;
  const shown = PAGES[page] ? page : "curves";
  const current = ["one", "compare"].includes(shown) ? "trajectories" : shown;
  document.getElementById("tabs").replaceChildren(...TABS.map(([name, label]) =>
    el("a", { href: `#/${run}/${name}`, "aria-current": name === current ? "page" : null }, label)));
  document.getElementById("run").value = String(run);
  const info = state.runs[run];
  if (!info) { main.replaceChildren(el("p", { class: "problem", role: "alert" }, `There is no run ${run}.`)); return; }
  document.title = `${info.name} – polyturn`;
  const asked = location.hash;
  try {
    const built = await PAGES[shown](run, values, info);
    if (location.hash !== asked) return;
    const problems = info.problems.length ? [el("div", { class: "problem", role: "alert" }, info.problems.join("\n"))] : [];
    main.replaceChildren(...problems, built.element);
    state.page = built;
    built.ready?.();
  } catch (problem) {
    main.replaceChildren(el("div", { class: "problem", role: "alert" }, problem.message), el("p", {}, el("a", { href: `#/${run}/${current}` }, "Back to all")));
  }
}

async function poll() {
  try {
    const before = JSON.stringify(state.runs.map((r) => [r.num_trajectories, r.num_metrics]));
    state.runs = await get("runs");
    const now = JSON.stringify(state.runs.map((r) => [r.num_trajectories, r.num_metrics]));
    const info = state.runs[place().run];
    document.getElementById("live").textContent = info ? `step ${info.last_step ?? "–"} · ${info.num_trajectories} trajectories` : "";
    if (before !== now) state.page?.update?.();
  } catch { document.getElementById("live").textContent = "the viewer has stopped"; }
}

function keyboard(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || document.getElementById("help").open) return;
  if (event.key === "?") { document.getElementById("help").showModal(); return; }
  if (/^[1-5]$/.test(event.key)) { go(TABS[Number(event.key) - 1][0]); return; }
  if (event.key === "/") { const box = main.querySelector("input[type=search]"); if (box) { event.preventDefault(); box.focus(); } return; }
  if (event.key === "Escape") { if (["one", "compare"].includes(place().page)) history.back(); return; }
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
  choice.replaceChildren(...state.runs.map((r) => el("option", { value: r.index }, r.name)));
  await show();
  await poll();
  setInterval(poll, 3000);
}

start();
