// The tokens of a trajectory: coloured by source or by a number, one of them explained in the panel.

import { address, el, go, kept, remember, route, short } from "/static/base.js";

const COLOURS = [["source", "source"], ["advantages", "advantage"], ["logprobs", "log-probability"], ["difference", "engine − trainer"], ["entropies", "entropy"], ["version", "policy version"]];

export function tokensView(data, panel, values) {
  const pieces = [];
  const boxes = data.segments.map((segment, s) => {
    const box = el("div", { class: "tokens", tabindex: 0, role: "application", "aria-roledescription": "tokens; arrow keys choose", "aria-label": `tokens of segment ${s + 1}` });
    const end = segment.start + segment.ids.length;
    let lastTurn = null;
    for (const span of segment.spans) {
      if (span.start >= end || span.start + span.length <= segment.start) continue;
      if (span.turn !== lastTurn) box.append(el("span", { class: "turn-mark", "aria-hidden": "true" }, span.turn < 0 ? "prompt" : `turn ${span.turn}`));
      lastTurn = span.turn;
      for (let t = Math.max(span.start, segment.start); t < Math.min(span.start + span.length, end); t++) {
        const at = t - segment.start;
        const isTrained = span.source === "sampled" && segment.used_weights[at] !== 0;
        const piece = el("span", { "data-at": pieces.length, class: span.source === "sampled" ? (isTrained ? "s-sampled" : "s-masked") : `s-${span.source}` }, visible(segment.texts[at]));
        pieces.push({ segment, s, span, t, at, piece });
        box.append(piece);
      }
    }
    const part = (start, label, is_there) => el("button", { type: "button", disabled: !is_there, onclick: () => go("one", { ...route().values, segment: s, start, token: "" }) }, label);
    const range = segment.ids.length ? `tokens ${segment.start}–${end - 1} of ${segment.num_tokens}` : `${segment.num_tokens} tokens`;
    const pager = segment.num_tokens === segment.ids.length ? null : kept ? el("p", { class: "muted" }, `${range}; the viewer shows the others`)
      : el("div", { class: "pager" }, part(Math.max(0, segment.start - data.page_size), "‹ tokens before", segment.start > 0), el("span", {}, range), part(end, "tokens after ›", end < segment.num_tokens));
    return el("section", { "aria-label": `Segment ${s + 1}` }, el("h3", {}, `Segment ${s + 1}: ${segment.num_tokens} tokens of ${segment.agent}` + (segment.parent ? `, branched from segment ${segment.parent[0] + 1} after ${segment.parent[1]} tokens` : "")), box, pager);
  });
  let chosen = -1;
  function choose(at) {
    if (at < 0 || at >= pieces.length) return;
    pieces[chosen]?.piece.classList.remove("chosen");
    chosen = at;
    const { s, t, piece } = pieces[at];
    piece.classList.add("chosen");
    piece.scrollIntoView({ block: "nearest" });
    panel.replaceChildren(...describe(pieces[at], data));
    remember({ token: `${s}:${t}` });
  }
  const area = el("div", {}, ...boxes);
  area.addEventListener("click", (e) => { const at = e.target.closest("[data-at]")?.dataset.at; if (at !== undefined) choose(Number(at)); });
  area.addEventListener("pointerover", (e) => { const at = e.target.closest("[data-at]")?.dataset.at; if (at !== undefined && chosen < 0) panel.replaceChildren(...describe(pieces[Number(at)], data)); });
  const colour = el("select", { "aria-label": "Colour tokens by" }, ...COLOURS.map(([v, l]) => el("option", { value: v, selected: v === values.colour }, l)));
  const legend = el("div", { class: "legend", role: "note", "aria-label": "What the colours mean" });
  const draw = () => legend.replaceChildren(...paint(pieces, colour.value).map(([c, t]) => el("span", {}, el("i", { class: c }), t)));
  colour.addEventListener("change", () => { draw(); remember({ colour: colour.value === "source" ? "" : colour.value }); });
  draw();
  const hint = data.has_tokenizer ? null : el("p", { class: "muted" }, "The run's folder has no tokenizer, so tokens are shown as ids.");
  const key = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return false;
    choose(Math.min(Math.max(chosen + by, 0), pieces.length - 1));
    return true;
  };
  const ready = () => { if (values.token) choose(pieces.findIndex((p) => `${p.s}:${p.t}` === values.token)); };
  return { element: el("div", {}, el("div", { class: "bar" }, el("label", {}, "Colour by", colour)), legend, hint, area), key, ready };
}

function visible(text) { return text === "" ? "·" : text.replace(/\r/g, "␍").replace(/\n/g, "⏎\n"); }

function value(piece, what) {
  const { segment, at, span } = piece;
  if (what === "version") return span.version;
  if (what === "difference") { const a = segment.logprobs?.[at], b = segment.policy_logprobs?.[at]; return typeof a === "number" && typeof b === "number" ? a - b : null; }
  return segment[what]?.[at] ?? null;
}

// Colour every token and return the legend: pairs of a class and its meaning. Log-probabilities, differences and entropies have
// a fixed scale, so that a colour means the same in every trajectory; advantages are scaled to the largest of this trajectory.
const SOURCES = [["s-sampled", "sampled and trained"], ["s-masked", "sampled, not trained"], ["s-observation", "observation"], ["s-prompt", "prompt"]];
const DIFFERENCES = [1e-3, 1e-2, 1e-1];
const ENTROPIES = [0.1, 0.5, 1.5]; // nats; two equally likely tokens have 0.69
function paint(pieces, what) {
  const numbers = what === "source" ? [] : pieces.map((p) => value(p, what)).filter((v) => typeof v === "number");
  let low = Infinity, high = -Infinity;
  for (const v of numbers) { low = Math.min(low, v); high = Math.max(high, v); }
  const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const level = {
    logprobs: (v) => Math.max(-3, Math.round(v)),
    version: (v) => (high > low ? Math.round(((v - low) / (high - low)) * 3) : 3),
    difference: (v) => Math.sign(v) * DIFFERENCES.filter((d) => Math.abs(v) >= d).length,
    entropies: (v) => ENTROPIES.filter((e) => v >= e).length,
    advantages: (v) => Math.round((v / size) * 3),
  }[what];
  for (const piece of pieces) {
    piece.piece.className = piece.piece.className.replace(/ ?heat-?\d/g, "");
    const v = value(piece, what);
    if (level && typeof v === "number") piece.piece.classList.add(`heat${level(v) || 0}`);
  }
  if (what === "source") return SOURCES;
  if (!numbers.length) return [["", "no token of this trajectory has this value"]];
  const steps = [-3, -2, -1, 0, 1, 2, 3];
  if (what === "logprobs") return [["heat0", "0 (certain)"], ["heat-1", "−1"], ["heat-2", "−2"], ["heat-3", "−3 or less"]];
  if (what === "entropies") return [["heat0", `below ${ENTROPIES[0]} nats (certain)`], ...ENTROPIES.map((e, n) => [`heat${n + 1}`, `≥ ${e}`])];
  if (what === "version") return high > low ? [["heat0", `version ${low}`], ["heat3", `version ${high}`]] : [["heat3", `version ${high}`]];
  if (what === "difference") return steps.map((n) => [`heat${n}`, n ? `${n < 0 ? "≤ −" : "≥ "}${DIFFERENCES[Math.abs(n) - 1]}` : `below ${DIFFERENCES[0]}`]);
  return steps.map((n) => [`heat${n}`, String(short((size * n) / 3))]);
}

function describe(piece, data) {
  const { segment, span, t, at } = piece;
  const turn = data.messages.find((m) => m.turn === span.turn && m.role === "assistant");
  const from = data.reward && span.source === "sampled" ? [["reward", `${short(data.reward.total)} (${Object.entries(data.reward.components).map(([k, v]) => `${k} ${short(v)}`).join(", ") || "no parts"})`]] : [];
  const rows = [["text", JSON.stringify(segment.texts[at])], ["id", segment.ids[at]], ["position", `${t} of segment ${piece.s + 1}`], ["turn", span.turn < 0 ? "the task's prompt" : span.turn], ["source", span.source], ["weight in the loss", short(segment.used_weights[at])]];
  if (segment.weights[at] !== segment.used_weights[at]) rows.push(["recorded weight", short(segment.weights[at])]);
  if (span.source === "sampled") {
    const a = segment.logprobs?.[at], b = segment.policy_logprobs?.[at];
    rows.push(["log-probability, engine", short(a)], ["log-probability, trainer", short(b ?? null)]);
    if (typeof a === "number" && typeof b === "number") rows.push(["difference", short(a - b)]);
    if (typeof segment.entropies?.[at] === "number") rows.push(["entropy of the policy (nats)", short(segment.entropies[at])]);
    rows.push(["advantage", el("span", {}, `${short(segment.advantages?.[at] ?? null)} `, el("a", { href: address("why", { id: data.id, step: data.step, split: data.split }) }, "why?"))], ["policy version", short(span.version)], ...from);
    if (turn?.score !== undefined && turn.score !== null) rows.push(["score of the turn", short(turn.score)]);
  }
  if (span.routed) rows.push(["experts recorded", `for ${span.routed} of the ${span.length} tokens of its span`]);
  const sentence = segment.notes[t] ?? span.why;
  return [el("h2", {}, "Token"), el("p", { class: "why" }, sentence.charAt(0).toUpperCase() + sentence.slice(1) + "."), el("dl", {}, ...rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v instanceof Node ? v : String(v))]))];
}

