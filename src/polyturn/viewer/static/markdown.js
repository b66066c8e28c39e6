// Markdown as elements: headings, lists, tables, quotes, coloured code, and indented JSON. Text only becomes text nodes, never HTML, and
// loads nothing: only pictures that the text contains (data:) are shown, and a link is followed only on a click. Every repetition in a
// pattern is bounded, and a long one contains no character that could start it again, so the time is proportional to the length of the
// text. Text after the first `MOST_ELEMENTS` elements is shown as plain text.

import { el, isWoven } from "/static/base.js";

const MOST_JSON = 200_000; // largest number of characters of a text that is parsed as JSON
const MOST_ELEMENTS = 5000; // of one text: a browser needs seconds to lay out as many as 100,000 characters can produce
const INLINE = /`([^`\n]{1,2000})`|\*\*([^*\n]{1,2000})\*\*|(?<![\w*])\*([^*\s][^*\n]{0,2000})\*(?![\w*])|(!?)\[([^[\]\n]{0,300})\]\((https?:[^)\s]{1,2000}|data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]{1,100000})\)/g;
const CODE = /("(?:[^"\\\n]|\\.){0,2000}"|'(?:[^'\\\n]|\\.){0,2000}')|(\/\/[^\n]{0,2000}|#[^\n]{0,2000})|\b(\d[\d_.]{0,40}(?:e[+-]?\d{1,5})?)\b|\b(and|as|assert|async|await|break|case|catch|class|const|continue|def|del|do|elif|else|except|export|false|False|finally|fn|for|from|function|if|import|in|is|lambda|let|new|None|not|null|or|pass|raise|return|self|struct|switch|this|throw|true|True|try|type|var|while|with|yield)\b/g;

// Split a text by a pattern: `make` converts each match while the budget lasts, and the text between matches stays text.
function pieces(text, pattern, budget, make) {
  if (isWoven(text)) return [text];
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (budget.left-- <= 0) break;
    if (match.index > end) parts.push(text.slice(end, match.index));
    parts.push(make(match));
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

const whole = () => ({ left: MOST_ELEMENTS });

export const inline = (text, budget = whole()) => pieces(text, INLINE, budget, ([, code, strong, soft, isPicture, label, url]) => {
  if (code !== undefined) return el("code", {}, code);
  if (strong !== undefined) return el("strong", {}, strong);
  if (soft !== undefined) return el("em", {}, soft);
  if (isPicture && url.startsWith("data:")) return picture(url, label);
  if (url.startsWith("data:")) return label;
  return el("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, isPicture ? `picture: ${label || url}` : label || url);
});

export const picture = (source, label) => el("img", { src: source, alt: label, loading: "lazy", decoding: "async" });

export const code = (text, language = "", budget = whole()) => el("pre", { class: "code", tabindex: 0, "data-language": language || null },
  ...pieces(text, CODE, budget, ([word, string, comment, number]) => el("span", { class: string ? "in-string" : comment ? "in-comment" : number ? "in-number" : "in-keyword" }, word)));

function asJson(text) {
  if (text.length > MOST_JSON || !/^\s*[[{]/.test(text)) return null;
  try {
    const laid = JSON.stringify(JSON.parse(text), null, 1);
    return laid.length > 2 * MOST_JSON ? null : laid; // indentation grows with the square of the depth
  } catch { return null; }
}

// The cells of a row; if there are more than `most`, the last cell contains the rest.
function cells(line, most = Infinity) {
  const all = line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
  if (all.length > most) all.splice(most - 1, Infinity, all.slice(most - 1).join("|"));
  return all.map((one) => one.trim());
}
const isRule = (line) => /^[\s|:-]{3,500}$/.test(line) && line.includes("-") && line.includes("|");

// A text as elements, for a box of the class "text".
export function rendered(text) {
  const json = asJson(text);
  if (json !== null) return [code(json, "json")];
  const lines = text.split("\n"), blocks = [], budget = whole();
  const make = (...of) => { budget.left--; return el(...of); };
  const run = (at, holds) => { let end = at; while (end < lines.length && holds(lines[end], end)) end++; return end; };
  const each = (at, holds, of) => { const items = []; while (at + items.length < lines.length && budget.left > 0 && holds(lines[at + items.length])) items.push(of(lines[at + items.length])); return items; };
  const row = (one, name, width) => make("tr", {}, ...cells(one, width).map((cell) => make(name, name === "th" ? { scope: "col" } : {}, ...inline(cell, budget))));
  const isTable = (at) => lines[at].includes("|") && isRule(lines[at + 1] ?? "") && cells(lines[at]).length === cells(lines[at + 1]).length;
  let at = 0;
  while (at < lines.length && budget.left > 0) {
    const line = lines[at], fence = /^\s{0,3}(`{3,10}|~{3,10})\s{0,9}([\w+#.-]{0,30})/.exec(line), heading = /^(#{1,6}) (.*)/.exec(line), bullet = /^(\s{0,40})([-*+]|\d{1,9}[.)]) /;
    if (fence) {
      const end = run(at + 1, (one) => !one.trimStart().startsWith(fence[1]));
      budget.left--;
      blocks.push(code(lines.slice(at + 1, end).join("\n"), fence[2], budget));
      at = end + 1;
    } else if (heading) {
      blocks.push(make("p", { class: "heading" }, make("span", { class: "muted" }, `${heading[1]} `), ...inline(heading[2], budget)));
      at++;
    } else if (bullet.test(line)) {
      const items = each(at, (one) => bullet.test(one), (one) => { const [head, indent, mark] = bullet.exec(one); return make("li", { class: `in${Math.min(4, Math.floor(indent.length / 2))}`, "data-mark": /\d/.test(mark) ? mark : "•" }, ...inline(one.slice(head.length), budget)); });
      blocks.push(make("ul", {}, ...items));
      at += items.length;
    } else if (isTable(at)) {
      const width = cells(line).length, rows = each(at + 2, (one) => one.includes("|"), (one) => row(one, "td", width));
      blocks.push(make("div", { class: "scroll" }, make("table", { class: "plain" }, make("thead", {}, row(line, "th")), make("tbody", {}, ...rows))));
      at += 2 + rows.length;
    } else if (/^\s{0,3}> ?/.test(line)) {
      const end = run(at, (one) => /^\s{0,3}>/.test(one));
      blocks.push(make("blockquote", {}, ...inline(lines.slice(at, end).map((one) => one.replace(/^\s{0,3}> ?/, "")).join("\n"), budget)));
      at = end;
    } else {
      const end = run(at, (one, n) => n === at || (one.trim() !== "" && !/^\s{0,40}(#{1,6} |`{3}|~{3}|> ?|[-*+] |\d{1,9}[.)] )/.test(one) && !isTable(n)));
      const words = lines.slice(at, end).join("\n");
      if (words.trim()) blocks.push(make("p", {}, ...inline(words, budget)));
      at = end;
    }
  }
  if (at < lines.length) blocks.push(el("p", {}, lines.slice(at).join("\n")));
  if (budget.left < 0 || at < lines.length) blocks.push(el("p", { class: "muted" }, `Only the first ${MOST_ELEMENTS} elements are laid out; the rest is plain text.`));
  return blocks;
}
