// Why a trajectory has its advantage: its group's rewards on a line, the estimator's formula with numbers, components and turns.

import { address, back, cell, el, get, kept, short, table } from "/static/base.js";
import { groupStrip } from "/static/charts.js";

function answer(data) {
  const known = data.advantage === null ? [] : [el("p", { class: "big" }, "recorded: ", el("b", {}, String(short(data.advantage))),
    data.low !== data.high ? ` on average, from ${short(data.low)} to ${short(data.high)} over its trained tokens` : " on each of its trained tokens")];
  const value = data.value === null ? "" : ` = ${short(data.value)}`;
  return el("section", { class: "answer", "aria-label": "The advantage" }, data.note ? el("p", { class: "problem" }, data.note) : null,
    data.formula ? el("p", { class: "formula" }, el("span", {}, `${data.estimator}: ${data.formula}`), data.numbers ? el("span", {}, `A = ${data.numbers}${value}`) : null) : null, ...known,
    el("p", { class: "muted" }, `Rewards of the group: mean ${short(data.mean)}, standard deviation ${short(data.std)} (unbiased), over the members that did not fail.`));
}

export async function why(run, values) {
  const data = await get(`runs/${run}/advantage`, values);
  const at = (id, page) => address(page, { id, step: data.step, split: data.split }, run);
  const link = (text, href) => el("a", { href }, text);
  const members = data.members.map((m) => el("tr", { "aria-current": m.id === data.id ? "true" : null }, el("td", {}, link(m.id, at(m.id, "why")), " ", link("read", at(m.id, "one"))), cell(m.reward, true), cell(m.advantage, true),
    cell(m.num_turns, true), cell(m.num_trained_tokens, true), cell(m.stop_reason), cell(m.is_failed ? "failed" : m.dropped ?? "")));
  const parts = data.parts.map((p) => el("tr", {}, cell(p.name), cell(p.value, true), cell(p.mean, true), cell(p.weight, true)));
  const turns = data.turns.map((t) => el("tr", {}, cell(t.turn, true), cell(t.score, true), cell(t.advantage, true), cell(t.tokens, true),
    cell(t.tools.map((c) => `${c.name || "(no name)"}${c.error ? ` (${c.error})` : ""}${c.reward !== null ? ` ${short(c.reward)}` : ""}`).join(", "))));
  const element = el("div", {},
    el("div", { class: "pager" }, back()),
    el("h2", {}, `Why does ${data.id} have this advantage?`),
    el("p", {}, link("the trajectory", at(data.id, "one")), ...(kept ? [] : [" · ", link(`its group ${data.group}`, address("trajectories", { group: data.group, min_step: data.step, max_step: data.step, split: data.split }, run)), " · ",
      link(`the task ${data.task_id} over training`, address("task", { task_id: data.task_id, split: data.split, step: data.step }, run))])),
    groupStrip(data, (id) => at(id, "why")), answer(data),
    el("h3", {}, "The group"), table("The group", [["member"], ["reward", 1], ["advantage", 1], ["turns", 1], ["trained tokens", 1], ["stop reason"], ["dropped"]], members),
    parts.length ? el("h3", {}, "Parts of its reward") : null, parts.length ? table("Parts of its reward", [["part"], ["here", 1], ["mean of the group", 1], ["weight", 1]], parts) : null,
    turns.length ? el("h3", {}, "Its turns") : null, turns.length ? table("Its turns", [["turn", 1], ["score", 1], ["mean advantage", 1], ["trained tokens", 1], ["tools"]], turns) : null);
  return { element };
}
