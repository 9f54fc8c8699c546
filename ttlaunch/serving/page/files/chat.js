// The chat page: it shows the chats of this tab, streams answers into them, and reports what the server says of itself.
// Whatever a model or a user wrote is set as text, never as HTML.

import { ApiError, ask, events, useKey } from "./api.js";
import { loadChats, newChat, storeChats } from "./chats.js";

const HEALTH_MS = 5000;
const LONGEST_TITLE = 40;
const REASONS = { stop: "the text came to its end", length: "the limit of tokens was reached", cancelled: "stopped" };
const at = (id) => document.getElementById(id);
const composer = at("composer");
const message = at("message");
const send = at("send");
const stop = at("stop");

const state = await loadChats();
const views = new Map(); // a chat's id to its log, and to the controller of its answer in progress

function current() {
  return state.chats[state.current];
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function viewOf(chat) {
  let view = views.get(chat.id);
  if (!view) {
    const log = element("div", "log");
    log.setAttribute("role", "log");
    log.setAttribute("aria-label", "Messages");
    log.tabIndex = 0; // so that the keyboard can scroll it
    at("logs").append(log);
    view = { log, answer: null };
    views.set(chat.id, view);
    if (chat.title) restore(chat, view);
  }
  return view;
}

async function restore(chat, view) {
  try {
    const { messages } = await ask(`/memory/history?session_id=${chat.id}`);
    for (const { role, content } of messages ?? []) addTurn(view, role === "user" ? "user" : "model", content);
    if (!messages?.length) view.log.append(element("p", "facts turn", "The server has no messages of this chat."));
  } catch (error) {
    report(error);
  }
}

function addTurn(view, who, text = "") {
  const turn = element("section", `turn ${who}`);
  turn.append(element("h2", "", who === "user" ? "You" : "Model"));
  const content = element("p", "text", text);
  turn.append(content);
  view.log.append(turn);
  view.log.scrollTop = view.log.scrollHeight;
  return { turn, content };
}

// Show.

function show() {
  const chat = current();
  const view = viewOf(chat);
  for (const other of views.values()) other.log.hidden = other !== view;
  const items = state.chats.map((one, index) => {
    const button = element("button", "", one.title || "New chat");
    button.type = "button";
    if (one === chat) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(index));
    const item = element("li");
    item.append(button);
    return item;
  });
  at("chats").replaceChildren(...items);
  showButtons();
  storeChats(state);
}

function showButtons() {
  const isBusy = viewOf(current()).answer !== null;
  if (!isBusy && document.activeElement === stop) message.focus(); // a disabled button would lose the focus
  send.disabled = isBusy;
  stop.disabled = !isBusy;
}

function choose(index) {
  state.current = index;
  at("problem").textContent = "";
  show();
  message.focus();
}

function report(error) {
  at("problem").textContent = error instanceof ApiError ? error.message : String(error);
  if (error.status === 401) at("key-dialog").showModal();
}

// Ask.

function settings() {
  const number = (id) => (at(id).value === "" ? undefined : at(id).valueAsNumber);
  return {
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
    use_memory: at("remember").checked,
  };
}

async function sendMessage() {
  const text = message.value;
  const chat = current();
  const view = viewOf(chat);
  if (text.trim() === "" || view.answer || !composer.reportValidity()) return;
  at("problem").textContent = "";
  view.answer = new AbortController();
  const question = addTurn(view, "user", text);
  chat.title ||= text.trim().slice(0, LONGEST_TITLE);
  message.value = "";
  message.focus();
  show();
  const { turn, content } = addTurn(view, "model");
  view.log.setAttribute("aria-busy", "true"); // a screen reader says the answer once it is complete
  try {
    const body = { text, session_id: chat.id, receipt: true, ...settings() };
    await stream(body, { view, turn, content });
  } catch (error) {
    const wasRefused = error instanceof ApiError && error.status >= 400 && content.textContent === "";
    if (error.name === "AbortError") addFacts(turn, "Stopped.");
    else if (wasRefused) takeBack(chat, { question, turn, text, error });
    else addFacts(turn, error instanceof ApiError ? error.message : "the connection to the server ended", "wrong");
  } finally {
    view.log.removeAttribute("aria-busy");
    view.answer = null;
    showButtons();
  }
}

// What the server refused was never part of the chat: the text goes back to where it can be changed.
function takeBack(chat, { question, turn, text, error }) {
  question.turn.remove();
  turn.remove();
  if (chat === current() && message.value === "") message.value = text;
  report(error);
}

async function stream(body, { view, turn, content }) {
  let isComplete = false;
  const notice = addFacts(turn, "", "wrong");
  for await (const event of events("/chat", body, view.answer.signal)) {
    const { log } = view;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (event.notice) notice.textContent = event.notice;
    if (typeof event.token === "string") {
      content.append(event.token);
      notice.textContent = ""; // the answer goes on
    }
    if (event.error) addFacts(turn, event.error, "wrong");
    if (event.done) {
      isComplete = true;
      if (!event.error) finish(event, { turn, content });
    }
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
  notice.remove();
  if (!isComplete) throw new Error("the answer has no end");
}

function finish(event, { turn, content }) {
  if (typeof event.full_text === "string") content.textContent = event.full_text;
  const speed = event.tokens_per_second ? `, ${event.tokens_per_second.toFixed(1)} a second` : "";
  const facts = [`${event.num_tokens} tokens${speed}`];
  if (event.seed !== undefined) facts.push(`seed ${event.seed}`);
  if (event.finish_reason) facts.push(REASONS[event.finish_reason] ?? event.finish_reason);
  const line = addFacts(turn, facts.join(" · "));
  if (!event.receipt) return;
  const save = element("button", "", "Save receipt");
  save.type = "button";
  save.addEventListener("click", () => saveFile(event.receipt, `receipt-${event.tokens_sha256.slice(0, 12)}.json`));
  line.append(save);
}

function addFacts(turn, text, className = "") {
  const line = element("p", `facts ${className}`, text);
  turn.append(line);
  return line;
}

function saveFile(receipt, name) {
  const link = element("a");
  const text = JSON.stringify(receipt, null, 1) + "\n"; // all its numbers are exact here: seeds have 53 bits
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function forget() {
  const chat = current();
  const view = viewOf(chat);
  view.answer?.abort();
  try {
    await ask("/memory/clear", { session_ids: [chat.id] });
  } catch (error) {
    report(error);
    return;
  }
  view.log.remove();
  views.delete(chat.id);
  state.chats.splice(state.current, 1);
  if (state.chats.length === 0) state.chats.push(newChat());
  choose(Math.min(state.current, state.chats.length - 1));
}

// What the server says of itself.

async function describe() {
  const config = await ask("/config");
  const exact = config.exact ? "exact: the training’s own bits" : `not exact: ${config.why_not_exact ?? "no reason given"}`;
  const known = [config.model_name, config.recipe, config.step === undefined ? null : `step ${config.step}`];
  const weights = config.weights_sha256 ? `weights ${config.weights_sha256.slice(0, 12)}` : null;
  at("model").textContent = [...known, weights, exact].filter((one) => one).join(" · ");
  at("max-tokens").placeholder = config.max_new_tokens ?? "";
  at("temperature").placeholder = config.temperature ?? "";
  at("top-p").placeholder = config.top_p?.p ?? config.top_p ?? "";
}

let wasHealthy = null;

async function checkHealth() {
  let words = "";
  try {
    await ask("/health");
  } catch (error) {
    words = error.message;
    if (error.status === 401) words = "a key is needed";
  }
  const text = words ? `Not ready: ${words}` : "Ready";
  if (at("health").textContent !== text) at("health").textContent = text; // said again only when it changes
  at("health").className = words ? "wrong" : "";
  const isHealthy = words === "";
  if (isHealthy && wasHealthy !== true) await describe().catch(report); // newer weights may have been loaded
  wasHealthy = isHealthy;
}

async function watchHealth() {
  for (;;) {
    if (document.visibilityState === "visible") await checkHealth();
    await new Promise((resolve) => setTimeout(resolve, HEALTH_MS));
  }
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  sendMessage();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  sendMessage();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("key-dialog").open) viewOf(current()).answer?.abort();
});
stop.addEventListener("click", () => viewOf(current()).answer?.abort());
at("forget").addEventListener("click", forget);
at("new-chat").addEventListener("click", () => choose(state.chats.push(newChat()) - 1));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value);
  at("key").value = "";
  at("key-dialog").close();
  at("problem").textContent = "";
  wasHealthy = null;
  checkHealth();
  message.focus();
});

show();
message.focus();
watchHealth();
