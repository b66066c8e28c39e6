// Charts by uPlot (line charts of metrics), and small pictures in SVG: dots of a group's rewards, the timeline of a step.

import { el, say, short, svg } from "/static/base.js";

const COLOURS = 6, DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 6], [4, 8]];
export const palette = (color) => `ink${color % COLOURS}`;
const WHOLE = [...Array(15).keys()].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e));

// The colour of a class in the page's theme, for a canvas, which has no classes.
function ink(name, property = "color") {
  const probe = document.body.appendChild(el("i", { class: name }));
  const value = getComputedStyle(probe)[property];
  probe.remove();
  return value;
}

const paled = (color) => color.replace("rgb(", "rgba(").replace(")", ", 0.25)");

// Several curves, each with its own x values, on the x values of all of them.
function joined(curves) {
  const drawn = curves.filter(({ x }) => x.length);
  return drawn.length ? uPlot.join(drawn.map(({ x, y }) => [x, y])) : [[]];
}

// The mean, lowest and highest curve of several runs, over the range of x that all of them cover.
export function banded(curves) {
  const drawn = curves.filter(({ x }) => x.length), low = Math.max(...drawn.map(({ x }) => x[0])), high = Math.min(...drawn.map(({ x }) => x.at(-1)));
  const x = [...new Set(drawn.flatMap((curve) => curve.x))].filter((v) => v >= low && v <= high).sort((a, b) => a - b);
  const at = drawn.map((curve) => { let i = 0; return x.map((v) => {
    while (curve.x[i + 1] <= v) i++;
    const share = i + 1 < curve.x.length ? (v - curve.x[i]) / (curve.x[i + 1] - curve.x[i]) : 0;
    return curve.y[i] + share * ((curve.y[i + 1] ?? 0) - curve.y[i]);
  }); });
  const line = (name, of, more = {}) => ({ name, color: 0, x, y: x.map((_, i) => of(at.map((y) => y[i]))), ...more });
  return [line(`mean of ${drawn.length} runs`, (all) => all.reduce((a, b) => a + b, 0) / all.length), line("lowest", (all) => Math.min(...all), { isFaint: true }), line("highest", (all) => Math.max(...all), { isFaint: true })];
}

// Curves stacked to their sum, the last one on top; unchanged if their x values differ, because the sums were not measured.
export function stack(curves) {
  if (curves.some((c) => c.x.join() !== curves[0].x.join())) return curves;
  const sums = curves[0]?.x.map(() => 0);
  return curves.map((c) => ({ ...c, isFilled: true, y: c.y.map((v, i) => (sums[i] += v)) })).reverse();
}

// The width of a picture in pixels, at most `most`; limited to the screen, so that text is not scaled down on a telephone.
const across = (most) => Math.min(most, document.getElementById("main").clientWidth - 32);

const fromZero = (u, low, high) => [Math.min(low, 0), Math.max(high, 0) * 1.05];
// For values that are all 0, uPlot would show 0 to 100.
const around = (u, low, high) => (low === 0 && high === 0 ? [0, 1] : low === null ? [null, null] : uPlot.rangeNum(low, high, 0.1, true));

// curves: [{name, color, dash, x, y, isFaint, isSparse, isFilled}]. Measured values are always drawn, faint behind a
// smoothed curve (`isFaint`). Points of a sparse curve (evaluations) are marked, because nothing was measured between them. `range` is
// the part of the x axis to show. `onZoom(low, high)` gets the range that was dragged over, and no arguments after a double click.
export function lineChart(curves, { label = "", height = 170, isLog = false, range = null, axis = "step", band = null, onZoom = () => {} } = {}) {
  const positive = isLog ? curves.map((c) => ({ ...c, y: c.y.map((v) => (v > 0 ? v : null)) })) : curves;
  const drawn = positive.filter(({ x }) => x.length);
  const data = joined(positive);
  const readout = el("p", { class: "told muted", "aria-hidden": "true" }, "\u00a0");
  const last = curves.filter((c) => c.x.length && !c.isFaint).map((c) => `${c.name}: ${short(c.y.at(-1))} at ${axis} ${short(c.x.at(-1))}`);
  const box = el("div", { class: "plot", role: "img", "aria-label": `${label}. ${last.join("; ")}` });
  const soft = ink("ink-soft"), line = ink("ink-line");
  const ticks = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui, sans-serif", values: (u, splits) => splits.map((v) => (v === null ? "" : short(v))) };
  const tell = (u) => {
    const at = u.cursor.idx;
    say(readout, at === null || at === undefined ? "\u00a0" : `${axis} ${short(data[0][at])}: ${drawn.map((c, i) => (typeof data[i + 1][at] === "number" && !c.isFaint ? `${drawn.length > 1 ? `${c.name} ` : ""}${short(data[i + 1][at])}` : "")).filter(Boolean).join(" · ")}`);
  };
  const options = {
    width: 320, height, legend: { show: false }, series: [{}, ...drawn.map((c) => {
      const stroke = ink(palette(c.color));
      return { stroke, dash: DASHES[(c.dash ?? 0) % DASHES.length], fill: c.isFilled ? paled(stroke) : undefined, alpha: c.isFaint ? 0.3 : 1, width: 1.6, spanGaps: true, points: { show: c.isSparse || c.x.length === 1, size: 6, fill: stroke } };
    })],
    bands: drawn.length > 1 && drawn.every((c) => c.isFilled) ? drawn.slice(1).map((_, i) => ({ series: [i + 1, i + 2] })) : band && drawn.length > Math.max(...band) ? [{ series: band.map((i) => i + 1), fill: paled(ink(palette(0))) }] : [],
    scales: { x: { time: false, range: (u, low, high) => range ?? (data[0].length === 1 ? [Math.max(0, data[0][0] - 1), data[0][0] + 1] : [low, high]) }, y: { distr: isLog ? 3 : 1, ...(isLog ? {} : { range: curves.some((c) => c.isFilled) ? fromZero : around }) } },
    axes: [{ ...ticks, size: 28, space: 60, incrs: axis === "time" ? undefined : WHOLE }, { ...ticks, size: 54, space: 32 }],
    cursor: { sync: { key: "curves" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { onZoom(); return null; } }, points: { size: 6 } },
    hooks: {
      setCursor: [tell],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const [low, high] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        onZoom(low, high);
      }],
    },
  };
  if (drawn.length) {
    box.plot = new uPlot(options, data, box);
    let wasShown = false;
    new ResizeObserver(() => { // also when the chart leaves the page: uPlot keeps every chart that shares a cursor
      if (!box.isConnected && wasShown) box.plot.destroy();
      else if (box.clientWidth > 0) box.plot.setSize({ width: box.clientWidth, height });
      wasShown ||= box.isConnected;
    }).observe(box);
  } else box.append(el("p", { class: "muted" }, isLog && curves.some((c) => c.x.length) ? "No value above 0." : "Nothing here."));
  return el("div", { class: "drawn" }, box, readout);
}

// data: {steps, low, high, counts: [column][bin], mean}. A darker field has a larger share of the values of its column.
export function heatMap({ steps, low, high, counts, mean }, { label = "" } = {}) {
  const width = 400, height = 190, left = 52, top = 6, bottom = 20, wide = (width - left) / counts.length, tall = (height - top - bottom) / counts[0].length;
  const box = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "heat-map", role: "img", "aria-label": `${label}: mean ${short(mean[0])} at step ${steps[0]}, ${short(mean.at(-1))} from step ${steps.at(-1)} on` });
  const Y = (v) => height - bottom - ((Math.min(Math.max(v, low), high) - low) / (high - low)) * (height - top - bottom);
  counts.forEach((column, i) => {
    const most = Math.max(...column), group = svg("g", {}, svg("title", {}, `step ${steps[i]}${steps[i + 1] > steps[i] + 1 ? `–${steps[i + 1] - 1}` : ""}: ${column.reduce((a, b) => a + b, 0)} values, mean ${short(mean[i])}`));
    column.forEach((count, bin) => { if (count) group.append(svg("rect", { x: left + i * wide, y: height - bottom - (bin + 1) * tall, width: wide, height: tall, class: "f0", "fill-opacity": Math.sqrt(count / most).toFixed(2) })); });
    box.append(group);
  });
  box.append(svg("polyline", { class: "mean", points: mean.map((v, i) => `${left + (i + 0.5) * wide},${Y(v)}`).join(" ") }));
  for (const v of [low, (low + high) / 2, high]) box.append(svg("text", { x: left - 4, y: Math.max(Y(v) + 4, 11), "text-anchor": "end" }, String(short(Number(v.toPrecision(3))))));
  for (const [i, anchor] of [[0, "start"], [steps.length - 1, "end"]]) if (i || anchor === "start") box.append(svg("text", { x: i ? width : left, y: height - 5, "text-anchor": anchor }, String(steps[i])));
  return box;
}

// A dot for each reward; `low` and `high` are the range of all groups shown.
export function strip(rewards, low, high) {
  const box = svg("svg", { viewBox: "0 0 150 16", class: "strip", role: "img" });
  box.append(svg("title", {}, `rewards ${rewards.map(short).join(", ")}`));
  box.append(svg("line", { x1: 4, x2: 146, y1: 8, y2: 8, class: "axis" }));
  const at = high > low ? (r) => 6 + ((r - low) / (high - low)) * 138 : () => 75;
  const stacked = new Map();
  for (const reward of rewards) {
    if (typeof reward !== "number") continue;
    const x = Math.round(at(reward)), n = stacked.get(x) ?? 0;
    stacked.set(x, n + 1);
    box.append(svg("circle", { cx: x, cy: 8 + (n % 2 ? -1 : 1) * Math.ceil(n / 2) * 1.6, r: 3, class: "f0", "fill-opacity": 0.65 }));
  }
  return box;
}

// The rewards of a group on one line: its mean, one standard deviation to either side, and each member as a link.
export function groupStrip(data, href) {
  const known = data.members.filter((m) => typeof m.reward === "number");
  const width = across(700), height = 96, left = 20, base = 48;
  const box = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "group-strip", role: "group", "aria-label": "The rewards of the group" });
  if (!known.length) return box;
  const spread = data.std ?? 0;
  let low = Math.min(...known.map((m) => m.reward), (data.mean ?? Infinity) - spread), high = Math.max(...known.map((m) => m.reward), (data.mean ?? -Infinity) + spread);
  if (low === high) { low -= 0.5; high += 0.5; }
  const X = (v) => left + ((v - low) / (high - low)) * (width - 2 * left);
  if (data.mean !== null && spread) box.append(svg("rect", { x: X(data.mean - spread), width: X(data.mean + spread) - X(data.mean - spread), y: base - 26, height: 52, class: "f3", "fill-opacity": 0.25 }));
  box.append(svg("line", { x1: left, x2: width - left, y1: base, y2: base, class: "axis" }));
  if (data.mean !== null) {
    box.append(svg("line", { x1: X(data.mean), x2: X(data.mean), y1: base - 28, y2: base + 28, class: "mean" }));
    box.append(svg("text", { x: Math.min(Math.max(X(data.mean), 60), width - 60), y: 14, "text-anchor": "middle" }, `mean ${short(data.mean)} ± ${short(spread)}`));
  }
  for (const [value, anchor] of [[low, "start"], [high, "end"]]) box.append(svg("text", { x: X(value), y: height - 4, "text-anchor": anchor }, String(short(value))));
  for (const [x, members] of Map.groupBy(known, (member) => Math.round(X(member.reward)))) members.forEach((member, n) => {
    const isOwn = member.id === data.id;
    const link = svg("a", { href: href(member.id), "aria-label": `${member.id}, reward ${short(member.reward)}${isOwn ? ", this one" : ""}` });
    link.append(svg("title", {}, `${member.id}: reward ${short(member.reward)}, advantage ${short(member.advantage)}`),
      svg("circle", { cx: x, cy: base + (n - (members.length - 1) / 2) * Math.min(11, 44 / members.length), r: isOwn ? 8 : 5, class: isOwn ? "own f1" : member.is_failed ? "f3" : "f0" }));
    box.append(link);
  });
  return box;
}

const PARTS = [["generate", "f0"], ["tools", "f1"], ["interaction", "f2"]];
const begins = (episode) => episode.turns[0].start;
const ends = (episode) => { const last = episode.turns.at(-1); return last.start + PARTS.reduce((sum, [name]) => sum + (last[name] ?? 0), 0); };

// episodes: [{id, stop, turns: [{start, generate, tools, interaction}]}]; each is a lane. The axis above them stays in
// view. `range` is the part to show. `onZoom(from, to)` gets the range that was dragged over, and no arguments after a double click.
export function timeline(episodes, { onOpen, onZoom, range = null }) {
  const lane = episodes.length > 120 ? 6 : 16, width = across(1000), left = lane > 10 ? 90 : 4, whole = Math.max(1e-6, ...episodes.map(ends)), [low, high] = range ?? [0, whole];
  const X = (s) => left + ((s - low) / (high - low)) * (width - left - 4), S = (x) => low + ((x - left) / (width - left - 4)) * (high - low);
  const axis = svg("svg", { viewBox: `0 0 ${width} 22`, class: "lanes-axis", "aria-hidden": "true" });
  const box = svg("svg", { viewBox: `0 0 ${width} ${episodes.length * lane}`, role: "group", class: "lanes", "aria-label": `${episodes.length} episodes, from ${short(low)} to ${short(high)} seconds` });
  const rough = (high - low) / 6, size = 10 ** Math.floor(Math.log10(rough)), every = size * ([1, 2, 5, 10].find((m) => m * size >= rough) ?? 10);
  const first = Math.ceil(low / every);
  for (let n = 0, at; n < 20 && (at = (first + n) * every) <= high; n++) { // counted, because adding to a large `low` may not change it
    axis.append(svg("text", { x: X(at), y: 15, "text-anchor": X(at) > width - 30 ? "end" : "middle" }, `${short(Number(at.toPrecision(6)))} s`));
    box.append(svg("line", { x1: X(at), x2: X(at), y1: 0, y2: episodes.length * lane, class: "axis" }));
  }
  const clip = (from, to) => [Math.max(X(Math.max(from, low)), left), Math.min(X(Math.min(to, high)), width - 4)];
  const bar = (from, to, y, least, more) => { const [x, end] = clip(from, to); return to >= low && from <= high ? [svg("rect", { x, y, width: Math.max(least, end - x), height: lane - 2, ...more })] : []; };
  episodes.forEach((episode, i) => {
    const group = svg("g", { tabindex: 0, role: "link", "aria-label": `open ${episode.id}` });
    group.append(svg("title", {}, `${episode.id}: ${episode.turns.length} turns in ${short(Number((ends(episode) - begins(episode)).toPrecision(3)))} s, ${episode.stop}`));
    if (left > 10) group.append(svg("text", { x: 2, y: i * lane + 11 }, episode.id.slice(0, 14)));
    group.append(...bar(begins(episode), ends(episode), i * lane, 1, { class: "f3", "fill-opacity": 0.35 }));
    for (const turn of episode.turns) {
      let at = turn.start;
      for (const [name, color] of PARTS) {
        const spent = turn[name] ?? 0;
        if (spent > 0) group.append(...bar(at, at + spent, i * lane, 0.6, { class: color }));
        at += spent;
      }
    }
    group.addEventListener("click", () => { if (!dragged) onOpen(episode.id); });
    group.addEventListener("keydown", (event) => { if (event.key === "Enter") onOpen(episode.id); });
    box.append(group);
  });
  const chosen = box.appendChild(svg("rect", { y: 0, height: episodes.length * lane, class: "chosen-part", width: 0 }));
  let from = null, dragged = false;
  const pointerX = (event) => { const { left: edge, width: wide } = box.getBoundingClientRect(); return Math.min(Math.max(((event.clientX - edge) / wide) * width, left), width - 4); };
  box.addEventListener("pointerdown", (event) => { from = pointerX(event); dragged = false; });
  box.addEventListener("pointermove", (event) => { if (from === null) return; const to = pointerX(event); dragged ||= Math.abs(to - from) > 6; if (dragged) { chosen.setAttribute("x", Math.min(from, to)); chosen.setAttribute("width", Math.abs(to - from)); } });
  box.addEventListener("pointerup", (event) => { const to = pointerX(event); if (from !== null && dragged) onZoom(S(Math.min(from, to)), S(Math.max(from, to))); from = null; });
  box.addEventListener("pointerleave", () => { from = null; chosen.setAttribute("width", 0); });
  box.addEventListener("dblclick", () => onZoom());
  return { element: el("div", { class: "timeline" }, axis, box), low, high, whole };
}
