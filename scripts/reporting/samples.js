"use strict";
// Samples: the cards beside the reward curve, and the list with its token strip.

const FATES = { trained: "trained", heldout: "held-out", dropped: "dropped" };
const SHOWN_ROWS = 200;
const rewards = run.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
const LOW = Math.min(0, ...rewards), HIGH = Math.max(1e-9, ...rewards);

function answerOf(sample) {
  return sample.tokens.join("");
}

function badge(sample) {
  // from red to green over the rewards of the run
  if (sample.reward === null) return el("span", { class: "reward", title: "it was not scored" }, "none");
  const hue = Math.round(4 + 132 * (sample.reward - LOW) / (HIGH - LOW));
  return el("span", { class: "reward", title: "reward", style: { background: `hsl(${hue} 70% 45% / .25)` } }, number(sample.reward));
}

function about(sample) {
  const which = sample.fate === "heldout" ? `row ${sample.group}` : `group ${sample.group} · sample ${sample.index}`;
  const length = sample.length ? `${sample.length} tokens${sample.cut ? ", cut at its limit" : ""}` : "no answer";
  const more = [sample.staleness && `${sample.staleness} version${sample.staleness === 1 ? "" : "s"} old`, sample.actor, sample.why];
  return ["step " + sample.step, FATES[sample.fate], which, length, ...more.filter(Boolean)].map(visible).join(" · ");
}

function oneLine(text) {
  return visible(text.replace(/\s+/g, " ")).trim() || "(nothing)";
}

// ---- beside the curve -----------------------------------------------------------------------------------------------

function typical() {
  // of the newest train step the best, one in the middle and the worst; then the newest held-out answers
  const trained = run.samples.filter((sample) => sample.fate === "trained"), heldout = run.samples.filter((sample) => sample.fate === "heldout");
  const newest = (found) => found.filter((sample) => sample.step === Math.max(...found.map((each) => each.step)));
  const ranked = newest(trained).sort((a, b) => b.reward - a.reward);
  const places = unique([0, Math.floor((ranked.length - 1) / 2), ranked.length - 1]);
  return [...places.map((place) => ranked[place]).filter(Boolean), ...newest(heldout).slice(0, 2)];
}

function paidFor() {
  // Are answers with a reward the wanted ones? Not always, if the reward can be hacked.
  const letters = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");
  const trained = run.samples.filter((sample) => sample.fate === "trained" && letters(sample.wanted) && sample.wanted.length <= 60);
  const newer = trained.map((sample) => sample.step).sort((a, b) => a - b)[Math.floor(trained.length / 2)];
  const paid = trained.filter((sample) => sample.step >= newer && sample.reward > 0);
  const exact = paid.filter((sample) => letters(answerOf(sample)) === letters(sample.wanted)).length;
  return paid.length ? `Exactly the wanted answer: ${exact} of the ${paid.length} newer samples that earned a reward.` : "";
}

function written(open) {
  const list = typical().map((sample) => el("button", { class: "row", type: "button", onclick: () => open(sample) }, badge(sample),
    el("span", {}, el("span", { class: "line soft" }, oneLine(sample.prompt)), el("span", { class: "line mono" }, oneLine(answerOf(sample))),
      sample.wanted ? el("span", { class: "line soft" }, "wanted: " + oneLine(sample.wanted)) : null, el("span", { class: "line faint" }, about(sample)))));
  return el("div", { class: "card written" }, el("h3", {}, "Newest samples"), el("p", { class: "soft" }, paidFor()),
    list.length ? list : el("p", { class: "soft" }, "This run has kept no samples (run.samples_bytes)."));
}

// ---- the list -------------------------------------------------------------------------------------------------------

class Browser {
  constructor() {
    this.filters = { fate: "", order: "newest", why: "", search: "", colour: "age" };
    this.limit = SHOWN_ROWS;
    this.rows = el("div", { class: "card rows" });
    this.detail = el("div", { class: "card detail" });
    this.count = el("span", { class: "soft" });
    this.element = section("samples", "Samples", "Spread over the run, with the best and the worst. Tokens are coloured by the age of the weights that made them, or by a number that the learner kept.",
      this.tools(), el("div", { class: "browser" }, this.rows, this.detail));
    this.list();
  }

  tools() {
    const set = (name) => (value) => { this.filters[name] = value; this.limit = SHOWN_ROWS; this.list(); };
    const present = (values) => unique(values).map((value) => [value, FATES[value] || value]);
    const reasons = run.samples.map((sample) => sample.why.split(":")[0]).filter(Boolean);
    const names = run.samples.flatMap((sample) => Object.keys(sample.numbers));
    return el("div", { class: "tools" },
      selection("of", [["", "all"], ...present(run.samples.map((sample) => sample.fate))], "", set("fate")),
      selection("order", ["newest", "oldest", "best", "worst"].map((name) => [name, name]), "newest", set("order")),
      reasons.length ? selection("why", [["", "any reason"], ...present(reasons)], "", set("why")) : null,
      selection("colour", [["age", "age of weights"], ...present(names)], "age", (value) => { this.filters.colour = value; this.open(this.chosen); }),
      el("input", { type: "text", placeholder: "search prompt and answer", "aria-label": "search", oninput: (event) => set("search")(event.target.value) }),
      this.count);
  }

  list() {
    const { fate, order, why, search } = this.filters, value = (sample) => (sample.reward === null ? -1e300 : sample.reward);
    const found = run.samples.filter((sample) => (!fate || sample.fate === fate) && (!why || sample.why.split(":")[0] === why) &&
      (sample.prompt + "\n" + answerOf(sample)).toLowerCase().includes(search.toLowerCase()));
    const orders = { newest: (a, b) => b.step - a.step, oldest: (a, b) => a.step - b.step, best: (a, b) => value(b) - value(a), worst: (a, b) => value(a) - value(b) };
    found.sort((a, b) => orders[order](a, b) || b.step - a.step);
    this.count.textContent = `${found.length} of ${run.samples.length} samples here`;
    this.rows.replaceChildren(...found.slice(0, this.limit).map((sample) => {
      const made = el("button", { class: "row", type: "button", onclick: () => this.open(sample) }, badge(sample),
        el("span", {}, el("span", { class: "line mono" }, oneLine(answerOf(sample)).slice(0, 120)), el("span", { class: "line faint" }, about(sample))));
      made.sample = sample;
      return made;
    }));
    if (found.length > this.limit) this.rows.append(el("button", { type: "button", onclick: () => { this.limit += SHOWN_ROWS; this.list(); } }, `${found.length - this.limit} more`));
    this.open(found.includes(this.chosen) ? this.chosen : found[0] || null);
  }

  open(sample) {
    this.chosen = sample;
    for (const row of this.rows.children) row.setAttribute("aria-current", String(row.sample === sample));
    this.detail.replaceChildren();
    if (!sample) { this.detail.append(el("div", { class: "soft" }, "no such samples")); return; }
    const box = (title, ...inside) => el("div", {}, el("h3", {}, title), el("div", { class: "box mono" }, inside));
    const taken = Object.entries(sample.numbers).filter(([name]) => name.startsWith("penalty/"))
      .map(([name, values]) => `${name}: ${number(values.reduce((sum, value) => sum + (value || 0), 0))}`);
    this.detail.append(el("div", { class: "soft" }, badge(sample), " ", [about(sample), ...taken].join(" · ")), box("Prompt", visible(sample.prompt)));
    if (sample.length) this.detail.append(box("Answer", this.strip(sample)), el("div", { class: "soft" }, this.legend(sample)));
    if (sample.wanted) this.detail.append(box("Wanted", visible(sample.wanted)));
    const parts = Object.entries(sample.parts).map(([name, part]) => `${visible(name)} ${number(part)}`);
    if (parts.length) this.detail.append(el("div", { class: "soft" }, "parts of the reward: " + parts.join(", ")));
    if (sample.turns.length) this.detail.append(el("div", { class: "soft" }, "turns earned " + sample.turns.map(([, earned]) => number(earned)).join(", ")));
  }

  strip(sample) {
    const versions = sample.versions.flatMap(([version, count]) => Array(count).fill(version)), colours = this.colours(sample, versions), masked = new Set(sample.masked);
    return sample.tokens.flatMap((text, at) => {
      const numbers = Object.entries(sample.numbers).filter(([, values]) => values[at] !== null).map(([name, values]) => `${name} ${number(values[at])}`);
      const title = [JSON.stringify(visible(text)), `version ${versions[at]} (${sample.version - versions[at]} old)`, ...numbers].join("\n");
      const made = el("span", { class: masked.has(at) ? "token masked" : "token", title }, text === "" ? "·" : text.includes("\n") ? "⏎" + visible(text) : visible(text));
      made.style.background = colours[at] || "";
      return sample.gap && at === sample.gap[0] ? [`\n… ${sample.gap[1]} tokens …\n`, made] : [made];
    });
  }

  colours(sample, versions) {
    const by = this.filters.colour, values = sample.numbers[by], centre = /ratio|weight/.test(by) ? 1 : 0;
    if (by === "age") return versions.map((version) => `rgba(var(--age${Math.min(3, Math.max(0, sample.version - version))}), .3)`);
    if (!values) return [];
    const largest = Math.max(1e-9, ...values.filter((value) => value !== null).map((value) => Math.abs(value - centre)));
    return values.map((value) => (value === null || value === centre ? "" : `rgba(var(--age${value > centre ? 0 : 3}), ${(.08 + .47 * Math.abs(value - centre) / largest).toFixed(3)})`));
  }

  legend(sample) {
    const by = this.filters.colour, known = (sample.numbers[by] || []).filter((value) => value !== null);
    const mask = sample.masked.length ? "; dotted: not trained (mask)" : "";
    if (by === "age") return "green: the newest weights, then yellow, orange and red: 1, 2, 3 or more versions old" + mask;
    return (known.length ? `${by}: ${number(Math.min(...known))} to ${number(Math.max(...known))}, green above and red below ${/ratio|weight/.test(by) ? 1 : 0}` : `${by} was not computed for this sample`) + mask;
  }
}
