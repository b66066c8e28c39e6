// The overview of one run, or of several side by side: results, tools, settings, and the most informative trajectories.

import { address, besidePicker, cell, el, get, kept, short, state, table, together } from "/static/base.js";

const TABLES = [["facts", "Summary"], ["before_after", "Evaluations before and after training"], ["stop_reasons", "Stop reasons"]];
const TIMES = ["p50_s", "p99_s", "longest_s"];
const seconds = (value) => (typeof value === "number" ? Number(value.toPrecision(3)) : value);

// A table with a row for each name that any run has, and a column for each run.
function words(title, runs, columns, names = [...new Set(columns.flatMap(Object.keys))]) {
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), ...columns.map((column) => cell(Object.hasOwn(column, name) ? column[name] : "–"))));
  return el("section", { "aria-label": title }, el("h3", {}, title), rows.length ? table(title, [["name"], ...runs.map((run) => [state.runs[run].name])], rows) : el("p", { class: "muted" }, "Nothing is recorded."));
}

function tools(runs, overviews) {
  const rows = overviews.flatMap(({ tools: of }, i) => of.map((tool) => el("tr", {}, cell(tool.name), runs.length > 1 ? cell(state.runs[runs[i]].name) : null, cell(tool.calls, true), cell(tool.failed, true), ...TIMES.map((name) => cell(seconds(tool[name]), true)),
    cell(Object.entries(tool.errors).map(([kind, count]) => `${kind} (${count})`).join(", ") || "–"))));
  const names = [["tool"], ...(runs.length > 1 ? [["run"]] : []), ["calls", 1], ["failed", 1], ["p50 (s)", 1], ["p99 (s)", 1], ["max (s)", 1], ["errors"]];
  return rows.length ? el("section", { "aria-label": "Tools" }, el("h3", {}, "Tools"), table("Tools", names, rows)) : null;
}

// Highlights are requested when the section opens, because the server reads some trajectories whole to select them.
function highlights(runs) {
  const body = el("div");
  const box = el("details", { ontoggle: async () => {
    body.replaceChildren();
    const selected = await Promise.all(runs.map((run) => get(`runs/${run}/highlights`).catch((problem) => { body.append(el("p", { class: "problem" }, problem.message)); return []; })));
    state.list = selected.flatMap((of) => of.map(({ id, step, split }) => ({ id, step, split })));
    const link = (run, page, { id, step, split }, text) => el("a", { href: address(page, { id, step, split }, run) }, text);
    const rows = selected.flatMap((of, i) => of.map((one) => el("tr", {}, cell(one.title), cell(one.why), cell(link(runs[i], "one", one, one.id)), cell(one.step, true), cell(one.split), cell(state.runs[runs[i]].name), cell(one.split.startsWith("train") ? link(runs[i], "why", one, "why?") : ""))));
    body.append(table("Highlights", [["kind"], ["why it is shown"], ["trajectory"], ["step", 1], ["split"], ["run"], ["advantage"]], rows));
  } }, el("summary", {}, "Highlights"), body);
  box.open = Boolean(kept);
  return box;
}

export async function about(run, values, info) {
  const runs = together(run, values), overviews = await Promise.all(runs.map((one) => get(`runs/${one}/overview`)));
  const all = [...new Set(overviews.flatMap((of) => Object.keys(of.settings)))];
  const differing = all.filter((name) => new Set(overviews.map((of) => of.settings[name])).size > 1);
  const config = runs.length > 1 ? (differing.length ? words("Settings that differ", runs, overviews.map((of) => of.settings), differing) : el("h3", {}, "All settings are the same"))
    : el("section", {}, el("h3", {}, "config.yaml"), el("pre", { tabindex: 0 }, (await get(`runs/${run}/config`).catch((problem) => problem.message)) || "The run has no config.yaml."));
  return { element: el("div", {}, el("h2", {}, runs.map((one) => state.runs[one].name).join(" and ")), kept ? null : el("p", { class: "muted" }, info.folder), besidePicker(run, "about", runs),
    ...overviews.filter((of) => of.config_problem).map((of) => el("p", { class: "muted" }, `Settings: ${of.config_problem}.`)),
    ...TABLES.map(([name, title]) => words(title, runs, overviews.map((of) => of[name]))), tools(runs, overviews), highlights(runs), config), follows: true };
}
