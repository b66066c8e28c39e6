// The table of trajectories: filters, columns, marks, pages. Text from a run only ever becomes text nodes.

import { PAGE_SIZE, address, el, get, go, pager, query, say, select, short, state } from "/static/base.js";

// Columns: name, title, whether the values are numbers. `DEFAULT` is shown unless the address names others.
const COLUMNS = [["id", "id"], ["step", "step", 1], ["split", "split"], ["reward", "reward", 1], ["num_turns", "turns", 1], ["num_sampled_tokens", "tokens", 1], ["num_tool_calls", "calls", 1], ["num_tool_errors", "errors", 1], ["stop_reason", "stop reason"], ["label", "label"], ["task_id", "task"], ["question", "question"],
  ["group", "group"], ["data_source", "data source"], ["dropped", "dropped"], ["error", "error"], ["num_segments", "segments", 1], ["num_tokens", "all tokens", 1], ["num_trained_tokens", "trained tokens", 1], ["min_version", "oldest policy version", 1], ["max_version", "newest policy version", 1], ["generate_s", "generation (s)", 1], ["tools_s", "tools (s)", 1], ["interaction_s", "interaction (s)", 1], ["note", "note"]];
const DEFAULT = COLUMNS.slice(0, 12).map(([name]) => name);
const NOT_SORTED = ["label", "note"];
const NUMBERS = ["step", "reward", "num_turns", "num_tool_errors"];
const FORM = ["text", "regex", "note", "split", "stop_reason", "data_source", "errors", "where", ...["step", "reward", "num_turns"].flatMap((name) => [`min_${name}`, `max_${name}`])];
const VIEW = ["sort", "desc", "cols", "offset"]; // values in the address that are not filters

function filterForm(values, info, hasLabels) {
  const number = (name, label) => el("label", {}, label, el("input", { type: "number", step: "any", name, value: values[name] ?? "" }));
  const form = el("form", { class: "bar", role: "search", "aria-label": "Filter the trajectories" },
    el("label", {}, "Search", el("input", { type: "search", name: "text", value: values.text ?? "", placeholder: "words in any text" })),
    el("label", { class: "check" }, el("input", { type: "checkbox", name: "regex", value: "1", checked: values.regex === "1" }), "regular expression"),
    select("split", values, info.splits, "Split"), select("stop_reason", values, info.stop_reasons, "Stop reason"), select("data_source", values, info.data_sources, "Data source"),
    number("min_step", "Step from"), number("max_step", "to"), number("min_reward", "Reward from"), number("max_reward", "to"), number("min_num_turns", "Turns from"), number("max_num_turns", "to"),
    el("label", { class: "check" }, el("input", { type: "checkbox", name: "errors", value: "1", checked: values.errors === "1" }), "errors only"),
    hasLabels || values.note ? el("label", {}, "Note", el("input", { type: "text", name: "note", value: values.note ?? "", placeholder: "words of a note", size: 14 })) : null,
    el("label", {}, "SQL condition", el("input", { type: "text", name: "where", value: values.where ?? "", placeholder: "num_tokens > 500", size: 24 })),
    el("button", { type: "submit" }, "Filter"), el("button", { type: "button", onclick: () => { form.reset(); go("trajectories", { cols: values.cols }); } }, "Reset"));
  const beside = Object.fromEntries(Object.entries(values).filter(([name]) => !FORM.includes(name) && name !== "offset")); // values without a field in the form stay
  const apply = () => go("trajectories", { ...beside, ...Object.fromEntries(new FormData(form)) });
  form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
  form.addEventListener("change", (event) => { if (event.target.matches("select,[type=checkbox]")) apply(); });
  return form;
}

// The number of rows with each value: a click filters by the value, a second click removes the filter. A number with many values has
// ranges. Filters in the address that are not among these come first, so that they can be removed.
function facetBar(run, values, data) {
  const link = (wanted, text) => {
    const isOn = Object.entries(wanted).every(([name, value]) => values[name] === value);
    const off = Object.fromEntries(Object.keys(wanted).map((name) => [name, ""]));
    return el("a", { class: "facet", "aria-current": isOn ? "true" : null, href: address("trajectories", { ...values, offset: "", ...(isOn ? off : wanted) }, run) }, isOn ? `${text} ×` : text);
  };
  const readable = (value, name) => (NUMBERS.includes(name) ? short(Number(value)) : value);
  const facet = ({ name, title, values: of, num_more: more }) => el("div", { class: "facets" }, el("b", {}, title), ...of.map(({ value, low, high, count }) =>
    value === undefined ? link({ [`min_${name}`]: low, [`max_${name}`]: high }, `${low === high ? readable(low, name) : `${readable(low, name)} – ${readable(high, name)}`} (${count})`) : link({ [name]: value }, `${readable(value, name)} (${count})`)), more ? el("span", { class: "muted" }, `${more} further values`) : null);
  const isCounted = (name) => data.facets.some((f) => f.name === name && f.values.some((v) => v.value === values[name]));
  const isBound = (name) => /^(min|max)_(?!version$)/.test(name), isKnown = (name) => ["text", "regex", "note", "errors", "where", "label", ...VIEW].includes(name);
  const only = Object.keys(values).filter((name) => values[name] && !isKnown(name) && !isBound(name) && !isCounted(name)).map((name) => link({ [name]: values[name] }, `${title(name)} ${values[name]}`));
  for (const name of new Set(Object.keys(values).filter(isBound).map((name) => name.slice(4)))) {
    const [low, high] = [values[`min_${name}`], values[`max_${name}`]], isShown = data.facets.some((f) => f.name === name && f.values.some((v) => v.low === low && v.high === high));
    if ((low || high) && !isShown) only.push(link(Object.fromEntries([["min", low], ["max", high]].filter(([, v]) => v).map(([which, v]) => [`${which}_${name}`, v])), `${title(name)} ${low ? `from ${readable(low, name)} ` : ""}${high ? `to ${readable(high, name)}` : ""}`.trim()));
  }
  const labels = data.has_labels || values.label ? el("div", { class: "facets" }, el("b", {}, "Label"), link({ label: "*" }, "any label or note"), ...[...new Set([...data.labels, values.label ?? "*"])].filter((label) => label !== "*").map((label) => link({ label }, label))) : null;
  return el("nav", { "aria-label": "Kinds of trajectories" }, only.length ? el("div", { class: "facets" }, el("b", {}, "Only"), ...only) : null, ...data.facets.map(facet), ...(labels ? [labels] : []));
}

const title = (name) => COLUMNS.find(([one]) => one === name)?.[1] ?? name;

function columnPicker(values, shown) {
  const box = ([name, label]) => el("label", { class: "check" }, el("input", { type: "checkbox", value: name, checked: shown.includes(name) }), label);
  const picker = el("details", { class: "picker" }, el("summary", {}, "Columns"), ...COLUMNS.map(box));
  picker.addEventListener("change", () => {
    const chosen = [...picker.querySelectorAll("input:checked")].map((one) => one.value).join(",");
    go("trajectories", { ...values, cols: chosen === DEFAULT.join(",") ? "" : chosen });
  });
  return picker;
}

export async function trajectories(run, values, info) {
  const { cols, ...params } = values;
  const data = await get(`runs/${run}/trajectories`, { desc: values.sort ? values.desc : values.desc ?? 1, ...params, limit: PAGE_SIZE });
  state.list = data.rows.map((r) => ({ id: r.id, step: r.step, split: r.split }));
  const wanted = cols ? cols.split(",") : DEFAULT;
  const columns = COLUMNS.filter(([name]) => wanted.includes(name));
  const form = filterForm(values, info, data.has_labels);
  const head = el("tr", {}, el("th", {}, el("span", { class: "muted" }, "compare")), ...columns.map(([name, label, isNumber]) => {
    if (NOT_SORTED.includes(name)) return el("th", {}, label);
    const on = values.sort === name;
    return el("th", { class: isNumber ? "number" : null, "aria-sort": on ? (values.desc === "1" ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => go("trajectories", { ...values, offset: "", sort: name, desc: on && values.desc === "1" ? "0" : "1" }) }, label + (on ? (values.desc === "1" ? " ↓" : " ↑") : "")));
  }).toSpliced(4, 0, el("th", {}, "advantage")));
  const isSame = (row) => (m) => m.id === row.id && m.step === row.step && m.split === row.split && m.run === run, isMarked = (row) => state.marked.some(isSame(row));
  const compareButton = el("button", { type: "button", disabled: state.marked.length !== 2, onclick: () => openCompare() }, label());
  function label() { return state.marked.length === 2 ? "Compare the two marked" : `Compare (${state.marked.length} of 2 marked)`; }
  function mark(row, box) {
    if (isMarked(row)) state.marked = state.marked.filter((m) => !isSame(row)(m));
    else state.marked = [...state.marked, { run, id: row.id, step: row.step, split: row.split }].slice(-2);
    for (const tr of body.children) tr.querySelector("input").checked = isMarked(data.rows[tr.dataset.at]);
    compareButton.disabled = state.marked.length !== 2;
    say(compareButton, label());
  }
  const open = (row) => go("one", { id: row.id, step: row.step, split: row.split });
  const body = el("tbody", {}, ...data.rows.map((row, at) => {
    const box = el("input", { type: "checkbox", "aria-label": `mark ${row.id} for comparing`, checked: isMarked(row), tabindex: -1, onclick: (e) => { e.stopPropagation(); }, onchange: () => mark(row) });
    return el("tr", { tabindex: at ? -1 : 0, "data-at": at, "data-key": `${row.id} ${row.step} ${row.split}`, onclick: () => open(row), "aria-label": `trajectory ${row.id} of step ${row.step}, reward ${short(row.reward)}` },
      el("td", { onclick: (e) => e.stopPropagation() }, box),
      ...columns.map(([name, , isNumber]) => {
        const bad = (name === "num_tool_errors" && row[name] > 0) || (name === "stop_reason" && row.error);
        const good = name === "reward" && row[name] > 0;
        return el("td", { class: [isNumber ? "number" : "", bad ? "bad" : "", good ? "good" : ""].join(" ").trim() || null, title: name === "question" || name === "note" ? row[name] : row.error && name === "stop_reason" ? row.error : null }, isNumber ? String(short(row[name])) : String(row[name] ?? "–"));
      }).toSpliced(4, 0, el("td", { onclick: (e) => e.stopPropagation() }, row.split.startsWith("train") ? el("a", { href: address("why", { id: row.id, step: row.step, split: row.split }, run), "aria-label": `why this advantage of ${row.id}?`, tabindex: -1 }, "why?") : null)));
  }));
  function key(event) {
    const rows = [...body.children];
    const at = rows.indexOf(document.activeElement);
    const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (move && rows.length) { const next = rows[Math.min(Math.max(at + move, 0), rows.length - 1)]; rows.forEach((r) => (r.tabIndex = -1)); next.tabIndex = 0; next.focus(); return true; }
    if (event.key === "Enter" && at >= 0) { open(data.rows[at]); return true; }
    if (event.key === "w" && at >= 0) { go("why", { id: data.rows[at].id, step: data.rows[at].step, split: data.rows[at].split }); return true; }
    if (event.key === "c" && at >= 0) { mark(data.rows[at]); return true; }
    return false;
  }
  const save = (format) => el("a", { href: `/api/runs/${run}/export?${query({ ...params, format })}`, download: `trajectories.${format}` }, format === "parquet" ? "Parquet" : format);
  const tools = el("div", { class: "bar" }, columnPicker(values, wanted), data.total ? el("span", {}, `Save these ${data.total}: `, save("jsonl"), " ", save("parquet")) : null);
  const openCompare = () => { const [a, b] = state.marked; go("compare", { a: a.id, as: a.step, al: a.split, ar: a.run, b: b.id, bs: b.step, bl: b.split, br: b.run }); };
  return { element: el("div", {}, form, facetBar(run, values, data), tools, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)), pager("trajectories", values, data.total, "trajectory", compareButton)), key, follows: true };
}

