// Curves of one or several runs: which metrics, over what, how smooth; drag over a chart to zoom into all of them.

import { el, get, place, remember, select, state } from "/static/base.js";
import { lineChart } from "/static/charts.js";

const FIRST = [/^warm_start\/loss\/total$/, /^warm_start\/loss\/sft$/, /^eval\/.*\/success$/, /^reward\/mean$/, /^rollout\/turns$/, /^policy\/entropy$/, /^loss\/grad_norm$/, /^buffer\/groups_kept$/, /^policy\/approx_kl$/, /^time\/step_s$/, /^time\/other_share$/];
const MOST = 60;
const AXES = [["step", "step"], ["time", "seconds of training"], ["tokens", "sampled tokens"]];
const MAX_RUNS = 6;

const rank = (name) => { const at = FIRST.findIndex((pattern) => pattern.test(name)); return at < 0 ? FIRST.length : at; };

// Names that hold every word, or, without words, those that a run is first judged by.
function chosen(names, words) {
  const found = names.filter((name) => (words.length ? words.every((word) => name.toLowerCase().includes(word)) : rank(name) < FIRST.length));
  return found.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)).slice(0, MOST);
}

export async function curves(run, values) {
  const beside = (values.with ?? "").split(",").filter(Boolean).map(Number).filter((i) => state.runs[i] && i !== run);
  const runs = [run, ...beside].slice(0, MAX_RUNS);
  const alarms = el("div"), grid = el("div", { class: "charts" }), legend = el("div", { class: "legend" });
  const search = el("input", { type: "search", placeholder: "metric, for instance reward", value: values.metric ?? "", "aria-label": "Which metrics" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: values.smooth ?? 0, "aria-label": "Smoothing" });
  const axis = select("axis", { axis: values.axis ?? "step" }, [], "Over");
  axis.querySelector("select").replaceChildren(...AXES.map(([name, label]) => el("option", { value: name, selected: name === (values.axis ?? "step") }, label)));
  const isLog = el("input", { type: "checkbox", checked: values.log === "1" });
  const low = el("input", { type: "number", step: "any", value: values.low ?? "", "aria-label": "From" }), high = el("input", { type: "number", step: "any", value: values.high ?? "", "aria-label": "To" });
  let asked = 0;

  async function load() {
    const mine = ++asked;
    const infos = await Promise.all(runs.map((index) => get(`runs/${index}/metrics`)));
    const meanings = Object.assign({}, ...infos.map((info) => info.names).reverse());
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const names = chosen(Object.keys(meanings), words);
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
    const total = Math.max(0, ...drawn.map((of) => of[name]?.total ?? 0));
    return el("section", { class: "chart", "aria-label": name }, el("h2", {}, name), meaning ? el("p", { class: "meaning" }, meaning) : null,
      lineChart(series, { label: name, isLog: isLog.checked, range, axis: over, onZoom: zoom }), total > 1200 ? el("p", { class: "muted" }, `${total} points; drag to see single ones`) : null);
  }

  function zoom(from = "", to = "") {
    low.value = from === "" ? "" : Number(from.toPrecision(6));
    high.value = to === "" ? "" : Number(to.toPrecision(6));
    changed();
  }

  async function changed() {
    remember({ metric: search.value, smooth: Number(smoothing.value) || "", axis: axis.querySelector("select").value === "step" ? "" : axis.querySelector("select").value, log: isLog.checked ? 1 : "", low: low.value, high: high.value });
    await load();
  }

  const picker = el("details", { class: "picker" }, el("summary", {}, `Beside: ${beside.length ? `${beside.length} more` : "none"}`), ...state.runs.filter((r) => r.index !== run).map((r) =>
    el("label", { class: "check" }, el("input", { type: "checkbox", value: r.index, checked: beside.includes(r.index), onchange: () => {
      const on = [...picker.querySelectorAll("input:checked")].map((box) => box.value).join(",");
      location.hash = `#/${run}/curves?${new URLSearchParams({ ...place().values, with: on })}`;
    } }), r.name)));
  legend.replaceChildren(...runs.map((index, color) => el("span", {}, el("i", { class: `ink${color}` }), state.runs[index].name)));
  for (const input of [search, smoothing, low, high]) input.addEventListener("input", changed);
  for (const input of [axis, isLog]) input.addEventListener("change", changed);
  const bar = el("div", { class: "bar" }, el("label", {}, "Metrics", search), el("label", {}, "Smoothing", smoothing), axis, el("label", {}, "From", low), el("label", {}, "to", high),
    el("label", { class: "check" }, isLog, "log scale"), el("button", { type: "button", onclick: () => zoom() }, "Whole run"), state.runs.length > 1 ? picker : null);
  await load();
  return { element: el("div", {}, alarms, bar, runs.length > 1 ? legend : null, grid), update: load, repaint: load };
}
