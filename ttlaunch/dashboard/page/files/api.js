// The requests of the page, all to the server that it came from. The key comes in the part of the address that no browser sends,
// is kept in this tab only, and is sent in a header. A page that was saved as a file has its answers inside.

const KEY = "ttlaunch-dashboard-key";
const LONGEST_EVENT = 16 * 1024 * 1024;

/** An answer that is an error, with the text to show. */
export class ApiError extends Error {
  constructor(message, status = 0, diagnostics = []) {
    super(message);
    this.status = status;
    this.diagnostics = diagnostics;
  }
}

/** What a saved page contains: the answers by path. Null for a page that a server offers. */
export const saved = readSaved();

function readSaved() {
  const element = document.getElementById("saved");
  return element ? JSON.parse(element.textContent) : null;
}

/** Take the key out of the address, so that it is neither in the history nor in a copied link. */
export function takeKey() {
  const match = /^#key=([!-~]+)$/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(KEY, match[1]);
  history.replaceState(null, "", `${location.pathname}#/`);
}

/** Keep the key that the user typed for as long as this tab is open. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** GET a path; the answer's JSON. Errors are an ApiError. */
export async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const address = given.length ? `${path}?${new URLSearchParams(given)}` : path;
  if (saved) return fromSaved(path, query);
  return await (await send(address, {})).json();
}

/** POST an order; the answer's JSON. Errors are an ApiError, whose `diagnostics` say why nothing was done. */
export async function order(path, content) {
  return await (await send(path, { "content-type": "application/json" }, undefined, { method: "POST", body: JSON.stringify(content) })).json();
}

/** The path of a run, or of a part of it. */
export function pathOf(run, part = "") {
  return `/api/runs/${encodeURIComponent(run)}${part && `/${part}`}`;
}

/**
 * Follow a run's events until `signal` ends it: calls `take(kind, content, number)` for each one, and `tell(isConnected)`.
 * After a break it goes on where it was: the server sends what came later, or a `reset`.
 */
export async function follow(run, { token, number }, take, tell, signal) {
  let last = `${token}-${number}`;
  let pause = 300;
  while (!signal.aborted) {
    try {
      const response = await send(pathOf(run, "events"), { "last-event-id": last }, signal);
      tell(true);
      pause = 300;
      for await (const event of events(response)) {
        last = event.id;
        take(event.event, JSON.parse(event.data), numberOf(event.id));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status && error.status < 500) throw error;
    }
    if (signal.aborted) return;
    tell(false);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(5000, pause * 1.6);
  }
}

function numberOf(id) {
  const [token, number] = id.split("-");
  return { token, number: Number(number) };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const fields = {};
      for (const line of rest.slice(0, end).split("\n")) {
        const at = line.indexOf(": ");
        if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
      }
      rest = rest.slice(end + 2);
      if (fields.data) yield fields;
    }
    if (rest.length > LONGEST_EVENT) throw new ApiError("the server sent an event that is too long");
  }
}

async function send(address, headers, signal, more = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(address, { ...more, headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is `ttlaunch dashboard` still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    const { error, diagnostics } = await response.json();
    if (typeof error === "string") return new ApiError(error, response.status, diagnostics);
  } catch {
    // no JSON: the status has to do
  }
  return new ApiError(`the server answered with status ${response.status}`, response.status);
}

// What a server would choose from is all there in a saved page: the points of the whole run, and the last lines of its output.
function fromSaved(path, query) {
  const answer = saved.answers[path];
  if (!answer) throw new ApiError("This file does not contain that.", 404);
  if (path.endsWith("/series")) return seriesBetween(answer[query.name], query.from ?? -Infinity, query.to ?? Infinity);
  if (path.endsWith("/steps")) return { ...answer, ranks: answer.ranks.map((one) => ({ ...one, steps: one.steps.slice(-query.last) })) };
  if (path.endsWith("/logs")) return chosenLines(answer[query.fold ? "folded" : "whole"], query);
  return answer;
}

function seriesBetween(answer, first, last) {
  const ranks = Object.entries(answer.ranks).map(([rank, one]) => {
    const at = one.steps.map((step, place) => (first <= step && step <= last ? place : -1)).filter((place) => place >= 0);
    const [steps, times, values] = [one.steps, one.times, one.values].map((all) => at.map((place) => all[place]));
    return [rank, { steps, times, values, points: first === -Infinity && last === Infinity ? one.points : at.length }];
  });
  return { ...answer, ranks: Object.fromEntries(ranks) };
}

function chosenLines(answer, { level, ranks, host, stream, text, before, after }) {
  if (before) throw new ApiError(`This file contains the last ${answer.lines.length} lines; \`ttlaunch logs\` shows all.`, 404);
  const levels = ["debug", "info", "warning", "error", "critical"];
  const begin = after ? answer.lines.findIndex((one) => one.place === after) : 0;
  if (begin < 0) throw new ApiError("This file does not contain that line.", 404);
  const lines = answer.lines.slice(begin).filter((one) =>
    levels.indexOf(one.level) >= levels.indexOf(level) && (!ranks || one.ranks.includes(Number(ranks))) && (!host || one.host === host)
    && (!stream || one.stream === stream) && one.text.toLowerCase().includes(text.toLowerCase()));
  return { ...answer, lines, is_last: true };
}
