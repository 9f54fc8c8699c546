// A serving run: its texts now and so far, how fast they come, what each rank does meanwhile, and a link to its own chat page.
import { ask, pathOf, saved } from "./api.js";
import { spark } from "./charts.js";
import { empty, facts, fill, h, s, seconds, section, short, table } from "./dom.js";

const READ_MS = 2000;
const KEPT_SPEEDS = 300;

/** Show the answers of a serving run; `end()` of the result ends what reads them again. */
export async function showServing(place, run) {
  const chat = h("div", {});
  const answers = h("div", { class: "view" });
  const speeds = [];
  let before = null;
  let ended = false;
  fill(place, chat, answers);

  function draw(found) {
    const { served } = found;
    if (served && before && found.time > before.time && served.tokens >= before.tokens) {
      speeds.push([found.time, (served.tokens - before.tokens) / (found.time - before.time)]);
      speeds.splice(0, Math.max(0, speeds.length - KEPT_SPEEDS));
    }
    if (served && (!before || found.time > before.time)) before = { time: found.time, tokens: served.tokens };
    fill(chat, chatSection(found));
    fill(answers, served ? [
      section("Texts", facts([
        ["Open now", found.is_running ? served.open_texts : null], ["Waiting for a place", found.is_running ? served.waiting_texts : null],
        ["So far", `${short(served.texts)} ${served.texts === 1 ? "text" : "texts"}, ${short(served.tokens)} tokens`],
        ["Speed while there was one", served.tokens_per_s ? `${short(Math.round(served.tokens_per_s))} tokens/s` : null],
        ["To the first token", latency(served.first_token)], ["To each further token", latency(served.token)],
        ["Tokens a second, all together", speeds.length > 1 ? h("span", {}, spark(speeds, { svg: s, name: "tokens a second" }), ` ${short(Math.round(speeds.at(-1)[1]))} now`) : null]])),
      served.working_s ? section("What each rank did while there was a text", table(["rank", "computing", "messages", "waiting", "rest"], served.ranks.map((one) => [nameOfRank(run, one.rank),
        ...["computing_s", "messages_s", "waiting_s", "rest_s"].map((name) => share(one[name], served.working_s))]), { right: [1, 2, 3, 4], label: "What each rank did" })) : null,
    ] : section("Texts", empty("No numbers yet", "Ranks of a serving run write what they have answered every few seconds.")));
  }

  draw(await ask(pathOf(run.run_id, "serving")));
  async function readAgain() {
    while (!ended) {
      await new Promise((resolve) => setTimeout(resolve, READ_MS));
      if (ended || document.hidden) continue;
      const found = await ask(pathOf(run.run_id, "serving")).catch(() => null);
      if (found && !ended) draw(found);
    }
  }
  if (!run.is_over && !saved) readAgain();
  return {
    end() {
      ended = true;
    },
  };
}

function chatSection({ chat, is_running }) {
  if (!is_running) return null;
  if (!chat) return section("Chat", h("p", { class: "soft" }, "This run's addresses are not of this machine, or an older ttlaunch started it: its terminal shows them."));
  return section("Chat", h("p", {}, h("a", { class: "button", href: chat.page, target: "_blank", rel: "noopener noreferrer" }, "Open the chat page"), h("span", { class: "soft" }, ` ${chat.page}, offered by the run itself`)),
    h("p", { class: "soft" }, "Its API: ", h("code", {}, `${chat.api}/v1`), chat.needs_key ? ". Both ask for the key that the run was started with." : "."));
}

function latency(one) {
  return one ? `${seconds(one.median_s)}, nine in ten ≤ ${seconds(one.p90_s)}` : null;
}

function share(part, whole) {
  return part === null ? "–" : `${((100 * part) / whole).toFixed(1)} %`;
}

function nameOfRank(run, rank) {
  return `${rank} ${run.rank_states.find((one) => one.rank === rank)?.role ?? ""}`;
}
