// Charts of numbers by rank over the steps, with uPlot, each with the same numbers as a table.
import { h, fill, short, table } from "./dom.js";

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const DASHES = [[], [6, 3], [2, 3]];

/** The colour of a series, by its number, as the page's style has it. */
export function colourOf(number) {
  return getComputedStyle(document.documentElement).getPropertyValue(COLOURS[number % COLOURS.length]).trim();
}

/**
 * A chart. `series` are `{ label, steps, values, dash }`; `zoom(first, last)` is called when the user has chosen a part of the
 * steps, with nulls for all of them.
 */
export function chart(title, { unit = "", zoom, sync } = {}) {
  const place = h("div", { class: "plot", role: "img", "aria-label": title });
  const legend = h("ul", { class: "legend" });
  const numbers = h("div", { class: "numbers" });
  const details = h("details", {}, h("summary", {}, "Table"), numbers);
  const reset = h("button", { type: "button", class: "small", hidden: true, onclick: () => zoom?.(null, null) }, "Whole run");
  const element = h("figure", { class: "chart" },
    h("figcaption", {}, h("span", { class: "title" }, title), unit && h("span", { class: "soft" }, unit), reset), place, legend, details);
  let plot = null;
  let known = [];
  let isZoomed = false;

  function draw() {
    plot?.destroy();
    plot = null;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--soft").trim();
    const grid = { stroke: style.getPropertyValue("--grid").trim(), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui, sans-serif" };
    fill(legend, known.map((one, at) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = one.colour ?? colourOf(at);
      return h("li", {}, swatch, one.label, h("span", { class: "value", "data-series": at }, last(one)));
    }));
    if (!known.some((one) => one.steps.length)) {
      fill(place, h("p", { class: "soft" }, "Nothing was measured yet."));
      return;
    }
    fill(place);
    plot = new uPlot({
      width: Math.max(200, place.clientWidth),
      height: 200,
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, sync: sync ? { key: sync } : undefined, points: { size: 6 } },
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 56, values: (_, ticks) => ticks.map(short) }],
      series: [{ label: "step" }, ...known.map((one, at) => ({
        label: one.label, stroke: one.colour ?? colourOf(at), width: 1.5, spanGaps: true, dash: DASHES[one.dash ?? 0],
        points: { show: one.steps.length < 40, size: 4 },
      }))],
      hooks: {
        setCursor: [(u) => showValues(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width < 4 || !zoom) return;
          const [first, end] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          zoom(Math.floor(first), Math.ceil(end));
        }],
      },
    }, joined(known), place);
  }

  function showValues(at) {
    for (const [number, one] of known.entries()) {
      const value = at === null || at === undefined ? last(one) : short(plot.data[number + 1][at] ?? null);
      const cell = legend.querySelector(`[data-series="${number}"]`);
      if (cell) cell.textContent = at === null || at === undefined ? value : `${value} at ${plot.data[0][at]}`;
    }
  }

  const watcher = new ResizeObserver(() => {
    if (plot && place.clientWidth > 0 && Math.abs(plot.width - place.clientWidth) > 1) plot.setSize({ width: place.clientWidth, height: 200 });
  });
  watcher.observe(place);
  details.addEventListener("toggle", () => details.open && tabulate());

  function tabulate() {
    const rows = [];
    for (const one of known) for (const [at, step] of one.steps.entries()) rows.push([one.label, String(step), String(one.values[at])]);
    const most = 500;
    fill(numbers, rows.length > most && h("p", { class: "soft" }, `The last ${most} of ${rows.length} points.`),
      table(["series", "step", title], rows.slice(-most), { right: [1, 2], label: `${title} as a table` }));
  }

  return {
    element,
    /** Show other series; `zoomed` says whether they are a part of the steps. */
    show(series, zoomed = false) {
      known = series;
      isZoomed = zoomed;
      reset.hidden = !isZoomed;
      if (element.isConnected && place.clientWidth) draw();
      else requestAnimationFrame(() => element.isConnected && draw());
      if (details.open) tabulate();
    },
    redraw: draw,
    end() {
      watcher.disconnect();
      plot?.destroy();
    },
  };
}

function last(one) {
  return one.values.length ? short(one.values.at(-1)) : "–";
}

function joined(known) {
  const tables = known.map((one) => [one.steps, one.values.map((value) => (typeof value === "number" ? value : null))]);
  for (const one of tables) {
    // uPlot wants steps that grow; a rank that repeats a step after a restart keeps its last value there
    const byStep = new Map(one[0].map((step, at) => [step, one[1][at]]));
    one[0] = [...byStep.keys()].sort((a, b) => a - b);
    one[1] = one[0].map((step) => byStep.get(step));
  }
  return uPlot.join(tables);
}

/** A small curve without axes, for a list: `[[step, value], …]`. */
export function spark(points, { width = 120, height = 28, svg, name = "loss" }) {
  const known = points.filter(([, value]) => typeof value === "number");
  if (known.length < 2) return svg("svg", { width, height, class: "spark", "aria-hidden": "true" });
  const [first, end] = [known[0][0], known.at(-1)[0]];
  const values = known.map(([, value]) => value);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const at = ([step, value]) => [2 + ((step - first) / (end - first || 1)) * (width - 4), height - 3 - ((value - least) / (most - least || 1)) * (height - 6)];
  const path = known.map((point) => at(point).map((part) => part.toFixed(1)).join(" ")).join("L");
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "spark", role: "img", "aria-label": `${name} from ${short(values[0])} to ${short(values.at(-1))}` },
    svg("path", { d: `M${path}` }));
}
