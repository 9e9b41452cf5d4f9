"use strict";
// Everything that comes from a run is put on the page as text (textContent), never as HTML.
const page = document.getElementById("page");
const SECONDS = 2;
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

function list(data) {
  document.getElementById("folder").textContent = data.folder;
  document.title = "Steelyard";
  if (!data.runs.length) return [make("p", { class: "quiet" }, "There are no runs here yet.")];
  const rows = data.runs.map((run) => make("tr", {},
    make("td", { class: "long" }, make("span", { class: `dot ${level(run.verdict.level)}` }),
      make("a", { href: `#${encodeURIComponent(run.id)}` }, run.id === "." ? run.name : run.id)),
    make("td", {}, run.state), make("td", { class: "number" }, progressText(run.progress)),
    make("td", { class: "number" }, run.progress.seconds_left === null ? "" : duration(run.progress.seconds_left)),
    make("td", { class: "number" }, number(run.loss)), make("td", { class: "long" }, run.verdict.message)));
  const head = ["run", "state", "step", "left", "loss", "verdict"].map((name) => make("th", {}, name));
  return [make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))];
}

function facts(run) {
  const now = run.now;
  const all = [["step", progressText(run.progress)]];
  if (run.progress.seconds_left !== null) all.push(["time left", duration(run.progress.seconds_left)]);
  if ("loss" in now) all.push(["loss", number(now.loss)]);
  if (now.seconds) all.push(["a step", `${number(1000 * now.seconds, 3)} ms`]);
  if (now.tokens_per_second) all.push(["tokens per second", number(now.tokens_per_second, 3)]);
  if ("grad_norm" in now) all.push(["gradient norm", number(now.grad_norm, 3)]);
  if (now.learning_rate) all.push(["learning rate", now.learning_rate.toExponential(2)]);
  if (now.mfu) all.push(["MFU", number(now.mfu, 3)]);
  if (now.peak_memory) all.push(["memory at most", size(now.peak_memory)]);
  if (run.slowest) all.push(["slowest rank", `${run.slowest.slowest}: ${number(1000 * run.slowest.seconds, 3)} ms, others ${number(1000 * run.slowest.median, 3)} ms`]);
  if (run.disk) all.push(["disk left", size(run.disk.free)]);
  return make("div", { class: "facts" }, all.map(([name, value]) => make("div", {}, make("span", {}, name), value)));
}

function configuration(told) {
  const keys = Object.keys(told.requested);
  if (!keys.length) return [];
  const cells = (key) => {
    const there = key in told.reported;
    const differs = there && String(told.reported[key]) !== String(told.requested[key]);
    return make("tr", {}, make("td", {}, key), make("td", { class: "long" }, String(told.requested[key])),
      make("td", { class: differs ? "long differs" : "long" }, there ? String(told.reported[key]) : ""));
  };
  const head = ["", "asked for", "as the ranks report it"].map((name) => make("th", {}, name));
  return [make("h2", {}, "Configuration"), make("table", {}, make("tr", {}, head), keys.map(cells))];
}

function host(told) {
  const ranks = told.ranks.length ? `ranks ${told.ranks.join(", ")}` : "";
  const devices = told.devices.map((device) => make("tr", {},
    make("td", { class: "long" }, `${device.index ?? ""} ${device.name ?? ""}`),
    make("td", { class: "number" }, device.utilisation == null ? "" : `${number(device.utilisation, 3)}%`),
    make("td", { class: "number" }, device.memory_total && device.memory_used != null ? `${size(device.memory_used)} of ${size(device.memory_total)}` : ""),
    make("td", { class: "number" }, device.temperature == null ? "" : `${number(device.temperature, 3)} °C`),
    make("td", { class: "number" }, device.power == null ? "" : `${number(device.power, 3)} W`),
    make("td", { class: "number" }, `${device.processes} ${device.processes === 1 ? "process" : "processes"}`)));
  return [make("h2", {}, told.host, " ", make("span", { class: "quiet" }, `${told.device} ${ranks}`)),
    devices.length ? make("table", {}, devices) : null,
    told.out.length ? make("pre", {}, told.out.join("\n")) : null,
    told.err.length ? make("pre", { class: "err" }, told.err.join("\n")) : null,
    told.unread ? make("p", { class: "quiet" }, `${size(told.unread)} of errors before that are not looked through yet`) : null];
}

function draw(canvas, curve) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const [low, high] = [Math.min(...curve.loss), Math.max(...curve.loss)];
  const [first, last] = [curve.step[0], curve.step[curve.step.length - 1]];
  const x = (step) => 50 + (width - 60) * (step - first) / Math.max(1, last - first);
  const y = (loss) => 10 + (height - 35) * (high - loss) / Math.max(1e-9, high - low);
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = style.getPropertyValue("--quiet");
  pen.fillText(number(high, 3), 0, 15);
  pen.fillText(number(low, 3), 0, height - 25);
  pen.fillText(`step ${first}`, 50, height - 5);
  pen.textAlign = "right";
  pen.fillText(String(last), width - 10, height - 5);
  pen.strokeStyle = style.getPropertyValue("--waiting");
  pen.lineWidth = 1.5;
  pen.beginPath();
  curve.step.forEach((step, at) => pen[at ? "lineTo" : "moveTo"](x(step), y(curve.loss[at])));
  pen.stroke();
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
  const canvas = run.curve.step.length > 1 ? make("canvas", { title: "loss" }) : null;
  if (canvas) nodes.push(make("h2", {}, "Loss"), canvas);
  if (run.scheduler.length) {
    const keys = ["job", "state", "reason", "nodes", "time_limit", "restarts"];
    const cell = (job, key) => job[key] == null ? "" : key === "time_limit" && typeof job[key] === "number" ? duration(job[key]) : String(job[key]);
    nodes.push(make("h2", {}, "Scheduler"), make("table", {},
      make("tr", {}, keys.map((key) => make("th", {}, key.replace("_", " ")))),
      run.scheduler.map((job) => make("tr", {}, keys.map((key) => make("td", { class: "long" }, cell(job, key)))))));
  }
  nodes.push(...run.hosts.flatMap(host), ...configuration(run.configuration));
  return [nodes.filter((node) => node !== null), canvas ? () => draw(canvas, run.curve) : null];
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
    if (body === shown || String(window.getSelection())) return;  // Whoever marks text keeps it.
    shown = body;
    if (!answer.ok) {
      page.replaceChildren(make("p", { class: "quiet" }, answer.status === 404 ? "There is no such run." : "This run cannot be read."));
      return;
    }
    const data = JSON.parse(body);
    const [nodes, after] = id ? one(data) : [list(data), null];
    const top = window.scrollY;
    page.replaceChildren(...nodes);
    if (after) after();
    window.scrollTo(0, top);
  } catch (error) {
    fresh.textContent = "the server does not answer";
  }
}

async function forever() {
  await refresh();
  setTimeout(forever, SECONDS * 1000);
}

window.addEventListener("hashchange", () => { shown = null; refresh(); });
forever();
