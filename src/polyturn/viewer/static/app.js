// The frame: shows the page in the address, polls the runs, and handles the keyboard.
// A page is a function of the run, the values in its address and the run's summary; it returns
// {element, ready?, update?, key?, leave?, follows?}.

import { address, doing, el, get, go, kept, lasting, leave, legible, route, say, state } from "/static/base.js";
import { answer } from "/static/answer.js";
import { curves } from "/static/curves.js";
import { distributions } from "/static/distributions.js";
import { groups, timelinePage } from "/static/groups.js";
import { compare, one } from "/static/one.js";
import { about } from "/static/run.js";
import { runs } from "/static/runs.js";
import { trajectories } from "/static/table.js";
import { task } from "/static/task.js";
import { why } from "/static/why.js";

const TABS = [["runs", "Runs"], ["curves", "Curves"], ["trajectories", "Trajectories"], ["distributions", "Distributions"], ["groups", "Groups"], ["timeline", "Timeline"], ["about", "Overview"], ["answer", "Answer"]];
// Without runs there is only the desk. A report has the pages whose data is in its file.
const isThere = (name) => (name === "answer" ? state.hasDesk : state.runs.length > 0 && (!kept || ["curves", "distributions", "about"].includes(name)));
const PAGES = { runs, curves, distributions, trajectories, groups, timeline: timelinePage, one, compare, why, task, about, answer };
const INSIDE = ["one", "compare", "why", "task"]; // pages of single trajectories, which belong to the table's tab
const main = document.getElementById("main");

// The run's problems, shown above every page and updated by each poll.
const problems = el("div");
function drawProblems(info) {
  const sentences = info && !["runs", "answer"].includes(route().page) ? [...(info.end ? [`The run died: ${info.end}.`] : []), ...info.problems] : [];
  problems.replaceChildren(...(sentences.length ? [el("div", { class: "problem", role: "alert" }, sentences.join("\n"))] : []));
}

async function show() {
  const { run, page, values } = route();
  const shown = !state.runs.length && state.hasDesk ? "answer" : Object.hasOwn(PAGES, page) ? page : "curves";
  const current = INSIDE.includes(shown) ? (kept ? "about" : "trajectories") : shown;
  if (shown === current) state.last[`${run}/${shown}`] = location.hash;
  document.getElementById("tabs").replaceChildren(...TABS.filter(([name]) => isThere(name)).map(([name, label]) =>
    el("a", { href: (name !== shown && state.last[`${run}/${name}`]) || `#/${run}/${name}`, "aria-current": name === current ? "page" : null }, label)));
  document.getElementById("run").value = String(run);
  const info = state.runs[run];
  drawProblems(info);
  if (!info && shown !== "answer") { main.replaceChildren(el("p", { class: "problem", role: "alert" }, `There is no run ${run}.`)); return; }
  document.title = legible(`${shown === "runs" ? "Runs" : info?.name ?? "Answer"} – polyturn`);
  const hash = location.hash, of = `${run}/${shown}${INSIDE.includes(shown) ? `/${values.id}/${values.step}/${values.split}` : ""}`;
  try {
    const built = await PAGES[shown](run, values, info);
    if (location.hash === hash) swap(built, of);
  } catch (problem) {
    const alert = el("div", { class: "problem", role: "alert" }, problem.message);
    main.querySelector(".refused")?.remove();
    // After an invalid filter the form stays, so that it can be corrected.
    if (state.page?.of === of && main.querySelector("form")) { alert.classList.add("refused"); main.prepend(alert); return; }
    state.page = null;
    main.replaceChildren(problems, alert, el("p", {}, el("a", { href: `#/${run}/${current}` }, "Back to all")));
  }
}

const fields = () => [...main.querySelectorAll("form [name]")];
const isTyped = (field) => (field.type === "checkbox" ? field.checked !== field.defaultChecked : field.tagName !== "SELECT" && field.value !== field.defaultValue);
const isTextual = (field) => isTyped(field) && field.type !== "checkbox";

// Replace the page. If it is the same page, built again, then typed text, open sections and the focus stay. Otherwise the page of a
// trajectory starts at its top, and any other page where it was left, with the focus on the row of the trajectory that was shown.
const heights = {};
function swap(built, of) {
  const isSame = state.page?.of === of, before = document.activeElement, { id, step, split } = route().values;
  const row = isSame ? before?.closest("tr[data-key]")?.dataset.key : state.page?.shown;
  const typed = fields().filter(isTextual), opened = [...main.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
  state.page?.leave?.();
  if (state.page) heights[state.page.of] = scrollY;
  state.page = Object.assign(built, { of, shown: `${id} ${step} ${split}` });
  main.replaceChildren(problems, built.element);
  if (!isSame) scrollTo(0, INSIDE.includes(route().page) ? 0 : heights[of] ?? 0);
  built.ready?.();
  for (const field of isSame ? fields() : []) {
    const old = typed.find((one) => one.name === field.name);
    if (old) field.value = old.value;
    if (field.name !== before?.name || document.activeElement !== document.body) continue;
    field.focus({ preventScroll: true });
    if (typeof before.selectionStart === "number") field.setSelectionRange(before.selectionStart, before.selectionEnd);
  }
  for (const summary of isSame ? main.querySelectorAll("details > summary") : []) if (opened.includes(summary.textContent)) summary.parentElement.open = true;
  const again = row && [...main.querySelectorAll("tr[data-key]")].find((tr) => tr.dataset.key === row);
  if (again) { main.querySelectorAll("tr[data-key]").forEach((tr) => (tr.tabIndex = -1)); again.tabIndex = 0; again.focus({ preventScroll: true }); }
}

// Build the page again with new data. The scroll position stays, and a page with a half-filled form is not built again.
async function follow() {
  const page = state.page, hash = location.hash;
  if (page?.update) return page.update();
  if (!page?.follows || fields().some((field) => field === document.activeElement || isTyped(field))) return;
  const { run, page: name, values } = route();
  const built = await PAGES[name](run, values, state.runs[run]);
  if (location.hash !== hash || state.page !== page) return;
  const [x, y] = [scrollX, scrollY];
  swap(built, page.of);
  scrollTo(x, y);
}

function drawRuns() {
  const choice = document.getElementById("run");
  if (choice.options.length !== state.runs.length) {
    choice.replaceChildren(...state.runs.map((r) => el("option", { value: r.index }, r.name)));
    choice.value = String(route().run);
  }
}

async function poll() {
  const live = document.getElementById("live");
  const size = (runs) => JSON.stringify(runs.map((r) => [r.num_trajectories, r.num_metrics, r.problems, r.state]));
  try {
    const before = size(state.runs);
    state.runs = await get("runs");
    drawRuns();
    const info = state.runs[route().run];
    drawProblems(info);
    if (before !== size(state.runs)) await follow();
    live.replaceChildren(...(info ? [doing(info), `${info.spent_s ? ` · ${lasting(info.spent_s)} of training` : ""} · step ${info.last_step ?? "–"} · ${info.num_trajectories} trajectories · read ${new Date().toLocaleTimeString("en-GB")}`] : []));
  } catch (problem) {
    say(live, problem instanceof TypeError ? "the viewer has stopped" : problem.message);
  }
  setTimeout(poll, 3000);
}

function keyboard(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || document.getElementById("help").open) return;
  if (event.key === "?") { document.getElementById("help").showModal(); return; }
  if (/^[1-9]$/.test(event.key)) { document.querySelectorAll("#tabs a")[Number(event.key) - 1]?.click(); return; }
  if (event.key === "/") { const box = main.querySelector("input[type=search]"); if (box) { event.preventDefault(); box.focus(); } return; }
  if (event.key === "Escape") { leave(); return; }
  if (state.page?.key?.(event)) event.preventDefault();
}

function theme(choice) {
  if (choice) document.documentElement.dataset.theme = choice; else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("theme", choice ?? ""); } catch { /* private windows store nothing */ }
  state.page?.repaint?.(); // a canvas does not follow the theme by itself
}

async function start() {
  let themed = "";
  try { themed = localStorage.getItem("theme") ?? ""; } catch { /* private windows store nothing */ }
  if (themed) theme(themed);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(dark ? "light" : "dark");
  });
  document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
  const choice = document.getElementById("run");
  choice.addEventListener("change", () => go(INSIDE.includes(route().page) ? "trajectories" : route().page, {}, { run: Number(choice.value) }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.page?.repaint?.());
  const head = document.querySelector("header"); // sticky elements are placed below it
  new ResizeObserver(() => document.documentElement.style.setProperty("--head", `${getComputedStyle(head).position === "sticky" ? head.offsetHeight : 0}px`)).observe(head);
  document.addEventListener("keydown", keyboard);
  window.addEventListener("hashchange", show);
  history.scrollRestoration = "manual"; // `swap` scrolls when the page is built
  try { [state.runs, state.hasDesk] = await Promise.all([get("runs"), kept ? false : get("desk")]); } catch (problem) { main.replaceChildren(el("div", { class: "problem", role: "alert" }, problem.message)); return; }
  drawRuns();
  if (kept) {
    for (const [name] of TABS.filter(([one]) => isThere(one))) state.last[`0/${name}`] = address(name, { with: state.runs.slice(1).map((run) => run.index).join(",") }, 0);
    if (!location.hash) history.replaceState(null, "", state.last["0/about"]);
  }
  await show();
  if (!kept) await poll();
}

start();
