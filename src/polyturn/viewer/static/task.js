// One task over training: its rewards, a slider over the steps, and what the model said there, beside what it said a step before.

import { address, el, get, leave, place, remember, short } from "/static/base.js";
import { lineChart } from "/static/charts.js";
import { heading, inStep, message } from "/static/one.js";

const MOST = 1000;

export async function task(run, values) {
  const { total, rows } = await get(`runs/${run}/trajectories`, { task_id: values.task_id, split: values.split, sort: "step", desc: "0", limit: MOST });
  const back = el("div", { class: "pager" }, el("a", { href: "#", onclick: (e) => { e.preventDefault(); leave(); } }, "‹ back"));
  if (!rows.length) return { element: el("div", {}, back, el("p", { class: "muted" }, "No trajectory of this task is recorded.")) };
  const steps = [...new Set(rows.map((row) => row.step))], at = (step) => rows.filter((row) => row.step === step);
  const rewards = (step) => at(step).map((row) => row.reward).filter((reward) => typeof reward === "number");
  const known = steps.filter((step) => rewards(step).length);
  const line = (name, color, of) => ({ name, color, isSparse: true, x: known, y: known.map((step) => of(rewards(step))) });
  const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
  const curves = [line("lowest", 3, (r) => Math.min(...r)), line("mean", 0, mean), line("highest", 2, (r) => Math.max(...r))];
  const start = Math.max(0, values.step === undefined ? steps.length - 1 : steps.indexOf(Number(values.step)));
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: start, "aria-label": "Step" });
  const member = el("select", { "aria-label": "Trajectory of the step" });
  const said = el("span", { role: "status" }), talk = el("div");
  let asked = 0;

  async function show() {
    const mine = ++asked, number = Number(slider.value), chosen = at(steps[number]);
    if (member.dataset.step !== String(number)) {
      const held = member.selectedIndex;
      member.replaceChildren(...chosen.map((row) => el("option", {}, `${row.id}, reward ${short(row.reward)}`)));
      member.selectedIndex = Math.max(0, Math.min(held, chosen.length - 1));
      member.dataset.step = number;
    }
    const before = number ? at(steps[number - 1]) : [];
    const pair = [chosen[member.selectedIndex], before[Math.min(member.selectedIndex, before.length - 1)]];
    const [now, old] = await Promise.all(pair.map((row) => row && get(`runs/${run}/trajectory`, { id: row.id, step: row.step, split: row.split })));
    if (mine !== asked) return;
    said.textContent = `step ${now.step}, ${number + 1} of ${steps.length}${old ? `; marked is what differs from ${old.id} at step ${old.step}` : ""}`;
    talk.replaceChildren(heading(now, run), el("p", {}, el("a", { href: address("one", { id: now.id, step: now.step, split: now.split }, run) }, "Its tokens")), ...inStep([now.messages, old?.messages ?? []]).filter(([m]) => m).map(([m, before]) => message(m, { other: before ?? undefined, kind: "±" })));
  }
  slider.addEventListener("input", () => { remember({ step: steps[slider.value] }); show(); });
  member.addEventListener("change", show);
  await show();
  const table = address("trajectories", { task_id: values.task_id, sort: "step" }, run);
  return { element: el("div", {}, back, el("h2", {}, `Task ${values.task_id} over training`), el("p", {}, el("a", { href: table }, `All ${total} trajectories`), total > MOST ? `; the first ${MOST} are here` : ""),
    lineChart(curves, { label: "Reward of the task" }), el("div", { class: "bar" }, el("label", { class: "wide" }, "Step", slider), el("label", {}, "Trajectory", member), said), talk) };
}
