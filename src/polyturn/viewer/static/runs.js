// The list of runs: state, step, time, last reward and evaluation, and problems.

import { address, cell, doing, el, lasting, short, state, table } from "/static/base.js";

const today = (at) => at.toDateString() === new Date().toDateString();
function moment(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000);
  return `${today(at) ? "" : `${at.toLocaleDateString("en-CA")} `}${at.toLocaleTimeString("en-GB")}`;
}

const names = [["run"], ["state"], ["step", 1], ["time of the steps", 1], ["last line"], ["reward", 1], ["last evaluation"], ["trajectories", 1], ["problems"]];

function row(info) {
  const { "reward/mean": reward, ...evaluation } = info.latest, problems = [info.end, ...info.problems].filter(Boolean);
  const step = info.last_step === null ? "–" : info.planned ? `${info.last_step} of ${info.planned}` : String(info.last_step);
  return el("tr", { "data-key": info.folder }, cell(el("a", { href: address("curves", {}, info.index), title: info.folder }, info.name)), cell(doing(info)), cell(el("span", {}, step), true),
    cell(info.spent_s ? lasting(info.spent_s) : "–", true), cell(moment(info.written_at)), cell(reward ?? null, true),
    cell(Object.entries(evaluation).map(([name, value]) => `${name.replace("eval/", "").replace("/", ": ")} ${short(value)}`).join(", ") || "–"), cell(el("a", { href: address("trajectories", {}, info.index), "aria-label": `the ${info.num_trajectories} trajectories of ${info.name}` }, String(info.num_trajectories)), true),
    el("td", { class: problems.length ? "bad words" : null }, problems.join("; ") || "–"));
}

export async function runs() {
  const count = (of) => state.runs.filter((info) => info.state === of).length;
  const states = ["running", "silent", "finished", "stopped", "died"].filter(count).map((of) => `${count(of)} ${of}`).join(", ");
  const ordered = [...state.runs].sort((a, b) => b.written_at - a.written_at);
  const beside = ordered.slice(0, 6).map((info) => info.index);
  return { element: el("div", {}, el("h2", {}, "Runs"), el("p", { role: "status", class: "muted" }, `${state.runs.length} ${state.runs.length === 1 ? "run" : "runs"}${states ? `: ${states}` : ""}. New runs in the folder appear here.`),
    table("Runs", names, ordered.map(row)), beside.length > 1 ? el("p", {}, el("a", { href: address("curves", { with: beside.slice(1).join(",") }, beside[0]) }, `Curves of the latest ${beside.length} side by side`)) : null), follows: true };
}
