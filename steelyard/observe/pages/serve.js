"use strict";
// The served page: `#` lists the runs, `#id` shows one, `#id&id` compares several. Each of them is a view: an object with
// a function `refresh`, called every two seconds, which changes only what is new, so that zoom, scroll position and
// selection stay. Data from a run is added to the page as text (textContent), never as HTML.
const page = document.getElementById("page");
const SECONDS = 2;

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") node.className = value; else node[key] = value;
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(typeof child === "object" ? child : String(child));
  }
  return node;
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${bytes.toPrecision(3)} ${units[at]}`;
}

const number = (value, digits = 4) => typeof value === "number" ? Number(value.toPrecision(digits)).toLocaleString("en") : "none";
const level = (word) => ["ok", "waiting", "warning", "wrong"].includes(word) ? word : "wrong";
const dot = (verdict) => make("span", { class: `light ${level(verdict.level)}` });
const linkTo = (ids) => `#${ids.map(encodeURIComponent).join("&")}`;

function progressText(progress) {
  if (!progress.steps) return `step ${progress.step}`;
  return `${progress.step} of ${progress.steps} (${Math.round(100 * progress.step / progress.steps)}%)`;
}

// A part of the page that is filled again only if its data changed, and never while text in it is selected.
function part(kind = "div", options = {}) {
  const root = make(kind, options);
  let known = null;
  root.show = (data, nodes) => {
    const text = JSON.stringify(data), selection = window.getSelection();
    if (text === known || (String(selection) && root.contains(selection.anchorNode))) return;
    known = text;
    root.replaceChildren(...nodes(data).filter((node) => node !== null));
  };
  return root;
}

function table(head, rows, kind = "") {
  return make("div", { class: `wide ${kind && "list"}` }, make("table", { class: kind },
    make("thead", {}, make("tr", {}, head.map((name) => make("th", {}, name)))), make("tbody", {}, rows)));
}

async function ask(path, values) {
  const query = new URLSearchParams(values).toString();
  const answer = await fetch(query ? `${path}?${query}` : path);
  if (answer.ok) return answer.json();
  const error = new Error(answer.status === 404 ? "There is no such run." : "This run cannot be read.");
  throw Object.assign(error, { isAnswer: true });
}

let view = null, route = null;
async function refresh() {
  const asked = location.hash.slice(1), fresh = document.getElementById("fresh");
  if (asked !== route) {
    const ids = asked.split("&").filter(Boolean).map(decodeURIComponent);
    route = asked;
    page.replaceChildren();
    view = ids.length ? runPage(page, ids) : runList(page);
    window.scrollTo(0, 0);
  }
  try {
    await view.refresh();
    fresh.textContent = "";
  } catch (error) {
    if (asked !== location.hash.slice(1)) return;
    if (error.isAnswer) page.replaceChildren(make("p", { class: "note" }, error.message));
    else fresh.textContent = "the server does not answer";
  }
}

async function forever() {
  await refresh();
  setTimeout(forever, SECONDS * 1000);
}

window.addEventListener("hashchange", refresh);
window.addEventListener("DOMContentLoaded", forever);
