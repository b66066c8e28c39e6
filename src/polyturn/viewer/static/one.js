// One trajectory as a conversation and as tokens, and two side by side.

import { address, back, el, get, go, kept, post, reading, route, say, short, state } from "/static/base.js";
import { marked } from "/static/diff.js";
import { code, picture, rendered } from "/static/markdown.js";
import { tokensView } from "/static/tokens.js";

export async function one(run, values) {
  const data = await get(`runs/${run}/trajectory`, values);
  const panel = el("aside", { class: "side-panel", "aria-live": "polite", "aria-label": "The chosen token" }, el("p", { class: "muted" }, "Choose a token to see why it was trained or not."));
  const view = tokensView(data, panel, values);
  const list = state.list, at = list.findIndex((r) => r.id === data.id && r.step === data.step && r.split === data.split);
  const step = (by) => { const next = at >= 0 ? list[at + by] : null; if (next) go("one", { ...next, show: values.show, changes: values.changes, raw: values.raw, colour: route().values.colour }); return Boolean(next); };
  const show = values.show ?? "both";
  const choice = el("div", { class: "tabs2", role: "group", "aria-label": "How it is shown" }, ...[["both", "Both"], ["conversation", "Conversation"], ["tokens", "Tokens"]].map(([name, label]) =>
    el("button", { type: "button", "aria-pressed": String(show === name), onclick: () => go("one", { ...route().values, show: name }, { replace: true }) }, label)), ...[["changes", "Changes since the turn before"], ["raw", "As written"]].map(([name, label]) =>
    el("button", { type: "button", "aria-pressed": String(values[name] === "1"), onclick: () => go("one", { ...route().values, [name]: values[name] === "1" ? "" : 1 }, { replace: true }) }, label)));
  const page = wholePage(), linked = (m) => m.at && (!kept || m.at[1] < data.page_size) && address("one", { ...values, segment: m.at[0], start: m.at[1] - (m.at[1] % data.page_size), token: m.at.join(":") }, run);
  const talk = show !== "tokens" ? el("section", { "aria-label": "Conversation" }, ...data.messages.map((m, i) => message(m, { ...turnBefore(data.messages, i, values), isRaw: values.raw === "1", link: linked(m), page }))) : null;
  const tokens = show !== "conversation" ? view.element : null;
  const nav = el("div", { class: "pager" }, back(), el("button", { type: "button", disabled: at <= 0, onclick: () => step(-1) }, "previous"), el("button", { type: "button", disabled: at < 0 || at >= list.length - 1, onclick: () => step(1) }, "next"));
  const element = el("div", {}, nav, heading(data, run), kept ? null : labelForm(run, data), choice, el("div", { class: show === "both" ? "three" : "two" }, talk, tokens, panel));
  return { element, ready: view.ready, key: (event) => (event.key === "n" ? step(1) : event.key === "p" ? step(-1) : view.key(event)) };
}

// The form for a label and a note, which are stored in the run's folder.
function labelForm(run, data) {
  const label = el("input", { name: "label", value: data.label, maxlength: 60, list: "labels", placeholder: "for instance reward hack" });
  const note = el("input", { name: "note", value: data.note, maxlength: 4000, size: 40 });
  const status = el("span", { role: "status", class: "muted" });
  const form = el("form", { class: "bar", "aria-label": "Label and note" }, el("label", {}, "Label", label), el("datalist", { id: "labels" }, ...data.labels.map((l) => el("option", { value: l }))), el("label", {}, "Note", note), el("button", { type: "submit" }, "Save"), status);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post(`runs/${run}/label`, { id: data.id, step: data.step, split: data.split, label: label.value, note: note.value });
      say(status, "saved in the run's folder");
    } catch (problem) { say(status, problem.message); }
  });
  return form;
}

export function heading(data, run = null) {
  if (data.problem) return el("div", { class: "problem" }, data.problem);
  const facts = [["step", data.step], ["split", data.split], ["group", data.group], ["task", data.task.id], ["stopped", `${data.stop_reason} (${data.stop_meaning})`], ["reward", data.reward ? short(data.reward.total) : "–"]];
  const parts = data.reward ? Object.entries(data.reward.components) : [];
  return el("div", {}, el("h2", {}, `Trajectory ${data.id}`), el("div", { class: "facts" }, ...facts.map(([k, v]) => el("span", {}, `${k} `, el("b", {}, String(v)))), ...parts.map(([k, v]) => el("span", { class: "muted" }, `${k} ${short(v)}`)), ...(run === null ? [] : [el("a", { href: address("why", { id: data.id, step: data.step, split: data.split }, run) }, "Why this advantage?"), kept ? null : el("a", { href: address("task", { task_id: data.task.id, split: data.split, step: data.step }, run) }, "This task over training")])),
    data.error ? el("div", { class: "problem" }, data.error) : null,
    data.dropped ? el("div", { class: "problem" }, `Dropped before training: ${data.dropped_meaning}`) : null);
}

// With `changes=1` in the address, a message is compared with the message of the same role in the turn before.
function turnBefore(messages, at, values) {
  if (values.changes !== "1" || messages[at].turn < 1) return {};
  return { other: messages.findLast((m, i) => i < at && m.role === messages[at].role && m.turn === messages[at].turn - 1), kind: "±" };
}

const seconds = (value) => `${short(typeof value === "number" ? Number(value.toPrecision(3)) : value)} s`;

// A message. With `other`, the two are compared word by word, and `kind` selects the differences to show (`marked`). Otherwise Markdown,
// code and JSON are laid out, unless `isRaw` or the page has too many elements.
export const wholePage = () => ({ left: 50_000 }); // number of elements that its messages may still add

export function message(m, { differs = false, link = null, other = undefined, kind = "±", isRaw = false, page = wholePage() } = {}) {
  const isFull = page.left <= 0, isPlain = isRaw || isFull || other !== undefined;
  const body = (text, before, lay = rendered) => (isPlain ? marked(text, before, kind) : lay(text));
  const box = isPlain ? "text" : "text rich";
  const head = el("div", { class: "head" }, el("b", {}, m.role + (m.name ? ` ${m.name}` : "")), m.turn >= 0 ? el("span", {}, `turn ${m.turn}`) : null,
    m.num_tokens !== undefined ? el("span", {}, `${m.num_tokens} tokens`) : null, link ? el("a", { href: link }, "its tokens") : null, m.finish_reason && m.finish_reason !== "stop" ? el("span", { class: "bad" }, m.finish_reason) : null,
    m.score !== undefined && m.score !== null ? el("span", {}, `score ${short(m.score)}`) : null,
    m.timings?.generate !== undefined ? el("span", {}, seconds(m.timings.generate)) : null);
  const cut = m.num_characters > m.text.length ? el("p", { class: "muted" }, `the first ${m.text.length} of ${m.num_characters} characters`) : null;
  const article = el("article", { class: `message ${["assistant", "user", "tool"].includes(m.role) ? m.role : "other"}${differs ? " differs" : ""}` }, head,
    m.reasoning ? el("details", {}, el("summary", {}, "reasoning"), el("div", { class: box }, ...(isPlain ? [m.reasoning] : rendered(m.reasoning)))) : null,
    ...m.media.map((x) => (x.source ? picture(x.source, x.kind) : el("p", { class: "muted" }, `[${x.kind}]`))),
    m.text ? el("div", { class: box, tabindex: m.text.length > 500 ? 0 : null }, ...body(m.text, other?.text)) : null, cut,
    ...m.tool_calls.map((call, i) => el("div", { class: "call" },
      el("div", { class: "head" }, el("b", {}, `→ ${call.name || "(no name)"}`), call.result ? el("span", {}, seconds(call.result.duration_s)) : null, call.result?.reward !== null && call.result?.reward !== undefined ? el("span", {}, `reward ${short(call.result.reward)}`) : null,
        call.error || call.result?.error ? el("span", { class: "bad" }, call.result?.error ?? call.error) : null),
      el("div", { class: box }, ...body(call.error ? call.raw : call.arguments, other && (other.tool_calls[i]?.arguments ?? ""), (text) => [code(text)])), call.result ? el("div", { class: `${box} result` }, ...body(call.result.text, other && (other.tool_calls[i]?.result?.text ?? ""))) : null)),
    m.info && Object.keys(m.info).length ? el("details", {}, el("summary", {}, "details"), el("pre", {}, JSON.stringify(m.info, null, 1))) : null,
    isFull && !isRaw ? el("p", { class: "muted" }, "Shown as plain text, because the messages before it have too many elements.") : null);
  article.classList.toggle("long", article.textContent.length > 5000); // a browser lays it out when it comes into view
  page.left -= article.getElementsByTagName("*").length;
  return article;
}

// Two side by side

export async function compare(run, v) {
  const pair = await Promise.all([["a", "as", "al", "ar"], ["b", "bs", "bl", "br"]].map(([id, step, split, of]) => reading(v[of] ?? run, { id: v[id], step: v[step], split: v[split] })));
  const rows = inStep(pair.map((d) => d.messages)), content = (m) => JSON.stringify(m ? [m.role, m.text, m.tool_calls.map((c) => [c.name, c.arguments, c.result?.text])] : null);
  const differs = rows.map((row) => content(row[0]) !== content(row[1])), first = differs.indexOf(true);
  const status = pair.some((data) => data.problem) ? "One of them cannot be shown." : first < 0 ? "Both conversations are the same." : `${differs.filter(Boolean).length} of ${rows.length} messages differ, the first in ${rows[first].find(Boolean).turn < 0 ? "the prompt" : `turn ${rows[first].find(Boolean).turn}`}.`;
  const page = wholePage(), columns = pair.map((data, side) => el("section", { "aria-label": `Trajectory ${data.id}` }, el("div", {}, el("p", {}, el("b", {}, state.runs[v[side ? "br" : "ar"] ?? run]?.name)), heading(data)),
    ...rows.map((row, i) => (row[side] ? message(row[side], { differs: differs[i], other: differs[i] ? row[1 - side] ?? undefined : undefined, kind: side ? "+" : "-", page }) : el("p", { class: "gap muted" }, "no such message")))));
  const sides = el("div", { class: "sides" }, ...columns);
  sides.style.setProperty("--rows", rows.length + 1);
  sides.addEventListener("scroll", (event) => scrollTogether(event.target, columns), true);
  let at = -1;
  function step(by) {
    const next = by > 0 ? differs.indexOf(true, at + 1) : differs.lastIndexOf(true, at - 1);
    if (next < 0 || (by < 0 && at <= 0)) return false;
    at = next;
    columns[0].children[at + 1].scrollIntoView({ block: "center" });
    for (const column of columns) [...column.children].forEach((child, i) => child.classList.toggle("current", i === at + 1));
    return true;
  }
  const nav = el("div", { class: "pager" }, back(), el("span", { role: "status" }, status), el("button", { type: "button", disabled: first < 0, onclick: () => step(-1) }, "previous difference"), el("button", { type: "button", disabled: first < 0, onclick: () => step(1) }, "next difference"));
  return { element: el("div", {}, nav, sides), key: (event) => (event.key === "n" ? step(1) : event.key === "p" ? step(-1) : false) };
}

// Messages of two conversations in rows, paired by turn and by position in the turn.
export function inStep(conversations) {
  const turns = [...new Set(conversations.flat().map((m) => m.turn))].sort((a, b) => a - b);
  return turns.flatMap((turn) => {
    const mine = conversations.map((all) => all.filter((m) => m.turn === turn));
    return [...Array(Math.max(...mine.map((of) => of.length))).keys()].map((i) => mine.map((of) => of[i] ?? null));
  });
}

// When a long text is scrolled, scroll the text beside it to the same relative position.
function scrollTogether(box, columns) {
  const side = columns.findIndex((column) => column.contains(box)), cell = columns[side] && [...columns[side].children].findIndex((child) => child.contains(box));
  if (side < 0 || !box.matches(".text, .text *")) return;
  const texts = columns.map((column) => [...column.children[cell].querySelectorAll(".text")]), other = texts[1 - side][texts[side].indexOf(box.closest(".text"))];
  const target = other && box.scrollHeight > box.clientHeight ? (box.scrollTop / (box.scrollHeight - box.clientHeight)) * (other.scrollHeight - other.clientHeight) : null;
  if (target !== null && Math.abs(other.scrollTop - target) > 1.5) other.scrollTop = target;
}
