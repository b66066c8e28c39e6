// One trajectory as a conversation and as tokens, and two side by side.

import { address, el, get, go, kept, leave, legible, place, post, short, state } from "/static/base.js";
import { marked } from "/static/diff.js";
import { tokensView } from "/static/tokens.js";

export async function one(run, values) {
  const data = await get(`runs/${run}/trajectory`, values);
  const panel = el("aside", { class: "side-panel", "aria-live": "polite", "aria-label": "The chosen token" }, el("p", { class: "muted" }, "Choose a token to see why it was trained or not."));
  const view = tokensView(data, panel, values);
  const list = state.list, at = list.findIndex((r) => r.id === data.id && r.step === data.step && r.split === data.split);
  const step = (by) => { const next = at >= 0 ? list[at + by] : null; if (next) go("one", { ...next, show: values.show, changes: values.changes, colour: place().values.colour }); return Boolean(next); };
  const show = values.show ?? "both";
  const choice = el("div", { class: "tabs2", role: "group", "aria-label": "How it is shown" }, ...[["both", "Both"], ["conversation", "Conversation"], ["tokens", "Tokens"]].map(([name, label]) =>
    el("button", { type: "button", "aria-pressed": String(show === name), onclick: () => go("one", { ...place().values, show: name }, { replace: true }) }, label)), el("button", { type: "button", "aria-pressed": String(values.changes === "1"), onclick: () => go("one", { ...place().values, changes: values.changes === "1" ? "" : 1 }, { replace: true }) }, "Changes since the turn before"));
  const talk = show !== "tokens" ? el("section", { "aria-label": "Conversation" }, ...data.messages.map((m, i) => message(m, { ...turnBefore(data.messages, i, values), link: m.at && `#/${run}/one?${new URLSearchParams({ ...values, segment: m.at[0], start: m.at[1] - (m.at[1] % data.page_size), token: m.at.join(":") })}` }))) : null;
  const tokens = show !== "conversation" ? view.element : null;
  const nav = el("div", { class: "pager" }, el("a", { href: "#", onclick: (e) => { e.preventDefault(); leave(); } }, "‹ back"), el("button", { type: "button", disabled: at <= 0, onclick: () => step(-1) }, "previous"), el("button", { type: "button", disabled: at < 0 || at >= list.length - 1, onclick: () => step(1) }, "next"));
  const element = el("div", {}, nav, heading(data, run), kept ? null : labelForm(run, data), choice, el("div", { class: show === "both" ? "three" : "two" }, talk, tokens, panel));
  return { element, ready: view.ready, key: (event) => (event.key === "n" ? step(1) : event.key === "p" ? step(-1) : view.key(event)) };
}

// What somebody says about the trajectory, kept beside the run.
function labelForm(run, data) {
  const label = el("input", { name: "label", value: data.label, maxlength: 60, list: "labels", placeholder: "for instance reward hack" });
  const note = el("input", { name: "note", value: data.note, maxlength: 4000, size: 40 });
  const said = el("span", { role: "status", class: "muted" });
  const form = el("form", { class: "bar", "aria-label": "Label and note" }, el("label", {}, "Label", label), el("datalist", { id: "labels" }, ...data.labels.map((l) => el("option", { value: l }))), el("label", {}, "Note", note), el("button", { type: "submit" }, "Keep"), said);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post(`runs/${run}/label`, { id: data.id, step: data.step, split: data.split, label: label.value, note: note.value });
      said.textContent = "kept beside the run";
    } catch (problem) { said.textContent = problem.message; }
  });
  return form;
}

export function heading(data, run = null) {
  const facts = [["step", data.step], ["split", data.split], ["group", data.group], ["task", data.task.id], ["stopped", `${data.stop_reason} (${data.stop_meaning})`], ["reward", data.reward ? short(data.reward.total) : "–"]];
  const parts = data.reward ? Object.entries(data.reward.components) : [];
  return el("div", {}, el("h2", {}, `Trajectory ${data.id}`), el("div", { class: "facts" }, ...facts.map(([k, v]) => el("span", {}, `${k} `, el("b", {}, String(v)))), ...parts.map(([k, v]) => el("span", { class: "muted" }, `${k} ${short(v)}`)), ...(run === null ? [] : [el("a", { href: address("why", { id: data.id, step: data.step, split: data.split }, run) }, "Why this advantage?"), kept ? null : el("a", { href: address("task", { task_id: data.task.id, split: data.split, step: data.step }, run) }, "This task over training")])),
    data.error ? el("div", { class: "problem" }, data.error) : null,
    data.dropped ? el("div", { class: "problem" }, `Left out of training: ${data.dropped_meaning}`) : null);
}

// Where the address asks for it, what the model says in a turn is shown beside what it said in the turn before.
function turnBefore(messages, at, values) {
  if (values.changes !== "1" || messages[at].turn < 1) return {};
  return { other: messages.findLast((m, i) => i < at && m.role === messages[at].role && m.turn === messages[at].turn - 1), kind: "±" };
}

// `other` is a message that this one is compared with, word by word; `kind` is what of the differences is shown (`marked`).
export function message(m, { differs = false, link = null, other = undefined, kind = "±" } = {}) {
  const head = el("div", { class: "head" }, el("b", {}, m.role + (m.name ? ` ${m.name}` : "")), m.turn >= 0 ? el("span", {}, `turn ${m.turn}`) : null,
    m.num_tokens !== undefined ? el("span", {}, `${m.num_tokens} tokens`) : null, link ? el("a", { href: link }, "its tokens") : null, m.finish_reason && m.finish_reason !== "stop" ? el("span", { class: "bad" }, m.finish_reason) : null,
    m.score !== undefined && m.score !== null ? el("span", {}, `score ${short(m.score)}`) : null,
    m.timings?.generate !== undefined ? el("span", {}, `${short(Number(m.timings.generate.toPrecision(3)))} s`) : null);
  const cut = m.num_characters > m.text.length ? el("p", { class: "muted" }, `the first ${m.text.length} of ${m.num_characters} characters`) : null;
  return el("article", { class: `message ${["assistant", "user", "tool"].includes(m.role) ? m.role : "other"}${differs ? " differs" : ""}` }, head,
    m.reasoning ? el("details", {}, el("summary", {}, "reasoning"), el("div", { class: "text" }, legible(m.reasoning))) : null,
    ...m.media.map((x) => (x.source ? el("img", { src: x.source, alt: x.kind }) : el("p", { class: "muted" }, `[${x.kind}]`))),
    m.text ? el("div", { class: "text", tabindex: m.text.length > 2000 ? 0 : null }, ...marked(m.text, other?.text, kind)) : null, cut,
    ...m.tool_calls.map((call, i) => el("div", { class: "call" },
      el("div", { class: "head" }, el("b", {}, `→ ${call.name || "(no name)"}`), call.result ? el("span", {}, `${short(Number(call.result.duration_s.toPrecision(3)))} s`) : null, call.result?.reward !== null && call.result?.reward !== undefined ? el("span", {}, `reward ${short(call.result.reward)}`) : null,
        call.error || call.result?.error ? el("span", { class: "bad" }, call.result?.error ?? call.error) : null),
      el("div", { class: "text" }, ...marked(call.error ? call.raw : call.arguments, other?.tool_calls[i]?.arguments, kind)), call.result ? el("div", { class: "text muted" }, "= ", ...marked(call.result.text, other?.tool_calls[i]?.result?.text, kind)) : null)),
    m.info && Object.keys(m.info).length ? el("details", {}, el("summary", {}, "details"), el("pre", {}, JSON.stringify(m.info, null, 1))) : null);
}

// Two side by side

export async function compare(run, v) {
  const pair = await Promise.all([["a", "as", "al", "ar"], ["b", "bs", "bl", "br"]].map(([id, step, split, of]) => get(`runs/${v[of] ?? run}/trajectory`, { id: v[id], step: v[step], split: v[split] })));
  const texts = pair.map((d) => d.messages.map((m) => JSON.stringify([m.role, m.text, m.tool_calls.map((c) => [c.name, c.arguments])])));
  const first = texts[0].findIndex((t, i) => t !== texts[1][i]);
  const differ = first < 0 ? (texts[0].length === texts[1].length ? "Both conversations are the same." : `They are the same for ${texts[0].length} messages; then only one goes on.`) : `They differ from message ${first + 1} on.`;
  const columns = pair.map((data, side) => el("section", { "aria-label": `Trajectory ${data.id}` }, el("p", {}, el("b", {}, state.runs[v[side ? "br" : "ar"] ?? run].name)), heading(data), ...data.messages.map((m, i) => message(m, { differs: texts[0][i] !== texts[1][i], other: pair[1 - side].messages[i], kind: side ? "+" : "-" }))));
  return { element: el("div", {}, el("div", { class: "pager" }, el("a", { href: "#", onclick: (e) => { e.preventDefault(); leave(); } }, "‹ back"), el("span", { role: "status" }, differ)), el("div", { class: "sides" }, ...columns)) };
}
