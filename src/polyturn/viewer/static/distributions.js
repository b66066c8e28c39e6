// How rewards, lengths, turns, staleness, advantages and differences of log-probabilities are distributed over the steps.

import { addressForm, el, get, kept, select } from "/static/base.js";
import { heatMap, lineChart, palette, stack } from "/static/charts.js";

export async function distributions(run, values, info) {
  const split = values.split ?? (info.splits.includes("train") ? "train" : info.splits[0] ?? "train");
  const data = await get(`runs/${run}/distributions`, { split });
  const form = addressForm("distributions", select("split", { split }, info.splits, "Split", null));
  const sections = data.distributions.map((one) => el("section", { class: "chart", "aria-label": one.title }, el("h2", {}, one.title), heatMap(one, { label: one.title })));
  const parts = Object.entries(data.parts.parts), { steps } = data.parts;
  const title = data.parts.is_sum ? "The reward by its parts, stacked" : "Parts of the reward", curves = parts.map(([name, means], color) => ({ name, color, x: steps, y: means }));
  const draw = () => lineChart(data.parts.is_sum ? stack(curves) : curves, { label: title });
  const stacked = el("div", {}, draw());
  const legend = el("div", { class: "legend" }, ...parts.map(([name], color) => el("span", {}, el("i", { class: palette(color) }), name)));
  if (parts.length) sections.splice(1, 0, el("section", { class: "chart", "aria-label": title }, el("h2", {}, title), legend, stacked));
  const note = el("p", { class: "muted" }, "Darker fields have a larger share of the values of their steps; the line is the mean. At most 64 tokens of a trajectory are counted, evenly spaced.");
  return { element: el("div", {}, kept ? null : form, note, el("div", { class: "charts" }, ...(sections.length ? sections : [el("p", { class: "muted" }, "Nothing was recorded yet.")]))), follows: true, repaint: () => stacked.replaceChildren(draw()) };
}
