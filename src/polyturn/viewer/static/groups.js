// Groups with their rewards, and the timeline of a step's episodes.

import { PAGE_SIZE, addressForm, el, get, go, pager, remember, route, select, short } from "/static/base.js";
import { strip, timeline as drawTimeline } from "/static/charts.js";

const EVERY = "*"; // all splits, in the address; without a split, the page shows training

// Groups

export async function groups(run, values, info) {
  const split = values.split ?? (info.splits.includes("train") ? "train" : EVERY);
  const data = await get(`runs/${run}/groups`, { split: split === EVERY ? "" : split, step: values.step, offset: values.offset, limit: PAGE_SIZE });
  const rewards = data.rows.flatMap((r) => r.reward_list).filter((r) => typeof r === "number");
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const body = el("tbody", {}, ...data.rows.map((row) => el("tr", { tabindex: 0, "data-key": `${row.group} ${row.step} ${row.split}`, onclick: () => go("trajectories", { group: row.group, split: row.split, min_step: row.step, max_step: row.step }), onkeydown: (e) => { if (e.key === "Enter") e.currentTarget.click(); } },
    el("td", {}, row.group), el("td", { class: "number" }, String(row.step)), el("td", {}, row.split), el("td", {}, strip(row.reward_list, low, high)),
    el("td", { class: "number" }, String(short(row.reward_mean))), el("td", { class: "number" }, String(short(row.reward_stddev))), el("td", { class: "number" }, String(row.id_count)),
    el("td", { class: "number" }, String(short(row.num_turns_mean))), el("td", { class: row.dropped_min ? "bad" : null }, row.dropped_min ?? ""), el("td", { title: row.question_min }, row.question_min ?? ""))));
  const form = addressForm("groups", select("split", { split }, info.splits, "Split", EVERY), el("label", {}, "Step", el("input", { type: "number", name: "step", value: values.step ?? "" })), el("button", { type: "submit" }, "Show"));
  const head = el("tr", {}, ...[["group"], ["step", 1], ["split"], ["rewards"], ["mean", 1], ["standard deviation", 1], ["size", 1], ["turns", 1], ["dropped"], ["question"]].map(([h, isNumber]) => el("th", { class: isNumber ? "number" : null }, h)));
  return { element: el("div", {}, form, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)), pager("groups", values, data.total, "group", el("span", { class: "muted" }, "the latest first"))), follows: true };
}

// Timeline

export async function timelinePage(run, values, info) {
  const split = values.split ?? (info.splits.includes("train") ? "train" : info.splits[0] ?? "train");
  const data = await get(`runs/${run}/timeline`, { step: values.step, split }), { step } = data;
  const form = addressForm("timeline", el("label", {}, "Step", el("input", { type: "number", name: "step", value: step })), select("split", { split }, info.splits, "Split", null), el("button", { type: "submit" }, "Show"));
  const legend = el("div", { class: "legend" }, ...[["f0", "generation"], ["f1", "tools"], ["f2", "interaction"], ["f3", "waiting"]].map(([c, t]) => el("span", {}, el("i", { class: c }), t)));
  if (!data.episodes.length) return { element: el("div", {}, form, el("p", { class: "muted" }, data.total ? "These trajectories were recorded without the start times of their turns." : `No trajectory of the split ${split} is recorded${step === null ? "" : ` for step ${step}`}.`)), follows: true };
  const picture = el("div");
  let drawn = null;
  function zoom(low, high) {
    if (high !== undefined && !(high - low > 1e-3)) return; // a millisecond
    remember({ low: low === undefined ? "" : Number(low.toPrecision(6)), high: high === undefined ? "" : Number(high.toPrecision(6)) });
    draw();
  }
  function draw() {
    const { low, high } = route().values, range = [Number(low), Number(high)];
    drawn = drawTimeline(data.episodes, { onOpen: (id) => go("one", { id, step, split }), onZoom: zoom, range: low !== undefined && high !== undefined && range[1] > range[0] ? range : null });
    picture.replaceChildren(drawn.element);
  }
  // Zoom around the middle of the range shown by a scale, or move the range by a share of it, within the step.
  function move(scale, by = 0) {
    const size = Math.min((drawn.high - drawn.low) * scale, drawn.whole), middle = (drawn.low + drawn.high) / 2 + by * size, low = Math.min(Math.max(0, middle - size / 2), drawn.whole - size);
    if (size >= drawn.whole) zoom(); else zoom(low, low + size);
    return true;
  }
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  form.append(button("+", "Zoom in", () => move(0.5)), button("−", "Zoom out", () => move(2)), button("‹", "Earlier", () => move(1, -0.5)), button("›", "Later", () => move(1, 0.5)), button("Reset zoom", "Show the whole step", () => zoom()));
  draw();
  const keys = { "+": () => move(0.5), "-": () => move(2), ArrowLeft: () => move(1, -0.5), ArrowRight: () => move(1, 0.5) };
  return { element: el("div", {}, form, legend, el("p", { class: "muted" }, "Drag over the lanes to zoom; a double click shows the whole step."), picture), follows: true, key: (event) => keys[event.key]?.() ?? false };
}

