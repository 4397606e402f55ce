"use strict";
// Several runs: what a factor does to a measure, curves over one another, and a table to choose from.

const RUN = "run";

class Several {
  constructor(data, state, choose) {
    this.choose = choose;
    this.state = state;
    this.element = section("runs", "Runs", "");
    this.update(data);
  }

  update(data) {
    this.data = data;
    this.factors = Object.keys(data.runs[0].labels).filter((factor) => unique(data.runs.map((run) => run.labels[factor])).length > 1);
    this.measures = unique(data.runs.flatMap((run) => Object.keys(run.measures)));
    const state = this.state;
    const few = data.runs.length <= 8;
    if (!state.by) {
      state.by = this.factors.length && (!few || data.points.length < data.runs.length) ? this.factors[0] : few || !this.factors.length ? RUN : this.factors[0];
      state.x = this.factors.filter((factor) => factor !== state.by).sort((a, b) => this.order(b) - this.order(a))[0] || state.by;
      state.measure = this.measures[0];
      state.only = {};
    }
    this.build();
  }

  renew(data) {
    // live runs: their charts redraw themselves
    this.data = data;
    this.element.querySelector(".scroll").replaceWith(this.table());
  }

  order(factor) {
    // factors of numbers with many values first
    const values = unique(this.data.runs.map((run) => run.labels[factor]));
    return values.length + (values.every((value) => value !== "" && Number.isFinite(Number(value))) ? 100 : 0);
  }

  name(run) {
    if (this.isNamed()) return run.name;
    const seeds = unique(this.data.runs.map((other) => other.seed)).length > 1;
    return this.factors.map((factor) => `${factor.split(".").pop()}=${run.labels[factor]}`).join(", ") + (seeds ? `, seed ${run.seed}` : "");
  }

  isNamed() {
    // few runs are known by their folders, many by their settings
    return !this.factors.length || (this.data.points.length === this.data.runs.length && this.data.runs.length <= 8);
  }

  group(run) {
    return this.state.by === RUN ? this.name(run) : run.labels[this.state.by];
  }

  sorted(values) {
    return values.every((value) => Number.isFinite(Number(value))) ? values.sort((a, b) => Number(a) - Number(b)) : values;
  }

  chosen() {
    return this.data.runs.filter((run) => Object.entries(this.state.only).every(([factor, value]) => !value || run.labels[factor] === value));
  }

  groups() {
    return this.sorted(unique(this.data.runs.map((run) => this.group(run))));
  }

  colourOf(group) {
    return PALETTE[this.groups().indexOf(group) % PALETTE.length];
  }

  build() {
    const { state, data } = this, again = (name) => (value) => { state[name] = value; this.build(); };
    const options = this.factors.map((factor) => [factor, factor]);
    const tools = el("div", { class: "tools" });
    if (options.length || data.runs.length <= 8) tools.append(selection("colour", [...(data.runs.length <= 8 ? [[RUN, RUN]] : []), ...options], state.by, again("by")));
    for (const factor of data.runs.length > 8 ? this.factors.filter((each) => each !== state.by) : []) {
      const values = this.sorted(unique(data.runs.map((run) => run.labels[factor])));
      if (values.length < 20) tools.append(selection(factor, [["", "all"], ...values.map((value) => [value, value])], state.only[factor] || "", (value) => { state.only[factor] = value; this.build(); }));
    }
    const head = this.element.querySelector(".head");
    head.querySelector("h2").textContent = `${data.runs.length} runs`;
    const points = data.points.length, seeds = data.runs.length / Math.max(1, points);
    this.element.replaceChildren(head, tools);
    if (points < data.runs.length || this.factors.length) this.element.append(el("p", { class: "soft small" }, `${points} settings${seeds > 1 ? `, about ${Math.round(seeds)} runs each; thin lines and points: runs; thick lines: means` : ""}`));
    const grid = el("div", { class: "grid wide" });
    const effect = this.factors.length && this.measures.length && data.points.length > 2 && state.by !== RUN;
    if (effect) grid.append(this.effect());
    for (const [title, words, key] of [["Held-out reward", "", "eval"], ["Train reward", "", "reward/mean"], ["Staleness", "mean, versions", "staleness/mean"], ["Trained tokens per second", "", "train/tokens_per_second"], ["Effective sample size", "", "ess"], ...(effect ? [] : [["Entropy", "nats per token", "entropy"]])]) {
      grid.append(chart(title, words, () => this.curves(key), 280));
    }
    this.element.append(grid, this.table());
  }

  // ---- a measure against a factor -----------------------------------------------------------------------------------

  effect() {
    const { state } = this;
    const box = chart("", "", () => this.effectOf(), 280), title = box.querySelector("h3");
    const redo = (name) => (value) => { state[name] = value; draw(box.querySelector(".plot")); };
    title.replaceChildren(
      selection("", this.measures.map((name) => [name, name]), state.measure, redo("measure")), el("span", {}, "against"),
      selection("", this.factors.map((name) => [name, name]), state.x, redo("x")));
    return box;
  }

  effectOf() {
    const { state } = this, runs = this.chosen().filter((run) => Number.isFinite(run.measures[state.measure]));
    const xs = this.sorted(unique(this.data.runs.map((run) => run.labels[state.x])));
    const traces = [], single = state.by === state.x || state.by === RUN;
    for (const group of single ? [null] : this.groups()) {
      const mine = group === null ? runs : runs.filter((run) => this.group(run) === group);
      const name = group === null ? "c0" : this.colourOf(group);
      const at = (x) => mine.filter((run) => run.labels[state.x] === x).map((run) => run.measures[state.measure]);
      traces.push({ x: mine.map((run) => run.labels[state.x]), y: mine.map((run) => run.measures[state.measure]), mode: "markers", marker: { size: 5, color: faded(name, .45) }, hoverinfo: "skip", showlegend: false });
      traces.push({ x: xs, y: xs.map((x) => mean(at(x))), error_y: this.intervals(group, xs), name: safe(group === null ? "mean" : `${group}`), mode: "lines+markers", connectgaps: true, line: { color: colour(name), width: 2 }, marker: { size: 7 }, hovertemplate: "%{y:.4~g}" });
    }
    return { traces, layout: { showlegend: !single, xaxis: { type: "category", categoryorder: "array", categoryarray: xs, title: { text: safe(state.x), font: { size: 11 } } } } };
  }

  intervals(group, xs) {
    // 95 % of the mean, where a point of the picture is one setting with at least five runs
    const { state } = this;
    const rows = xs.map((x) => this.data.points.filter((point) => point.labels[state.x] === x && (group === null || point.labels[state.by] === group) && Object.entries(state.only).every(([factor, value]) => !value || point.labels[factor] === value)));
    const found = rows.map((each) => (each.length === 1 ? each[0].measures[state.measure] : null));
    if (!found.some((each) => each && each.count >= 5)) return undefined;
    const part = (side) => found.map((each) => (each && each.count >= 5 ? Math.abs(each[side] - each.mean) : 0));
    return { type: "data", symmetric: false, array: part("high"), arrayminus: part("low"), thickness: 1, width: 3 };
  }

  // ---- curves -------------------------------------------------------------------------------------------------------

  curve(run, key) {
    if (key === "eval") {
      const found = run.evaluations.filter((each) => Number.isFinite(evaluationPlace(run, each)));
      return [found.map((each) => evaluationPlace(run, each)), found.map((each) => each.reward)];
    }
    const column = run.series.columns[key];
    return column ? [places(run), column.y] : [[], []];
  }

  curves(key) {
    const runs = this.chosen(), traces = [];
    for (const group of this.groups()) {
      const curves = runs.filter((run) => this.group(run) === group).map((run) => this.curve(run, key)).filter(([x]) => x.length);
      if (!curves.length) continue;
      const name = this.colourOf(group), many = curves.length > 1;
      const x = curves.flatMap(([each]) => [...each, null]), y = curves.flatMap(([, each]) => [...each, null]);
      traces.push({ x, y, mode: "lines", name: safe(group), line: { color: many ? faded(name, runs.length > 40 ? .14 : .3) : colour(name), width: many ? 1 : 1.8 }, showlegend: !many, connectgaps: false, hoverinfo: many ? "skip" : undefined, hovertemplate: many ? undefined : "%{y:.4~g}" });
      if (many) traces.push({ ...this.average(curves), mode: "lines", name: safe(group), line: { color: colour(name), width: 2.4 }, hovertemplate: "%{y:.4~g}" });
    }
    return { traces, layout: { showlegend: this.groups().length < 12 } };
  }

  average(curves) {
    // over the x that all curves have, as far as most do
    const ends = curves.map(([x]) => x[x.length - 1]).sort((a, b) => a - b), begin = Math.max(...curves.map(([x]) => x[0])), end = ends[Math.floor(ends.length / 2)];
    const x = Array.from({ length: 61 }, (_, place) => begin + (end - begin) * place / 60);
    return { x, y: x.map((at) => mean(curves.map((each) => interpolated(each, at)))) };
  }

  // ---- the table ----------------------------------------------------------------------------------------------------

  table() {
    const { state, data } = this, measures = this.measures.slice(0, 8);
    const columns = [...(this.isNamed() ? [[RUN, (run) => this.name(run)]] : []), ...this.factors.map((factor) => [factor, (run) => run.labels[factor]]), ["seed", (run) => run.seed], ...measures.map((name) => [name, (run) => run.measures[name]]), ["state", (run) => run.state]];
    const shown = [...data.runs];
    if (state.sort) {
      const value = (columns.find(([name]) => name === state.sort[0]) || columns[0])[1], sign = state.sort[1];
      const key = (run) => { const found = value(run); return Number.isFinite(Number(found)) && found !== "" ? Number(found) : found ?? -Infinity; };
      shown.sort((a, b) => (key(a) < key(b) ? -sign : key(a) > key(b) ? sign : 0));
    }
    const sort = (name) => () => { state.sort = [name, state.sort && state.sort[0] === name ? -state.sort[1] : -1]; this.build(); };
    const head = el("tr", {}, columns.map(([name]) => el("th", { class: "sorts", onclick: sort(name) }, visible(name) + (state.sort && state.sort[0] === name ? (state.sort[1] < 0 ? " ↓" : " ↑") : ""))));
    const body = shown.map((run) => el("tr", { class: "pick", "aria-current": String(run.folder === state.folder), onclick: () => { this.choose(run.folder); this.build(); } },
      columns.map(([, value]) => { const found = value(run); return el("td", {}, typeof found === "number" ? number(found) : visible(found ?? "–")); })));
    return el("div", { class: "card scroll" }, el("table", { class: "data" }, el("thead", {}, head), el("tbody", {}, body)));
  }
}

function interpolated([x, y], at) {
  if (at < x[0] || at > x[x.length - 1]) return null;
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle; else high = middle;
  }
  if (y[low] === null || y[high] === null || x[high] === x[low]) return y[low];
  return y[low] + (y[high] - y[low]) * (at - x[low]) / (x[high] - x[low]);
}
