// Hosts with their ranks, the bytes that they send to each other against the formula, and who waits for whom.
import { ask, pathOf, saved } from "./api.js";
import { bytes, empty, fill, h, s, seconds, section, table } from "./dom.js";
import { membershipOf, membersSection, presentRanks } from "./members.js";

const MOST_DRAWN = 48;
const R = 22;
const LOOK_MS = 1000;
const CARD_EDGES = 42; // pixels beside what a card shows
const SHORTEST_WAIT_S = 0.5;

/** Show the topology; `update(ranks)` of the result shows newer states of the ranks, and `end()` ends what looks at them. */
export function showTopology(place, run) {
  const states = new Map(run.rank_states.map((one) => [one.rank, one]));
  const picture = h("div", {});
  const now = h("div", {});
  const cluster = h("div", {});
  const { links, perStep } = linksOf(run);
  const isLive = !run.is_over && !saved;
  let waits = isLive ? [] : waitsOf(run);
  let ended = false;

  function draw() {
    const ranks = presentRanks([...states.values()]);
    fill(picture, ranks.length <= MOST_DRAWN ? drawing(run, ranks, links, waits) : h("p", { class: "soft" }, `${ranks.length} ranks are too many for a picture; the table has them.`));
  }
  draw();
  fill(place, section("Ranks and traffic", picture, h("ul", { class: "legend" },
    roles(run).map((role, at) => h("li", {}, h("span", { class: `swatch k${at % 8}` }), role)),
    links.length > 0 && h("li", {}, "thicker lines carry more bytes"),
    (isLive || waits.length > 0) && h("li", {}, h("span", { class: "swatch p-bad" }), isLive ? "waits for half a second or longer" : "waited when the run ended"))),
  now,
  cluster,
  membersSection(run, { isWhole: true, width: place.clientWidth - CARD_EDGES }),
  waitSection(run),
  section("Bytes between ranks", links.length ? [h("p", { class: "soft" }, perStep),
    table(["from", "to", "operation", "messages", "bytes", "formula", "÷ formula", "bytes/s"], run.report.traffic.edges.map((edge) => [
      who(states, edge.source), who(states, edge.dest), edge.operation, edge.messages.toLocaleString("en"),
      edge.bytes === null ? "not measured" : edge.bytes.toLocaleString("en"), edge.formula_bytes === null ? "–" : edge.formula_bytes.toLocaleString("en"),
      ratio(edge), rateOf(run, edge.bytes ?? edge.formula_bytes)]), { right: [3, 4, 5, 6, 7], label: "Bytes between ranks" })]
    : empty("No bytes to show", run.no_telemetry ?? "No rank has sent anything yet.")),
  costs(run));

  async function showCluster() {
    const found = await ask(pathOf(run.run_id, "cluster")).catch(() => null);
    if (!ended && found?.picture) fill(cluster, section("Cluster", h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Picture of the cluster" }, drawn(found.picture))));
  }

  async function look() {
    while (!ended) {
      if (!document.hidden) {
        const found = await ask(pathOf(run.run_id, "waits")).catch(() => null);
        if (ended) return;
        if (found) show(found.waits);
      }
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }

  function show(found) {
    waits = found.filter((one) => one.for_s >= SHORTEST_WAIT_S).flatMap((one) => one.waits_for.map((dest) => ({ source: one.rank, dest, text: `rank ${one.rank} ${one.state}, ${one.operation}, for ${seconds(one.for_s)}` })));
    fill(now, found.length ? section("Who waits for whom now", table(["rank", "at this moment", "for", "in"], found.map((one) => [`${one.rank} ${one.role}`,
      one.seen_s ? `${one.state} (as it was ${seconds(one.seen_s)} ago)` : one.state, one.for_s === null ? "–" : seconds(one.for_s), one.place ? `${one.operation}, at ${one.place}` : one.operation || "–"]), { right: [2], label: "Who waits for whom now" })) : null);
    draw();
  }
  showCluster();
  if (isLive) look();
  return {
    update(newer) {
      for (const one of newer) states.set(one.rank, { ...states.get(one.rank), ...one });
      draw();
    },
    end() {
      ended = true;
    },
  };
}

const MAY_BE_DRAWN = new Set(["svg", "title", "g", "rect", "text", "path"]);

/** The elements of a picture that the server has laid out; nothing else can come of it. */
function drawn([name, properties, ...inner]) {
  const classes = name === "svg" ? "cluster" : properties.class;
  const { id, ["aria-labelledby"]: label, ...rest } = properties;
  return s(MAY_BE_DRAWN.has(name) ? name : "g", { ...rest, class: classes, "aria-label": name === "svg" ? "The cluster with its ranks" : null }, inner.map((one) => (Array.isArray(one) ? drawn(one) : one)));
}

function roles(run) {
  return [...new Set(presentRanks(run.rank_states).map((one) => one.role))];
}

function who(states, rank) {
  return `${rank} ${states.get(rank)?.role ?? ""}`;
}

function ratio(edge) {
  if (edge.ratio === null || edge.ratio === undefined) return edge.formula_bytes === 0 ? "not in it" : "–";
  return edge.ratio.toFixed(3);
}

/** The mean time of a step, from the report's times by rank. */
function stepSeconds(run) {
  const medians = run.report.times.map((one) => one.step.median_s).filter((value) => value > 0);
  return medians.length ? Math.max(...medians) : null;
}

function rateOf(run, size) {
  const time = stepSeconds(run);
  const steps = run.report.traffic?.steps;
  return time && steps && size !== null ? `${bytes(size / steps / time)}/s` : "–";
}

function linksOf(run) {
  const found = new Map();
  for (const edge of run.report.traffic?.edges ?? []) {
    const key = `${edge.source}-${edge.dest}`;
    const known = found.get(key) ?? { source: edge.source, dest: edge.dest, bytes: 0, formula: 0, hasFormula: true, operations: [] };
    known.bytes += edge.bytes ?? edge.formula_bytes ?? 0;
    if (edge.formula_bytes === null) known.hasFormula = false;
    known.formula += edge.formula_bytes ?? 0;
    known.operations.push(edge.operation);
    found.set(key, known);
  }
  const traffic = run.report.traffic;
  const time = stepSeconds(run);
  const perStep = run.report.served ? `Sent for ${run.report.served.tokens.toLocaleString("en")} tokens.` : traffic ? `Sent in ${traffic.steps} steps and ${traffic.validations} validations${traffic.not_compared ? `; not compared: ${traffic.not_compared}` : ""}.${time ? ` A step takes ${seconds(time)} (median of the slowest rank).` : ""}` : "";
  for (const link of found.values()) link.rate = time && traffic.steps ? link.bytes / traffic.steps / time : null;
  return { links: [...found.values()], perStep };
}

function waitsOf(run) {
  return run.rank_states.filter((one) => one.last_operation && one.last_operation.ended_s === null && one.last_operation.peer >= 0)
    .map((one) => ({ source: one.rank, dest: one.last_operation.peer, text: one.last_operation.text }));
}

function drawing(run, ranks, links, waits) {
  const hosts = [...new Set(ranks.map((one) => one.host))];
  const names = [...new Set(ranks.map((one) => one.role))];
  const perRow = Math.min(hosts.length, hosts.length > 6 ? 4 : hosts.length > 3 ? 3 : hosts.length);
  const largest = Math.max(...hosts.map((host) => ranks.filter((one) => one.host === host).length));
  const [w, hgt] = size(largest);
  const gap = 36;
  const width = perRow * w + (perRow + 1) * gap;
  const rows = Math.ceil(hosts.length / perRow);
  const height = rows * hgt + (rows + 1) * gap;
  const at = new Map();
  const boxes = hosts.map((host, number) => {
    const left = gap + (number % perRow) * (w + gap);
    const top = gap + Math.floor(number / perRow) * (hgt + gap);
    const own = ranks.filter((one) => one.host === host);
    own.forEach((one, place) => at.set(one.rank, spot(place, own.length, left + w / 2, top + hgt / 2 + 8, w, hgt)));
    return [s("rect", { x: left, y: top, width: w, height: hgt, rx: 10, class: "host" }), s("text", { x: left + 12, y: top + 20, class: "name" }, host)];
  });
  const most = Math.max(1, ...links.map((link) => link.bytes));
  const lines = links.map((link) => {
    const [a, b] = [at.get(link.source), at.get(link.dest)];
    if (!a || !b) return null;
    const share = link.hasFormula && link.formula ? `, ${((100 * link.bytes) / link.formula).toFixed(1)} % of the formula` : "";
    const title = `rank ${link.source} to rank ${link.dest}: ${link.rate === null ? bytes(link.bytes) : `${bytes(link.rate)}/s`}${share} (${link.operations.join(", ")})`;
    return s("path", { d: curve(a, b), class: "flow", "stroke-width": (0.8 + 4.2 * Math.sqrt(link.bytes / most)).toFixed(2), "marker-end": "url(#arrow)" }, s("title", {}, title));
  });
  const waiting = waits.filter((wait) => at.get(wait.source) && at.get(wait.dest)).map((wait) => {
    const d = curve(at.get(wait.source), at.get(wait.dest));
    return s("g", {}, s("title", {}, wait.text), s("path", { d, class: "waiting-back" }), s("path", { d, class: "waiting", "marker-end": "url(#arrow-bad)" }));
  });
  const labels = links.length <= 12 ? links.map((link) => {
    const [a, b] = [at.get(link.source), at.get(link.dest)];
    if (!a || !b || link.rate === null || link.bytes < most / 50) return null;
    const [x, y] = middle(a, b);
    return s("text", { x, y, class: "rate", "text-anchor": "middle" }, `${bytes(link.rate)}/s`);
  }) : [];
  const circles = ranks.map((one) => {
    const [x, y] = at.get(one.rank);
    const bad = ["failed", "lost", "hung"].includes(one.state);
    const membership = membershipOf(run, one.rank);
    const took = membership ? `; took part in steps ${membership.parts.map(([first, last]) => `${first} to ${last}`).join(" and ") || "none yet"}${membership.why ? `; ${membership.why}` : ""}` : "";
    return s("g", { class: ["rank", bad && "bad", membership?.why && "gone"].filter(Boolean).join(" ") }, s("title", {}, `rank ${one.rank}, ${one.role} on ${one.host}: ${one.state}${one.last_operation ? `; ${one.last_operation.text}` : ""}${took}`),
      s("circle", { cx: x, cy: y, r: R, class: `k${names.indexOf(one.role) % 8}` }), s("text", { x, y: y + 5, "text-anchor": "middle" }, String(one.rank)));
  });
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Picture of ranks and traffic" },
    s("svg", { viewBox: `0 0 ${width} ${height}`, class: "topology", width, role: "img", "aria-label": "Ranks on their hosts and the bytes between them; the table below has the numbers" },
      s("defs", {}, marker("arrow", "flow-head"), marker("arrow-bad", "waiting-head")), boxes, lines, waiting, circles, labels));
}

function marker(id, kind) {
  return s("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { d: "M0 0L8 4L0 8z", class: kind }));
}

function size(count) {
  if (count <= 1) return [150, 110];
  if (count <= 2) return [260, 150];
  if (count <= 4) return [420, 300];
  return [Math.max(420, count * 52), Math.max(320, count * 40)];
}

function spot(place, count, x, y, width, height) {
  if (count === 1) return [x, y];
  if (count === 2) return [x + (place ? 1 : -1) * (width / 2 - 60), y];
  const angle = (2 * Math.PI * place) / count - Math.PI / 2;
  return [x + Math.cos(angle) * (width / 2 - 56), y + Math.sin(angle) * (height / 2 - 52)];
}

function bend(a, b) {
  const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
  const length = Math.hypot(dx, dy) || 1;
  const off = Math.min(60, length * 0.22);
  return [(a[0] + b[0]) / 2 - (dy / length) * off, (a[1] + b[1]) / 2 + (dx / length) * off];
}

function curve(a, b) {
  const c = bend(a, b);
  const [from, to] = [edge(a, c), edge(b, c)];
  return `M${from.map(round).join(" ")}Q${c.map(round).join(" ")} ${to.map(round).join(" ")}`;
}

function middle(a, b) {
  const c = bend(a, b);
  const t = 0.34; // nearer to the sender, so that the labels of the two directions do not meet
  const at = (i) => (1 - t) ** 2 * a[i] + 2 * t * (1 - t) * c[i] + t ** 2 * b[i];
  return [at(0), at(1) + 4];
}

function edge(from, to) {
  const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
  return [from[0] + ((to[0] - from[0]) * (R + 3)) / length, from[1] + ((to[1] - from[1]) * (R + 3)) / length];
}

function round(value) {
  return value.toFixed(1);
}

function waitSection(run) {
  const times = run.report.times;
  if (!times.length) return null;
  const waited = times.map((one) => ({ rank: one.ranks[0], share: one.exposed.reduce((sum, each) => sum + each.share, 0), longest: one.exposed[0] }));
  const ordered = [...waited].sort((a, b) => a.share - b.share);
  const least = ordered.length > 1 && ordered[1].share - ordered[0].share > 0.02 ? ordered[0] : null; // else nobody is waited for
  const states = new Map(run.rank_states.map((one) => [one.rank, one]));
  const rows = waited.map((one) => [who(states, one.rank), meter(one.share), `${(100 * one.share).toFixed(1)} %`, one.longest ? `${one.longest.name} ${seconds(one.longest.median_s)}` : "–"]);
  return section("Who waits", least && h("p", { class: "soft" }, `Rank ${least.rank} waits least, so the others wait for it. Waiting is the part of a step in which a rank could only wait for messages.`),
    table(["rank", "", "of a step", "mostly in"], rows, { right: [2], label: "Who waits" }));
}

function meter(share) {
  const inner = h("span", { class: "meter-value" });
  inner.style.width = `${Math.min(100, 100 * share)}%`;
  return h("span", { class: "meter", "aria-hidden": "true" }, inner);
}

function costs(run) {
  if (!run.report.communication.length) return null;
  const rows = run.report.communication.map((one) => [one.operation, one.role, number(one.messages_per_step ?? one.messages), number(one.bytes_per_step ?? one.bytes),
    one.waited ? seconds(one.waited.median_s) : "–", one.waited ? `${(100 * one.waited.share).toFixed(1)} %` : "–"]);
  return section("What each operation costs", table(["operation", "role", "messages/step", "bytes/step", "waited", "of a step"], rows, { right: [2, 3, 4, 5], label: "Costs of operations" }));
}

function number(value) {
  return typeof value === "number" ? Number(value.toFixed(2)).toLocaleString("en") : "–";
}
