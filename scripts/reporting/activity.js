"use strict";
// Who worked and who waited: shares of the whole run, activity over time, and the spans of a part of it.

const WORDS = {
  generate: "generates", evaluate: "evaluates", update: "takes new weights", train: "trains", take: "takes gradients of groups",
  publish: "publishes weights", checkpoint: "writes a checkpoint",
};

function roleBars(found) {
  const box = el("div", { class: "roles" });
  for (const role of found.roles) {
    const row = found.shares[role], stack = el("div", { class: "stack", title: describeShares(found, row) });
    for (const name of found.names) if (row[name]) stack.append(el("div", { style: { width: 100 * row[name] + "%", background: `var(--${name})` } }));
    box.append(el("span", {}, visible(role)), stack, el("span", { class: "soft number" }, percent(row[found.waits])));
  }
  return box;
}

function describeShares(found, row) {
  return found.names.filter((name) => row[name]).map((name) => `${name} ${percent(row[name])}`).join(", ");
}

function activityLegend(found) {
  const box = el("div", { class: "legend" });
  for (const name of found.names) box.append(el("span", {}, el("i", { style: { background: `var(--${name})` } }), WORDS[name] || name));
  box.append(el("span", {}, el("i", { style: { background: "var(--waits)" } }), "waits"));
  return box;
}

class Lanes {
  // Rows of roles on a canvas, with seconds below. `paint(pen, role, x, y, height)` fills a row.
  constructor(found, paint, window) {
    this.found = found;
    this.paint = paint;
    this.window = window;
    this.canvas = el("canvas", { role: "img", "aria-label": "activity of each process over time" });
    this.observer = new ResizeObserver(() => requestAnimationFrame(() => this.draw()));
    this.observer.observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  draw() {
    const { found, canvas } = this, wide = canvas.clientWidth;
    if (!wide || !canvas.isConnected) return;
    const high = found.roles.length > 10 ? 14 : 22, left = wide < 500 ? 58 : 78, below = 22, scale = devicePixelRatio || 1;
    const height = found.roles.length * high + below;
    canvas.style.height = height + "px";
    canvas.width = wide * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    const [begin, end] = this.window, x = (time) => left + (wide - left - 4) * (time - begin) / (end - begin);
    this.left = left;
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, wide - left - 4, height);
    pen.clip();
    found.roles.forEach((role, place) => {
      pen.fillStyle = colour("waits");
      pen.fillRect(left, place * high + 2, wide - left - 4, high - 4);
      this.paint(pen, role, x, place * high + 2, high - 4);
    });
    pen.restore();
    pen.fillStyle = colour("soft");
    pen.textBaseline = "middle";
    found.roles.forEach((role, place) => pen.fillText(visible(role).slice(0, 12), 0, place * high + high / 2, left - 6));
    this.ticks(pen, x, begin, end, height - below, wide);
  }

  ticks(pen, x, begin, end, top, wide) {
    const rough = (end - begin) / Math.max(3, wide / 110), unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * unit).find((each) => each >= rough);
    pen.textAlign = "center";
    for (let tick = Math.ceil(begin / step) * step; tick <= end + 1e-9; tick += step) {
      pen.fillRect(x(tick), top, 1, 4);
      if (x(tick) < wide - 16) pen.fillText(Number(tick.toPrecision(6)) + " s", x(tick), top + 13);
    }
    pen.textAlign = "left";
  }
}

function overTime(found) {
  const width = found.seconds / found.columns;
  return new Lanes(found, (pen, role, x, y, high) => {
    for (let column = 0; column < found.columns; column += 1) {
      let base = y + high;
      const names = found.names.filter((name) => found.strip[role][name]);
      const whole = names.reduce((sum, name) => sum + found.strip[role][name][column], 0); // more than 1: at once
      for (const name of names) {
        const share = found.strip[role][name][column];
        if (!share) continue;
        const part = share * high / Math.max(1, whole);
        pen.fillStyle = colour(name);
        pen.fillRect(x(column * width), base - part, x(width) - x(0) + .6, part);
        base -= part;
      }
    }
  }, [0, found.seconds]);
}

function closeUp(found) {
  const lanes = new Lanes(found, (pen, role, x, y, high) => {
    found.names.forEach((name, place) => {
      pen.fillStyle = colour(name);
      for (const [which, begin, end] of found.spans[role]) {
        if (which === place && end >= lanes.window[0] && begin <= lanes.window[1]) pen.fillRect(x(begin), y, Math.max(.7, x(end) - x(begin)), high);
      }
    });
  }, firstWindow(found));
  const [first, final] = found.part;
  const move = (begin, length) => {
    const size = Math.min(final - first, Math.max(.005, length));
    const from = Math.min(final - size, Math.max(first, begin));
    lanes.window = [from, from + size];
    lanes.draw();
  };
  const zoom = (factor) => {
    const [begin, end] = lanes.window, size = (end - begin) * factor;
    move((begin + end) / 2 - size / 2, size);
  };
  let held = null;
  lanes.canvas.style.cursor = "grab";
  lanes.canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, ...lanes.window]; lanes.canvas.setPointerCapture(event.pointerId); });
  lanes.canvas.addEventListener("pointerup", () => { held = null; });
  lanes.canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const size = held[2] - held[1];
    move(held[1] - (event.clientX - held[0]) * size / (lanes.canvas.clientWidth - lanes.left), size);
  });
  lanes.canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : .8);
  }, { passive: false });
  const button = (label, words, act) => el("button", { class: "plain", type: "button", title: words, "aria-label": words, onclick: act }, label);
  const buttons = el("span", {}, button("−", "show more time", () => zoom(2)), " ", button("+", "show less time", () => zoom(.5)), " ", button("all", "show all that is here", () => move(first, final - first)));
  return { lanes, buttons };
}

function firstWindow(found) {
  // in the middle, about sixty spans of the process that has most
  const [first, final] = found.part, most = Math.max(1, ...Object.values(found.spans).map((spans) => spans.length));
  const size = (final - first) * Math.min(1, 60 / most), middle = (first + final) / 2;
  return [middle - size / 2, middle + size / 2];
}
