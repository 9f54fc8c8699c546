// Elements without HTML: every text becomes a text node, so that nothing that a rank prints or a stranger names is ever code.

/** Make an element: `h("p", { class: "soft" }, "text", child, …)`. Properties beginning with `on` are listeners. */
export function h(name, properties, ...children) {
  const element = document.createElement(name);
  set(element, properties);
  element.append(...flat(children));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Make an element of SVG. */
export function s(name, properties, ...children) {
  const element = document.createElementNS(SVG, name);
  set(element, properties);
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
}

function set(element, properties) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Replace what an element contains. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/** A table with a heading; cells are texts or elements, `right` names the columns of numbers. */
export function table(heading, rows, { right = [], caption, label } = {}) {
  const side = (at) => (right.includes(at) ? "number" : null);
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label ?? caption ?? "Table" },
    h("table", {},
      caption && h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heading.map((text, at) => (text ? h("th", { scope: "col", class: side(at) }, text) : h("td", {}))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h("td", { class: side(at) }, cell ?? "–")))))));
}

/** Facts as a list of names and values; those without a value are left out. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => h("div", { class: typeof value === "string" && value.length > 32 ? "long" : null }, h("dt", {}, name), h("dd", {}, value))));
}

/** A word for a run's or a rank's state, with its colour. */
export function badge(state) {
  const kind = { running: "good", done: "done", failed: "bad", hung: "bad", "cut off": "bad", lost: "bad", silent: "warn", starting: "good" }[state] ?? "plain";
  return h("span", { class: `badge ${kind}` }, state);
}

/** What an empty view shows. */
export function empty(title, ...more) {
  return h("div", { class: "empty" }, h("p", { class: "title" }, title), more.map((text) => h("p", {}, typeof text === "string" ? prose(text) : text)));
}

/** Text of our own with what is between two backticks as code. */
export function prose(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}

/** A section with a heading. */
export function section(title, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("h2", {}, title), children);
}

/** A number with up to four significant digits, or as a whole; its exact value is on hover. */
export function numeral(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  return h("data", { value, title: String(value) }, short(value));
}

/** A number as text, as `ttlaunch metrics` shows it. */
export function short(value) {
  if (typeof value !== "number") return String(value ?? "–");
  if (Number.isInteger(value) && Math.abs(value) >= 1) return value.toLocaleString("en");
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(3);
  return String(Number(value.toPrecision(4)));
}

/** Whole numbers as text, as the terminal folds them: 0-3,7. */
export function fold(numbers) {
  const parts = [];
  for (const one of [...numbers].sort((a, b) => a - b)) {
    if (parts.length && parts.at(-1)[1] === one - 1) parts.at(-1)[1] = one;
    else parts.push([one, one]);
  }
  return parts.map(([first, last]) => (first === last ? String(first) : `${first}-${last}`)).join(",");
}

/** Bytes in the unit that suits them. */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  for (const [unit, of] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (size >= of) return `${(size / of).toPrecision(3)} ${unit}`;
  return `${Math.round(size)} B`;
}

/** Seconds in the unit that suits them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (value < 120) return `${value.toPrecision(3)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(0)} d`;
}

/** A time of day, with the date if it is not today. */
export function clock(time) {
  if (!time) return "–";
  const date = new Date(time * 1000);
  const day = date.toDateString() === new Date().toDateString() ? "" : `${date.toISOString().slice(0, 10)} `;
  return `${day}${date.toLocaleTimeString("en-GB")}`;
}

/** Seconds and milliseconds of a line of a log. */
export function stamp(time) {
  const date = new Date(time * 1000);
  return `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}
