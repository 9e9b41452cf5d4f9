"use strict";
// Data from a run is added to the page as text (textContent), never as HTML.
const page = document.getElementById("page");
const find = document.getElementById("find");
const SECONDS = 2, FEW = 10; // FEW: no search field below this number of runs
let shown = null;

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

function progressText(progress) {
  if (!progress.steps) return `step ${progress.step}`;
  return `${progress.step} of ${progress.steps} (${Math.round(100 * progress.step / progress.steps)}%)`;
}

function counted(runs) {
  const states = {};
  for (const run of runs) states[run.state] = (states[run.state] || 0) + 1;
  const parts = Object.entries(states).map(([state, count]) => `${count} ${state}`);
  return `${runs.length} ${runs.length === 1 ? "run" : "runs"}${parts.length > 1 ? `: ${parts.join(", ")}` : ""}`;
}

function list(data) {
  document.getElementById("folder").textContent = data.folder;
  document.title = "Steelyard";
  if (!data.runs.length) return [make("p", { class: "quiet" }, "There are no runs here yet.")];
  const wanted = find.hidden ? "" : find.value.trim().toLowerCase();
  const found = data.runs.filter((run) => `${run.id} ${run.state} ${run.verdict.message}`.toLowerCase().includes(wanted));
  const rows = found.map((run) => make("tr", {},
    make("td", { class: "long" }, make("span", { class: `dot ${level(run.verdict.level)}` }),
      make("a", { href: `#${encodeURIComponent(run.id)}` }, run.id === "." ? run.name : run.id)),
    make("td", {}, run.state), make("td", { class: "number" }, progressText(run.progress)),
    make("td", { class: "number" }, run.progress.seconds_left === null ? "" : duration(run.progress.seconds_left)),
    make("td", { class: "number" }, number(run.loss)), make("td", { class: "long" }, run.verdict.message)));
  const head = ["run", "state", "step", "left", "loss", "verdict"].map((name) => make("th", {}, name));
  return [make("p", { class: "quiet" }, counted(found)),
    make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))];
}

function facts(run) {
  const now = run.now;
  const all = [["step", progressText(run.progress)]];
  if (run.progress.seconds_left !== null) all.push(["time left", duration(run.progress.seconds_left)]);
  if ("loss" in now) all.push(["loss", number(now.loss)]);
  if (now.seconds) all.push(["step time", `${number(1000 * now.seconds, 3)} ms`]);
  if (now.tokens_per_second) all.push(["tokens per second", number(now.tokens_per_second, 3)]);
  if ("grad_norm" in now) all.push(["gradient norm", number(now.grad_norm, 3)]);
  if (now.learning_rate) all.push(["learning rate", now.learning_rate.toExponential(2)]);
  if (now.mfu) all.push(["MFU", number(now.mfu, 3)]);
  if (now.expert_load) all.push(["expert load, max/mean", number(now.expert_load, 3)]);
  if (now.router_entropy) all.push(["router entropy", number(now.router_entropy, 3)]);
  if (now.experts_dropped) all.push(["dropped tokens", `${number(100 * now.experts_dropped, 3)} %`]);
  if (now.peak_memory) all.push(["peak memory", size(now.peak_memory)]);
  if (run.slowest) all.push(["slowest rank", `${run.slowest.slowest}: ${number(1000 * run.slowest.seconds, 3)} ms, others ${number(1000 * run.slowest.median, 3)} ms`]);
  if (run.disk) all.push(["disk left", size(run.disk.free)]);
  return make("div", { class: "facts" }, all.map(([name, value]) => make("div", {}, make("span", {}, name), value)));
}

function configuration(info) {
  const keys = Object.keys(info.requested);
  if (!keys.length) return [];
  const cells = (key) => {
    const there = key in info.reported;
    const differs = there && String(info.reported[key]) !== String(info.requested[key]);
    return make("tr", {}, make("td", {}, key), make("td", { class: "long" }, String(info.requested[key])),
      make("td", { class: differs ? "long differs" : "long" }, there ? String(info.reported[key]) : ""));
  };
  const head = ["", "requested", "reported by the ranks"].map((name) => make("th", {}, name));
  return [make("h2", {}, "Configuration"), make("table", {}, make("tr", {}, head), keys.map(cells))];
}

function host(info, hasEnded) {
  const ranks = info.ranks.length ? `${info.ranks.length > 1 ? "ranks" : "rank"} ${info.ranks.join(", ")}` : "";
  // After the end, the last samples no longer describe the GPUs.
  const devices = (hasEnded ? [] : info.devices).map((device) => make("tr", {},
    make("td", { class: "long" }, `${device.index ?? ""} ${device.name ?? ""}`),
    make("td", { class: "number" }, device.utilisation == null ? "" : `${number(device.utilisation, 3)}%`),
    make("td", { class: "number" }, device.memory_total && device.memory_used != null ? `${size(device.memory_used)} of ${size(device.memory_total)}` : ""),
    make("td", { class: "number" }, device.temperature == null ? "" : `${number(device.temperature, 3)} °C`),
    make("td", { class: "number" }, device.power == null ? "" : `${number(device.power, 3)} W`),
    make("td", { class: "number" }, `${device.processes} ${device.processes === 1 ? "process" : "processes"}`)));
  return [make("h2", {}, info.host, " ", make("span", { class: "quiet" }, `${info.device} ${ranks}`)),
    devices.length ? make("table", {}, devices) : null,
    info.out.length ? make("pre", {}, info.out.join("\n")) : null,
    info.err.length ? make("pre", { class: "err" }, info.err.join("\n")) : null,
    info.unread ? make("p", { class: "quiet" }, `${size(info.unread)} of the error log before that are not scanned yet`) : null];
}

// The loss chart. It is reused when the page updates, so that its zoom is kept.
let kept = null;
function lossChart(run) {
  const lines = [{ run: "", label: "training", colour: 0, x: run.curve.step, y: run.curve.loss }];
  if (kept === null || kept.path !== run.path) {
    const root = make("div", { class: "chart" });
    kept = { path: run.path, root, chart: steelyard.lines(root, { x: "step", y: "loss", height: 240, lines }) };
  } else kept.chart.update(lines);
  return kept.root;
}

function one(run) {
  document.title = `${run.name} · Steelyard`;
  const nodes = [make("h1", {}, run.name, " ", make("span", { class: "quiet" }, run.state))];
  for (const verdict of run.verdicts) {
    nodes.push(make("div", { class: `verdict ${level(verdict.level)}` }, make("strong", {}, verdict.message),
      verdict.what_to_do === "nothing" ? null : make("p", {}, verdict.what_to_do)));
  }
  if (run.progress.steps) nodes.push(make("progress", { max: run.progress.steps, value: run.progress.step }));
  nodes.push(facts(run));
  if (run.curve.step.length > 1) nodes.push(make("h2", {}, "Loss"), lossChart(run));
  if (run.scheduler.length) {
    const keys = ["job", "state", "reason", "nodes", "time_limit", "restarts"];
    const cell = (job, key) => job[key] == null ? "" : key === "time_limit" && typeof job[key] === "number" ? duration(job[key]) : String(job[key]);
    nodes.push(make("h2", {}, "Scheduler"), make("table", {},
      make("tr", {}, keys.map((key) => make("th", {}, key.replace("_", " ")))),
      run.scheduler.map((job) => make("tr", {}, keys.map((key) => make("td", { class: "long" }, cell(job, key)))))));
  }
  nodes.push(...run.hosts.flatMap((info) => host(info, run.ended)), ...configuration(run.configuration));
  return nodes.filter((node) => node !== null);
}

async function refresh() {
  const id = decodeURIComponent(location.hash.slice(1));
  const address = id ? `/api/run?id=${encodeURIComponent(id)}` : "/api/runs";
  const fresh = document.getElementById("fresh");
  try {
    const answer = await fetch(address);
    const body = await answer.text();
    if (decodeURIComponent(location.hash.slice(1)) !== id) return;
    fresh.textContent = "";
    if (body === shown || String(window.getSelection())) return;  // Do not clear a text selection.
    shown = body;
    if (!answer.ok) {
      page.replaceChildren(make("p", { class: "quiet" }, answer.status === 404 ? "There is no such run." : "This run cannot be read."));
      return;
    }
    const data = JSON.parse(body);
    find.hidden = Boolean(id) || data.runs.length < FEW;
    const top = window.scrollY;
    page.replaceChildren(...(id ? one(data) : list(data)));
    window.scrollTo(0, top);
  } catch (error) {
    fresh.textContent = "the server does not answer";
  }
}

async function forever() {
  await refresh();
  setTimeout(forever, SECONDS * 1000);
}

find.addEventListener("input", () => { shown = null; refresh(); });
window.addEventListener("hashchange", () => { shown = null; refresh(); });
forever();
