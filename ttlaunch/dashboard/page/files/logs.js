// What ranks print: merged, filtered and folded by the server, a page at a time from any place, so that size does not matter.
import { ask, pathOf } from "./api.js";
import { empty, fill, h, stamp } from "./dom.js";
import { presentRanks } from "./members.js";

const KEPT = 3000;

/** Show the output; `grew()` of the result reads what is new. `at` is a place to begin from. */
export async function showLogs(place, run, ranks, { at } = {}) {
  const query = { fold: "1", level: "debug", ranks: "", host: "", stream: "", text: "" };
  const list = h("ol", { class: "lines", tabindex: 0, "aria-label": "Output" });
  const note = h("p", { class: "soft", role: "status" });
  const more = h("button", { type: "button", class: "small", onclick: () => older() }, "Older lines");
  const newer = h("button", { type: "button", class: "small", hidden: true, onclick: () => grew(true) }, "Newer lines");
  ranks = presentRanks(ranks);
  const hosts = [...new Set(ranks.map((one) => one.host))];
  let before = null;
  let after = null;
  let busy = Promise.resolve();
  let turn = 0;

  const choice = (name, label, options) => h("span", { class: "pair" }, h("label", { for: `log-${name}` }, label), h("select", { id: `log-${name}`, onchange: (event) => change(name, event.target.value) },
    options.map(([value, text]) => h("option", { value }, text))));
  let typing = 0;
  const text = h("input", { type: "search", id: "log-text", placeholder: "contains …", oninput: (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => change("text", event.target.value), 250);
  } });
  const fold = h("input", { type: "checkbox", id: "log-fold", onchange: (event) => change("fold", event.target.checked ? "1" : "") });
  fold.checked = true;
  fill(place, h("section", { class: "card logs", "aria-label": "Output of ranks" },
    h("div", { class: "bar" },
      choice("ranks", "Rank", [["", "all"], ...ranks.map((one) => [String(one.rank), `${one.rank} ${one.role}`])]),
      hosts.length > 1 && choice("host", "Host", [["", "all"], ...hosts.map((host) => [host, host])]),
      choice("level", "Level", [["debug", "all"], ["info", "info and above"], ["warning", "warnings and above"], ["error", "errors"]]),
      choice("stream", "Stream", [["", "both"], ["stdout", "stdout"], ["stderr", "stderr"]]),
      h("span", { class: "pair" }, h("label", { for: "log-text" }, "Text"), text), h("label", { class: "check" }, fold, "fold equal lines")),
    more, list, newer, note));

  function change(name, value) {
    query[name] = value;
    enqueue(() => load());
  }

  function enqueue(work) {
    busy = busy.then(work, work).catch((error) => { note.textContent = error.message; });
    return busy;
  }

  async function load(from) {
    const mine = (turn += 1);
    const page = await ask(pathOf(run, "logs"), { ...query, lines: 300, ...(from ? { after: from } : {}) });
    if (mine !== turn) return;
    before = page.before;
    after = page.after;
    fill(list, page.lines.map(line));
    ends(page.is_first, page.is_last);
    if (!from) list.scrollTop = list.scrollHeight;
    if (!page.is_first && page.lines.length < 40 && !from) await extend();
  }

  function ends(isFirst, isLast) {
    list.querySelector(".nothing")?.remove();
    if (isFirst !== undefined) more.hidden = isFirst;
    if (isLast !== undefined) newer.hidden = isLast;
    const count = list.querySelectorAll("li:not(.nothing)").length;
    note.textContent = count ? `${count} lines` : "";
    const isFiltered = query.level !== "debug" || query.ranks || query.host || query.stream || query.text;
    if (!count && more.hidden) fill(list, h("li", { class: "nothing" }, isFiltered ? empty("No lines", "Nothing was printed that fits this choice.") : empty("Nothing was printed", "What ranks print appears here as soon as they do. Recipes print nothing themselves; their losses are under Metrics.")));
    list.classList.toggle("none", !count);
  }

  async function extend() {
    const page = await ask(pathOf(run, "logs"), { ...query, lines: 300, before });
    before = page.before;
    const height = list.scrollHeight;
    list.querySelector(".nothing")?.remove();
    list.prepend(...page.lines.map(line));
    list.scrollTop += list.scrollHeight - height;
    ends(page.is_first);
  }

  function older() {
    return enqueue(extend);
  }

  function grew() {
    return enqueue(async () => {
      if (after === null) return;
      const isAtEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 40;
      const page = await ask(pathOf(run, "logs"), { ...query, lines: 500, after });
      after = page.after;
      if (page.lines.length) list.querySelector(".nothing")?.remove();
      list.append(...page.lines.map(line));
      while (list.children.length > KEPT) list.firstChild.remove();
      ends(undefined, page.is_last);
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    });
  }

  function line(one) {
    const who = one.ranks.length === 1 ? `${one.ranks[0]} ${one.role}` : `×${one.ranks.length} ranks ${one.ranks.join(",")}`;
    return h("li", { class: `${one.level} ${one.stream}`, "data-place": one.place },
      h("a", { class: "time", href: `#/run/${encodeURIComponent(run)}/logs?at=${one.place}`, title: `${one.stream}, byte ${one.offset} of its file` }, stamp(one.time)),
      h("span", { class: "who" }, who), h("span", { class: "text" }, one.text || " "));
  }

  await enqueue(() => load(at));
  if (at) list.querySelector("li")?.classList.add("linked");
  return { grew };
}
