// What a run is and how it ended: the failure in the words of the terminal, its ranks, where its time went.
import { badge, bytes, clock, empty, facts, fill, h, numeral, seconds, section, short, table } from "./dom.js";
import { membersSection, presentRanks } from "./members.js";

const PARTS = { command: "start of the command", checks: "checks and plan", folder: "run folder and guard", engine: "start of the ranks by the engine",
  python: "start of Python", joining: "joining the other ranks", data: "reading the data", torch: "import of torch", connecting: "connecting the ranks",
  setup: "set-up, such as model and data", first_step: "the first step" };

/** Show the overview; `update(ranks)` of the result shows newer states of the ranks. */
export function showOverview(place, run) {
  const ranks = h("div", {});
  const states = new Map(run.rank_states.map((one) => [one.rank, one]));
  const { report, results } = run;

  function drawRanks() {
    const present = presentRanks([...states.values()]);
    const memory = (one) => (one.peak_memory_bytes ? bytes(one.peak_memory_bytes) : "–");
    if (run.is_serving) {
      fill(ranks, table(["rank", "role", "host", "state", "peak memory"], present.map((one) => [String(one.rank), one.role, one.host, badge(one.state), one.stage || memory(one)]), { right: [4], label: "Ranks" }));
      return;
    }
    const rows = present.map((one) => [String(one.rank), one.role, one.host, badge(one.state),
      h("span", {}, one.stage || (one.total_steps ? `${one.step}/${one.total_steps}` : String(one.step || "–"))),
      numeral(one.loss), numeral(one.grad_norm), one.speed ? `${short(Math.round(one.speed))} ${one.counts}/s` : "–", memory(one)]);
    fill(ranks, table(["rank", "role", "host", "state", "step", "loss", "gradient norm", "speed", "peak memory"], rows, { right: [4, 5, 6, 7, 8], label: "Ranks" }));
  }
  drawRanks();
  const tokens = report.tokens_per_s ?? report.samples_per_s;
  fill(place,
    failure(run),
    section("Result", facts([
      ["State", badge(run.state)], ["Ended by", report.ended_by && report.ended_by.startsWith("still running") ? null : report.ended_by],
      ["Texts", report.served ? `${short(report.served.texts)} with ${short(report.served.tokens)} tokens` : null],
      ["Steps", run.is_serving ? null : run.total_steps ? `${short(report.steps)} of ${short(run.total_steps)}` : short(report.steps)],
      ["Validation loss", results.last_validation === null ? null : h("span", {}, numeral(results.first_validation), results.first_validation === results.last_validation ? null : [" → ", numeral(results.last_validation)])],
      ["Perplexity", results.last_perplexity === null ? null : numeral(results.last_perplexity)],
      ["Speed", tokens ? `${short(Math.round(tokens))} ${report.tokens_per_s ? "tokens" : "samples"}/s` : null],
      ["Took", results.duration_s === null ? null : seconds(results.duration_s)], ["Started", clock(run.started)],
      ["Cluster", run.topology], ["Machine", run.machine],
      ["Parameters", results.parameters_sha256 && h("code", { title: results.parameters_sha256 }, `sha256 ${results.parameters_sha256.slice(0, 16)}…`)],
      ...Object.entries(results.results ?? {}).map(([name, value]) => [name, short(value)]),
    ])),
    section("Ranks", ranks),
    membersSection(run),
    start(report.start_times),
    history(run));
  return {
    update(newer) {
      for (const one of newer) states.set(one.rank, { ...states.get(one.rank), ...one });
      drawRanks();
    },
  };
}

function failure(run) {
  if (!run.diagnostics.length) return null;
  const lasts = run.rank_states.filter((one) => one.last_operation);
  return h("section", { class: "card failure", "aria-label": "What went wrong" },
    h("h2", {}, run.diagnostics.some((one) => one.severity === "error") ? "What went wrong" : "Warnings"),
    run.diagnostics.map((one) => [
      h("pre", { class: one.severity, tabindex: 0 }, one.text),
      run.pages[one.code] && h("details", {}, h("summary", {}, `What ${one.code} means and what helps`), h("pre", { class: "prose", tabindex: 0 }, run.pages[one.code])),
    ]),
    lasts.length > 0 && [h("h3", {}, "The last operation of each rank, from its flight recorder"),
      table(["rank", "role", "last operation"], lasts.map((one) => [String(one.rank), one.role, one.last_operation.text]), { label: "Last operations" })]);
}

function start(times) {
  if (!times) return null;
  const total = times.parts.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const bar = h("div", { class: "stack", "aria-hidden": "true" }, times.parts.map((one, at) => {
    const part = h("span", { class: `k${at % 8}`, title: `${PARTS[one.part] ?? one.part}: ${seconds(one.seconds)}` });
    part.style.flexGrow = String(one.seconds);
    return part;
  }));
  const rows = times.parts.map((one, at) => [h("span", {}, h("span", { class: `swatch k${at % 8}` }), PARTS[one.part] ?? one.part),
    one.rank === null ? "" : `rank ${one.rank} on ${times.host}`, seconds(one.seconds), `${((100 * one.seconds) / total).toFixed(1)} %`]);
  return section("From Enter to the first step", h("p", { class: "soft" }, `${seconds(times.seconds)}, measured on rank ${times.rank}, the last to get there`), bar,
    table(["part", "", "time", "share"], rows, { right: [2, 3], label: "Start" }));
}

function history(run) {
  const rows = run.events.map((one) => [clock(one.time), one.event, one.text]);
  const parts = [rows.length ? table(["time", "event", ""], rows, { label: "History" }) : empty("Nothing yet")];
  if (run.messages.length) parts.push(h("h3", {}, "Messages of the supervisor"), h("pre", { tabindex: 0 }, run.messages.join("\n")));
  return h("details", { class: "card" }, h("summary", {}, "History"), parts);
}
