"use strict";
// The curves of one or several runs (observe/run_curves.py): charts with a common x-axis, smoothing, zoom and markers.
//   runs       [{ name, axes: { step, tokens, time }, charts: [{ title, unit, log, limits, fixed,
//                 lines: [{ label, over, marks, x, y }] }], markers: [{ kind, level, step, time, text }], note }]
// `update` takes newer data and keeps axis, smoothing, zoom and scales.
steelyard.curves = function (root, data) {
  const { element, ticks, short, exact, theme } = steelyard;
  const AXES = ["step", "tokens", "time"], DASHES = ["", "dot", "dash"], NEAR = 6, HEIGHT = 240;
  const KINDS = ["restart", "replan", "checkpoint", "verdict"];
  const name = `curves ${Object.keys(steelyard.groups).length}`;
  const group = (steelyard.groups[name] = { view: null, hidden: new Set(), members: [] });
  const charts = new Map(), without = new Set(), averages = new WeakMap();
  let runs = data.runs, axis = "step", weight = 0, markers = [];

  // The x-axes.
  const clock = (seconds) => {
    const whole = Math.round(Math.abs(seconds)), two = (part) => String(part).padStart(2, "0");
    const text = `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
    return seconds <= -0.5 ? "-" + text : text;
  };
  const ROUND = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  function clockTicks(low, high, count) {
    const raw = (high - low) / Math.max(1, count);
    const step = ROUND.find((each) => each >= raw) || 86400 * Math.ceil(raw / 86400), found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
    return found;
  }
  const LABELS = {
    step: { label: "step", ticks, short, exact }, tokens: { label: "tokens", ticks, short, exact },
    time: { label: "time, h:mm:ss", ticks: clockTicks, short: clock, exact: clock },
  };
  const has = (run, which) => run.axes.step.length > 0 && run.axes[which].length === run.axes.step.length;
  // A value of one axis on another one; null outside of what was recorded.
  function converted(axes, value, from, to) {
    const table = axes[from], other = axes[to];
    if (from === to || value === null) return value;
    if (!table.length || other.length !== table.length || value < table[0] || value > table[table.length - 1]) return null;
    let [low, high] = [0, table.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (table[middle] <= value) low = middle;
      else high = middle;
    }
    const share = table[high] > table[low] ? (value - table[low]) / (table[high] - table[low]) : 0;
    return other[low] + share * (other[high] - other[low]);
  }

  // The parts of the page.
  root.classList.add("curves");
  const bar = element("div", root), grid = element("div", root), note = element("p", root);
  bar.className = "controls";
  grid.className = "charts";
  note.className = "note";
  const choice = element("span", bar, "x-axis ");
  choice.className = "choice";
  const buttons = AXES.map((each) => {
    const button = element("button", choice, each);
    button.type = "button";
    button.onclick = () => choose(each);
    return button;
  });
  const slide = element("label", bar, "smoothing "), smooth = element("input", slide), amount = element("output", slide, "0");
  Object.assign(smooth, { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
  smooth.oninput = () => {
    weight = Number(smooth.value);
    amount.textContent = smooth.value;
    redraw();
  };
  const legend = element("span", bar), all = element("button", bar, "show all");
  legend.className = "legend";
  all.type = "button";
  all.onclick = () => { group.view = null; redraw(); };
  const redraw = () => group.members.forEach((member) => member.soon());
  group.members.push({ soon: () => { all.hidden = group.view === null; }, xs: () => [] });
  all.hidden = true;

  function choose(next) {
    const old = group.view, first = runs.find((run) => has(run, axis) && has(run, next));
    const ends = old && first && old.map((value) => converted(first.axes, value, axis, next));
    group.view = ends && ends.every((value) => value !== null) && ends[0] < ends[1] ? ends : null;
    axis = next;
    show();
  }

  // Smoothing: an exponential moving average without the bias of its start.
  group.smoothed = (line) => {
    if (!weight || line.marks) return null; // The few points of a validation are shown as they are.
    const known = averages.get(line);
    if (known && known.weight === weight) return known.values;
    let sum = 0, mass = 0;
    const values = line.y.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
    averages.set(line, { weight, values });
    return values;
  };

  // Markers: checkpoints at the bottom, restarts and replans as dashed lines, verdicts as lines with a head.
  const colourOf = (marker) => {
    const { series, quiet } = theme();
    if (marker.kind === "verdict") return { ok: series[2], waiting: series[0], warning: series[1] }[marker.level] || series[7];
    return { restart: series[3], replan: series[4] }[marker.kind] || quiet;
  };
  group.paint = (pen, at) => {
    for (const marker of markers) {
      const x = at.x(marker.x);
      if (without.has(marker.kind) || x < 0 || x > at.width) continue;
      pen.fillStyle = pen.strokeStyle = colourOf(marker);
      pen.beginPath();
      if (marker.kind === "checkpoint") {
        pen.moveTo(x, at.base - 7);
        pen.lineTo(x - 4, at.base);
        pen.lineTo(x + 4, at.base);
        pen.fill();
        continue;
      }
      pen.setLineDash(marker.kind === "verdict" ? [] : [4, 3]);
      pen.lineWidth = 1.2;
      pen.moveTo(x, at.top);
      pen.lineTo(x, at.base);
      pen.stroke();
      pen.setLineDash([]);
      if (marker.kind !== "verdict") continue;
      pen.beginPath();
      pen.arc(x, at.top + 2, 4, 0, 2 * Math.PI);
      pen.fill();
    }
  };
  group.near = (px, at) =>
    markers.filter((marker) => !without.has(marker.kind) && Math.abs(at.x(marker.x) - px) < NEAR)
      .map((marker) => (marker.text.length > 90 ? marker.text.slice(0, 89) + "…" : marker.text)).slice(0, 6);
  function placeMarkers() {
    markers = [];
    for (const run of runs)
      for (const marker of run.markers || []) {
        const order = axis === "time" ? ["time", "step"] : ["step", "time"];
        const own = { step: marker.step, time: marker.time };
        const found = order.filter((from) => own[from] !== null).map((from) => converted(run.axes, own[from], from, axis));
        const x = found.find((value) => value !== null && value !== undefined);
        if (x !== undefined) markers.push({ ...marker, x, text: runs.length > 1 ? `${run.name}: ${marker.text}` : marker.text });
      }
    const there = KINDS.filter((kind) => markers.some((marker) => marker.kind === kind));
    if (legend.dataset.kinds === there.join()) return;
    legend.dataset.kinds = there.join();
    legend.replaceChildren();
    const looks = { restart: { colour: 3, dash: "dash" }, replan: { colour: 4, dash: "dash" },
      checkpoint: { colour: "var(--quiet)", area: true }, verdict: { colour: 7, area: true } };
    for (const kind of there) {
      const button = steelyard.entry(legend, looks[kind], `${kind}s`, () => {
        if (!without.delete(kind)) without.add(kind);
        redraw();
        return !without.has(kind);
      });
      button.setAttribute("aria-pressed", String(!without.has(kind)));
    }
  }

  // Lines of one run have a colour each; with several runs the colour is that of the run.
  function linesOf(title) {
    const several = runs.length > 1, labels = [], found = [];
    runs.forEach((run, number) => {
      for (const line of run.charts.find((chart) => chart.title === title)?.lines || []) {
        if (!labels.includes(line.label)) labels.push(line.label);
        const place = labels.indexOf(line.label), x = [], y = [];
        line.x.forEach((value, at) => {
          const there = converted(run.axes, value, line.over, axis);
          if (there === null) return;
          x.push(there);
          y.push(line.y[at]);
        });
        found.push({ run: several ? run.name : "", label: line.label, colour: several ? number : place,
          dash: several ? DASHES[place % DASHES.length] : "", marks: line.marks, x, y });
      }
    });
    return found;
  }
  function show() {
    group.axis = LABELS[axis];
    buttons.forEach((button, place) => {
      button.setAttribute("aria-pressed", String(AXES[place] === axis));
      button.disabled = !runs.some((run) => has(run, AXES[place]));
    });
    placeMarkers();
    const titles = [...new Set(runs.flatMap((run) => run.charts.map((chart) => chart.title)))];
    for (const title of titles) {
      const lines = linesOf(title), known = charts.get(title);
      if (known) known.chart.update(lines);
      else charts.set(title, added(title, lines));
    }
    for (const [title, { box }] of charts) box.hidden = !titles.includes(title);
    note.textContent = titles.length ? runs.map((run) => run.note).filter(Boolean).join(" ") : "Nothing was recorded yet.";
    bar.hidden = !titles.length;
    redraw();
  }
  function added(title, lines) {
    const { unit, log, limits, fixed } = runs.flatMap((run) => run.charts).find((chart) => chart.title === title);
    const box = element("div", grid);
    element("h3", box, title);
    const place = element("div", box);
    place.className = "chart";
    place.style.minHeight = HEIGHT + "px";
    const chart = steelyard.lines(place, { x: "step", y: unit, title, log, limits, fixed, lines, group: name, height: HEIGHT });
    steelyard.charts.push(Object.assign(chart, { root: place }));
    return { box, chart };
  }
  show();
  return { update: (newer) => { runs = newer.runs; show(); }, choose, group, axis: () => axis,
    markers: () => markers, chart: (title) => charts.get(title)?.chart };
};
