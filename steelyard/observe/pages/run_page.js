"use strict";
// One run, or several side by side: verdicts, curves, attempts, timeline, hosts, logs and configuration.
function facts(run) {
  const now = run.now;
  const all = [["step", progressText(run.progress)]];
  if (run.progress.seconds_left !== null) all.push(["time left", duration(run.progress.seconds_left)]);
  if ("loss" in now) all.push(["loss", number(now.loss)]);
  if (now.seconds) all.push(["step time", `${number(1000 * now.seconds, 3)} ms`]);
  if (now.tokens_per_second) all.push(["tokens per second", number(now.tokens_per_second, 3)]);
  if ("grad_norm" in now) all.push(["gradient norm", number(now.grad_norm, 3)]);
  if (now.learning_rate) all.push(["learning rate", now.learning_rate.toExponential(2)]);
  if (now.mfu) all.push(["MFU", `${number(100 * now.mfu, 3)} %`]);
  if (now.expert_load) all.push(["expert load, max/mean", number(now.expert_load, 3)]);
  if (now.router_entropy) all.push(["router entropy", number(now.router_entropy, 3)]);
  if (now.experts_dropped) all.push(["dropped tokens", `${number(100 * now.experts_dropped, 3)} %`]);
  if (now.peak_memory) all.push(["peak memory", size(now.peak_memory)]);
  if (run.slowest) all.push(["slowest rank", `${run.slowest.slowest}: ${number(1000 * run.slowest.seconds, 3)} ms, others ${number(1000 * run.slowest.median, 3)} ms`]);
  if (run.disk) all.push(["disk left", size(run.disk.free)]);
  return make("div", { class: "facts" }, all.map(([name, value]) => make("div", {}, make("span", {}, name), value)));
}

function verdictsOf(run) {
  return run.verdicts.map((verdict) => make("div", { class: `verdict ${level(verdict.level)}` },
    make("strong", {}, verdict.message), verdict.what_to_do === "nothing" ? null : make("p", {}, verdict.what_to_do)));
}

function attemptsTable(attempts) {
  if (!attempts.length) return [];
  const day = (seconds) => (seconds === null ? "" : new Date(1000 * seconds).toLocaleString());
  const rows = attempts.map((one) => make("tr", {},
    make("td", {}, one.number), make("td", {}, one.kind), make("td", {}, day(one.started)),
    make("td", { class: "number" }, one.step === null ? "" : `${one.step} to ${one.last_step ?? ""}`),
    make("td", { class: "number" }, one.repeated || ""), make("td", {}, one.hosts.join(", ")), make("td", {}, one.devices),
    make("td", { class: "long" }, one.layout, one.changed ? make("span", { class: "quiet" }, ` (${one.changed})`) : null),
    make("td", {}, one.end)));
  const head = ["attempt", "kind", "started", "steps", "repeated", "hosts", "devices", "layout", "end"];
  return [make("h2", {}, "Attempts"), table(head, rows)];
}

function scheduler(jobs) {
  if (!jobs.length) return [];
  const keys = ["job", "state", "reason", "nodes", "time_limit", "restarts"];
  const cell = (job, key) => job[key] == null ? "" : key === "time_limit" && typeof job[key] === "number" ? duration(job[key]) : String(job[key]);
  const rows = jobs.map((job) => make("tr", {}, keys.map((key) => make("td", {}, cell(job, key)))));
  return [make("h2", {}, "Scheduler"), table(keys.map((key) => key.replace("_", " ")), rows)];
}

function configuration(info) {
  const keys = Object.keys(info.requested);
  if (!keys.length) return [];
  const rows = keys.map((key) => {
    const there = key in info.reported;
    const differs = there && String(info.reported[key]) !== String(info.requested[key]);
    return make("tr", {}, make("td", {}, key), make("td", {}, String(info.requested[key])),
      make("td", { class: differs ? "differs" : "" }, there ? String(info.reported[key]) : ""));
  });
  return [make("h2", {}, "Configuration"), table(["", "requested", "reported by the ranks"], rows)];
}

function hostsTable({ hosts, ended }) {
  if (!hosts.length) return [];
  const rows = hosts.flatMap((info) => {
    // After the end, the last samples no longer describe the GPUs.
    const devices = ended || !info.devices.length ? [null] : info.devices;
    return devices.map((device, place) => make("tr", {},
      make("td", {}, place ? "" : info.host), make("td", {}, place ? "" : info.ranks.join(", ")),
      make("td", {}, device ? `${device.index ?? ""} ${device.name ?? ""}` : info.device),
      make("td", { class: "number" }, device?.utilisation == null ? "" : `${number(Math.min(100, device.utilisation), 3)} %`),
      make("td", { class: "number" }, device?.memory_total && device.memory_used != null ? `${size(device.memory_used)} of ${size(device.memory_total)}` : ""),
      make("td", { class: "number" }, device?.temperature == null ? "" : `${number(device.temperature, 3)} °C`),
      make("td", { class: "number" }, device?.power == null ? "" : `${number(device.power, 3)} W`),
      make("td", { class: "number" }, device ? device.processes : "")));
  });
  const unread = hosts.filter((info) => info.unread).map((info) =>
    make("p", { class: "note" }, `${info.host}: ${size(info.unread)} of the error log are not scanned yet`));
  return [make("h2", {}, "Hosts"), table(["host", "ranks", "device", "utilisation", "memory", "temperature", "power", "processes"], rows), ...unread];
}

// The timeline is fetched at once, and again when its files have grown and grow no more. It shows the same steps and time.
function timelinePart(root, id) {
  let known = -1, before = -1, shown = null;
  return { refresh: async (bytes) => {
    const isSettled = bytes === before || known === -1;
    before = bytes;
    if (bytes === known || !isSettled) return;
    known = bytes;
    const data = await ask("/api/timeline", { id }), box = make("div");
    root.replaceChildren(make("h2", {}, "Timeline"), box);
    if (!data.ranks) return void box.append(make("p", { class: "note" }, data.note || "There is no timeline."));
    const place = shown?.place();
    timelinePart.shown = shown = steelyardTimeline(box, data);
    if (place) shown.show(place);
    if (data.predicted.why_none) box.append(make("p", { class: "note" }, `No prediction: ${data.predicted.why_none}.`));
  } };
}

function compared(runs, ids) {
  const rows = runs.map((run, place) => make("tr", {},
    make("td", { class: "name" }, dot(run.verdicts[0]), make("a", { href: linkTo([ids[place]]) }, ids[place])),
    make("td", { class: "state" }, run.state), make("td", { class: "number step" }, progressText(run.progress)),
    make("td", { class: "number" }, "loss" in run.now ? number(run.now.loss) : ""),
    make("td", { class: "number" }, run.now.tokens_per_second ? number(run.now.tokens_per_second, 3) : ""),
    make("td", {}, run.verdicts[0].message)));
  return [table(["run", "state", "step", "loss", "tokens/s", "verdict"], rows)];
}

function runPage(page, ids) {
  const head = part(), drawn = make("div"), under = part(), one = ids.length === 1 ? ids[0] : null;
  const attempts = part(), hosts = part(), timeline = make("div"), logs = make("div"), last = part();
  page.append(head, drawn, ...(one === null ? [under] : [attempts, timeline, hosts, logs, last]));
  const output = one === null ? null : runLogs(logs, one), spans = one === null ? null : timelinePart(timeline, one);
  let curves = null, known = null;

  // A run that has ended has no more points, until it is resumed.
  async function draw(views) {
    const seen = JSON.stringify(views.map((run) => [run.state, run.progress, run.verdicts[0], run.attempts]));
    if (views.every((run) => run.ended) && seen === known) return;
    const runs = await Promise.all(ids.map((id) => ask("/api/curves", { id })));
    const data = { runs: runs.map((run, place) => ({ name: ids[place], ...run })) };
    if (curves) curves.update(data);
    else runPage.curves = curves = steelyard.curves(drawn, data);
    known = seen;
  }
  async function single() {
    const run = await ask("/api/run", { id: one });
    document.title = `${run.name} · Steelyard`;
    head.show({ verdicts: run.verdicts, state: run.state, progress: run.progress, now: run.now, slowest: run.slowest, name: run.name }, () => [
      make("h1", {}, run.name, " ", make("span", { class: "quiet" }, run.state)), ...verdictsOf(run),
      run.progress.steps ? make("progress", { max: run.progress.steps, value: run.progress.step }) : null, facts(run)]);
    await draw([run]);
    attempts.show(run.attempts, attemptsTable);
    hosts.show({ hosts: run.hosts.map(({ age, out, err, ...host }) => host), ended: run.ended }, hostsTable);
    output.hosts(run.hosts.map((info) => info.host));
    last.show([run.scheduler, run.configuration], () => [...scheduler(run.scheduler), ...configuration(run.configuration)]);
    await spans.refresh(run.timeline);
    await output.refresh();
  }
  async function several() {
    const runs = await Promise.all(ids.map((id) => ask("/api/run", { id })));
    document.title = `${ids.length} runs · Steelyard`;
    head.show(runs.map(({ state, verdicts, progress, now }) => ({ state, verdicts, progress, now })),
      () => [make("h1", {}, `${ids.length} runs`), ...compared(runs, ids)]);
    await draw(runs);
    const recipes = await ask("/api/recipes", ids.map((id) => ["id", id]));
    under.show(recipes.rows, (rows) => [make("h2", {}, "Recipes"), rows.length
      ? table(["differs in", ...ids], rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell)))))
      : make("p", { class: "note" }, "All have the same recipe.")]);
  }
  return { refresh: one === null ? several : single };
}
