// Launch, stop and resume: what the server allows is asked for, and what it refuses is shown in its words.
import { ask, order, pathOf, saved } from "./api.js";
import { empty, fill, h, prose, section } from "./dom.js";

const MOST_KEYS = 10;
const COMMON_KEYS = ["steps", "learning_rate", "batch_size", "optimizer", "precision", "seed", "validation_interval"].map((name) => `training_config.${name}`)
  .concat("multihost_config.num_workers", "transformer_config.num_blocks", "transformer_config.embedding_dim");
let allowed = null;

/** Whether this page may act; asked once. */
export async function mayAct() {
  if (saved) return false;
  allowed ??= (await ask("/api/about")).may_act;
  return allowed;
}

/** Show the form that launches a run; `open(run)` is called with the id of the one that has begun. */
export async function showLaunch(place, open) {
  if (!(await mayAct())) {
    fill(place, empty("This page only shows", "`ttlaunch dashboard --allow-actions` makes a page that can launch runs."));
    return;
  }
  const { recipes, configurations } = await ask("/api/actions");
  const recipe = h("select", { id: "recipe", onchange: () => choose() }, recipes.map((one) => h("option", { value: one.name }, one.name)));
  const on = h("select", { id: "on" }, configurations.map((name) => h("option", { value: name, selected: name === "local" }, name)));
  const ranks = h("input", { type: "text", inputmode: "numeric", id: "ranks", placeholder: "the recipe decides", autocomplete: "off" });
  const summary = h("p", { class: "soft" });
  const filter = h("input", { type: "search", id: "keys", placeholder: "steps, learning_rate …", oninput: () => drawKeys() });
  const keys = h("div", { class: "keys" });
  const problems = h("div", { role: "alert" });
  const start = h("button", {}, "Launch");
  const values = new Map();
  const form = h("form", { class: "card launch", onsubmit: (event) => { event.preventDefault(); submit(); } },
    h("div", { class: "fields" },
      h("label", { for: "recipe" }, "Recipe"), recipe, h("label", { for: "on" }, "Cluster"), on, h("label", { for: "ranks" }, "Ranks"), ranks),
    summary, h("h2", {}, h("label", { for: "keys" }, "Configuration")), filter, keys, problems, h("div", { class: "bar" }, start));
  fill(place, h("div", { class: "bar" }, h("h1", {}, "Launch a run")), form);
  choose();

  function chosen() {
    return recipes.find((one) => one.name === recipe.value);
  }

  function choose() {
    fill(summary, prose(chosen()?.summary ?? ""));
    values.clear();
    drawKeys();
  }

  function drawKeys() {
    const word = filter.value.toLowerCase();
    const known = [...chosen().keys].sort((a, b) => rankOf(a.key) - rankOf(b.key));
    const fit = known.filter((one) => values.has(one.key) || (one.key + one.description).toLowerCase().includes(word));
    const shown = word ? fit.slice(0, 40) : fit.slice(0, MOST_KEYS);
    fill(keys, shown.flatMap((one) => {
      const id = `key-${one.key}`;
      const props = { id, value: values.get(one.key) ?? "", onchange: (event) => set(one.key, event.target.value) };
      const field = one.choices.length
        ? h("select", props, h("option", { value: "" }, "as the recipe has it"), one.choices.map((each) => h("option", { value: each, selected: values.get(one.key) === each }, each)))
        : h("input", { ...props, type: "text", placeholder: one.default ?? "", autocomplete: "off" });
      return [h("label", { for: id }, h("code", {}, one.key), h("span", { class: "soft" }, prose(one.description))), field];
    }), fit.length > shown.length && h("p", { class: "soft" }, `${fit.length - shown.length} more keys: search for them.`));
  }

  function rankOf(key) {
    const at = COMMON_KEYS.indexOf(key);
    return at < 0 ? COMMON_KEYS.length : at;
  }

  function set(key, value) {
    if (value.trim()) values.set(key, value.trim());
    else values.delete(key);
  }

  async function submit() {
    start.disabled = true;
    start.textContent = "Checking …";
    fill(problems);
    try {
      const { run } = await order("/api/actions/launch", { recipe: recipe.value, on: on.value, ranks: ranks.value.trim() || null, set: Object.fromEntries(values) });
      open(run);
    } catch (error) {
      fill(problems, told(error));
    }
    start.disabled = false;
    start.textContent = "Launch";
  }
}

/** The buttons that stop or resume a run; `open(run)` is called with the id of a run that was resumed. */
export function runButtons(facts, open, problems) {
  const act = async (button, work) => {
    button.disabled = true;
    fill(problems);
    try {
      await work();
    } catch (error) {
      fill(problems, told(error));
      button.disabled = false;
    }
  };
  const id = facts.run_id;
  if (facts.state === "running") {
    const stop = h("button", { type: "button", class: "small", onclick: () => act(stop, async () => {
      await order(pathOf(id, "stop"), {});
      stop.textContent = "Told to end";
      now.hidden = false;
    }) }, "Stop");
    const now = h("button", { type: "button", class: "small", hidden: true, onclick: () => act(now, () => order(pathOf(id, "stop"), { now: true })) }, "End at once");
    return [stop, now];
  }
  if (!facts.is_over || !facts.is_recipe || !facts.checkpoints.length) return [];
  const resume = h("button", { type: "button", class: "small", onclick: () => act(resume, async () => open((await order(pathOf(id, "resume"), {})).run)) }, "Resume");
  return [resume];
}

function told(error) {
  const found = error.diagnostics ?? [];
  return found.length ? found.map((one) => h("pre", { class: one.severity, tabindex: 0 }, one.text)) : section("That was refused", h("p", {}, error.message));
}
