// One task over training: its rewards, a slider over the steps, and the conversation at a step, compared with the step before.

import { address, back, el, get, reading, remember, say, short } from "/static/base.js";
import { lineChart, palette } from "/static/charts.js";
import { heading, inStep, message, wholePage } from "/static/one.js";

const MOST = 1000;
const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;

export async function task(run, values) {
  const slider = el("input", { type: "range", min: 0, "aria-label": "Step" }), member = el("select", { "aria-label": "Trajectory of the step" });
  const status = el("span", { role: "status" }), talk = el("div"), drawn = el("div"), legend = el("div", { class: "legend" }), all = el("a", { href: address("trajectories", { task_id: values.task_id, sort: "step" }, run) }), more = el("span");
  let rows = [], steps = [], total = 0, numShown = 0, beside = "";
  const tell = () => { say(status, `step ${steps[slider.value]}, ${Number(slider.value) + 1} of ${steps.length}${beside}`); };
  const at = (step) => rows.filter((row) => row.step === step);

  async function load() {
    ({ total, rows } = await get(`runs/${run}/trajectories`, { task_id: values.task_id, split: values.split, sort: "step", desc: "0", limit: MOST }));
    const step = steps[slider.value] ?? Number(values.step ?? NaN);
    steps = [...new Set(rows.map((row) => row.step))];
    slider.max = Math.max(0, steps.length - 1);
    slider.value = steps.includes(step) ? steps.indexOf(step) : steps.length - 1;
    say(all, `All ${total} trajectories`);
    say(more, total > MOST ? `; the first ${MOST} are here` : "");
    draw();
    tell();
  }

  function draw() {
    const rewards = (step) => at(step).map((row) => row.reward).filter((reward) => typeof reward === "number"), known = steps.filter((step) => rewards(step).length);
    const line = (name, color, of) => ({ name, color, isSparse: true, x: known, y: known.map((step) => of(rewards(step))) });
    drawn.replaceChildren(lineChart([line("lowest", 3, (r) => Math.min(...r)), line("mean", 0, mean), line("highest", 2, (r) => Math.max(...r))], { label: "Reward of the task" }));
    legend.replaceChildren(...["highest", "mean", "lowest"].map((name, n) => el("span", {}, el("i", { class: palette([2, 0, 3][n]) }), `${name} reward of the step`)));
  }

  async function show() {
    const mine = ++numShown, number = Number(slider.value), chosen = at(steps[number]), before = number ? at(steps[number - 1]) : [];
    if (member.dataset.step !== String(steps[number])) {
      const index = member.selectedIndex;
      member.replaceChildren(...chosen.map((row) => el("option", {}, `${row.id}, reward ${short(row.reward)}`)));
      member.selectedIndex = Math.max(0, Math.min(index, chosen.length - 1));
      member.dataset.step = steps[number];
    }
    const pair = [chosen[member.selectedIndex], before[Math.min(member.selectedIndex, before.length - 1)]];
    const [now, old] = await Promise.all(pair.map((row) => row && reading(run, row)));
    if (mine !== numShown) return;
    beside = old && !old.problem ? `; differences from ${old.id} at step ${old.step} are marked` : "";
    tell();
    const page = wholePage();
    talk.replaceChildren(heading(now, run), el("p", {}, el("a", { href: address("one", { id: pair[0].id, step: pair[0].step, split: pair[0].split }, run) }, "Its tokens")), ...inStep([now.messages, old?.messages ?? []]).filter(([m]) => m).map(([m, before]) => message(m, { other: before ?? undefined, kind: "±", page })));
  }

  slider.addEventListener("input", () => { remember({ step: steps[slider.value] }); show(); });
  member.addEventListener("change", show);
  await load();
  if (!rows.length || !values.task_id) return { element: el("div", {}, el("div", { class: "pager" }, back()), el("p", { class: "muted" }, "No trajectory of this task is recorded.")), follows: true };
  await show();
  return { element: el("div", {}, el("div", { class: "pager" }, back()), el("h2", {}, `Task ${values.task_id} over training`), el("p", {}, all, more), legend, drawn, el("div", { class: "bar" }, el("label", { class: "wide" }, "Step", slider), el("label", {}, "Trajectory", member), status), talk), update: load, repaint: draw };
}
