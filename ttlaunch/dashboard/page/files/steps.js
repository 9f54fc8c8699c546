// The last steps as a timeline: a row for each rank, its phases in the order of a step, and how much of them it could only wait.
import { ask, pathOf } from "./api.js";
import { empty, fill, h, s, seconds, section, table } from "./dom.js";

const ORDER = ["forward", "backward", "exchange", "update"];
const ROW = 34;
const LEFT = 130;
const LEAST_WIDTH = 640;

/** Show the timeline; `update` reads it again. */
export async function showSteps(place, run) {
  let last = 8;
  const many = h("select", { id: "many", onchange: (event) => { last = Number(event.target.value); update(); } },
    [4, 8, 16, 40].map((count) => h("option", { value: count, selected: count === last }, `${count} steps`)));
  const picture = h("div", {});
  fill(place, section("Timeline of the last steps", h("div", { class: "bar" }, h("label", { for: "many" }, "Show"), many, legend()), picture));

  async function update() {
    const found = await ask(pathOf(run, "steps"), { last });
    const rows = found.ranks.filter((one) => one.steps.length);
    fill(picture, rows.length ? [draw(rows, Math.max(LEAST_WIDTH, picture.clientWidth)), numbers(rows)] : empty("No step has ended yet", "Ranks of recipes record the times of their steps; a plain script does not."));
  }
  await update();
  let width = picture.clientWidth;
  const watcher = new ResizeObserver(() => {
    if (picture.clientWidth && picture.clientWidth !== width) {
      width = picture.clientWidth;
      update();
    }
  });
  watcher.observe(picture);
  return { update, end: () => watcher.disconnect() };
}

function legend() {
  return h("ul", { class: "legend" }, [...ORDER, "other"].map((name) => h("li", {}, h("span", { class: `swatch p-${name}` }), name)), h("li", {}, h("span", { class: "swatch p-wait" }), "could only wait"));
}

function draw(rows, width) {
  const all = rows.flatMap((one) => one.steps);
  const [begin, end] = [Math.min(...all.map((one) => one.begin)), Math.max(...all.map((one) => one.end))];
  const x = (time) => LEFT + ((time - begin) / (end - begin || 1)) * (width - LEFT - 10);
  const height = rows.length * ROW + 34;
  const ticks = 6;
  const parts = [];
  for (let tick = 0; tick <= ticks; tick += 1) {
    const time = begin + ((end - begin) * tick) / ticks;
    parts.push(s("line", { x1: x(time), x2: x(time), y1: 0, y2: rows.length * ROW + 6, class: "tick" }),
      s("text", { x: x(time), y: height - 8, class: "tick", "text-anchor": tick === ticks ? "end" : "middle" }, tick ? seconds(time - begin) : "0"));
  }
  for (const [at, rank] of rows.entries()) {
    const top = at * ROW + 6;
    parts.push(s("text", { x: 4, y: top + 16, class: "name" }, `${rank.rank} ${rank.role}`));
    for (const step of rank.steps) parts.push(...one(step, top, x, rank));
  }
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Timeline" },
    s("svg", { viewBox: `0 0 ${width} ${height}`, class: "timeline", role: "img", "aria-label": "When each rank computed, exchanged and waited; the table below has the numbers" }, parts));
}

function one(step, top, x, rank) {
  const length = step.end - step.begin;
  const phases = Object.entries(step.phases).sort(([a], [b]) => place(a) - place(b));
  const known = phases.reduce((sum, [, time]) => sum + time, 0);
  const scale = known > length && known > 0 ? length / known : 1;
  const wait = Math.min(length, Object.values(step.waits).reduce((sum, time) => sum + time, 0));
  const title = `rank ${rank.rank}, step ${step.step}: ${seconds(length)}${phases.map(([name, time]) => `, ${name} ${seconds(time)}`).join("")}, waited ${seconds(wait)}`;
  const parts = [s("title", {}, title), s("rect", { x: x(step.begin), y: top, width: Math.max(1, x(step.end) - x(step.begin) - 1), height: 20, class: "p-other" })];
  let time = step.begin;
  for (const [name, duration] of phases) {
    const until = time + duration * scale;
    parts.push(s("rect", { x: x(time), y: top, width: Math.max(0.5, x(until) - x(time)), height: 20, class: `p-${ORDER.includes(name) ? name : "other"}` }));
    time = until;
  }
  if (wait) parts.push(s("rect", { x: x(step.begin), y: top + 21, width: Math.max(0.5, x(step.begin + wait) - x(step.begin)), height: 4, class: "p-wait" }));
  return [s("g", {}, parts)];
}

function place(name) {
  const at = ORDER.indexOf(name);
  return at < 0 ? ORDER.length : at;
}

function numbers(rows) {
  const cells = rows.flatMap((rank) => rank.steps.map((step) => [String(rank.rank), rank.role, String(step.step), seconds(step.end - step.begin),
    ...ORDER.map((name) => (name in step.phases ? seconds(step.phases[name]) : "–")),
    Object.entries(step.waits).sort((a, b) => b[1] - a[1]).map(([name, time]) => `${name} ${seconds(time)}`).join(", ") || "–"]));
  return h("details", {}, h("summary", {}, "Table"), table(["rank", "role", "step", "took", ...ORDER, "could only wait"], cells, { right: [0, 2, 3, 4, 5, 6, 7], label: "Steps" }));
}
