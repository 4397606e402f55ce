"use strict";
// Charts: drawn when they come near the window, and again when the theme or the x axis changes.

const run = JSON.parse(document.getElementById("data").textContent);
const plots = new Map(); // element of a plot → function that returns {traces, layout}
const axis = { name: "step" };
const AXES = { step: "train step", seconds: "seconds", samples: "samples trained" };
const PALETTE = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

const nearby = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    nearby.unobserve(target);
    draw(target);
  }
}, { rootMargin: "400px" });

function chart(title, words, make, height = 230) {
  const plot = el("div", { class: "plot", style: { minHeight: height + "px" } });
  plot.make = make;
  plot.high = height;
  nearby.observe(plot);
  return el("div", { class: "card" }, el("h3", {}, title, words ? el("span", {}, "  " + words) : null), plot);
}

function draw(plot) {
  const { traces, layout } = plot.make();
  plots.set(plot, true);
  if (!traces.length) {
    plot.replaceChildren(el("div", { class: "soft" }, "nothing was recorded"));
    plot.style.minHeight = "0";
    return;
  }
  const line = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const base = {
    height: plot.high, margin: { l: 44, r: 12, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("soft"), size: 11.5, family: "system-ui, 'DejaVu Sans', sans-serif" }, hovermode: "x unified",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, uirevision: axis.name,
    showlegend: traces.filter((trace) => trace.name).length > 1, ...layout,
    xaxis: { ...line, showgrid: false, title: { text: AXES[axis.name], standoff: 4 }, ...(layout || {}).xaxis },
    yaxis: { ...line, rangemode: "tozero", ...(layout || {}).yaxis },
  };
  Plotly.react(plot, traces, base, { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
}

function redraw() {
  for (const plot of plots.keys()) draw(plot);
}

addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(draw)); // a print has no empty panels
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

function safe(text) {
  // Plotly reads tags in the texts of traces and axes
  return visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function faded(name, share) {
  const parts = [1, 3, 5].map((at) => parseInt(colour(name).slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${share})`;
}

function places() {
  // where the buckets stand on the x axis
  const { step, seconds } = run.series.columns;
  if (axis.name === "seconds") return seconds ? seconds.y : [];
  return axis.name === "samples" && step ? step.y.map((each) => each * run.samples_per_step) : step ? step.y : [];
}

function placeOf(evaluation) {
  return axis.name === "seconds" ? evaluation.seconds : axis.name === "samples" ? evaluation.step * run.samples_per_step : evaluation.step;
}

function line(key, name, colourName, stack) {
  // the mean of each bucket, and a band from its lowest to its highest value
  const column = run.series.columns[key], x = places();
  if (!column) return [];
  const band = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, connectgaps: true };
  const traces = column.lo && !stack ? [{ ...band, y: column.lo }, { ...band, y: column.hi, fill: "tonexty", fillcolor: faded(colourName, .15) }] : [];
  traces.push({
    x, y: column.y, name: safe(name), mode: x.length > 1 ? "lines" : "markers", connectgaps: true, line: { color: colour(colourName), width: 1.8 },
    hovertemplate: "%{y:.4~g}", stackgroup: stack ? "one" : undefined, fillcolor: stack ? faded(colourName, .45) : undefined,
  });
  return traces;
}

function lines(specs, { layout, stack } = {}) {
  // specs: [key, name] pairs
  return { traces: specs.flatMap(([key, name], place) => line(key, name, PALETTE[place % 8], stack)), layout };
}
