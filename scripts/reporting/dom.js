"use strict";
// Elements, texts and numbers. Text of the model or the user enters the page only as text nodes.

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Characters that would hide or reorder their neighbours.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

function visible(text) {
  return String(text).replace(INVISIBLE, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + " G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

function percent(value) {
  return value === null || value === undefined ? "–" : Math.round(100 * value) + " %";
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return Number(value.toPrecision(3)) + " " + units[place];
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return Number(seconds.toPrecision(3)) + " s";
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function last(values) {
  for (let place = values.length - 1; place >= 0; place -= 1) if (values[place] !== null) return values[place];
  return null;
}

function unique(values) {
  return [...new Set(values)];
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

const PALETTE = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

function section(id, title, words, ...children) {
  return el("section", { id }, el("div", { class: "head" }, el("h2", {}, title), words ? el("p", {}, words) : null), children);
}

function choice(options, current, chosen) {
  // options: [value, label] pairs
  const box = el("span", { class: "choice" });
  for (const [value, label] of options) {
    box.append(el("button", {
      type: "button", "aria-pressed": String(value === current),
      onclick: (event) => {
        for (const other of box.children) other.setAttribute("aria-pressed", "false");
        event.currentTarget.setAttribute("aria-pressed", "true");
        chosen(value);
      },
    }, label));
  }
  return box;
}

function selection(label, options, current, chosen) {
  const list = el("select", { "aria-label": label, onchange: (event) => chosen(event.target.value) });
  for (const [value, text] of options) list.append(el("option", { value, selected: value === current }, visible(text)));
  return el("label", { class: "control" }, label ? el("span", {}, label) : null, list);
}
