// The desk: conversations that wait for a person, oldest first. One is open; the unsent answers to all of them stay.

import { el, get, lasting, post, say } from "/static/base.js";

const EVERY_MS = 1000;
const drafts = new Map(); // ticket -> text that was typed and not sent
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? ""));

export async function answer() {
  const queue = el("nav", { id: "queue", "aria-label": "Waiting conversations" }), talk = el("section", { id: "talk", "aria-label": "Conversation" });
  const status = el("p", { class: "muted", role: "status" });
  let conversations = [], open = null, timer = 0;

  const left = (conversation) => Math.max(0, Math.round(conversation.until - Date.now() / 1000));
  const showQueue = () => queue.replaceChildren(...conversations.map((conversation) => el("button", { type: "button", class: "ticket", "aria-current": conversation.ticket === open ? "true" : null, onclick: () => choose(conversation.ticket) },
    el("strong", {}, String(conversation.about.conversation ?? conversation.ticket.slice(0, 8))), ` ${lasting(left(conversation))} left`, el("span", { class: "muted" }, asText(conversation.messages.at(-1)?.content).slice(0, 80)))));

  function choose(ticket) {
    open = ticket;
    const conversation = conversations.find((one) => one.ticket === ticket);
    showQueue();
    if (!conversation) { talk.replaceChildren(el("p", { class: "muted" }, conversations.length ? "Choose a conversation." : "No conversation is waiting.")); return; }
    const text = el("textarea", { id: "text", rows: "4", required: true, oninput: () => drafts.set(ticket, text.value) });
    text.value = drafts.get(ticket) ?? "";
    const score = el("input", { id: "score", type: "number", step: "any" });
    const problem = el("p", { class: "problem", role: "alert", hidden: true });
    const send = async (isEnd) => {
      try {
        await post("answer", { ticket, text: text.value, is_end: isEnd, score: score.value === "" ? null : Number(score.value) });
        drafts.delete(ticket);
        conversations = conversations.filter((one) => one.ticket !== ticket);
        choose(conversations[0]?.ticket ?? null);
        document.getElementById("text")?.focus();
      } catch (failed) {
        say(problem, failed.message);
        problem.hidden = false;
      }
    };
    text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(false); });
    talk.replaceChildren(
      el("dl", {}, ...Object.entries(conversation.about).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, asText(value))])),
      ...conversation.messages.map((message) => el("div", { class: `said ${message.role}` }, el("h2", {}, String(message.role)), el("p", {}, asText(message.content)))),
      problem,
      el("form", { onsubmit: (event) => { event.preventDefault(); send(false); } }, el("label", { for: "text" }, "Your answer, as the user"), text,
        el("div", { class: "bar" }, el("label", {}, "Score of the model's turn", score), el("button", { type: "submit" }, "Answer"), el("button", { type: "button", onclick: () => send(true) }, "End the conversation"))));
  }

  async function poll() {
    try {
      conversations = await get("waiting");
      say(status, `${conversations.length} waiting`);
      if (conversations.some((conversation) => conversation.ticket === open)) showQueue();
      else choose(conversations[0]?.ticket ?? null);
    } catch (failed) {
      say(status, failed.message);
    }
    timer = setTimeout(poll, EVERY_MS);
  }

  await poll();
  return { element: el("div", {}, status, el("div", { class: "desk" }, queue, talk)), leave: () => clearTimeout(timer) };
}
