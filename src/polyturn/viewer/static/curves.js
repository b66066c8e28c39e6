// Curves of one or several runs, with a choice of metrics, x axis and smoothing. Dragging over a chart zooms into all charts.

import { besidePicker, el, get, kept, remember, select, state, together } from "/static/base.js";
import { banded, lineChart, stack } from "/static/charts.js";
import { inline } from "/static/markdown.js";

const MOST = 60, MOST_GROUPS = 30;
const MOST_ASKED = 16_000; // characters of an address; the server refuses heads of more than 32,768 bytes
const AXES = [["step", "step"], ["time", "seconds of training"], ["tokens", "sampled tokens"]];

// Names that contain every word. Without words: the run's most important metrics, which come first, or all if it has none of them.
function chosen(info, words) {
  const names = Object.keys(info.names);
  return words.length ? names.filter((name) => words.every((word) => name.toLowerCase().includes(word))) : names.slice(0, info.num_first || names.length);
}

// The panels to draw: a shared panel if one of its metrics is chosen, and a separate one for every other metric.
function panels(infos, names) {
  const known = new Map(infos.flatMap((info) => info.panels).map((panel) => [panel.title, panel])), byTitle = new Map();
  for (const name of names) {
    const panel = [...known.values()].find((one) => one.names.includes(name)) ?? { title: name, names: [name] };
    byTitle.set(panel.title, panel);
  }
  return [...byTitle.values()];
}

// Pairs of a group, such as `policy/`, and its names; a name without a group is a group of its own.
const groupsOf = (names) => Object.entries(Object.groupBy(names, (name) => name.replace(/\/.*/s, "/"))).sort();

// The curves of a run, in as many requests as the length of their names requires.
async function drawnOf(run, window, names) {
  const parts = [[]];
  let size = 0;
  for (const name of names) {
    const more = encodeURIComponent(name).length + 6;
    if (size && size + more > MOST_ASKED) { parts.push([]); size = 0; }
    parts.at(-1).push(name);
    size += more;
  }
  return Object.assign({}, ...await Promise.all(parts.map((name) => get(`runs/${run}/curves`, { ...window, name }))));
}

export async function curves(run, values) {
  const runs = together(run, values);
  const alarms = el("div"), groups = el("nav", { class: "facets", "aria-label": "Groups of metrics" }), grid = el("div", { class: "charts" }), legend = el("div", { class: "legend" });
  const search = el("input", { type: "search", placeholder: "metric, for instance reward", value: values.metric ?? "", "aria-label": "Which metrics" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: values.smooth ?? 0, "aria-label": "Smoothing" });
  const axis = select("axis", { axis: values.axis ?? "step" }, [], "Over");
  axis.querySelector("select").replaceChildren(...AXES.map(([name, label]) => el("option", { value: name, selected: name === (values.axis ?? "step") }, label)));
  const asBand = el("input", { type: "checkbox", checked: values.band === "1" });
  const isLog = el("input", { type: "checkbox", checked: values.log === "1" });
  const low = el("input", { type: "number", step: "any", value: values.low ?? "", "aria-label": "From" }), high = el("input", { type: "number", step: "any", value: values.high ?? "", "aria-label": "To" });
  let numLoads = 0;

  async function load() {
    const mine = ++numLoads;
    const infos = await Promise.all(runs.map((index) => get(`runs/${index}/metrics`)));
    const meanings = Object.assign({}, ...infos.map((info) => info.names).reverse());
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = [...new Set(infos.flatMap((info) => chosen(info, words)))];
    const shown = panels(infos, matching.slice(0, MOST)), names = [...new Set(shown.flatMap((panel) => panel.names))].slice(0, MOST);
    const over = axis.querySelector("select").value;
    const window = { axis: over, smooth: Number(smoothing.value) || "", low: low.value, high: high.value };
    const drawn = await Promise.all(runs.map((index, at) => drawnOf(index, window, names.filter((name) => Object.hasOwn(infos[at].names, name)))));
    if (mine !== numLoads) return; // a newer request replaces this one
    const range = low.value !== "" && high.value !== "" && Number(low.value) < Number(high.value) ? [Number(low.value), Number(high.value)] : null;
    grid.replaceChildren(...shown.filter((panel) => names.includes(panel.names[0])).map((panel) => chart(panel, meanings, drawn, { over, range })));
    const every = groupsOf(Object.keys(meanings)), further = every.length - MOST_GROUPS;
    groups.replaceChildren(...every.slice(0, MOST_GROUPS).map(([name, of]) => el("button", { type: "button", class: "facet", title: name, "aria-pressed": String(search.value === name), onclick: () => { search.value = search.value === name ? "" : name; changed(); } }, `${name.replace(/\/$/, "")} (${of.length})`)), ...(further > 0 ? [el("span", { class: "muted" }, `${further} further groups`)] : []));
    if (!names.length) grid.replaceChildren(el("p", { class: "muted" }, Object.keys(meanings).length ? `No metric matches; there are ${Object.keys(meanings).length}.` : "Nothing was recorded yet."));
    const numLeftOut = Math.max(0, ...infos.map((info) => info.num_left_out ?? 0)); // only a report leaves metrics out
    if (matching.length > MOST) grid.append(el("p", { class: "muted" }, `${MOST} of ${matching.length} metrics are shown; write a part of the names of others above.`));
    if (numLeftOut) grid.append(el("p", { class: "muted" }, `${numLeftOut} further metrics are not in this report; the viewer shows them.`));
    alarms.replaceChildren(...infos[0].alarms.slice(-3).map((alarm) => el("div", { class: "problem" }, alarm.message)));
  }

  // With several runs, each run has a colour and each metric of the panel a dash pattern. With one run, each metric has a colour.
  function chart({ title, names, stacked }, meanings, drawn, { over, range }) {
    const isOne = runs.length === 1, label = (at, name) => (names.length === 1 ? state.runs[runs[at]].name : isOne ? name : `${state.runs[runs[at]].name} ${name}`);
    const series = runs.flatMap((_, at) => names.flatMap((name, number) => {
      const curve = drawn[at][name];
      if (!curve) return [];
      const one = { name: label(at, name), color: isOne ? number : at, dash: isOne ? 0 : number, isSparse: curve.is_sparse };
      if (!curve.smooth_x.length) return [{ ...one, x: curve.x, y: curve.y }];
      return [{ ...one, x: curve.x, y: curve.y, isFaint: true }, { ...one, x: curve.smooth_x, y: curve.smooth_y, isSparse: false }];
    }));
    const smooth = series.filter((one) => !one.isFaint && one.x.length), isBand = asBand.checked && names.length === 1 && smooth.length > 1;
    const total = Math.max(0, ...drawn.flatMap((of) => names.map((name) => of[name]?.total ?? 0)));
    const sentences = [...new Set(names.map((name) => meanings[name]).filter(Boolean))];
    const key = names.length === 1 ? null : el("div", { class: "legend" }, ...names.map((name, number) => el("span", { title: meanings[name] || null }, el("i", { class: isOne ? `ink${number % 6}` : `dash dash${number % 6}` }), name)));
    return el("section", { class: "chart", "aria-label": title }, el("h2", { title }, title), sentences.length ? el("p", { class: "meaning" }, ...inline(sentences.slice(0, 2).join(" "))) : null, key,
      lineChart(isBand ? banded(smooth) : stacked && isOne ? stack(smooth) : series, { label: title, band: isBand ? [2, 1] : null, isLog: isLog.checked, range, axis: over, onZoom: zoom }), total > 1200 ? el("p", { class: "muted" }, `${total} points; drag to zoom in`) : null);
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
    el("label", { class: "check" }, isLog, "log scale"), runs.length > 1 ? el("label", { class: "check" }, asBand, "runs as a band") : null, el("button", { type: "button", onclick: () => zoom() }, "Reset zoom"), besidePicker(run, "curves", runs));
  await load();
  return { element: el("div", {}, alarms, bar, groups, runs.length > 1 ? legend : null, grid), update: load, repaint: load };
}
