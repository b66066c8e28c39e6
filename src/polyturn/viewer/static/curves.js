// Curves of one or several runs: which metrics, over what, how smooth; drag over a chart to zoom into all of them.

import { besidePicker, el, get, kept, remember, select, state, together } from "/static/base.js";
import { banded, lineChart } from "/static/charts.js";

const MOST = 60;
const AXES = [["step", "step"], ["time", "seconds of training"], ["tokens", "sampled tokens"]];

// Names that hold every word, or, without words, those that a run is first judged by, which come first.
function chosen(info, words) {
  const names = Object.keys(info.names);
  return (words.length ? names.filter((name) => words.every((word) => name.toLowerCase().includes(word))) : names.slice(0, info.num_first)).slice(0, MOST);
}

export async function curves(run, values) {
  const runs = together(run, values);
  const alarms = el("div"), grid = el("div", { class: "charts" }), legend = el("div", { class: "legend" });
  const search = el("input", { type: "search", placeholder: "metric, for instance reward", value: values.metric ?? "", "aria-label": "Which metrics" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: values.smooth ?? 0, "aria-label": "Smoothing" });
  const axis = select("axis", { axis: values.axis ?? "step" }, [], "Over");
  axis.querySelector("select").replaceChildren(...AXES.map(([name, label]) => el("option", { value: name, selected: name === (values.axis ?? "step") }, label)));
  const asBand = el("input", { type: "checkbox", checked: values.band === "1" });
  const isLog = el("input", { type: "checkbox", checked: values.log === "1" });
  const low = el("input", { type: "number", step: "any", value: values.low ?? "", "aria-label": "From" }), high = el("input", { type: "number", step: "any", value: values.high ?? "", "aria-label": "To" });
  let asked = 0;

  async function load() {
    const mine = ++asked;
    const infos = await Promise.all(runs.map((index) => get(`runs/${index}/metrics`)));
    const meanings = Object.assign({}, ...infos.map((info) => info.names).reverse());
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const names = [...new Set(infos.flatMap((info) => chosen(info, words)))].slice(0, MOST);
    const over = axis.querySelector("select").value;
    const window = { axis: over, smooth: Number(smoothing.value) || "", low: low.value, high: high.value };
    const drawn = await Promise.all(runs.map((index, at) => get(`runs/${index}/curves`, { ...window, name: names.filter((name) => name in infos[at].names) })));
    if (mine !== asked) return; // something else was asked for since
    const range = low.value !== "" && high.value !== "" && Number(low.value) < Number(high.value) ? [Number(low.value), Number(high.value)] : null;
    grid.replaceChildren(...names.map((name) => chart(name, meanings[name], drawn, { over, range })));
    if (!names.length) grid.replaceChildren(el("p", { class: "muted" }, Object.keys(meanings).length ? `No metric matches; there are ${Object.keys(meanings).length}.` : "Nothing was recorded yet."));
    alarms.replaceChildren(...infos[0].alarms.slice(-3).map((alarm) => el("div", { class: "problem" }, `step ${alarm.step}: ${alarm.message}`)));
  }

  function chart(name, meaning, drawn, { over, range }) {
    const series = runs.flatMap((index, color) => {
      const found = drawn[color][name];
      if (!found) return [];
      const one = { name: state.runs[index].name, color, isSparse: found.is_sparse };
      if (!found.smooth_x.length) return [{ ...one, x: found.x, y: found.y }];
      return [{ ...one, x: found.x, y: found.y, isFaint: true }, { ...one, x: found.smooth_x, y: found.smooth_y, isSparse: false }];
    });
    const smooth = series.filter((one) => !one.isFaint && one.x.length), isBand = asBand.checked && smooth.length > 1;
    const total = Math.max(0, ...drawn.map((of) => of[name]?.total ?? 0));
    return el("section", { class: "chart", "aria-label": name }, el("h2", {}, name), meaning ? el("p", { class: "meaning" }, meaning) : null,
      lineChart(isBand ? banded(smooth) : series, { label: name, band: isBand ? [2, 1] : null, isLog: isLog.checked, range, axis: over, onZoom: zoom }), total > 1200 ? el("p", { class: "muted" }, `${total} points; drag to see single ones`) : null);
  }

  function zoom(from = "", to = "") {
    low.value = from === "" ? "" : Number(from.toPrecision(6));
    high.value = to === "" ? "" : Number(to.toPrecision(6));
    changed();
  }

  async function changed() {
    remember({ metric: search.value, smooth: Number(smoothing.value) || "", axis: axis.querySelector("select").value === "step" ? "" : axis.querySelector("select").value, log: isLog.checked ? 1 : "", band: asBand.checked ? 1 : "", low: low.value, high: high.value });
    await load();
  }

  legend.replaceChildren(...runs.map((index, color) => el("span", {}, el("i", { class: `ink${color}` }), state.runs[index].name)));
  for (const input of [search, smoothing, low, high]) input.addEventListener("input", changed);
  for (const input of [axis, isLog, asBand]) input.addEventListener("change", changed);
  const bar = el("div", { class: "bar" }, el("label", {}, "Metrics", search), kept ? null : el("label", {}, "Smoothing", smoothing), kept ? null : axis, el("label", {}, "From", low), el("label", {}, "to", high),
    el("label", { class: "check" }, isLog, "log scale"), runs.length > 1 ? el("label", { class: "check" }, asBand, "runs as a band") : null, el("button", { type: "button", onclick: () => zoom() }, "Whole run"), besidePicker(run, "curves", runs));
  await load();
  return { element: el("div", {}, alarms, bar, runs.length > 1 ? legend : null, grid), update: load, repaint: load };
}
