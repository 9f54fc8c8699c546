// The requests of the page, all to the server that it came from. A key is sent in a header and kept in this tab only.

const KEY = "ttlaunch-key";
const LONGEST_EVENT = 16 * 1024 * 1024; // a final event repeats the whole text and may hold a receipt

/** An answer that is an error, with the text to show. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keep the key that the user typed for as long as this tab is open. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** GET a path, or POST `body` to it; the answer's JSON. Errors are an ApiError. */
export async function ask(path, body) {
  const response = await send(path, body);
  return await response.json();
}

/**
 * POST `body` and yield the events of the answer, each the object of its JSON, until it ends; `signal` stops it.
 * A comment that holds JSON says why nothing comes for a while: it is yielded as `{ notice }`.
 */
export async function* events(path, body, signal) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = rest.slice(0, end);
      rest = rest.slice(end + 2);
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
      else if (event.startsWith(": {")) yield { notice: JSON.parse(event.slice(2)).error };
    }
    if (rest.length > LONGEST_EVENT) throw new ApiError("the server sent an event that is too long");
  }
}

async function send(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  let response;
  try {
    response = await fetch(path, { ...options, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer; is `ttlaunch serve` still running?");
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  const waits = response.headers.get("retry-after");
  const hint = response.status === 429 && waits ? `; try again in ${waits} s` : "";
  try {
    const { error, detail, reason: why } = await response.json();
    const found = [error?.message, error, detail, why].find((one) => typeof one === "string");
    return (found ?? `the server answered with status ${response.status}`) + hint;
  } catch {
    return `the server answered with status ${response.status}${hint}`;
  }
}
