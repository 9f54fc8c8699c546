// Members of an elastic run that come and go: who took part in which steps, why workers came and left, what that cost.
import { badge, bytes, empty, fold, h, s, seconds, section, short, table } from "./dom.js";

const BAR = 16;
const BAR_ROW = 30;
const NAMES = 110;
const LEAST_PICTURE = 640;
const MOST_EPOCHS = 200;
const MOST_WORKERS = 64;

/** The ranks that have been started; an elastic run's plan has rows for those that may come yet. */
export function presentRanks(ranks) {
  return ranks.filter((one) => one.state !== "absent");
}

/** The section of a run's members, null for a run that is not elastic; with `isWhole` also the workers and their picture, as wide as `width` if it has room for it. */
export function membersSection(run, { isWhole = false, width = 0 } = {}) {
  const epochs = (run.report.epochs ?? []).slice(-MOST_EPOCHS);
  if (!epochs.length) return run.is_elastic && isWhole ? section("Members that come and go", empty("Nobody takes part yet", "Workers appear here when they have registered with the coordinator.")) : null;
  const workers = workersOf(run, epochs);
  const shown = workers.slice(0, MOST_WORKERS);
  return section("Members that come and go",
    isWhole && [membersPicture(run, epochs, shown, Math.max(LEAST_PICTURE, width)),
      workers.length > shown.length && h("p", { class: "soft" }, `The picture has the first ${MOST_WORKERS} of ${workers.length} workers.`),
      table(["worker", "host", "state", "took part in steps", "left because"], workers.map((one) => [one.name, one.host ?? "–", one.state ? badge(one.state) : "–",
        one.parts.map(([first, last]) => (first === last ? String(first) : `${first}–${last}`)).join(", ") || "none yet", one.why ?? "–"]), { label: "Workers" }),
      h("h3", {}, "Epochs")],
    table(["epoch", "after step", "workers", "computed anew", "pause", "bytes", "÷ formula", "because"], epochs.map((one) => [short(one.epoch), short(one.step), fold(one.members), short(one.computed_anew),
      seconds(one.pause_s), one.traffic ? bytes(one.traffic.bytes) : "–", one.traffic?.formula_bytes ? (one.traffic.bytes / one.traffic.formula_bytes).toFixed(3) : "–",
      `${one.reasons.join("; ") || "the run began"}${one.lost_steps ? `; ${one.lost_steps} steps lost` : ""}`]), { right: [0, 1, 3, 4, 5, 6], label: "Epochs" }));
}

/** The steps in which a rank took part, and why it is no member any more; null for a rank that never was. */
export function membershipOf(run, rank) {
  return workersOf(run, run.report.epochs ?? []).find((one) => one.number === rank) ?? null;
}

function workersOf(run, epochs) {
  const newest = Math.max(run.report.steps, ...epochs.map((one) => one.step));
  const known = new Map(run.rank_states.map((one) => [one.rank, one]));
  return [...new Set(epochs.flatMap((one) => one.members))].sort((a, b) => a - b).map((number) => {
    const name = `worker-${String(number).padStart(4, "0")}`;
    const parts = [];
    let why = null;
    epochs.forEach((epoch, at) => {
      if (!epoch.members.includes(number)) {
        if (epochs[at - 1]?.members.includes(number)) why = epoch.reasons.find((one) => one.startsWith(`${name} `))?.slice(name.length + 1) ?? "it takes part no more";
        return;
      }
      why = null;
      const [first, last] = [epoch.step + 1, epochs[at + 1]?.step ?? newest];
      if (parts.length && parts.at(-1)[1] === epoch.step) parts.at(-1)[1] = Math.max(last, parts.at(-1)[1]);
      else if (last >= first) parts.push([first, last]);
    });
    return { number, name, parts, why, host: known.get(number)?.host, state: known.get(number)?.state };
  });
}

function membersPicture(run, epochs, workers, width) {
  const first = epochs[0].step;
  const last = Math.max(first + 1, run.report.steps, ...epochs.map((one) => one.step));
  const x = (step) => NAMES + ((step - first) / (last - first)) * (width - NAMES - 30);
  const bottom = workers.length * BAR_ROW + 24;
  const marks = epochs.map((one, at) => {
    const reason = one.reasons.join("; ") || "the run began";
    const next = epochs[at + 1]?.step ?? last;
    return [s("line", { x1: x(one.step), x2: x(one.step), y1: 18, y2: bottom, class: "tick" }, s("title", {}, `epoch ${one.epoch}, after step ${one.step}: ${reason}`)),
      x(next) - x(one.step) > 30 && s("text", { x: x(one.step) + 4, y: 12, class: "tick" }, x(next) - x(one.step) > 62 ? `epoch ${one.epoch}` : String(one.epoch))];
  });
  const rows = workers.map((one, at) => {
    const top = at * BAR_ROW + 26;
    const bars = one.parts.map(([from, to]) => s("rect", { x: x(from - 1), y: top, width: Math.max(2, x(to) - x(from - 1)), height: BAR, rx: 4, class: one.why ? "member left" : "member" },
      s("title", {}, `${one.name} took part in steps ${from} to ${to}`)));
    const end = one.parts.at(-1)?.[1];
    const cross = one.why && end !== undefined && s("g", {}, s("title", {}, `${one.name} ${one.why}, after step ${end}`),
      s("path", { d: `M${(x(end) + 6).toFixed(1)} ${top + 4}l8 8m0 -8l-8 8`, class: "cross" }));
    return [s("text", { x: 4, y: top + 13, class: "name" }, one.name), bars, cross];
  });
  const steps = [first, Math.round((first + last) / 2), last].map((step, at) => s("text", { x: x(step), y: bottom + 16, class: "tick", "text-anchor": ["start", "middle", "end"][at] }, at ? short(step) : `step ${short(step)}`));
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Picture of the members" },
    s("svg", { viewBox: `0 0 ${width} ${bottom + 24}`, class: "timeline members", role: "img", "aria-label": "Which worker took part in which steps; the tables below have the numbers" }, marks, rows, steps));
}
