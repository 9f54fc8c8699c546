// The page: what the address names is shown, and followed by one stream of events for as long as it is.
import { mayAct, runButtons, showLaunch } from "./actions.js";
import { ApiError, ask, follow, pathOf, saved, takeKey, useKey } from "./api.js";
import { badge, empty, fill, h } from "./dom.js";
import { showLogs } from "./logs.js";
import { showMetrics } from "./metrics.js";
import { showOverview } from "./overview.js";
import { linkTo, showRuns } from "./runs.js";
import { showCheckpoints, showSettings } from "./settings.js";
import { showServing } from "./serving.js";
import { showSteps } from "./steps.js";
import { showTopology } from "./topology.js";

const VIEWS = [["", "Overview"], ["metrics", "Metrics"], ["topology", "Topology"], ["steps", "Timeline"], ["logs", "Logs"], ["configuration", "Configuration"], ["checkpoints", "Checkpoints"]];
const SERVING_VIEWS = [["", "Overview"], ["streams", "Streams"], ...VIEWS.filter(([name]) => ["metrics", "topology", "logs", "configuration"].includes(name))];
const content = document.getElementById("content");
const where = document.getElementById("where");
const link = document.getElementById("link");
let ending = new AbortController();
let redraw = null;

function route() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  const given = new URLSearchParams(query);
  if (saved) return { run: saved.run, view: parts[0] === "run" ? parts[2] ?? "" : "", given };
  return parts[0] === "run" && parts[1] ? { run: decodeURIComponent(parts[1]), view: parts[2] ?? "", given } : { run: null, view: "", given };
}

async function show() {
  ending.abort();
  ending = new AbortController();
  redraw = null;
  const { signal } = ending;
  link.textContent = saved ? "saved as a file" : "";
  try {
    const { run, view, given } = route();
    if (run === null && location.hash.startsWith("#/launch")) {
      fill(where, h("a", { href: "#/" }, "Runs"));
      document.title = "Launch a run · ttlaunch";
      await showLaunch(content, (begun) => { location.hash = linkTo(begun); });
    } else if (run === null) {
      fill(where);
      document.title = "Runs · ttlaunch";
      await showRuns(content, signal);
    } else await showRun(run, view, given, signal);
  } catch (error) {
    if (!signal.aborted) showError(error);
  }
}

function showError(error) {
  if (!(error instanceof ApiError)) {
    fill(content, empty("The page has a fault", String(error)));
    throw error;
  }
  if (error.status === 401) {
    const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
    fill(content, h("form", { class: "card key", onsubmit: (event) => { event.preventDefault(); useKey(field.value.trim()); show(); } },
      h("h1", {}, "A key is needed"), h("p", {}, "Open the link that `ttlaunch dashboard` printed, or copy what follows `#key=` in it."),
      h("label", { for: "key" }, "Key"), field, h("button", {}, "Use this key")));
    return;
  }
  fill(content, h("div", { role: "alert" }, empty(error.message, h("a", { href: "#/" }, "All runs"))));
}

async function showRun(id, view, given, signal) {
  const place = h("div", { class: "view" });
  const tabs = h("nav", { class: "tabs", "aria-label": "Views of this run" });
  const state = h("span", {});
  const buttons = h("span", { class: "buttons" });
  const problems = h("div", { role: "alert", class: "problems" });
  const acts = await mayAct();
  const reading = h("p", { class: "reading", role: "status", hidden: true });
  let facts = await ask(pathOf(id));
  if (signal.aborted) return;
  fill(tabs, (facts.is_serving ? SERVING_VIEWS : VIEWS).map(([name, title]) =>
    h("a", { href: `${linkTo(id)}${name && `/${name}`}`, "aria-current": name === view ? "page" : null }, title)));
  const title = h("h1", {}, facts.name, facts.report.layout && facts.report.layout !== facts.name && h("span", { class: "soft" }, ` ${facts.report.layout}`));
  fill(where, saved ? [] : [h("a", { href: "#/" }, "Runs"), " / "], h("span", { class: "id" }, id));
  document.title = `${facts.name} ${id.slice(-4)} · ttlaunch`;
  fill(state, badge(facts.state));
  fill(content, h("div", { class: "bar run" }, title, state, h("span", { class: "soft" }, `${facts.ranks} ${facts.ranks === 1 ? "rank" : "ranks"} on ${facts.topology}`), buttons), problems, tabs, reading, place);
  drawButtons();
  const other = given.get("with") ?? "";
  const choose = (chosen) => { location.hash = `${linkTo(id)}/${view}${chosen && `?with=${encodeURIComponent(chosen)}`}`; };
  const runs = ["metrics", "configuration"].includes(view) && !saved ? (await ask("/api/runs")).runs : [];
  const known = saved ? null : await ask(pathOf(id, "numbers"));
  tellReading(known?.reading ?? null);
  let shown = await draw();
  if (signal.aborted || saved) return;

  async function draw() {
    switch (view) {
      case "metrics": return await showMetrics(place, id, { other, runs, choose });
      case "topology": return showTopology(place, facts);
      case "streams": return await showServing(place, facts);
      case "steps": return await showSteps(place, id);
      case "logs": return await showLogs(place, id, facts.rank_states, { at: given.get("at") });
      case "configuration": return await showSettings(place, facts, { other, runs, choose });
      case "checkpoints": return showCheckpoints(place, facts);
      default: return showOverview(place, facts);
    }
  }

  function drawButtons() {
    if (acts) fill(buttons, runButtons(facts, (begun) => { location.hash = linkTo(begun); }, problems));
  }

  function tellReading(share) {
    reading.hidden = share === null;
    if (share !== null) reading.textContent = `This run is long and is being read: ${Math.round(100 * share)} %. Until that is done, its last steps are shown.`;
  }

  redraw = () => shown?.redraw?.();
  signal.addEventListener("abort", () => shown?.end?.());
  let refreshed = 0;
  let waiting = null;

  async function refresh() {
    waiting = null;
    refreshed = performance.now();
    const before = facts.state;
    facts = await ask(pathOf(id));
    if (signal.aborted) return;
    fill(state, badge(facts.state));
    if (facts.state !== before) drawButtons();
    if (["", "topology", "checkpoints"].includes(view)) {
      shown?.end?.();
      shown = await draw();
    }
  }

  await follow(id, known, (kind, change, { number }) => {
    if (kind === "points") {
      shown?.take?.(change.points, number);
      if (view === "steps") later(() => shown.update(), 1000);
      if (view === "topology") later(refresh, 3000);
    } else if (kind === "ranks") shown?.update?.(change.ranks);
    else if (kind === "log") shown?.grew?.();
    else if (kind === "reading") {
      tellReading(change.share);
      if (change.share === null) later(refresh, 300);
    } else if (kind === "facts") later(refresh, 300);
    else if (kind === "reset") {
      shown?.reset?.();
      shown?.grew?.();
      later(refresh, 300);
    }
  }, (isConnected) => {
    link.textContent = isConnected ? (facts.is_over ? "" : "live") : "not connected; trying again";
    link.className = isConnected ? "good" : "bad";
  }, signal);

  function later(work, pause) {
    if (waiting !== null) return;
    const since = performance.now() - refreshed;
    waiting = setTimeout(async () => {
      waiting = null;
      refreshed = performance.now();
      if (!signal.aborted) await Promise.resolve(work()).catch(() => {});
    }, Math.max(0, pause - since));
  }
}

takeKey();
addEventListener("hashchange", () => { takeKey(); show(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw?.());
show();
