"use strict";
// The sections about one run.

function tiles(run) {
  const { summary, row } = run, known = (name, other) => summary[name] ?? row[other];
  const evaluations = run.evaluations, first = evaluations[0], final = evaluations[evaluations.length - 1];
  const tile = (label, value, more) => el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "more" }, more || ""));
  const found = [];
  if (final) found.push(tile("held-out reward", number(summary.reward_after ?? final.reward), first && first !== final ? `from ${number(summary.reward_before ?? first.reward)}` : ""));
  found.push(tile("train reward", number(row["reward/mean"]), "last train step"));
  found.push(tile("train steps", `${number(known("steps", "step"))}`, `of ${run.steps}`));
  found.push(tile("time", duration(known("seconds", "seconds")), summary.seconds_to_target ? `target after ${duration(summary.seconds_to_target)}` : ""));
  const bound = summary.staleness_bound ?? row["staleness/bound"];
  found.push(tile("staleness", number(known("staleness_mean", "staleness/mean")), `max ${number(known("staleness_max", "staleness/max"))}, bound ${bound ?? "none"}`));
  found.push(tile("trained tokens/s", number(known("trained_tokens_per_second", "train/tokens_per_second")), `${number(known("tokens_per_second", "rollout/tokens_per_second"))} rolled out`));
  found.push(tile("learner waits", percent(known("learner_idle_share", "train/idle_share")), `actors ${percent(known("actor_idle_share", "rollout/idle_share"))} of the time`));
  const count = Object.fromEntries(run.ledger.fates.map((each) => [each.fate, each.count]));
  const admitted = run.ledger.fates.reduce((sum, each) => sum + each.count, 0);
  if (admitted) found.push(tile("groups trained", number(count.trained || 0), `of ${number(admitted)} admitted`));
  return el("div", { class: "tiles" }, found);
}

function rewardChart(run) {
  const box = chart("Reward", "mean of each train step; points: held-out", () => {
    const traces = line(run, "reward/mean", "train", "c0");
    const points = run.evaluations.filter((each) => evaluationPlace(run, each) !== null && evaluationPlace(run, each) !== undefined);
    if (points.length) {
      traces.push({
        x: points.map((each) => evaluationPlace(run, each)), y: points.map((each) => each.reward), name: "held-out", mode: "lines+markers", cliponaxis: false,
        line: { color: colour("c1"), width: 2 }, marker: { size: 7, color: colour("c1"), line: { color: colour("card"), width: 1.5 } },
        hovertemplate: "%{y:.4~g}",
      });
    }
    return { traces, layout: { showlegend: true } };
  }, 400);
  box.querySelector(".plot").fills = matchMedia("(min-width: 1001px)").matches;
  return box;
}

function heldoutSets(run) {
  // figures of held-out sets with their intervals of 95 %, the first round against the newest; the own set alone is in the chart of the reward
  const rounds = run.evaluations.filter((each) => each.sets), names = unique(rounds.flatMap((each) => Object.keys(each.sets)));
  const several = (name) => rounds.some((each) => each.sets[name] && each.sets[name].samples > 1);
  if (names.length < 2 && !names.some(several)) return null;
  const said = (found, figure) => (found[figure] === undefined ? "–" : number(found[figure]) + (found[figure + "_low"] === undefined ? "" : ` [${number(found[figure + "_low"])}, ${number(found[figure + "_high"])}]`));
  const table = el("table", { class: "data" }, el("tr", {}, ["set", "figure", "prompts", "answers each", "first", "newest", "at step"].map((name) => el("th", {}, name))));
  const charts = names.map((name) => {
    const found = rounds.filter((each) => each.sets[name]), first = found[0], newest = found[found.length - 1], last = newest.sets[name];
    const passes = Object.keys(last).filter((key) => /^pass@\d+$/.test(key)).sort((a, b) => a.slice(5) - b.slice(5));
    ["reward", ...passes].forEach((figure, place) => {
      const cells = [figure, number(last.prompts), number(last.samples), first === newest ? "" : said(first.sets[name], figure), said(last, figure), number(newest.step)];
      table.append(el("tr", {}, el("td", {}, place ? "" : visible(name)), cells.map((cell) => el("td", {}, cell))));
    });
    return chart(safe(name), "mean reward" + (last.samples > 1 ? " and pass@k" : "") + ", with intervals of 95 %", () => {
      const points = found.filter((each) => Number.isFinite(evaluationPlace(run, each)));
      return {
        traces: unique(["reward", passes[passes.length - 1]]).filter((figure) => figure && (figure === "reward" || last.samples > 1)).map((figure, place) => {
          const y = points.map((each) => each.sets[name][figure]);
          const away = (end) => points.map((each, at) => Math.abs((each.sets[name][`${figure}_${end}`] ?? y[at]) - y[at]));
          return { x: points.map((each) => evaluationPlace(run, each)), y, name: figure, mode: "lines+markers", line: { color: colour(PALETTE[place]), width: 1.8 }, error_y: { type: "data", symmetric: false, array: away("high"), arrayminus: away("low"), thickness: 1, width: 2 }, hovertemplate: "%{y:.4~g}" };
        }),
        layout: { showlegend: last.samples > 1 },
      };
    });
  });
  return section("heldout", "Held-out sets", "Means over prompts, with intervals of 95 % over prompts.", el("div", { class: "card" }, el("div", { class: "scroll" }, table)), el("div", { class: "grid" }, charts));
}

function learning(run) {
  return section("learning", "Loss and policy", "Diagnostics of the loss over time.",
    el("div", { class: "grid" },
      chart("Entropy", "nats per token", () => lines(run, [["entropy", "entropy"]])),
      chart("Effective sample size", "of importance weights, share of tokens", () => lines(run, [["ess", "ess", { band: true }]])),
      chart("KL", "current policy against the behaviour policy", () => lines(run, [["kl/k3", "k3"], ["kl/k1", "k1", { band: false }]])),
      chart("Clipped and capped", "share of tokens", () => lines(run, [["loss/clip_share", "clipped"], ["loss/capped_share", "capped"], ["loss/masked_share", "masked"]])),
      chart("Gradient norm", "", () => lines(run, [["grad_norm", "norm"]])),
      chart("Groups without signal", "share of groups whose rewards are all equal", () => lines(run, [["zero_variance_share", "share"]])),
      chart("Loss", "", () => ({ ...lines(run, [["loss", "loss"]], { yaxis: { rangemode: "normal" } }) })),
      chart("Learning rate", "", () => lines(run, [["lr", "lr"]]))));
}

function byStaleness(run) {
  // NAME/staleness_4 is NAME over tokens that are 4 to 7 versions old; here its mean over the run
  const table = {};
  for (const [key, column] of Object.entries(run.series.columns)) {
    const found = key.match(/^(.*)\/staleness_(\d+)$/);
    if (found) (table[found[1]] ||= {})[found[2]] = [mean(column.y), column.lo ? Math.min(...column.lo.filter((v) => v !== null)) : null];
  }
  const ages = unique(Object.values(table).flatMap((each) => Object.keys(each).map(Number))).sort((a, b) => a - b);
  const wanted = ["loss/clip_share", "loss/gate/mean", "loss/ratio/mean", "loss/ratio/max", "ratio/max", "kl/k3", "ess", "entropy", "zero_variance_share", "loss/capped_share", "loss/behaviour_weight/max", "grad_norm"];
  const names = [...wanted.filter((name) => table[name]), ...Object.keys(table).filter((name) => !wanted.includes(name))];
  if (!names.length || !ages.length) return null;
  const label = (age) => (age < 2 ? String(age) : `${age}–${2 * age - 1}`);
  const panel = (name) => chart(name, "mean over the run", () => ({
    traces: [{
      type: "bar", x: ages.map(label), y: ages.map((age) => (table[name][age] ? table[name][age][0] : null)),
      marker: { color: ages.map((age, place) => faded("c0", .95 - .6 * (ages.length - 1 - place) / Math.max(1, ages.length))) }, hovertemplate: "%{y:.4~g}<extra></extra>",
    }],
    layout: { xaxis: { type: "category", title: { text: "staleness of the token (versions)", font: { size: 11 } } }, bargap: .35, hovermode: "closest" },
  }), 200);
  const [front, rest] = [names.slice(0, 8), names.slice(8)];
  const box = section("losses", "Loss by staleness", "The same diagnostics, split by how many versions old a token was when it was trained.", el("div", { class: "grid" }, front.map(panel)));
  if (rest.length) box.append(el("details", {}, el("summary", { class: "soft" }, `${rest.length} more`), el("div", { class: "grid" }, rest.map(panel))));
  return box;
}

function staleness(run) {
  const heat = run.series.heat.staleness, bound = run.summary.staleness_bound ?? run.row["staleness/bound"];
  return section("staleness", "Staleness", "Versions between the weights that made a sample's oldest token and those that trained it. The bound holds for every token.",
    el("div", { class: "grid wide" },
      chart("Mean and oldest", "versions", () => {
        const found = lines(run, [["staleness/mean", "mean"], ["staleness/max", "oldest", { band: false }]]);
        if (bound !== undefined && bound !== null) {
          const x = places(run);
          found.traces.push({ x: [x[0], x[x.length - 1]], y: [bound, bound], name: "bound", mode: "lines", line: { color: colour("c3"), dash: "dash", width: 1.5 }, hovertemplate: "%{y}" });
          found.layout.showlegend = true;
        }
        return found;
      }),
      chart("Samples by staleness", "share of each train step", () => {
        if (!heat || !heat.values.length) return null;
        return {
          traces: [{ type: "heatmap", x: places(run), y: heat.values, z: heat.shares, zmin: 0, zmax: 1, colorscale: [[0, faded("c0", 0)], [1, colour("c0")]], colorbar: { thickness: 8, outlinewidth: 0, tickformat: ".0%", len: .9 }, hovertemplate: "%{y} old: %{z:.1%}<extra></extra>" }],
          layout: { hovermode: "closest", yaxis: { rangemode: "normal", dtick: heat.values.length < 10 ? 1 : undefined, showgrid: false, title: { text: "versions", font: { size: 11 } } } },
        };
      }),
      chart("Where it comes from", "versions, mean per sample", () => lines(run, [["staleness/in_flight_mean", "while it was written", { band: false, stack: "one" }], ["staleness/in_queue_mean", "while it waited to be trained", { band: false, stack: "one" }]])),
      chart("Versions within a sample", "weights changed while it was written", () => lines(run, [["version_span/mean", "mean"], ["version_span/max", "most", { band: false }]]))));
}

function waiting(run) {
  const found = run.timeline, box = section("waiting", "Who waited for whom", found ? `Work of each process over ${duration(found.seconds)}; empty parts are waiting.` : "This run has no timeline.");
  if (found) {
    const over = overTime(found), close = closeUp(found);
    box.append(el("div", { class: "card" }, el("h3", {}, "Share of the whole time", el("span", { class: "soft small" }, "  right: waiting")), roleBars(found), activityLegend(found),
      found.hidden ? el("p", { class: "soft small" }, `${found.hidden} more processes are not shown`) : ""));
    box.append(el("div", { class: "card" }, el("h3", {}, "Over time"), over.canvas));
    box.append(el("div", { class: "card" }, el("div", { class: "tools" }, el("h3", {}, "Close up"), el("span", { class: "soft small" }, "drag to move; Ctrl and wheel to zoom"), close.buttons), close.lanes.canvas));
  }
  box.append(el("div", { class: "grid" },
    chart("Idle shares", "of the time so far", () => lines(run, [["rollout/idle_share", "actors"], ["train/idle_share", "learner"]], { yaxis: { tickformat: ".0%", range: [0, 1] } })),
    chart("Idle because of stragglers", "share of a group's or a round's time", () => lines(run, [["barrier/group_idle_share", "within groups"], ["barrier/round_idle_share", "within rounds"]], { yaxis: { tickformat: ".0%", range: [0, 1] } })),
    chart("Buffer", "groups", () => lines(run, [["buffer/waiting", "wait to be trained"], ["buffer/running", "are written"], ["buffer/queued", "queued"]]))));
  return box;
}

function throughput(run) {
  return section("throughput", "Throughput", "",
    el("div", { class: "grid" },
      chart("Tokens per second", "", () => lines(run, [["rollout/tokens_per_second", "rolled out"], ["train/tokens_per_second", "trained"]])),
      chart("Seconds of a train step", "", () => lines(run, [["train/step_seconds", "trains", { band: false, stack: "one" }], ["publish/seconds", "publishes", { band: false, stack: "one" }], ["train/wait_seconds", "waits for a batch", { band: false, stack: "one" }]])),
      chart("Response length", "tokens", () => lines(run, [["response_length/mean", "mean"], ["response_length/p95", "95 %", { band: false }], ["response_length/max", "longest", { band: false }]])),
      chart("Seconds of a group", "", () => lines(run, [["buffer/flight_seconds", "being written"], ["buffer/queue_seconds", "waiting to be trained"]]))));
}

function ledger(run) {
  const { fates, edges, bias } = run.ledger, total = fates.reduce((sum, each) => sum + each.count, 0);
  if (!total) return null;
  const colours = (fate) => (fate === "trained" ? "train" : fate === "active" ? "generate" : fate.startsWith("filtered") ? "publish" : "update");
  const words = bias === undefined || bias === null ? "" : Math.abs(bias) < .005 ? " Trained responses are as long as all that were rolled out." : ` Trained responses are ${percent(Math.abs(bias))} ${bias < 0 ? "shorter" : "longer"} than all that were rolled out.`;
  const stack = el("div", { class: "stack" }, fates.map((each) => el("div", { style: { width: 100 * each.count / total + "%", background: `var(--${colours(each.fate)})` }, title: `${each.fate}: ${each.count}` })));
  const rich = fates.some((each) => each.length !== undefined);
  const trained = fates.find((each) => each.fate === "trained");
  const head = ["fate", "groups", "share", ...(rich ? ["samples", "cut", "redrawn", "mean length", "median", "95 %", "mean reward", "length / trained"] : [])];
  const table = el("table", { class: "data" }, el("tr", {}, head.map((name) => el("th", {}, name))));
  for (const each of fates) {
    const more = rich ? [number(each.samples), each.cut || "", each.redrawn || "", number(each.length), number(each.p50), number(each.p95), number(each.reward), each.length && trained && trained.length ? number(each.length / trained.length) : "–"] : [];
    const sign = el("i", { class: "sign", style: { display: "inline-block", width: ".8em", height: ".8em", borderRadius: "3px", marginRight: ".5em", background: `var(--${colours(each.fate)})` } });
    table.append(el("tr", {}, el("td", {}, sign, visible(each.fate)), [number(each.count), percent(each.count / total), ...more].map((cell) => el("td", {}, cell))));
  }
  const box = section("ledger", "Ledger", `Where each of the ${number(total)} admitted prompts went.${words}`, el("div", { class: "card" }, stack, el("div", { class: "scroll" }, table)));
  if (rich) {
    const histogram = (name, title, unit) => chart(title, "share of each fate's samples", () => {
      const known = fates.filter((each) => each[name]);
      return {
        traces: known.map((each, place) => ({ x: edges[name].slice(0, -1).map((edge, at) => (edge + edges[name][at + 1]) / 2), y: each[name], name: safe(each.fate), type: "scatter", mode: "lines", line: { shape: "hvh", width: 1.8, color: colour(PALETTE[place % 8]) } })),
        layout: { showlegend: known.length > 1, xaxis: { title: { text: unit, font: { size: 11 } } }, yaxis: { tickformat: ".0%" } },
      };
    });
    box.append(el("div", { class: "grid wide" }, histogram("lengths", "Length", "tokens of the response"), histogram("rewards", "Reward", "reward")));
  }
  return box;
}

function weights(run) {
  return section("weights", "Weight updates", "What the learner sends and how actors take it.",
    el("div", { class: "grid" },
      chart("Bytes per update", "", () => lines(run, [["publish/delta_bytes", "sent"]], { yaxis: { tickformat: ".3s" } })),
      chart("Size of an update", "share of whole weights", () => lines(run, [["publish/ratio", "sent"], ["publish/density", "elements changed"]], { yaxis: { tickformat: ".0%" } })),
      chart("Seconds", "of an update", () => lines(run, [["publish/encode_seconds", "encode"], ["rollout/update_apply_seconds", "apply"], ["rollout/update_pause_seconds", "pause of the actor"], ["rollout/update_fetch_seconds", "fetch"]])),
      chart("How tensors travel", "share", () => lines(run, [["publish/share_skip", "unchanged", { band: false, stack: "one" }], ["publish/share_gaps", "gaps", { band: false, stack: "one" }], ["publish/share_mask", "mask", { band: false, stack: "one" }], ["publish/share_dense", "whole", { band: false, stack: "one" }]])),
      chart("Updates", "so far", () => lines(run, [["rollout/deltas", "deltas"], ["rollout/base_snapshots", "base snapshots"], ["rollout/full_syncs", "whole weights"]]))));
}

function anyMetric(run, state) {
  const keys = Object.keys(run.series.columns).filter((key) => !["step", "seconds"].includes(key)).sort();
  if (!keys.includes(state.metric)) state.metric = keys.includes("reward/std") ? "reward/std" : keys[0];
  const shown = chart("", "", () => lines(run, [[state.metric, state.metric]], { yaxis: { rangemode: "normal" } }), 280);
  return section("metrics", "Any metric", run.series.width > 1 ? `Each point is the mean of ${run.series.width} train steps; the band spans the lowest and the highest.` : "",
    el("div", { class: "tools" }, selection("", keys.map((key) => [key, key]), state.metric, (value) => { state.metric = value; draw(shown.querySelector(".plot")); })), shown);
}

function config(run, settings, state) {
  const body = el("tbody", {});
  const fill = () => {
    const wanted = state.key.toLowerCase();
    const rows = settings.filter(([key, value, usual]) => (!state.differs || value !== usual) && (!wanted || key.toLowerCase().includes(wanted)));
    body.replaceChildren(...rows.map(([key, value, usual]) => el("tr", { class: value !== usual ? "differs" : "" }, el("td", { class: "text mono" }, visible(key)), el("td", { class: "text mono" }, visible(value)), el("td", { class: "text mono soft" }, visible(usual)))));
  };
  fill();
  const differ = settings.filter(([, value, usual]) => value !== usual).length;
  const record = run.record, facts = [];
  if (record.command) facts.push(el("div", { class: "commands mono small" }, "$ " + visible(record.command.join(" "))));
  facts.push(el("div", { class: "soft small" }, [record.started && `started ${record.started}`, record.commit && `commit ${record.commit}`, `folder ${run.folder}`].filter(Boolean).map(visible).join(" · ")));
  return section("config", "Config", `${differ} of ${settings.length} keys differ from the default.`, el("div", { class: "card" }, facts),
    el("div", { class: "tools" }, choice([[true, "what differs"], [false, "everything"]], state.differs, (value) => { state.differs = value; fill(); }),
      el("input", { type: "text", placeholder: "find a key", "aria-label": "find a key", value: state.key, oninput: (event) => { state.key = event.target.value; fill(); } })),
    el("div", { class: "card scroll" }, el("table", { class: "data" }, el("thead", {}, el("tr", {}, ["key", "value", "default"].map((name) => el("th", { class: "text" }, name)))), body)));
}
