// Groups with their rewards, and when the episodes of a step did what.

import { el, get, go, place, remember, select, short } from "/static/base.js";
import { strip, timeline as drawTimeline } from "/static/charts.js";

const SIZE = 100;

// Groups

export async function groups(run, values, info) {
  const wanted = { split: values.split ?? (info.splits.includes("train") ? "train" : ""), step: values.step, offset: values.offset };
  const found = await get(`runs/${run}/groups`, { ...wanted, limit: SIZE });
  const rewards = found.rows.flatMap((r) => r.reward_list).filter((r) => typeof r === "number");
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const body = el("tbody", {}, ...found.rows.map((row) => el("tr", { tabindex: 0, "data-key": `${row.group} ${row.step} ${row.split}`, onclick: () => go("trajectories", { group: row.group, split: row.split, min_step: row.step, max_step: row.step }), onkeydown: (e) => { if (e.key === "Enter") e.currentTarget.click(); } },
    el("td", {}, row.group), el("td", { class: "number" }, String(row.step)), el("td", {}, row.split), el("td", {}, strip(row.reward_list, low, high)),
    el("td", { class: "number" }, String(short(row.reward_mean))), el("td", { class: "number" }, String(short(row.reward_stddev))), el("td", { class: "number" }, String(row.id_list.length)),
    el("td", { class: "number" }, String(short(row.num_turns_mean))), el("td", { class: row.dropped_min ? "bad" : null }, row.dropped_min ?? ""), el("td", { title: row.question_min }, row.question_min ?? ""))));
  const form = el("form", { class: "bar" }, select("split", wanted, info.splits, "Split"), el("label", {}, "Step", el("input", { type: "number", name: "step", value: values.step ?? "" })), el("button", { type: "submit" }, "Show"));
  form.addEventListener("submit", (e) => { e.preventDefault(); go("groups", Object.fromEntries(new FormData(form))); });
  form.addEventListener("change", (e) => { if (e.target.matches("select")) go("groups", Object.fromEntries(new FormData(form))); });
  const offset = Number(values.offset ?? 0);
  const pager = el("div", { class: "pager" }, el("button", { type: "button", disabled: offset <= 0, onclick: () => go("groups", { ...values, offset: Math.max(0, offset - SIZE) || "" }) }, "‹ before"),
    el("span", { role: "status" }, found.total ? `${offset + 1}–${Math.min(offset + SIZE, found.total)} of ${found.total} groups, the latest first` : "no group"),
    el("button", { type: "button", disabled: offset + SIZE >= found.total, onclick: () => go("groups", { ...values, offset: offset + SIZE }) }, "after ›"));
  const head = el("tr", {}, ...["group", "step", "split", "rewards", "mean", "standard deviation", "size", "turns", "dropped", "question"].map((h) => el("th", {}, h)));
  return { element: el("div", {}, form, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)), pager), follows: true };
}

// Timeline

export async function timelinePage(run, values, info) {
  const split = values.split ?? (info.splits.includes("train") ? "train" : info.splits[0] ?? "train");
  const step = values.step ?? info.last_step ?? 0;
  const form = el("form", { class: "bar" }, el("label", {}, "Step", el("input", { type: "number", name: "step", value: step })), select("split", { split }, info.splits, "Split"), el("button", { type: "submit" }, "Show"));
  form.addEventListener("submit", (e) => { e.preventDefault(); go("timeline", Object.fromEntries(new FormData(form))); });
  const found = await get(`runs/${run}/timeline`, { step, split });
  const legend = el("div", { class: "legend" }, ...[["f0", "generation"], ["f1", "tools"], ["f2", "interaction"], ["f3", "waiting"]].map(([c, t]) => el("span", {}, el("i", { class: c }), t)));
  if (!found.episodes.length) return { element: el("div", {}, form, el("p", { class: "muted" }, found.total ? "These trajectories were recorded without the times at which their turns began." : `No trajectory of the split ${split} is recorded for step ${step}.`)), follows: true };
  const picture = el("div");
  let drawn = null;
  function zoom(low, high) {
    if (high !== undefined && !(high - low > 1e-3)) return; // a millisecond
    remember({ low: low === undefined ? "" : Number(low.toPrecision(6)), high: high === undefined ? "" : Number(high.toPrecision(6)) });
    draw();
  }
  function draw() {
    const { low, high } = place().values, range = [Number(low), Number(high)];
    drawn = drawTimeline(found.episodes, { onOpen: (id) => go("one", { id, step, split }), onZoom: zoom, range: low !== undefined && high !== undefined && range[1] > range[0] ? range : null });
    picture.replaceChildren(drawn.element);
  }
  // Around the middle of what is shown: half of it, twice of it, or beside it, inside the step.
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

