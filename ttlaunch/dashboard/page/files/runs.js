// All runs: their states, with a filter and a choice of two to compare.
import { mayAct } from "./actions.js";
import { ask } from "./api.js";
import { spark } from "./charts.js";
import { badge, clock, empty, fill, h, numeral, s, seconds } from "./dom.js";

/** Show the list into `place` until `signal` ends it. */
export async function showRuns(place, signal) {
  const chosen = new Set();
  const filter = h("input", { type: "search", id: "filter", placeholder: "name, state, id …", oninput: () => draw() });
  const compare = h("a", { class: "button", hidden: true }, "Compare");
  const count = h("p", { class: "soft", role: "status" });
  const body = h("div", {});
  fill(place, h("div", { class: "bar" }, h("h1", {}, "Runs"), h("label", { for: "filter" }, "Filter"), filter, compare, (await mayAct()) && h("a", { class: "button", href: "#/launch" }, "Launch a run"), count), body);
  let known = { runs: [] };

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = known.runs.filter((run) => words.every((word) => `${run.run_id} ${run.name} ${run.state}`.toLowerCase().includes(word)));
    fill(count, `${rows.length} of ${known.runs.length} runs in `, h("span", { title: known.folder }, known.folder.split("/").filter(Boolean).pop() ?? "", "/"), known.pending ? `; ${known.pending} more are being read` : "");
    if (!known.runs.length) {
      fill(body, empty("No runs yet", "`ttlaunch run hierarchical_parallel` makes the first one; it appears here as soon as it starts."));
      return;
    }
    if (!rows.length) {
      fill(body, empty("No run fits this filter"));
      return;
    }
    fill(body, h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Runs" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["", "state", "run", "step", "loss", "", "ranks", "started", "took"].map((text, at) =>
        h("th", { scope: "col", class: [3, 4, 6, 8].includes(at) ? "number" : null }, text || h("span", { class: "unseen" }, at ? "loss over the steps" : "compare"))))),
      h("tbody", {}, rows.slice(0, 500).map(row)))));
  }

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.run_id}`, onchange: (event) => choose(run.run_id, event.target.checked) });
    box.checked = chosen.has(run.run_id);
    const end = run.is_over ? run.ended : Date.now() / 1000;
    return h("tr", {},
      h("td", {}, box), h("td", {}, badge(run.state)),
      h("td", {}, h("a", { href: linkTo(run.run_id) }, run.name), h("span", { class: "id" }, idParts(run.run_id))),
      h("td", { class: "number" }, run.total_steps ? `${run.step}/${run.total_steps}` : run.step || "–"),
      h("td", { class: "number" }, numeral(run.loss)), h("td", {}, spark(run.curve, { svg: s })),
      h("td", { class: "number" }, run.ranks), h("td", {}, clock(run.started)),
      h("td", { class: "number" }, run.started && end ? seconds(Math.max(0, end - run.started)) : "–"));
  }

  function choose(id, is) {
    if (is) chosen.add(id);
    else chosen.delete(id);
    const two = [...chosen].slice(-2);
    compare.hidden = two.length < 2;
    if (two.length === 2) compare.setAttribute("href", `${linkTo(two[1])}/metrics?with=${encodeURIComponent(two[0])}`);
  }

  let before = "";
  while (!signal.aborted) {
    const found = await ask("/api/runs");
    const text = JSON.stringify(found);
    if (signal.aborted) return;
    if (text !== before) {
      known = found;
      draw();
    }
    before = text;
    await new Promise((resolve) => setTimeout(resolve, found.pending ? 50 : 2000));
  }
}

/** A run's id, which a narrow column may divide between its day and its time only. */
function idParts(id) {
  const found = /^(\d{4}-\d\d-\d\d)(T.*)$/.exec(id);
  return found ? [h("span", {}, found[1]), h("span", {}, found[2])] : id;
}

/** The address of a run's view. */
export function linkTo(run) {
  return `#/run/${encodeURIComponent(run)}`;
}
