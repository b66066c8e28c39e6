// Differences between two texts, word by word, from the longest common subsequence of their words.

import { el, isWoven } from "/static/base.js";

const MOST = 4e6; // cells of the table; in longer texts, all words between the common beginning and end count as replaced
const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// Pairs of a kind and a text: "=" is in both texts, "-" only in the first, "+" only in the second.
export function differences(first, second) {
  let a = words(first), b = words(second), head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a.at(-1 - tail) === b.at(-1 - tail)) tail++;
  const pairs = [];
  const add = (kind, word) => { if (!word) return; if (pairs.at(-1)?.[0] === kind) pairs.at(-1)[1] += word; else pairs.push([kind, word]); };
  add("=", a.slice(0, head).join(""));
  const end = a.slice(a.length - tail).join("");
  a = a.slice(head, a.length - tail); b = b.slice(head, b.length - tail);
  if (a.length * b.length > MOST) { add("-", a.join("")); add("+", b.join("")); add("=", end); return pairs; }
  const width = b.length + 1, common = new Uint16Array((a.length + 1) * width); // [i, j] length of the longest common subsequence of a[i:] and b[j:]
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
    common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("=", a[i++]); j++; }
    else if (j >= b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) add("-", a[i++]);
    else add("+", b[j++]);
  }
  add("=", end);
  return pairs;
}

// A text with its differences from another: "-" marks words that only this text has, as the first of two; "+" the same, as the second;
// "±" also shows the words that only the other text has.
export function marked(text, other, kind) {
  if (other === undefined || other === null || other === text || isWoven(text) || isWoven(other)) return [text];
  const pairs = kind === "-" ? differences(text, other) : differences(other, text);
  return pairs.filter(([one]) => one === "=" || kind === "±" || one === kind).map(([one, words]) => (one === "=" ? words : el(one === "-" ? "del" : "ins", {}, words)));
}
