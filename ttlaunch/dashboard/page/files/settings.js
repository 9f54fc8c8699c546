// The configuration of a run with the origin of each value, what differs from another run, its code, its checkpoints.
import { ask, pathOf } from "./api.js";
import { bytes, clock, empty, facts, fill, h, section, short, table } from "./dom.js";

/** Show the configuration and what differs from `other`. */
export async function showSettings(place, run, { other, runs, choose }) {
  const differences = h("div", {});
  const second = h("select", { id: "other", onchange: (event) => choose(event.target.value) }, h("option", { value: "" }, "choose a run"),
    runs.filter((one) => one.run_id !== run.run_id).slice(0, 200).map((one) => h("option", { value: one.run_id, selected: one.run_id === other }, `${one.name} · ${one.run_id}`)));
  const environment = run.environment.versions ?? {};
  fill(place,
    section("What differs from another run", h("div", { class: "bar" }, h("label", { for: "other" }, "Compare with"), second), differences),
    section("Configuration", run.configuration ? h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Configuration" }, h("table", { class: "configuration" }, h("tbody", {}, configuration(run.configuration))))
      : empty("No training file", "This run is of a program that is no recipe.")),
    section("Code and environment", facts([
      ["Python", run.environment.python], ...Object.entries(environment).map(([name, version]) => [name, version]),
      ["Commit", run.code.commit && h("code", {}, String(run.code.commit).slice(0, 12))], ["Recipe", run.code.recipe?.folder],
      ["Release", run.code.release && h("code", {}, String(run.code.release).slice(0, 12))]]),
    h("details", {}, h("summary", {}, "The exact command"), h("pre", { tabindex: 0 }, run.command))));
  if (!other) {
    fill(differences, h("p", { class: "soft" }, "Program, placement, configuration, code, environment and results, and the first step with another loss."));
    return;
  }
  const found = await ask(pathOf(run.run_id, "differences"), { from: other });
  const rows = found.differences.map((one) => [one.section, one.name, value(one.left, one.left_origin), value(one.right, one.right_origin)]);
  fill(differences,
    rows.length ? table(["section", "name", other, run.run_id], rows, { label: "Differences" }) : h("p", {}, `No differences in ${Object.values(found.compared).reduce((a, b) => a + b, 0)} values.`),
    h("ul", {}, found.losses.filter((one) => one.common_steps).map((one) => h("li", {}, one.first_step === null
      ? `${one.kind}: equal in ${one.common_steps} common steps, to the last bit`
      : `${one.kind}: differs from step ${one.first_step} on, ${short(one.left)} → ${short(one.right)}`))));
}

function value(text, origin) {
  return h("span", {}, text ?? "–", origin && h("span", { class: "soft" }, ` ${origin}`));
}

function configuration(text) {
  return text.split("\n").filter(Boolean).map((row) => {
    const [, indent, rest, origin] = /^( *)(.*?)(?: {2}# (.*))?$/.exec(row) ?? [null, "", row, ""];
    const [key, ...more] = rest.split(": ");
    const isDefault = origin === "default";
    return h("tr", { class: isDefault ? "default" : null }, h("td", { class: indent ? "key inner" : "key" }, key.replace(/:$/, "")), h("td", {}, h("code", {}, more.join(": "))), h("td", { class: "soft" }, origin ?? ""));
  });
}

/** Show the checkpoints. */
export function showCheckpoints(place, run) {
  const rows = run.checkpoints.map((one) => [String(one.step), clock(one.time), bytes(one.bytes), String(one.files), h("code", { title: one.sha256 }, `${one.sha256.slice(0, 12)}…`)]);
  const began = run.results.began_from;
  fill(place, began && section("Where it began", facts([["From", began.origin], ["Step", began.step]])),
    section("Checkpoints", rows.length ? [table(["step", "completed", "size", "files", "sha256"], rows, { right: [0, 2, 3] }),
      h("p", { class: "soft" }, h("code", {}, `ttlaunch run ${run.name} --resume ${run.run_id}`), " continues from the newest one.")]
      : empty("No checkpoint", "Ranks write one when the configuration's interval has passed, at Ctrl-C and at the end; a failed run may have none.")));
}
