"use strict";
// Charts: drawn when they come near the window, and again when the theme, the x axis or the data change.

const drawn = new Map(); // element of a plot → function that says what it shows
const axis = { name: "step" };
const AXES = { step: "train step", seconds: "seconds", samples: "samples trained" };

const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    nearby.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "400px" });

function chart(title, words, make, height = 230) {
  // `make` returns {traces, layout} or null where there is nothing to show
  const plot = el("div", { class: "plot", style: { minHeight: height + "px" } });
  plot.make = make;
  plot.high = height;
  nearby.observe(plot);
  return el("div", { class: "card chart" }, el("h3", {}, title, words ? el("span", {}, words) : null), plot);
}

function draw(plot) {
  const found = plot.make();
  if (!found || !found.traces.length) {
    if (drawn.has(plot)) Plotly.purge(plot);
    plot.replaceChildren(el("div", { class: "empty" }, "nothing was recorded"));
    plot.style.minHeight = "0";
    drawn.set(plot, false);
    return;
  }
  if (drawn.get(plot) === false) plot.replaceChildren();
  plot.style.minHeight = plot.high + "px";
  drawn.set(plot, true);
  const high = plot.fills ? Math.max(plot.high, plot.parentElement.clientHeight - 54) : plot.high;
  Plotly.react(plot, found.traces, layout(found.layout || {}, high), {
    responsive: true, displaylogo: false, displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  });
}

function redraw() {
  for (const plot of drawn.keys()) {
    if (plot.isConnected) draw(plot);
    else { Plotly.purge(plot); drawn.delete(plot); }
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

function layout(own, height) {
  const line = { gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const base = {
    height,
    margin: { l: 44, r: 12, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("soft"), size: 11.5, family: "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" },
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 11.5 } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)" },
    uirevision: axis.name,
    dragmode: "zoom",
    modebar: { color: colour("faint"), activecolor: colour("accent"), bgcolor: "rgba(0,0,0,0)" },
  };
  const made = { ...base, ...own };
  made.xaxis = { ...line, showgrid: false, title: { text: AXES[axis.name], standoff: 4, font: { size: 11 } }, ...own.xaxis };
  made.yaxis = { ...line, rangemode: "tozero", ...own.yaxis };
  return made;
}

function safe(text) {
  // Plotly reads tags in the texts of traces and axes
  return visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function faded(name, share) {
  const found = colour(name);
  const parts = [1, 3, 5].map((at) => parseInt(found.slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${share})`;
}

function places(run) {
  // where the buckets of a run stand on the x axis
  const columns = run.series.columns;
  if (axis.name === "seconds" && columns.seconds) return columns.seconds.y;
  const steps = columns.step ? columns.step.y : [];
  return axis.name === "samples" && run.samples_per_step ? steps.map((step) => step * run.samples_per_step) : steps;
}

function evaluationPlace(run, found) {
  if (axis.name === "seconds") return found.seconds;
  return axis.name === "samples" && run.samples_per_step ? found.step * run.samples_per_step : found.step;
}

function line(run, key, name, colourName, options = {}) {
  // the mean of each bucket, and a band from its lowest to its highest value
  const column = run.series.columns[key];
  if (!column) return [];
  const x = places(run), traces = [];
  if (column.lo && options.band !== false) {
    const common = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, connectgaps: true };
    traces.push({ ...common, y: column.lo });
    traces.push({ ...common, y: column.hi, fill: "tonexty", fillcolor: faded(colourName, .15) });
  }
  traces.push({
    x, y: column.y, name: safe(name), mode: x.length > 1 ? "lines" : "markers", connectgaps: true,
    line: { color: colour(colourName), width: options.width || 1.8, dash: options.dash },
    hovertemplate: `%{y:${options.format || ".4~g"}}`,
    stackgroup: options.stack, fillcolor: options.stack ? faded(colourName, .45) : undefined,
  });
  return traces;
}

function lines(run, specs, layoutMore) {
  // specs: [key, name, options] triples
  const traces = specs.flatMap(([key, name, options], place) => line(run, key, name, PALETTE[place % 8], options));
  const one = traces.filter((trace) => trace.name).length < 2;
  return { traces, layout: { showlegend: !one, ...layoutMore } };
}
