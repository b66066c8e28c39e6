// Conversations that wait for a person, the longest first. One is open; what is written to each stays while others come.

import { el, get, lasting, post, say } from "/static/base.js";

const EVERY_MS = 1000;
const drafts = new Map(); // ticket -> what is written and not yet sent
const said = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? ""));

export async function answer() {
  const queue = el("nav", { id: "queue", "aria-label": "Conversations that wait" }), talk = el("section", { id: "talk", "aria-label": "Conversation" });
  const status = el("p", { class: "muted", role: "status" });
  let papers = [], open = null, timer = 0;

  const left = (paper) => Math.max(0, Math.round(paper.until - Date.now() / 1000));
  const showQueue = () => queue.replaceChildren(...papers.map((paper) => el("button", { type: "button", class: "ticket", "aria-current": paper.ticket === open ? "true" : null, onclick: () => choose(paper.ticket) },
    el("strong", {}, String(paper.about.conversation ?? paper.ticket.slice(0, 8))), ` ${lasting(left(paper))} left`, el("span", { class: "muted" }, said(paper.messages.at(-1)?.content).slice(0, 80)))));

  function choose(ticket) {
    open = ticket;
    const paper = papers.find((one) => one.ticket === ticket);
    showQueue();
    if (!paper) { talk.replaceChildren(el("p", { class: "muted" }, papers.length ? "Choose a conversation." : "No conversation waits.")); return; }
    const text = el("textarea", { id: "text", rows: "4", required: true, oninput: () => drafts.set(ticket, text.value) });
    text.value = drafts.get(ticket) ?? "";
    const score = el("input", { id: "score", type: "number", step: "any" });
    const problem = el("p", { class: "problem", role: "alert", hidden: true });
    const send = async (isEnd) => {
      try {
        await post("answer", { ticket, text: text.value, is_end: isEnd, score: score.value === "" ? null : Number(score.value) });
        drafts.delete(ticket);
        papers = papers.filter((one) => one.ticket !== ticket);
        choose(papers[0]?.ticket ?? null);
        document.getElementById("text")?.focus();
      } catch (failed) {
        say(problem, failed.message);
        problem.hidden = false;
      }
    };
    text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(false); });
    talk.replaceChildren(
      el("dl", {}, ...Object.entries(paper.about).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, said(value))])),
      ...paper.messages.map((message) => el("div", { class: `said ${message.role}` }, el("h2", {}, String(message.role)), el("p", {}, said(message.content)))),
      problem,
      el("form", { onsubmit: (event) => { event.preventDefault(); send(false); } }, el("label", { for: "text" }, "Your answer, as the user"), text,
        el("div", { class: "bar" }, el("label", {}, "Score of the model's turn", score), el("button", { type: "submit" }, "Answer"), el("button", { type: "button", onclick: () => send(true) }, "End the conversation"))));
  }

  async function poll() {
    try {
      papers = await get("waiting");
      say(status, `${papers.length} waiting`);
      if (papers.some((paper) => paper.ticket === open)) showQueue();
      else choose(papers[0]?.ticket ?? null);
    } catch (failed) {
      say(status, failed.message);
    }
    timer = setTimeout(poll, EVERY_MS);
  }

  await poll();
  return { element: el("div", {}, status, el("div", { class: "desk" }, queue, talk)), leave: () => clearTimeout(timer) };
}
