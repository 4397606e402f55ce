"use strict";
// Elements, texts and numbers. Text of the model or the user enters the page only as text nodes.

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Characters that would hide or reorder their neighbours.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

function visible(text) {
  return String(text).replace(INVISIBLE, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toPrecision(3);
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en");
  return size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function percent(value) {
  return value === null || value === undefined ? "–" : Math.round(100 * value) + " %";
}

function unique(values) {
  return [...new Set(values)];
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function section(id, title, words, ...children) {
  const head = el("div", { class: "head" }, el("h2", {}, title), words ? el("p", {}, words) : null);
  return el("section", { id }, head, children);
}

function table(head, rows) {
  const cells = (tag, row) => el("tr", {}, row.map((cell) => el(tag, {}, cell)));
  return el("div", { class: "card scroll" }, el("table", { class: "data" }, cells("th", head), rows.map((row) => cells("td", row))));
}

function selection(label, options, current, chosen) {
  // options: [value, label] pairs
  const list = el("select", { "aria-label": label, onchange: (event) => chosen(event.target.value) });
  for (const [value, text] of options) list.append(el("option", { value, selected: value === current ? "" : null }, visible(text)));
  return el("label", { class: "control" }, label, list);
}
