"use strict";
// The page: header, then several runs if there are, then one run, section by section. A live page asks for new data.

const POLL_SECONDS = 2;
const state = { folder: null, metric: null, differs: true, key: "", several: {} };
let data = JSON.parse(document.getElementById("data").textContent);
let several = null;
const browser = new Browser();

function current() {
  return data.runs.find((run) => run.folder === state.folder) || data.runs[0];
}

function header(run) {
  const bar = el("div", { class: "bar" });
  bar.append(el("h1", {}, visible(data.runs.length > 1 ? data.title : run.name)));
  if (data.runs.length > 1) {
    state.several.folder = run.folder;
    bar.append(selection("run", data.runs.map((each) => [each.folder, several.name(each)]), run.folder, choose));
  }
  bar.append(el("span", { class: `chip ${run.state}` }, run.state));
  const value = (key) => (run.config.find(([name]) => name === key) || [])[1];
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

function show() {
  const run = current(), main = document.getElementById("main"), scrolled = scrollY;
  browser.show(run);
  const open = (sample) => { browser.open(sample); document.getElementById("samples").scrollIntoView(); };
  const front = el("section", { id: "reward", "data-link": "Reward" }, el("div", { class: "head" }, el("h2", {}, data.runs.length > 1 ? several.name(run) : "Reward")), notes(run), tiles(run), el("div", { class: "front" }, rewardChart(run), written(run, open)));
  const parts = [several && several.element, front, browser.element, staleness(run), waiting(run), throughput(run), ledger(run), byStaleness(run), learning(run), weights(run), anyMetric(run, state), config(run, state)];
  main.replaceChildren(...parts.filter(Boolean));
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

async function poll() {
  const chip = document.getElementById("live");
  try {
    const answer = await fetch("data?have=" + (data.number ?? 0), { cache: "no-store" });
    if (answer.status === 200) {
      data = await answer.json();
      if (several) several.update(data);
      if (document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName)) browser.show(current());
      else show();
    }
    document.getElementById("live").textContent = `live · ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    chip.textContent = "the server has ended";
  }
  setTimeout(poll, 1000 * POLL_SECONDS);
}

if (data.runs.length > 1) several = new Several(data, state.several, choose);
state.folder = data.runs[0].folder;
show();
if (data.live) setTimeout(poll, 1000 * POLL_SECONDS);
addEventListener("load", () => { document.documentElement.dataset.ready = String(Math.round(performance.now())); });
