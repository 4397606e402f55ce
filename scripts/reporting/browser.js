"use strict";
// Samples: the cards beside the reward curve, and the browser with its token strip.

const FATES = { trained: "trained", heldout: "held-out", dropped: "dropped" };
const SHOWN_ROWS = 200;

function answerOf(sample) {
  return sample.tokens.join("");
}

function rewardSpan(samples) {
  const rewards = samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  return [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
}

function rewardBadge(sample, span) {
  // from red to green over the rewards of the run
  if (sample.reward === null) return el("span", { class: "reward", title: "it was not scored" }, "none");
  const share = (sample.reward - span[0]) / Math.max(1e-9, span[1] - span[0]);
  const hue = Math.round(4 + 132 * share);
  const badge = el("span", { class: "reward", title: "reward" }, number(sample.reward));
  badge.style.background = `hsl(${hue} 70% 45% / .2)`;
  badge.style.color = `color-mix(in srgb, hsl(${hue} 75% 40%) 65%, var(--text))`;
  return badge;
}

function about(sample) {
  const which = sample.fate === "heldout" ? `row ${sample.group}` : `group ${sample.group} · sample ${sample.index}`;
  const age = sample.staleness ? ` · ${sample.staleness} old` : "";
  const length = sample.length ? `${sample.length} tokens` : "no answer";
  const calls = sample.calls ? ` · ${sample.calls.length} tool call${sample.calls.length > 1 ? "s" : ""}` : "";
  return `step ${sample.step} · ${FATES[sample.fate]} · ${which} · ${length}${calls}${age}${sample.why ? " · " + sample.why : ""}`;
}

function reasonOf(sample) {
  return sample.why.split(":")[0];
}

function ending(sample) {
  if (!sample.length) return "no answer";
  if (sample.finish === "abort") return `${sample.length} tokens, broken off`;
  return `${sample.length} tokens, ${sample.cut ? "cut at its limit (length)" : "ended by " + sample.finish}`;
}

function taken(sample) {
  // what the learner subtracted from the reward
  return Object.entries(sample.numbers).filter(([name]) => name.startsWith("penalty/")).map(([name, values]) => {
    const total = values.reduce((sum, value) => sum + (value || 0), 0);
    return `${total < 0 ? "+" : "−"} ${number(Math.abs(total))} ${name.slice("penalty/".length)}`;
  });
}

function shownText(text) {
  return visible(text.replace(/\n{2,}/g, "\n")).trim() || "(nothing)";
}

// ---- beside the curve -----------------------------------------------------------------------------------------------

function typical(run) {
  // of the newest train step the best, one in the middle and the worst; then the newest held-out answers
  const found = [];
  const trained = run.samples.filter((sample) => sample.fate === "trained");
  const newest = Math.max(...trained.map((sample) => sample.step));
  const ranked = trained.filter((sample) => sample.step === newest).sort((a, b) => b.reward - a.reward);
  const places = unique([0, Math.floor((ranked.length - 1) / 2), ranked.length - 1]).filter((place) => ranked[place]);
  for (const place of places) found.push(ranked[place]);
  const heldout = run.samples.filter((sample) => sample.fate === "heldout");
  const evaluated = Math.max(...heldout.map((sample) => sample.step));
  found.push(...heldout.filter((sample) => sample.step === evaluated).slice(0, 5 - Math.min(3, found.length)));
  return found;
}

const LONGEST_WANTED = 60; // characters; what is longer is no answer but a program's tests, say

function paidFor(run) {
  // Do answers with a reward contain the wanted answer? Not always, if the reward can be hacked.
  const letters = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");
  const trained = run.samples.filter((sample) => sample.fate === "trained" && sample.wanted && sample.wanted.length <= LONGEST_WANTED);
  const newer = trained.map((sample) => sample.step).sort((a, b) => a - b)[Math.floor(trained.length / 2)];
  const paid = trained.filter((sample) => sample.step >= newer && sample.reward > 0);
  if (!paid.length || !paid.some((sample) => letters(sample.wanted))) return "";
  const right = paid.filter((sample) => letters(answerOf(sample)).includes(letters(sample.wanted))).length;
  const exact = paid.filter((sample) => letters(answerOf(sample)) === letters(sample.wanted)).length;
  return `Exactly the wanted answer: ${exact} of the ${paid.length} newer samples that earned a reward (${right} contain it).`;
}

function written(run, open) {
  const span = rewardSpan(run.samples), list = el("div", { class: "list" });
  for (const sample of typical(run)) {
    list.append(el("button", { class: "piece", type: "button", onclick: () => open(sample) },
      el("span", { class: "reward-place" }, rewardBadge(sample, span)),
      el("span", {},
        el("span", { class: "clamp prompt" }, shownText(sample.prompt)),
        el("span", { class: "clamp answer mono" }, shownText(answerOf(sample))),
        sample.wanted ? el("span", { class: "clamp wanted" }, "wanted: ", el("span", { class: "mono" }, shownText(sample.wanted))) : null,
        el("span", { class: "about" }, about(sample)))));
  }
  if (!list.children.length) list.append(el("div", { class: "empty" }, "This run has kept no samples (run.samples_bytes)."));
  return el("div", { class: "card written" },
    el("h3", {}, "What it writes now", el("span", { class: "soft small" }, "  reward, prompt, answer; click for the tokens")), el("p", { class: "soft small" }, paidFor(run)), list);
}

// ---- the browser ----------------------------------------------------------------------------------------------------

class Browser {
  constructor() {
    this.filters = { fate: "", order: "newest", why: "", search: "", least: "", most: "", age: "", colour: "age" };
    this.rows = el("div", { class: "card rows", role: "listbox", "aria-label": "samples" });
    this.detail = el("div", { class: "card detail" });
    this.count = el("span", { class: "soft small" });
    this.tools = el("div", { class: "tools" });
    this.limit = SHOWN_ROWS;
    this.element = section("samples", "Samples",
      "What the model wrote, spread over the run, with the best and the worst of a group. Colours of tokens show the age of the weights that made them, in versions, or any number that the learner kept.",
      this.tools, el("div", { class: "browser" }, this.rows, this.detail));
    this.tip = el("div", { class: "tip", hidden: true });
    document.body.append(this.tip);
    this.detail.addEventListener("pointermove", (event) => this.explain(event));
    this.detail.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  show(run) {
    const same = this.run && this.run.folder === run.folder, before = this.chosen;
    this.run = run;
    this.span = rewardSpan(run.samples);
    this.chosen = (same && before && run.samples.find((sample) => this.isSame(sample, before))) || null;
    if (!same || !this.tools.contains(document.activeElement)) this.makeTools();
    const scrolled = same ? this.rows.scrollTop : 0;
    this.list(Boolean(this.chosen));
    this.rows.scrollTop = scrolled;
  }

  isSame(a, b) {
    return a.fate === b.fate && a.step === b.step && a.group === b.group && a.index === b.index;
  }

  makeTools() {
    const set = (name) => (value) => { this.filters[name] = value; this.limit = SHOWN_ROWS; this.list(); };
    const typed = (name) => (event) => set(name)(event.target.value);
    const fates = Object.entries(FATES).filter(([fate]) => this.run.samples.some((sample) => sample.fate === fate));
    if (this.filters.fate && !fates.some(([fate]) => fate === this.filters.fate)) this.filters.fate = "";
    const reasons = unique(this.run.samples.filter((sample) => sample.why).map(reasonOf)).sort();
    if (!reasons.includes(this.filters.why)) this.filters.why = "";
    const ages = unique(this.run.samples.map((sample) => sample.staleness)).sort((a, b) => a - b);
    const names = unique(this.run.samples.flatMap((sample) => Object.keys(sample.numbers)));
    if (!["age", ...names].includes(this.filters.colour)) this.filters.colour = "age";
    this.tools.replaceChildren(
      choice([["", "all"], ...fates], this.filters.fate, set("fate")),
      selection("order", [["newest", "newest"], ["oldest", "oldest"], ["best", "best"], ["worst", "worst"]], this.filters.order, set("order")),
      el("label", { class: "control" }, "reward",
        el("input", { type: "number", step: "any", placeholder: "from", "aria-label": "least reward", value: this.filters.least, oninput: typed("least") }),
        el("input", { type: "number", step: "any", placeholder: "to", "aria-label": "highest reward", value: this.filters.most, oninput: typed("most") })),
      reasons.length ? selection("why", [["", "any reason"], ...reasons.map((reason) => [reason, reason])], this.filters.why, set("why")) : "",
      ages.length > 1 ? selection("staleness", [["", "any"], ...ages.map((age) => [String(age), String(age)])], this.filters.age, set("age")) : "",
      el("input", { type: "text", placeholder: "search prompt and answer", "aria-label": "search", value: this.filters.search, oninput: typed("search") }),
      selection("colour", [["age", "age of weights"], ...names.map((name) => [name, name])], this.filters.colour, (value) => { this.filters.colour = value; this.open(this.chosen); }),
      this.count);
  }

  matching() {
    const { fate, order, why, search, least, most, age } = this.filters, wanted = search.toLowerCase();
    const value = (sample) => (sample.reward === null ? -Infinity : sample.reward);
    const found = this.run.samples.filter((sample) =>
      (!fate || sample.fate === fate) && (!why || reasonOf(sample) === why) && (least === "" || value(sample) >= Number(least)) &&
      (most === "" || (sample.reward !== null && sample.reward <= Number(most))) && (age === "" || sample.staleness === Number(age)) &&
      (!wanted || (sample.prompt + "\n" + answerOf(sample)).toLowerCase().includes(wanted)));
    const compare = (a, b) => (value(a) === value(b) ? 0 : value(a) - value(b)); // two of -Infinity differ by NaN
    const orders = { newest: (a, b) => b.step - a.step, oldest: (a, b) => a.step - b.step, best: (a, b) => compare(b, a), worst: (a, b) => compare(a, b) };
    const later = (a, b) => b.step - a.step || b.fate.localeCompare(a.fate) || compare(b, a);
    return found.sort((a, b) => orders[order](a, b) || later(a, b));
  }

  list(keep = false) {
    // `keep`: the sample that is shown stays
    const found = this.matching();
    this.count.textContent = `${found.length} of ${this.run.samples.length} samples here`;
    this.rows.replaceChildren(...found.slice(0, this.limit).map((sample) => this.row(sample)));
    if (found.length > this.limit) {
      this.rows.append(el("button", { class: "plain", type: "button", onclick: () => { this.limit += SHOWN_ROWS; this.list(); } }, `${found.length - this.limit} more`));
    }
    if (!found.length) this.rows.append(el("div", { class: "empty", style: { padding: "1rem" } }, "no such samples"));
    if (keep) this.mark();
    else this.open(found.includes(this.chosen) ? this.chosen : found[0] || null);
  }

  row(sample) {
    const made = el("button", { class: "row", type: "button", onclick: () => this.open(sample) },
      rewardBadge(sample, this.span),
      el("span", { class: "line mono" }, shownText(answerOf(sample)).slice(0, 120)),
      el("span", { class: "about" }, about(sample)));
    made.sample = sample;
    return made;
  }

  mark() {
    for (const row of this.rows.children) row.setAttribute("aria-current", String(row.sample === this.chosen));
  }

  open(sample) {
    this.chosen = sample;
    this.mark();
    this.detail.replaceChildren();
    if (!sample) { this.detail.append(el("div", { class: "empty" }, "no sample is chosen")); return; }
    const fact = (text) => el("span", { class: "chip" }, visible(text));
    this.detail.append(el("div", { class: "facts" }, rewardBadge(sample, this.span), fact(FATES[sample.fate]), fact(`step ${sample.step}`),
      ...taken(sample).map(fact), fact(ending(sample)), fact(sample.staleness ? `${sample.staleness} versions old` : "of the newest weights"),
      sample.actor ? fact(sample.actor) : null, sample.why ? el("span", { class: "chip stopped" }, visible(sample.why)) : null));
    this.detail.append(this.siblings(sample));
    this.detail.append(el("div", {}, el("h3", {}, "Prompt"), el("div", { class: "box soft mono" }, visible(sample.prompt))));
    if (sample.length) this.detail.append(el("div", {}, el("h3", {}, "Answer"), this.strip(sample)), this.legend(sample));
    if (sample.calls) this.detail.append(this.calls(sample));
    if (sample.wanted) this.detail.append(el("div", {}, el("h3", {}, "Wanted"), el("div", { class: "box mono" }, visible(sample.wanted))));
    if (sample.turns) this.detail.append(el("div", { class: "soft small" }, "turns earned " + sample.turns.map(([, earned]) => number(earned)).join(", ")));
  }

  calls(sample) {
    const box = el("div", {}, el("h3", {}, "Tool calls"));
    for (const [turn, name, given, result, failed] of sample.calls) {
      box.append(el("div", { class: "box mono call" },
        el("span", { class: "soft" }, `turn ${turn}  `), el("b", {}, visible(name || "(no call that can be read)")), " ", visible(given),
        el("div", { class: failed ? "failed" : "" }, "→ ", result === null ? el("span", { class: "soft" }, "not answered") : visible(result))));
    }
    return box;
  }

  siblings(sample) {
    // the same group, or the same held-out prompt at other evaluations
    const heldout = sample.fate === "heldout";
    const others = this.run.samples.filter((other) => other.fate === sample.fate && other.group === sample.group && (heldout || other.step === sample.step))
      .sort((a, b) => a.step - b.step || a.index - b.index);
    if (others.length < 2) return "";
    const box = el("div", { class: "facts" }, el("span", { class: "soft small" }, heldout ? "the same prompt at step" : "the same group"));
    for (const other of others.slice(0, 40)) {
      const button = el("button", { type: "button", class: "plain", "aria-current": String(other === sample), onclick: () => this.open(other) }, heldout ? `${other.step}: ` : "");
      button.append(rewardBadge(other, this.span));
      if (other === sample) button.style.borderColor = "var(--accent)";
      box.append(button);
    }
    return box;
  }

  strip(sample) {
    const box = el("div", { class: "box tokens mono" }), colours = this.colours(sample), masked = new Set(sample.masked);
    const turns = new Set((sample.turns || []).map(([at]) => at));
    sample.tokens.forEach((text, at) => {
      if (sample.gap && at === sample.gap[0]) box.append(el("span", { class: "gap" }, `\n… ${sample.gap[1]} tokens …\n`));
      const made = el("span", { class: masked.has(at) ? "token masked" : "token" });
      if (text === "") made.append(el("span", { class: "sign" }, "·"));
      else if (text.includes("\n")) made.append(el("span", { class: "sign" }, "⏎"), visible(text));
      else made.append(visible(text));
      if (colours[at]) made.style.background = colours[at];
      if (turns.has(at) && at) made.style.borderLeft = "2px solid var(--accent)";
      made.at = at;
      box.append(made);
    });
    return box;
  }

  ages(sample) {
    return sample.versions.flatMap(([version, count]) => Array(count).fill(sample.version - version));
  }

  colours(sample) {
    const by = this.filters.colour;
    if (by === "age") return this.ages(sample).map((age) => `rgba(var(--age${Math.min(3, Math.max(0, age))}), var(--tint))`);
    const values = sample.numbers[by];
    if (!values) return [];
    const centre = /ratio|weight/.test(by) ? 1 : 0;
    const known = values.filter((value) => value !== null);
    const largest = Math.max(1e-9, ...known.map((value) => Math.abs(value - centre)));
    return values.map((value) => {
      if (value === null || value === centre) return "";
      const share = (.08 + .47 * Math.abs(value - centre) / largest).toFixed(3);
      if (by === "logprob" || by === "proximal" || by === "entropy") return `rgba(var(--hue), ${share})`;
      return `rgba(var(--${value > centre ? "up" : "down"}), ${share})`;
    });
  }

  legend(sample) {
    const by = this.filters.colour, box = el("div", { class: "legend" });
    const sign = (background, text) => el("span", {}, el("i", { style: { background } }), text);
    if (by === "age") {
      for (const age of unique(this.ages(sample).map((each) => Math.min(3, Math.max(0, each)))).sort()) {
        box.append(sign(`rgba(var(--age${age}), .6)`, age === 3 ? "3 or more versions old" : age === 1 ? "1 version old" : `${age} versions old`));
      }
    } else {
      const known = (sample.numbers[by] || []).filter((value) => value !== null);
      if (!known.length) box.append(`${by} was not computed for this sample`);
      else {
        const centre = /ratio|weight/.test(by) ? 1 : 0;
        box.append(el("span", {}, `${by}: ${number(Math.min(...known))} to ${number(Math.max(...known))}`));
        if (by === "logprob" || by === "proximal" || by === "entropy") box.append(sign("rgba(var(--hue), .5)", "far from 0"));
        else box.append(sign("rgba(var(--up), .5)", `above ${centre}`), sign("rgba(var(--down), .5)", `below ${centre}`));
      }
    }
    if (sample.masked.length) box.append(el("span", {}, "dotted: not trained (mask)"));
    return box;
  }

  explain(event) {
    const token = event.target.closest && event.target.closest(".token");
    if (!token || !this.chosen) { this.tip.hidden = true; return; }
    const sample = this.chosen, at = token.at, table = el("table", {});
    const line = (name, value) => table.append(el("tr", {}, el("td", {}, name), el("td", {}, value)));
    const version = sample.versions.flatMap(([made, count]) => Array(count).fill(made))[at];
    line("token", JSON.stringify(visible(sample.tokens[at])));
    line("version", `${version} (${sample.version - version} old)`);
    if (sample.masked.includes(at)) line("mask", "not trained");
    for (const [name, values] of Object.entries(sample.numbers)) if (values[at] !== null) line(name, number(values[at]));
    this.tip.replaceChildren(table);
    this.tip.hidden = false;
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = Math.max(6, Math.min(innerWidth - box.width - 8, event.clientX + 14)) + "px";
    this.tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
  }
}
