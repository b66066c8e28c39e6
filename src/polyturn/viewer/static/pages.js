// The pages. Each returns {element, ready?, update?, key?, leave?}. Text from a run only ever becomes text nodes.

import { el, get, go, leave, place, state } from "/static/app.js";
import { lineChart, short, smooth, strip, timeline as drawTimeline } from "/static/charts.js";

const FIRST = [/^warm_start\/loss\/sft$/, /^eval\/.*\/success$/, /^reward\/mean$/, /^rollout\/turns$/, /^policy\/entropy$/, /^loss\/grad_norm$/, /^buffer\/groups_kept$/, /^policy\/approx_kl$/, /^time\/step_s$/, /^time\/other_share$/];

// Write values into the address without another page, so that a link shows what is on the screen.
function remember(values) {
  const { run, page, values: before } = place();
  const query = new URLSearchParams(Object.entries({ ...before, ...values }).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  history.replaceState(null, "", `#/${run}/${page}${query.size ? `?${query}` : ""}`);
  if (`${run}/${page}` in state.last) state.last[`${run}/${page}`] = location.hash;
}

// Curves

export async function curves(run, values, info) {
  const others = state.runs.filter((r) => r.index !== run);
  const chosen = (values.with ?? "").split(",").filter(Boolean).map(Number);
  const runs = [run, ...chosen.filter((i) => state.runs[i] && i !== run)].slice(0, 5);
  const loaded = new Map();
  const alarms = el("div");
  const grid = el("div", { class: "charts" });
  const search = el("input", { type: "search", placeholder: "metric, for instance reward", value: values.metric ?? "", "aria-label": "Which metrics" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: values.smooth ?? 0, "aria-label": "Smoothing" });
  async function load() {
    for (const index of runs) {
      const have = loaded.get(index) ?? { lines: [], next: "" };
      const more = await get(`runs/${index}/metrics`, { since: have.next });
      loaded.set(index, more.is_new ? more : { ...more, lines: [...have.lines, ...more.lines] });
    }
  }
  function draw() {
    const names = new Set(runs.flatMap((i) => loaded.get(i).lines.flatMap((line) => Object.keys(line))));
    names.delete("step");
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rank = (n) => { const i = FIRST.findIndex((r) => r.test(n)); return i < 0 ? FIRST.length : i; };
    const shown = [...names].filter((n) => (words.length ? words.every((w) => n.toLowerCase().includes(w)) : rank(n) < FIRST.length)).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)).slice(0, 60);
    grid.replaceChildren(...shown.map((name) => {
      const series = runs.map((index, color) => {
        const points = loaded.get(index).lines.filter((l) => typeof l[name] === "number").map((l) => [l.step, l[name]]);
        return { name: state.runs[index].name, color, points, smoothed: Number(smoothing.value) ? smooth(points, Number(smoothing.value)) : null };
      });
      return el("section", { class: "chart" }, el("h2", {}, name), lineChart(series, { label: name }));
    }));
    if (!shown.length) grid.replaceChildren(el("p", { class: "muted" }, names.size ? `No metric matches; there are ${names.size}.` : "Nothing was recorded yet."));
    alarms.replaceChildren(...loaded.get(run).alarms.slice(-3).map((a) => el("div", { class: "problem" }, `step ${a.step}: ${a.message}`)));
  }
  await load();
  draw();
  for (const input of [search, smoothing]) input.addEventListener("input", () => {
    draw();
    remember({ metric: search.value, smooth: Number(smoothing.value) || "" });
  });
  const beside = el("select", { "aria-label": "Beside another run", onchange: (e) => go("curves", { ...place().values, with: e.target.value }) },
    el("option", { value: "" }, "none"), ...others.map((r) => el("option", { value: r.index, selected: chosen.includes(r.index) }, r.name)));
  const legend = runs.length > 1 ? el("div", { class: "legend" }, ...runs.map((i, c) => el("span", {}, el("i", { class: `f${c}` }), state.runs[i].name))) : null;
  const bar = el("div", { class: "bar" }, el("label", {}, "Metrics", search), el("label", {}, "Smoothing", smoothing), others.length ? el("label", {}, "Beside", beside) : null);
  return { element: el("div", {}, alarms, bar, legend, grid), update: async () => { await load(); draw(); } };
}

// The table of trajectories

const COLUMNS = [["id", "id"], ["step", "step", 1], ["split", "split"], ["reward", "reward", 1], ["num_turns", "turns", 1], ["num_sampled_tokens", "tokens", 1], ["num_tool_calls", "calls", 1], ["num_tool_errors", "errors", 1], ["stop_reason", "stopped", 0], ["task_id", "task"], ["question", "question"]];
const SIZE = 100;

function select(name, values, choices, label) {
  return el("label", {}, label, el("select", { name }, el("option", { value: "" }, "all"), ...choices.map((c) => el("option", { value: c, selected: values[name] === c }, c))));
}

export async function trajectories(run, values, info) {
  const found = await get(`runs/${run}/trajectories`, { desc: values.sort ? values.desc : values.desc ?? 1, ...values, limit: SIZE });
  state.list = found.rows.map((r) => ({ id: r.id, step: r.step, split: r.split }));
  const number = (name, label) => el("label", {}, label, el("input", { type: "number", step: "any", name, value: values[name] ?? "" }));
  const form = el("form", { class: "bar", role: "search", "aria-label": "Filter the trajectories" },
    el("label", {}, "Search", el("input", { type: "search", name: "text", value: values.text ?? "", placeholder: "question, task or id" })),
    select("split", values, info.splits, "Split"), select("stop_reason", values, info.stop_reasons, "Stopped"), select("data_source", values, info.data_sources, "Source"),
    number("min_step", "Step from"), number("max_step", "to"), number("min_reward", "Reward from"), number("max_reward", "to"), number("min_num_turns", "Turns from"),
    el("label", { class: "check" }, el("input", { type: "checkbox", name: "errors", value: "1", checked: values.errors === "1" }), "errors only"),
    el("label", {}, "SQL condition", el("input", { type: "text", name: "where", value: values.where ?? "", placeholder: "num_tokens > 500", size: 24 })),
    el("button", { type: "submit" }, "Filter"), el("button", { type: "button", onclick: () => go("trajectories") }, "All"));
  const apply = () => { const data = Object.fromEntries(new FormData(form)); go("trajectories", { ...data, group: values.group, sort: values.sort, desc: values.desc }); };
  form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
  form.addEventListener("change", (event) => { if (event.target.matches("select,[type=checkbox]")) apply(); });
  const head = el("tr", {}, el("th", {}, el("span", { class: "muted" }, "compare")), ...COLUMNS.map(([name, label, isNumber]) => {
    const on = values.sort === name;
    return el("th", { class: isNumber ? "number" : null, "aria-sort": on ? (values.desc === "1" ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => go("trajectories", { ...values, offset: "", sort: name, desc: on && values.desc === "1" ? "0" : "1" }) }, label + (on ? (values.desc === "1" ? " ↓" : " ↑") : "")));
  }));
  const isMarked = (row) => state.marked.some((m) => m.id === row.id && m.step === row.step && m.split === row.split && m.run === run);
  const compareButton = el("button", { type: "button", disabled: state.marked.length !== 2, onclick: () => openCompare() }, label());
  function label() { return state.marked.length === 2 ? "Compare the two marked" : `Compare (${state.marked.length} of 2 marked)`; }
  function mark(row, box) {
    if (isMarked(row)) state.marked = state.marked.filter((m) => !(m.id === row.id && m.step === row.step && m.split === row.split));
    else state.marked = [...state.marked, { run, id: row.id, step: row.step, split: row.split }].slice(-2);
    for (const tr of body.children) tr.querySelector("input").checked = isMarked(found.rows[tr.dataset.at]);
    compareButton.disabled = state.marked.length !== 2;
    compareButton.textContent = label();
  }
  const open = (row) => go("one", { id: row.id, step: row.step, split: row.split });
  const body = el("tbody", {}, ...found.rows.map((row, at) => {
    const box = el("input", { type: "checkbox", "aria-label": `mark ${row.id} for comparing`, checked: isMarked(row), tabindex: -1, onclick: (e) => { e.stopPropagation(); }, onchange: () => mark(row) });
    return el("tr", { tabindex: at ? -1 : 0, "data-at": at, "data-key": `${row.id} ${row.step} ${row.split}`, onclick: () => open(row), "aria-label": `trajectory ${row.id} of step ${row.step}, reward ${short(row.reward)}` },
      el("td", { onclick: (e) => e.stopPropagation() }, box),
      ...COLUMNS.map(([name, , isNumber]) => {
        const bad = (name === "num_tool_errors" && row[name] > 0) || (name === "stop_reason" && row.error);
        const good = name === "reward" && row[name] > 0;
        return el("td", { class: [isNumber ? "number" : "", bad ? "bad" : "", good ? "good" : ""].join(" ").trim() || null, title: name === "question" ? row[name] : row.error && name === "stop_reason" ? row.error : null }, isNumber ? String(short(row[name])) : String(row[name] ?? "–"));
      }));
  }));
  const offset = Number(values.offset ?? 0);
  const page = (to) => go("trajectories", { ...values, offset: to || "" });
  const pager = el("div", { class: "pager" },
    el("button", { type: "button", disabled: offset <= 0, onclick: () => page(Math.max(0, offset - SIZE)) }, "‹ before"),
    el("span", { role: "status" }, found.total ? `${offset + 1}–${Math.min(offset + SIZE, found.total)} of ${found.total}` : "no trajectory matches"),
    el("button", { type: "button", disabled: offset + SIZE >= found.total, onclick: () => page(offset + SIZE) }, "after ›"), compareButton);
  function key(event) {
    const rows = [...body.children];
    const at = rows.indexOf(document.activeElement);
    const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (move && rows.length) { const next = rows[Math.min(Math.max(at + move, 0), rows.length - 1)]; rows.forEach((r) => (r.tabIndex = -1)); next.tabIndex = 0; next.focus(); return true; }
    if (event.key === "Enter" && at >= 0) { open(found.rows[at]); return true; }
    if (event.key === "c" && at >= 0) { mark(found.rows[at]); return true; }
    return false;
  }
  const group = values.group ? el("p", {}, `Only the group ${values.group}. `, el("a", { href: `#/${run}/trajectories` }, "Show all")) : null;
  const openCompare = () => { const [a, b] = state.marked; go("compare", { a: a.id, as: a.step, al: a.split, ar: a.run, b: b.id, bs: b.step, bl: b.split, br: b.run }); };
  return { element: el("div", {}, form, group, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)), pager), key, follows: true };
}

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
  const head = el("tr", {}, ...["group", "step", "split", "rewards", "mean", "spread", "size", "turns", "left out", "question"].map((h) => el("th", {}, h)));
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
  const picture = found.episodes.length ? drawTimeline(found.episodes, (id) => go("one", { id, step, split }))
    : el("p", { class: "muted" }, found.total ? "These trajectories were recorded without the times at which their turns began." : `No trajectory of the split ${split} is recorded for step ${step}.`);
  return { element: el("div", {}, form, legend, picture), follows: true };
}

// One trajectory

export async function one(run, values) {
  const data = await get(`runs/${run}/trajectory`, values);
  const panel = el("aside", { class: "side-panel", "aria-live": "polite", "aria-label": "The chosen token" }, el("p", { class: "muted" }, "Choose a token to see why it was trained or not."));
  const view = tokensView(data, panel, values);
  const list = state.list, at = list.findIndex((r) => r.id === data.id && r.step === data.step && r.split === data.split);
  const step = (by) => { const next = at >= 0 ? list[at + by] : null; if (next) go("one", { ...next, show: values.show, colour: place().values.colour }); return Boolean(next); };
  const show = values.show ?? "both";
  const choice = el("div", { class: "tabs2", role: "group", "aria-label": "How it is shown" }, ...[["both", "Both"], ["conversation", "Conversation"], ["tokens", "Tokens"]].map(([name, label]) =>
    el("button", { type: "button", "aria-pressed": String(show === name), onclick: () => go("one", { ...place().values, show: name }, { replace: true }) }, label)));
  const talk = show !== "tokens" ? el("section", { "aria-label": "Conversation" }, ...data.messages.map((m) => message(m, { link: m.at && `#/${run}/one?${new URLSearchParams({ ...values, segment: m.at[0], start: m.at[1] - (m.at[1] % data.page_size), token: m.at.join(":") })}` }))) : null;
  const tokens = show !== "conversation" ? view.element : null;
  const nav = el("div", { class: "pager" }, el("a", { href: "#", onclick: (e) => { e.preventDefault(); leave(); } }, "‹ back"), el("button", { type: "button", disabled: at <= 0, onclick: () => step(-1) }, "previous"), el("button", { type: "button", disabled: at < 0 || at >= list.length - 1, onclick: () => step(1) }, "next"));
  const element = el("div", {}, nav, heading(data), choice, el("div", { class: show === "both" ? "three" : "two" }, talk, tokens, panel));
  return { element, ready: view.ready, key: (event) => (event.key === "n" ? step(1) : event.key === "p" ? step(-1) : view.key(event)) };
}

function heading(data) {
  const facts = [["step", data.step], ["split", data.split], ["group", data.group], ["task", data.task.id], ["stopped", `${data.stop_reason} (${data.stop_meaning})`], ["reward", data.reward ? short(data.reward.total) : "–"]];
  const parts = data.reward ? Object.entries(data.reward.components) : [];
  return el("div", {}, el("h2", {}, `Trajectory ${data.id}`), el("div", { class: "facts" }, ...facts.map(([k, v]) => el("span", {}, `${k} `, el("b", {}, String(v)))), ...parts.map(([k, v]) => el("span", { class: "muted" }, `${k} ${short(v)}`))),
    data.error ? el("div", { class: "problem" }, data.error) : null,
    data.dropped ? el("div", { class: "problem" }, `Left out of training: ${data.dropped_meaning}`) : null);
}

function message(m, { differs = false, link = null } = {}) {
  const head = el("div", { class: "head" }, el("b", {}, m.role + (m.name ? ` ${m.name}` : "")), m.turn >= 0 ? el("span", {}, `turn ${m.turn}`) : null,
    m.num_tokens !== undefined ? el("span", {}, `${m.num_tokens} tokens`) : null, link ? el("a", { href: link }, "its tokens") : null, m.finish_reason && m.finish_reason !== "stop" ? el("span", { class: "bad" }, m.finish_reason) : null,
    m.score !== undefined && m.score !== null ? el("span", {}, `score ${short(m.score)}`) : null,
    m.timings?.generate !== undefined ? el("span", {}, `${short(Number(m.timings.generate.toPrecision(3)))} s`) : null);
  const cut = m.num_characters > m.text.length ? el("p", { class: "muted" }, `the first ${m.text.length} of ${m.num_characters} characters`) : null;
  return el("article", { class: `message ${["assistant", "user", "tool"].includes(m.role) ? m.role : "other"}${differs ? " differs" : ""}` }, head,
    m.reasoning ? el("details", {}, el("summary", {}, "reasoning"), el("div", { class: "text" }, legible(m.reasoning))) : null,
    ...m.media.map((x) => (x.source ? el("img", { src: x.source, alt: x.kind }) : el("p", { class: "muted" }, `[${x.kind}]`))),
    m.text ? el("div", { class: "text", tabindex: m.text.length > 2000 ? 0 : null }, legible(m.text)) : null, cut,
    ...m.tool_calls.map((call) => el("div", { class: "call" },
      el("div", { class: "head" }, el("b", {}, `→ ${call.name || "(no name)"}`), call.result ? el("span", {}, `${short(Number(call.result.duration_s.toPrecision(3)))} s`) : null, call.result?.reward !== null && call.result?.reward !== undefined ? el("span", {}, `reward ${short(call.result.reward)}`) : null,
        call.error || call.result?.error ? el("span", { class: "bad" }, call.result?.error ?? call.error) : null),
      el("div", { class: "text" }, legible(call.error ? call.raw : call.arguments)), call.result ? el("div", { class: "text muted" }, `= ${legible(call.result.text)}`) : null)),
    m.info && Object.keys(m.info).length ? el("details", {}, el("summary", {}, "details"), el("pre", {}, JSON.stringify(m.info, null, 1))) : null);
}

// Tokens

const COLOURS = [["source", "source"], ["advantages", "advantage"], ["logprobs", "log-probability"], ["difference", "engine − trainer"], ["version", "policy version"]];

function tokensView(data, panel, values) {
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
    const part = (start, label, is_there) => el("button", { type: "button", disabled: !is_there, onclick: () => go("one", { ...place().values, segment: s, start, token: "" }) }, label);
    const pager = segment.num_tokens > segment.ids.length ? el("div", { class: "pager" }, part(Math.max(0, segment.start - data.page_size), "‹ tokens before", segment.start > 0),
      el("span", {}, `tokens ${segment.start}–${end - 1} of ${segment.num_tokens}`), part(end, "tokens after ›", end < segment.num_tokens)) : null;
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
  const hint = data.has_tokenizer ? null : el("p", { class: "muted" }, "The run kept no tokenizer, so tokens are shown as their ids.");
  const key = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return false;
    choose(Math.min(Math.max(chosen + by, 0), pieces.length - 1));
    return true;
  };
  const ready = () => { if (values.token) choose(pieces.findIndex((p) => `${p.s}:${p.t}` === values.token)); };
  return { element: el("div", {}, el("div", { class: "bar" }, el("label", {}, "Colour by", colour)), legend, hint, area), key, ready };
}

// Control characters and those that turn the direction of writing are seen, not obeyed.
function legible(text) { return text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd"); }
function visible(text) { return text === "" ? "·" : legible(text.replace(/\r/g, "␍")).replace(/\n/g, "⏎\n"); }

function value(piece, what) {
  const { segment, at, span } = piece;
  if (what === "version") return span.version;
  if (what === "difference") { const a = segment.logprobs?.[at], b = segment.policy_logprobs?.[at]; return typeof a === "number" && typeof b === "number" ? a - b : null; }
  return segment[what]?.[at] ?? null;
}

// Colour every token and return the legend: pairs of a class and its meaning. Log-probabilities and differences have a fixed
// scale, so that a colour means the same in every trajectory; advantages are on the range of this one.
const SOURCES = [["s-sampled", "sampled and trained"], ["s-masked", "sampled, not trained"], ["s-observation", "observation"], ["s-prompt", "prompt"]];
const DIFFERENCES = [1e-3, 1e-2, 1e-1];
function paint(pieces, what) {
  const numbers = what === "source" ? [] : pieces.map((p) => value(p, what)).filter((v) => typeof v === "number");
  let low = Infinity, high = -Infinity;
  for (const v of numbers) { low = Math.min(low, v); high = Math.max(high, v); }
  const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const level = {
    logprobs: (v) => Math.max(-3, Math.round(v)),
    version: (v) => (high > low ? Math.round(((v - low) / (high - low)) * 3) : 3),
    difference: (v) => Math.sign(v) * DIFFERENCES.filter((d) => Math.abs(v) >= d).length,
    advantages: (v) => Math.round((v / size) * 3),
  }[what];
  for (const piece of pieces) {
    piece.piece.className = piece.piece.className.replace(/ ?heat-?\d/g, "");
    const v = value(piece, what);
    if (level && typeof v === "number") piece.piece.classList.add(`heat${level(v) || 0}`);
  }
  if (what === "source") return SOURCES;
  if (!numbers.length) return [["", "no token of this trajectory has a number for it"]];
  const steps = [-3, -2, -1, 0, 1, 2, 3];
  if (what === "logprobs") return [["heat0", "0 (certain)"], ["heat-1", "−1"], ["heat-2", "−2"], ["heat-3", "−3 or less"]];
  if (what === "version") return high > low ? [["heat0", `version ${low}`], ["heat3", `version ${high}`]] : [["heat3", `version ${high}`]];
  if (what === "difference") return steps.map((n) => [`heat${n}`, n ? `${n < 0 ? "≤ −" : "≥ "}${DIFFERENCES[Math.abs(n) - 1]}` : `below ${DIFFERENCES[0]}`]);
  return steps.map((n) => [`heat${n}`, String(short((size * n) / 3))]);
}

function describe(piece, data) {
  const { segment, span, t, at } = piece;
  const turn = data.messages.find((m) => m.turn === span.turn && m.role === "assistant");
  const from = data.reward && span.source === "sampled" ? [["reward", `${short(data.reward.total)} (${Object.entries(data.reward.components).map(([k, v]) => `${k} ${short(v)}`).join(", ") || "no parts"})`]] : [];
  const rows = [["text", JSON.stringify(segment.texts[at])], ["id", segment.ids[at]], ["position", `${t} of segment ${piece.s + 1}`], ["turn", span.turn < 0 ? "the task's prompt" : span.turn], ["source", span.source], ["weight in the loss", short(segment.used_weights[at])]];
  if (segment.weights[at] !== segment.used_weights[at]) rows.push(["weight that it was recorded with", short(segment.weights[at])]);
  if (span.source === "sampled") {
    const a = segment.logprobs?.[at], b = segment.policy_logprobs?.[at];
    rows.push(["log-probability, engine", short(a)], ["log-probability, trainer", short(b ?? null)]);
    if (typeof a === "number" && typeof b === "number") rows.push(["difference", short(a - b)]);
    rows.push(["advantage", short(segment.advantages?.[at] ?? null)], ["policy version", short(span.version)], ...from);
    if (turn?.score !== undefined && turn.score !== null) rows.push(["score of the turn", short(turn.score)]);
  }
  if (span.routed) rows.push(["experts known", `of ${span.routed} of its span's ${span.length} tokens`]);
  const sentence = segment.notes[t] ?? span.why;
  return [el("h2", {}, "Token"), el("p", { class: "why" }, sentence.charAt(0).toUpperCase() + sentence.slice(1) + "."), el("dl", {}, ...rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))]))];
}

// Two side by side

export async function compare(run, v) {
  const pair = await Promise.all([["a", "as", "al", "ar"], ["b", "bs", "bl", "br"]].map(([id, step, split, of]) => get(`runs/${v[of] ?? run}/trajectory`, { id: v[id], step: v[step], split: v[split] })));
  const texts = pair.map((d) => d.messages.map((m) => JSON.stringify([m.role, m.text, m.tool_calls.map((c) => [c.name, c.arguments])])));
  const first = texts[0].findIndex((t, i) => t !== texts[1][i]);
  const differ = first < 0 ? (texts[0].length === texts[1].length ? "Both conversations are the same." : `They are the same for ${texts[0].length} messages; then only one goes on.`) : `They differ from message ${first + 1} on.`;
  const columns = pair.map((data, side) => el("section", { "aria-label": `Trajectory ${data.id}` }, el("p", {}, el("b", {}, state.runs[v[side ? "br" : "ar"] ?? run].name)), heading(data), ...data.messages.map((m, i) => message(m, { differs: texts[0][i] !== texts[1][i] }))));
  return { element: el("div", {}, el("div", { class: "pager" }, el("a", { href: "#", onclick: (e) => { e.preventDefault(); leave(); } }, "‹ back"), el("span", { role: "status" }, differ)), el("div", { class: "sides" }, ...columns)) };
}

// The run itself

export async function about(run, values, info) {
  const answer = await fetch(`/api/runs/${run}/config`);
  const text = await answer.text();
  const facts = [["folder", info.folder], ["trajectories", info.num_trajectories], ["splits", info.splits.join(", ") || "–"], ["last step", info.last_step ?? "–"]];
  return { element: el("div", {}, el("h2", {}, info.name), el("dl", {}, ...facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))])), el("h3", {}, "config.yaml"), el("pre", { tabindex: 0 }, text || "The run kept no configuration.")), follows: true };
}
