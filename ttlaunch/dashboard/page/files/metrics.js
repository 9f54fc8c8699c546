// Numbers by rank over the steps: choose, zoom, and lay a second run over the first.
import { ask, pathOf } from "./api.js";
import { chart } from "./charts.js";
import { empty, fill, h, numeral, table } from "./dom.js";

const FIRST = ["train/loss", "validation/loss", "train/grad_norm", "train/step_time_s", "train/tokens_per_s", "train/samples_per_s"];
const MOST_CHARTS = 12;

/** Show the numbers of a run; the result's `take` adds newer points, and `reset` asks for everything again. */
export async function showMetrics(place, run, { other, runs, choose }) {
  const body = h("div", { class: "charts" });
  const shown = new Map();
  const names = (await ask(pathOf(run, "numbers"))).names;
  const others = other ? (await ask(pathOf(other, "numbers"))).names : {};
  const chosen = new Set(FIRST.filter((name) => names[name]));
  let part = [null, null];
  let isOver = false;
  if (!chosen.size) for (const name of Object.keys(names).slice(0, 4)) chosen.add(name);
  const offered = [...chosen, ...Object.keys(names).filter((name) => !chosen.has(name))];
  const list = h("div", { class: "names" });
  const filter = h("input", { type: "search", id: "names", placeholder: "communication/…", oninput: () => drawNames() });
  const second = h("select", { id: "second", onchange: (event) => choose(event.target.value) }, h("option", { value: "" }, "no other run"),
    runs.filter((one) => one.run_id !== run).slice(0, 200).map((one) => h("option", { value: one.run_id, selected: one.run_id === other }, `${one.name} · ${one.run_id}`)));
  const numbers = h("details", { class: "card", ontoggle: (event) => event.target.open && tabulate() }, h("summary", {}, "All numbers: first, last, least, most"), h("div", { id: "all-numbers" }));
  fill(place, h("div", { class: "with-side" },
    h("aside", { class: "card", "aria-label": "Which numbers" }, h("label", { for: "names" }, "Numbers"), filter, list,
      h("label", { for: "second" }, "Lay over"), second, h("p", { class: "soft" }, "Drag over a chart to zoom.")),
    h("div", {}, body, numbers)));

  function drawNames() {
    const word = filter.value.toLowerCase();
    fill(list, offered.filter((name) => name.toLowerCase().includes(word)).map((name) => {
      const box = h("input", { type: "checkbox", onchange: (event) => toggle(name, event.target) });
      box.checked = chosen.has(name);
      return h("label", {}, box, h("span", {}, name.split("/").flatMap((part, at) => (at ? ["/", h("wbr", {}), part] : [part]))));
    }));
    if (!offered.length) fill(list, h("p", { class: "soft" }, "Nothing was measured yet."));
  }

  async function toggle(name, box) {
    if (box.checked && chosen.size < MOST_CHARTS) chosen.add(name);
    else chosen.delete(name);
    box.checked = chosen.has(name); // the list stays as it is, and so does the focus
    await draw();
  }

  async function load(name) {
    const [first, last] = part;
    const query = { name, from: first, to: last, points: 1500 };
    const found = await ask(pathOf(run, "series"), query);
    const series = rowsOf(found, other ? `${run.slice(-4)} rank` : "rank", 0);
    if (other && others[name]) series.push(...rowsOf(await ask(pathOf(other, "series"), query), `${other.slice(-4)} rank`, 1));
    return { number: found.number, token: found.token, series };
  }

  async function draw() {
    for (const [name, one] of shown) {
      if (chosen.has(name)) continue;
      one.chart.end();
      shown.delete(name);
    }
    for (const name of chosen) {
      if (!shown.has(name)) shown.set(name, { chart: chart(name, { zoom, sync: "steps" }), loaded: null, waiting: [] });
    }
    fill(body, chosen.size ? [...chosen].map((name) => shown.get(name).chart.element) : offered.length ? empty("No number is chosen", "Choose some in the list of numbers.") : empty("Nothing was measured yet", "Numbers appear here when a rank has reported its first step."));
    await Promise.all([...chosen].map((name) => refresh(name)));
  }

  async function refresh(name) {
    const one = shown.get(name);
    one.loaded = null; // points that come meanwhile wait
    const loaded = await load(name);
    if (isOver || shown.get(name) !== one) return;
    one.loaded = loaded;
    const waiting = one.waiting.splice(0);
    for (const { number, points } of waiting) if (number > loaded.number) add(one, points);
    one.chart.show(loaded.series, part[0] !== null);
  }

  async function zoom(first, last) {
    part = [first, last];
    await Promise.all([...chosen].map((name) => refresh(name)));
  }

  function add(one, points) {
    for (const [, rank, step, , value] of points) {
      if (part[1] !== null && step > part[1]) continue;
      let series = one.loaded.series.find((each) => each.rank === rank && !each.dash);
      if (!series) {
        series = { label: `rank ${rank}`, rank, steps: [], values: [], dash: 0 };
        one.loaded.series.push(series);
      }
      series.steps.push(step);
      series.values.push(value);
    }
  }

  async function tabulate() {
    const rows = [];
    const all = await Promise.all(Object.keys(names).slice(0, 300).map((name) => ask(pathOf(run, "series"), { name, points: 2000 })));
    for (const found of all) for (const [rank, one] of Object.entries(found.ranks)) {
      const known = one.values.filter((value) => typeof value === "number");
      rows.push([found.name, rank, String(one.points), numeral(one.values[0]), numeral(one.values.at(-1)), numeral(Math.min(...known)), numeral(Math.max(...known))]);
    }
    fill(numbers.querySelector("#all-numbers"), table(["metric", "rank", "times", "first", "last", "least", "most"], rows, { right: [1, 2, 3, 4, 5, 6], label: "All numbers" }));
  }

  drawNames();
  await draw();
  return {
    take(points, number) {
      let isNew = false;
      for (const [name, rank] of points) {
        if (!names[name]) isNew = Boolean((names[name] = [rank]));
      }
      if (isNew) {
        if (!chosen.size || Object.keys(names).length < 12) for (const name of FIRST) if (names[name]) chosen.add(name);
        drawNames();
        draw();
      }
      for (const [name, one] of shown) {
        const own = points.filter((point) => point[0] === name);
        if (!own.length) continue;
        if (!one.loaded) one.waiting.push({ number, points: own });
        else if (number > one.loaded.number) {
          add(one, own);
          one.chart.show(one.loaded.series, part[0] !== null);
        }
      }
    },
    reset: draw,
    redraw() {
      for (const one of shown.values()) one.chart.redraw();
    },
    end() {
      isOver = true;
      for (const one of shown.values()) one.chart.end();
    },
  };
}

function rowsOf(found, label, dash) {
  return Object.entries(found.ranks).map(([rank, one]) => ({ label: `${label} ${rank}`, rank: Number(rank), steps: one.steps, values: one.values, dash }));
}
