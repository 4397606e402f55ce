"use strict";
// The page: the header, and the sections.

const LAST = (name, other) => run.summary[name] ?? run.row[other];
const SHARES = { layout: { yaxis: { tickformat: ".0%", range: [0, 1] } } };
const browser = new Browser();

function header() {
  const setting = (name) => (run.config.find(([key]) => key === name) || [])[1];
  const words = [run.state, setting("mode"), setting("scheduler.max_staleness") && `η = ${setting("scheduler.max_staleness")}`, setting("loss.name"), setting("task.name"), `seed ${run.seed}`];
  const axes = Object.entries(AXES).filter(([name]) => name !== "samples" || run.samples_per_step);
  const bar = el("div", { class: "tools" }, el("h1", {}, visible(run.name)), words.filter(Boolean).map((word) => el("span", { class: "chip" }, visible(word))),
    selection("x axis", axes, axis.name, (name) => { axis.name = name; redraw(); }));
  const links = [...document.querySelectorAll("main > section")].map((each) => el("a", { href: "#" + each.id }, each.querySelector("h2").textContent));
  document.getElementById("top").replaceChildren(bar, el("nav", {}, links));
}

function notes() {
  const found = [...run.notes];
  if (run.faults) found.push("faults: " + run.faults);
  if (run.state === "stopped") found.push("this run has ended without a summary: it was killed, or it failed (see its logs)");
  return found.map((note) => el("div", { class: "note" }, visible(note)));
}

function tiles() {
  const tile = (label, value, more) => el("div", { class: "card tile" }, el("div", { class: "soft" }, label), el("b", {}, value), el("div", { class: "faint" }, more || ""));
  const first = run.evaluations[0], final = run.evaluations[run.evaluations.length - 1];
  return el("div", { class: "tiles" },
    final ? tile("held-out reward", number(run.summary.reward_after ?? final.reward), `from ${number(run.summary.reward_before ?? first.reward)}`) : null,
    tile("train reward", number(run.row["reward/mean"]), "last train step"),
    tile("train steps", number(LAST("steps", "step")), `of ${run.steps}`),
    tile("time", number(LAST("seconds", "seconds")) + " s", run.summary.seconds_to_target ? `target after ${number(run.summary.seconds_to_target)} s` : ""),
    tile("staleness", number(LAST("staleness_mean", "staleness/mean")), `max ${number(LAST("staleness_max", "staleness/max"))}, bound ${LAST("staleness_bound", "staleness/bound") ?? "none"}`),
    tile("trained tokens/s", number(LAST("trained_tokens_per_second", "train/tokens_per_second")), `${number(LAST("tokens_per_second", "rollout/tokens_per_second"))} rolled out`),
    tile("learner waits", percent(LAST("learner_idle_share", "train/idle_share")), `actors ${percent(LAST("actor_idle_share", "rollout/idle_share"))} of the time`));
}

function reward() {
  const open = (sample) => { browser.open(sample); document.getElementById("samples").scrollIntoView(); };
  const curve = chart("Reward", "mean of each train step; points: held-out", () => {
    const found = run.evaluations.filter((each) => Number.isFinite(placeOf(each)));
    const points = { x: found.map(placeOf), y: found.map((each) => each.reward), name: "held-out", mode: "lines+markers", line: { color: colour("c1"), width: 2 }, marker: { size: 7 }, hovertemplate: "%{y:.4~g}" };
    return { traces: [...line("reward/mean", "train", "c0"), ...(found.length ? [points] : [])] };
  }, 400);
  const parts = Object.keys(run.series.columns).filter((key) => key.startsWith("reward/part/")).map((key) => [key, key.slice("reward/part/".length)]);
  const ofParts = parts.length ? chart("Parts of the reward", "before their weights, mean of each train step", () => lines(parts)) : null;
  return section("reward", "Reward", "", notes(), tiles(), el("div", { class: "front" }, curve, written(open)), ofParts);
}

function heldoutSets() {
  // figures of held-out sets with intervals, the first evaluation and the newest
  const names = unique(run.evaluations.flatMap((each) => Object.keys(each.sets)));
  const rows = names.flatMap((name) => {
    const found = run.evaluations.map((each) => each.sets[name]).filter(Boolean), first = found[0], newest = found[found.length - 1];
    const passes = Object.keys(newest).filter((key) => /^pass@\d+$/.test(key)).sort((a, b) => a.slice(5) - b.slice(5));
    const cell = (of, key) => number(of[key]) + (of[key + "_low"] === undefined ? "" : ` [${number(of[key + "_low"])}, ${number(of[key + "_high"])}]`);
    return ["reward", ...passes].map((key) => [visible(name), key, number(newest.prompts), number(newest.samples), cell(first, key), cell(newest, key)]);
  });
  return rows.length > 1 && section("heldout", "Held-out sets", "Means over prompts, with intervals of 95 %.", table(["set", "figure", "prompts", "answers each", "first", "newest"], rows));
}

function staleness() {
  const { values, shares } = run.series.ages, bound = LAST("staleness_bound", "staleness/bound");
  return section("staleness", "Staleness", "Versions between the weights that made a sample's oldest token and those that trained it. The bound holds for every token.", el("div", { class: "grid" },
    chart("Mean and oldest", "versions", () => {
      const found = lines([["staleness/mean", "mean"], ["staleness/max", "oldest"]]), x = places();
      if (Number.isFinite(bound)) found.traces.push({ x: [x[0], x[x.length - 1]], y: [bound, bound], name: "bound", mode: "lines", line: { color: colour("c3"), dash: "dash" } });
      return found;
    }),
    chart("Samples by staleness", "share of each train step", () => ({
      traces: values.length ? [{ type: "heatmap", x: places(), y: values, z: shares, zmin: 0, zmax: 1, colorscale: [[0, faded("c0", 0)], [1, colour("c0")]], colorbar: { thickness: 8, tickformat: ".0%" }, hovertemplate: "%{y} old: %{z:.1%}<extra></extra>" }] : [],
      layout: { hovermode: "closest", yaxis: { rangemode: "normal", title: { text: "versions" } } },
    })),
    chart("Where it comes from", "versions, mean per sample", () => lines([["staleness/in_flight_mean", "while it was written"], ["staleness/in_queue_mean", "while it waited to be trained"]], { stack: true })),
    chart("Versions within a sample", "weights changed while it was written", () => lines([["version_span/mean", "mean"], ["version_span/max", "most"]]))));
}

function waiting() {
  return section("waiting", "Who waited for whom", "", el("div", { class: "grid" },
    chart("Idle shares", "of the time so far", () => lines([["rollout/idle_share", "actors"], ["train/idle_share", "learner"]], SHARES)),
    chart("Idle because of stragglers", "share of a group's or a round's time", () => lines([["barrier/group_idle_share", "within groups"], ["barrier/round_idle_share", "within rounds"]], SHARES)),
    chart("Buffer", "groups", () => lines([["buffer/waiting", "wait to be trained"], ["buffer/running", "are written"], ["buffer/queued", "queued"]]))));
}

function ledger() {
  const { fates, bias } = run.ledger, total = fates.reduce((sum, each) => sum + each.count, 0), trained = fates.find((each) => each.fate === "trained");
  const rows = fates.map((each) => [visible(each.fate), number(each.count), percent(each.count / total), number(each.samples), number(each.cut), number(each.length), number(each.p95), number(each.reward), each.length && trained && trained.length ? number(each.length / trained.length) : "–"]);
  const words = Number.isFinite(bias) ? ` Trained responses are ${percent(Math.abs(bias))} ${bias < 0 ? "shorter" : "longer"} than all.` : "";
  return total ? section("ledger", "Ledger", `Where each of the ${number(total)} admitted prompts went.${words}`,
    table(["fate", "groups", "share", "samples", "cut", "mean length", "95 %", "mean reward", "length / trained"], rows)) : null;
}

function byStaleness() {
  // NAME/staleness_4 is NAME over tokens that are 4 to 7 versions old; here its mean over the run
  const found = {};
  for (const [key, column] of Object.entries(run.series.columns)) {
    const [, name, age] = key.match(/^(.*)\/staleness_(\d+)$/) || [];
    const known = column.y.filter((value) => value !== null);
    if (name && known.length) (found[name] ||= []).push([Number(age), known.reduce((sum, value) => sum + value, 0) / known.length]);
  }
  const label = (age) => (age < 2 ? String(age) : `${age}–${2 * age - 1}`);
  const panels = Object.entries(found).map(([name, pairs]) => chart(name, "", () => {
    const sorted = pairs.sort((a, b) => a[0] - b[0]);
    return {
      traces: [{ type: "bar", x: sorted.map(([age]) => label(age)), y: sorted.map(([, value]) => value), marker: { color: colour("c0") }, hovertemplate: "%{y:.4~g}<extra></extra>" }],
      layout: { xaxis: { type: "category", title: { text: "staleness of the token (versions)" } }, bargap: .35, hovermode: "closest" },
    };
  }, 200));
  return panels.length ? section("losses", "Loss by staleness", "Means over the run, by how many versions old a token was when it was trained.", el("div", { class: "grid" }, panels)) : null;
}

function overTime(id, title, charts) {
  // charts: [title, unit, [key, name] pairs, options]
  return section(id, title, "", el("div", { class: "grid" }, charts.map(([name, unit, specs, options]) => chart(name, unit, () => lines(specs, options)))));
}

function anyMetric() {
  const keys = Object.keys(run.series.columns).filter((key) => !["step", "seconds"].includes(key)).sort();
  let metric = keys.includes("reward/std") ? "reward/std" : keys[0];
  const shown = chart("", "", () => lines([[metric, metric]], { layout: { yaxis: { rangemode: "normal" } } }), 280);
  return section("metrics", "Any metric", run.series.width > 1 ? `Each point is the mean of ${run.series.width} train steps; the band spans the lowest and the highest.` : "Each point is a train step.",
    selection("key", keys.map((key) => [key, key]), metric, (value) => { metric = value; draw(shown.querySelector(".plot")); }), shown);
}

function config() {
  const differ = run.config.filter(([, , differs]) => differs), { command, started, commit } = run.record;
  const rows = (found) => table(["key", "value"], found.map((row) => row.slice(0, 2).map(visible)));
  const facts = [command && "$ " + command.join(" "), started && `started ${started}`, commit && `commit ${commit}`, `folder ${run.folder}`];
  return section("config", "Config", `${differ.length} of ${run.config.length} keys differ from the default.`, el("div", { class: "card mono" }, facts.filter(Boolean).map((fact) => el("div", {}, visible(fact)))),
    rows(differ), el("details", {}, el("summary", {}, "every key"), rows(run.config)));
}

const NAMED = { layout: { yaxis: { rangemode: "normal" } } };
const all = [
  reward(), heldoutSets(), browser.element, staleness(), waiting(),
  overTime("throughput", "Throughput", [
    ["Tokens per second", "", [["rollout/tokens_per_second", "rolled out"], ["train/tokens_per_second", "trained"]]],
    ["Seconds of a train step", "", [["train/step_seconds", "trains"], ["publish/seconds", "publishes"], ["train/wait_seconds", "waits for a batch"]], { stack: true }],
    ["Response length", "tokens", [["response_length/mean", "mean"], ["response_length/p95", "95 %"], ["response_length/max", "longest"]]],
    ["Seconds of a group", "", [["buffer/flight_seconds", "being written"], ["buffer/queue_seconds", "waiting to be trained"]]]]),
  ledger(), byStaleness(),
  overTime("learning", "Loss and policy", [
    ["Entropy", "nats per token", [["entropy", "entropy"]]],
    ["Effective sample size", "of importance weights, share of tokens", [["ess", "ess"]]],
    ["KL", "current policy against the behaviour policy", [["kl/k3", "k3"], ["kl/k1", "k1"]], NAMED],
    ["Clipped and capped", "share of tokens", [["loss/clip_share", "clipped"], ["loss/capped_share", "capped"], ["loss/masked_share", "masked"]]],
    ["Gradient norm", "", [["grad_norm", "norm"]]],
    ["Groups without signal", "share of groups whose rewards are all equal", [["zero_variance_share", "share"]]],
    ["Loss", "", [["loss", "loss"]], NAMED],
    ["Learning rate", "", [["lr", "lr"]]]]),
  overTime("weights", "Weight updates", [
    ["Bytes per update", "", [["publish/delta_bytes", "sent"]], { layout: { yaxis: { tickformat: ".3s" } } }],
    ["Whole weights ÷ update", "", [["publish/ratio", "ratio of bytes"]]],
    ["Seconds", "of an update", [["publish/encode_seconds", "encode"], ["rollout/update_fetch_seconds", "fetch"], ["rollout/update_apply_seconds", "apply"], ["rollout/update_pause_seconds", "pause of the actor"]]],
    ["Updates", "so far", [["rollout/deltas", "deltas"], ["rollout/base_snapshots", "base snapshots"], ["rollout/full_syncs", "whole weights"]]]]),
  anyMetric(), config()];
document.getElementById("main").replaceChildren(...all.filter(Boolean));
header();
