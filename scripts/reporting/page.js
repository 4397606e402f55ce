"use strict";
// The page: header, then a comparison if there are several runs, then one run, section by section. A live page asks for new data.

const POLL_SECONDS = 2;
const state = { folder: null, metric: null, differs: true, key: "", several: {} };
let data = JSON.parse(document.getElementById("data").textContent);
let several = null;
const browser = new Browser();

function current() {
  return data.runs.find((run) => run.folder === state.folder) || data.runs[0];
}

function settingsOf(run) {
  // those of the first run, with what differs; see several.py
  if (run === data.runs[0]) return run.config;
  const rows = new Map(data.runs[0].config.map((row) => [row[0], row]));
  for (const row of run.config) { if (row.length > 1) rows.set(row[0], row); else rows.delete(row[0]); }
  return [...rows.values()];
}

function header(run) {
  const bar = el("div", { class: "bar" });
  bar.append(el("h1", {}, visible(data.runs.length > 1 ? data.title : run.name)));
  if (data.runs.length > 1) {
    state.several.folder = run.folder;
    bar.append(selection("run", data.runs.map((each) => [each.folder, several.name(each)]), run.folder, choose));
  }
  bar.append(el("span", { class: `chip ${run.state}` }, run.state));
  const settings = settingsOf(run), value = (key) => (settings.find(([name]) => name === key) || [])[1];
  const words = [value("mode"), value("scheduler.max_staleness") && `η = ${value("scheduler.max_staleness")}`, value("loss.name"), value("task.name"), `seed ${run.seed}`];
  for (const word of words.filter(Boolean)) bar.append(el("span", { class: "chip" }, visible(word)));
  if (data.live) bar.append(el("span", { class: "chip", id: "live" }, "live"));
  bar.append(el("span", { class: "space" }));
  bar.append(el("span", { class: "control" }, "x axis", choice(Object.entries({ step: "steps", seconds: "seconds", samples: "samples" }), axis.name, (name) => { axis.name = name; redraw(); })));
  const links = [...document.querySelectorAll("main > section")].map((each) => el("a", { href: "#" + each.id }, each.dataset.link || each.querySelector("h2").textContent));
  document.getElementById("top").replaceChildren(bar, el("nav", {}, links));
}

function choose(folder) {
  state.folder = folder;
  state.several.folder = folder;
  show();
}

function front(run) {
  const open = (sample) => { browser.open(sample); document.getElementById("samples").scrollIntoView(); };
  return { notes: el("div", { class: "notes" }, notes(run)), tiles: tiles(run), written: written(run, open) };
}

function replaceable(run) {
  // made again when a live run has new data; charts elsewhere are drawn again in place
  return { heldout: heldoutSets(run), waiting: waiting(run), ledger: ledger(run), losses: byStaleness(run) };
}

function show() {
  const run = current(), head = front(run), parts = replaceable(run), scrolled = scrollY;
  browser.show(run);
  const reward = el("section", { id: "reward", "data-link": "Reward" },
    el("div", { class: "head" }, el("h2", {}, visible(data.runs.length > 1 ? several.name(run) : "Reward"))),
    head.notes, head.tiles, el("div", { class: "front" }, rewardChart(run), head.written));
  const all = [several && several.element, reward, parts.heldout, browser.element, staleness(run), parts.waiting, throughput(run), parts.ledger, parts.losses, learning(run), weights(run), anyMetric(run, state), config(run, settingsOf(run), state)];
  document.getElementById("main").replaceChildren(...all.filter(Boolean));
  header(run);
  redraw();
  if (scrolled) scrollTo({ top: scrolled, behavior: "instant" });
}

function notes(run) {
  const found = [...run.notes];
  if (run.faults) found.push("faults: " + run.faults);
  if (run.state === "stopped") found.push("this run has ended without a summary: it was killed, or it failed (see its logs)");
  return found.map((note) => el("div", { class: "note" }, visible(note)));
}

// ---- live -----------------------------------------------------------------------------------------------------------

function renew(newer) {
  // Charts, and what the reader has chosen, stay: a run's data change in place.
  const known = new Map(data.runs.map((run) => [run.folder, run])), run = current();
  const before = { state: run.state, keys: Object.keys(run.series.columns).length };
  data = { ...newer, runs: newer.runs.map((each) => Object.assign(known.get(each.folder) || {}, each)) };
  if (Object.keys(run.series.columns).length !== before.keys) {
    if (several) several.update(data);
    return show();
  }
  if (several) several.renew(data);
  const reward = document.getElementById("reward");
  for (const [name, made] of Object.entries(front(run))) reward.querySelector("." + name).replaceWith(made);
  for (const [id, made] of Object.entries(replaceable(run))) {
    const old = document.getElementById(id);
    if (old && made && !old.contains(document.activeElement)) old.replaceWith(made);
  }
  browser.show(run);
  if (run.state !== before.state) header(run);
  redraw();
}

async function poll() {
  let words = "the server has ended";
  try {
    const answer = await fetch("data?have=" + (data.number ?? 0), { cache: "no-store" });
    if (answer.status === 200) renew(await answer.json());
    words = `live · ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // that is how fetch fails
  }
  document.getElementById("live").textContent = words;
  setTimeout(poll, 1000 * POLL_SECONDS);
}

if (data.runs.length > 1) several = new Several(data, state.several, choose);
state.folder = data.runs[0].folder;
show();
if (data.live) setTimeout(poll, 1000 * POLL_SECONDS);
addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => {
  document.documentElement.dataset.ready = String(Math.round(performance.now())); // what is in sight has been drawn
}))));
