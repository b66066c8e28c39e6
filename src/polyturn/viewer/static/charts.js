// Small pictures in SVG: line charts of metrics, dots of a group's rewards, the timeline of a step.

const NS = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const child of children) element.append(child);
  return element;
}

export function short(value) {
  if (typeof value !== "number") return value ?? "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// series: [{name, color, points: [[x, y], …], smoothed: as points, or null}]. What was measured is always drawn, behind what is smoothed;
// points that stand apart from their neighbours (evaluations) are marked, because the line between them was not measured.
export function lineChart(series, { width = 360, height = 170, label = "" } = {}) {
  const left = 46, right = 8, top = 8, bottom = 22;
  const all = series.flatMap((s) => s.points);
  const box = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const last = series.filter((s) => s.points.length).map((s) => `${s.name}: ${short(s.points.at(-1)[1])} at step ${s.points.at(-1)[0]}`);
  box.append(svg("title", {}, `${label}. ${last.join("; ")}`));
  if (!all.length) return box;
  let x0 = Math.min(...all.map((p) => p[0])), x1 = Math.max(...all.map((p) => p[0]));
  let y0 = Math.min(...all.map((p) => p[1])), y1 = Math.max(...all.map((p) => p[1]));
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  for (const y of [y0, (y0 + y1) / 2, y1]) {
    box.append(svg("line", { x1: left, x2: width - right, y1: Y(y), y2: Y(y), class: "axis" }));
    const text = svg("text", { x: left - 5, y: Y(y) + 4, "text-anchor": "end" }, short(Number(y.toPrecision(3))));
    box.append(text);
  }
  for (const x of [x0, x1]) box.append(svg("text", { x: X(x), y: height - 6, "text-anchor": x === x0 ? "start" : "end" }, short(x)));
  for (const one of series) {
    const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
    box.append(svg("path", { d: path(one.points), class: `c${one.color}`, "stroke-opacity": one.smoothed ? 0.3 : 1 }));
    if (one.smoothed) box.append(svg("path", { d: path(one.smoothed), class: `c${one.color} smoothed` }));
    const is_sparse = one.points.length <= 60 && (one.points.length === 1 || one.points.some(([x], i) => i && x - one.points[i - 1][0] > 1));
    if (is_sparse) for (const [x, y] of one.points) box.append(svg("circle", { cx: X(x), cy: Y(y), r: one.points.length === 1 ? 3 : 2, class: `f${one.color}` }));
  }
  const hair = svg("line", { y1: top, y2: height - bottom, class: "hair", visibility: "hidden" });
  const said = svg("text", { y: top + 10, visibility: "hidden" });
  box.append(hair, said);
  box.addEventListener("pointermove", (event) => {
    const bounds = box.getBoundingClientRect();
    const wanted = x0 + (((event.clientX - bounds.left) / bounds.width) * width - left) / (width - left - right) * (x1 - x0);
    const near = series.filter((s) => s.points.length).map((s) => [s, s.points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a))]);
    if (!near.length) return;
    const x = X(near[0][1][0]);
    hair.setAttribute("x1", x); hair.setAttribute("x2", x);
    said.textContent = `${near[0][1][0]}: ${near.map(([, p]) => short(p[1])).join(" · ")}`;
    said.setAttribute("x", Math.min(Math.max(x, left + 40), width - 60)); said.setAttribute("text-anchor", "middle");
    hair.setAttribute("visibility", "visible"); said.setAttribute("visibility", "visible");
  });
  box.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); said.setAttribute("visibility", "hidden"); });
  return box;
}

export function smooth(points, weight) {
  if (!weight) return points;
  let kept = 0, norm = 0;
  return points.map(([x, y]) => { kept = kept * weight + (1 - weight) * y; norm = norm * weight + (1 - weight); return [x, kept / norm]; });
}

// A dot for each reward, on the range of all that are shown.
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

// episodes: [{id, stop, turns: [{start, generate, tools, interaction}]}]; each is a lane.
export function timeline(episodes, onOpen) {
  const lane = episodes.length > 120 ? 5 : 10, width = 1000, left = 4;
  const parts = [["generate", "f0"], ["tools", "f1"], ["interaction", "f2"]];
  const end = Math.max(1e-6, ...episodes.map((e) => Math.max(...e.turns.map((t) => t.start + parts.reduce((s, [n]) => s + (t[n] ?? 0), 0)))));
  const X = (s) => left + (s / end) * (width - 2 * left);
  const box = svg("svg", { viewBox: `0 0 ${width} ${episodes.length * lane + 22}`, role: "group", width: "100%" });
  box.append(svg("title", {}, `${episodes.length} episodes over ${short(end)} seconds`));
  episodes.forEach((episode, i) => {
    const group = svg("g", { tabindex: 0, role: "link", "aria-label": `open ${episode.id}` });
    group.append(svg("title", {}, `${episode.id}: ${episode.turns.length} turns, ${episode.stop}`));
    const first = episode.turns[0].start, tail = episode.turns.at(-1);
    const stop = tail.start + parts.reduce((s, [n]) => s + (tail[n] ?? 0), 0);
    group.append(svg("rect", { x: X(first), y: i * lane, width: Math.max(1, X(stop) - X(first)), height: lane - 2, class: "f3", "fill-opacity": 0.35 }));
    for (const turn of episode.turns) {
      let at = turn.start;
      for (const [name, color] of parts) {
        const spent = turn[name] ?? 0;
        if (spent > 0) group.append(svg("rect", { x: X(at), y: i * lane, width: Math.max(0.6, X(at + spent) - X(at)), height: lane - 2, class: color }));
        at += spent;
      }
    }
    group.addEventListener("click", () => onOpen(episode.id));
    group.addEventListener("keydown", (event) => { if (event.key === "Enter") onOpen(episode.id); });
    box.append(group);
  });
  const y = episodes.length * lane + 14;
  for (let i = 0; i <= 4; i++) box.append(svg("text", { x: X((end * i) / 4), y, "text-anchor": i === 4 ? "end" : i ? "middle" : "start" }, `${short(Number(((end * i) / 4).toPrecision(3)))} s`));
  return box;
}
