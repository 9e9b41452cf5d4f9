"use strict";
// Curves and points over one axis. A chart has
//   x, y       labels of the axes
//   lines      [{ run, label, colour, dash, marks, x: [...], y: [... or null], texts }]; x ascends unless `points` is set
//   group      charts of one group zoom together, and a run that is hidden in one is hidden in all
//   log        whether the y axis starts as a log scale
//   points     the tooltip shows the nearest point, rather than all lines at one x
steelyard.groups = {};
steelyard.lines = function (root, chart) {
  const { element, sized, theme, colour, ticks, powers, short, exact } = steelyard;
  const LEFT = 54, RIGHT = 14, TOP = 20, BOTTOM = 32, LEGEND = 26, DASHES = { dash: [6, 4], dot: [2, 3] };
  const alone = { view: null, hidden: new Set(), members: [] };
  const group = chart.group ? (steelyard.groups[chart.group] ??= alone) : alone;
  const hidden = new Set(), lines = chart.lines, height = chart.height - LEGEND;
  const runs = [...new Set(lines.map((line) => line.run).filter(Boolean))];
  const labels = [...new Set(lines.map((line) => line.label))];
  let isLog = Boolean(chart.log), hover = null, held = null;

  const legend = element("div", root), canvas = element("canvas", root), tip = steelyard.tip(root);
  legend.className = "legend";
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${chart.title || labels.join(", ")} over ${chart.x}`);
  const toggle = (set, name) => () => {
    if (!set.delete(name)) set.add(name);
    group.members.forEach((member) => member.soon());
    return !set.has(name);
  };
  const entries = new Map();
  for (const run of runs) {
    const look = lines.find((line) => line.run === run);
    entries.set(run, steelyard.entry(legend, { colour: look.colour }, run, toggle(group.hidden, run)));
  }
  if (!runs.length || labels.length > 1)
    for (const label of labels) {
      const { colour: own, dash, marks } = lines.find((line) => line.label === label);
      const look = { colour: runs.length ? "var(--quiet)" : own, dash, area: marks === "only" };
      steelyard.entry(legend, look, label, toggle(hidden, label));
    }
  if (mayBeLog()) {
    const scale = element("button", legend);
    scale.className = "scale";
    scale.type = "button";
    const setLabel = () => { scale.textContent = isLog ? "linear scale" : "log scale"; };
    scale.onclick = () => { isLog = !isLog; setLabel(); soon(); };
    setLabel();
  }

  // Visible lines and their ranges.
  const shown = () => lines.filter((line) => !group.hidden.has(line.run) && !hidden.has(line.label));
  const cut = (name) => (name.length > 32 ? name.slice(0, 14) + "…" + name.slice(-16) : name);
  const nameOf = (line) => (line.run && labels.length > 1 ? `${cut(line.run)}, ${line.label}` : cut(line.run) || line.label);
  function mayBeLog() {
    const [low, high] = extent(lines.map((line) => line.y));
    return low > 0 && high / low > 4;
  }
  function extent(arrays) {
    let [low, high] = [Infinity, -Infinity];
    for (const values of arrays)
      for (const value of values) {
        if (value === null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    return [low, high];
  }
  function wholeX() {
    const [low, high] = extent((shown().length ? shown() : lines).map((line) => line.x));
    if (low === high) return chart.points && low > 0 ? [0, 2 * low] : [low - 1, low + 1];
    const margin = chart.points ? 0.02 * (high - low) : 0; // A point on the edge would be clipped.
    return [low - margin, high + margin];
  }
  function rangeY([from, to]) {
    const inside = (line) => line.y.filter((value, at) => line.x[at] >= from && line.x[at] <= to && !(isLog && value <= 0));
    const [low, high] = extent(shown().map(inside));
    if (low > high) return isLog ? [1, 10] : [0, 1];
    if (low === high) return low === 0 ? [-1, 1] : isLog ? [low / 2, low * 2] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
    if (isLog) return [low / Math.pow(high / low, 0.04), high * Math.pow(high / low, 0.04)];
    return [low - 0.04 * (high - low), high + 0.04 * (high - low)];
  }
  function scales() {
    const width = root.clientWidth, view = group.view || wholeX(), [low, high] = rangeY(view);
    const [right, base] = [width - RIGHT, height - BOTTOM], way = isLog ? Math.log : (value) => value;
    return { width, view, low, high, right, base,
      x: (value) => LEFT + ((right - LEFT) * (value - view[0])) / (view[1] - view[0]),
      y: (value) => base - ((base - TOP) * (way(value) - way(low))) / (way(high) - way(low)),
      back: (place) => view[0] + ((view[1] - view[0]) * (place - LEFT)) / (right - LEFT) };
  }

  // Drawing.
  function draw() {
    const at = scales(), pen = sized(canvas, at.width, height);
    axes(pen, at);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 4, at.right - LEFT + 1, at.base - TOP + 8);
    pen.clip();
    for (const line of shown()) trace(pen, line, at);
    if (held) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = theme().link;
      pen.fillRect(held.from, TOP, held.to - held.from, at.base - TOP);
      pen.globalAlpha = 1;
    }
    if (hover) mark(pen, at);
    pen.restore();
  }
  function axes(pen, at) {
    const { quiet, line } = theme();
    pen.fillStyle = quiet;
    pen.textAlign = "left";
    pen.fillText(chart.y, 2, 10);
    pen.textAlign = "right";
    pen.fillText(group.view ? `${chart.x}; double click shows all` : chart.x, at.right, height - 3);
    pen.textBaseline = "middle";
    const many = Math.max(2, Math.floor((at.base - TOP) / 38));
    for (const value of (isLog ? powers : ticks)(at.low, at.high, many)) {
      const y = Math.round(at.y(value)) + 0.5;
      pen.fillStyle = quiet;
      pen.fillText(short(value), LEFT - 7, y);
      pen.fillStyle = line;
      pen.fillRect(LEFT, y - 0.5, at.right - LEFT, 1);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    pen.fillStyle = quiet;
    for (const value of ticks(at.view[0], at.view[1], Math.max(2, Math.floor((at.right - LEFT) / 70)))) {
      pen.fillText(short(value), at.x(value), at.base + 14);
      pen.fillRect(Math.round(at.x(value)), at.base, 1, 4);
    }
  }
  // A value that is not a number interrupts the line; a single value between two gaps is drawn as a dot.
  function trace(pen, line, at) {
    pen.strokeStyle = pen.fillStyle = colour(line.colour);
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(DASHES[line.dash] || []);
    const is = (place) => line.y[place] != null && !(isLog && line.y[place] <= 0);
    if (line.marks !== "only") {
      pen.beginPath();
      for (let place = 0, before = false; place < line.x.length; place++) {
        if (is(place)) pen[before ? "lineTo" : "moveTo"](at.x(line.x[place]), at.y(line.y[place]));
        before = is(place);
      }
      pen.stroke();
    }
    pen.setLineDash([]);
    for (let place = 0; place < line.x.length; place++)
      if (is(place) && (line.marks || !(is(place - 1) || is(place + 1))))
        dot(pen, at.x(line.x[place]), at.y(line.y[place]), line.marks === "only" ? 3.5 : 2.5);
  }
  function dot(pen, x, y, radius) {
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fill();
  }
  function mark(pen, at) {
    if (!chart.points) {
      pen.fillStyle = theme().quiet;
      pen.fillRect(Math.round(at.x(hover.x)), TOP, 1, at.base - TOP);
    }
    for (const { line, place } of hover.found) {
      if (line.y[place] === null || (line.x[place] !== hover.x && !chart.points)) continue;
      pen.fillStyle = theme().paper;
      dot(pen, at.x(line.x[place]), at.y(line.y[place]), 5);
      pen.fillStyle = colour(line.colour);
      dot(pen, at.x(line.x[place]), at.y(line.y[place]), 3.5);
    }
  }

  // Tooltips.
  function nearest(values, wanted) {
    let [low, high] = [0, values.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  }
  function linesAt(wanted, view) {
    const inside = (x) => x >= view[0] && x <= view[1];
    const found = shown().map((line) => ({ line, place: nearest(line.x, wanted) }));
    const near = found.map(({ line, place }) => line.x[place]).filter(inside);
    if (!near.length) return null;
    const x = near.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best));
    return { x, found: found.map(({ line }) => ({ line, place: nearest(line.x, x) })) };
  }
  function pointAt(px, py, at) {
    let best = null, least = 24 * 24;
    for (const line of shown())
      line.x.forEach((x, place) => {
        if (line.y[place] === null || (line.texts === undefined && !line.marks)) return;
        const away = (at.x(x) - px) ** 2 + (at.y(line.y[place]) - py) ** 2;
        if (away < least) [best, least] = [{ line, place }, away];
      });
    return best && { x: best.line.x[best.place], found: [best] };
  }
  function showTip(event) {
    if (chart.points) {
      const { line, place } = hover.found[0];
      const rows = [{ name: chart.x, value: exact(line.x[place]) }, { name: chart.y, value: exact(line.y[place]) }];
      return tip.show(event, nameOf(line), rows, line.texts ? line.texts[place] : "");
    }
    const rows = hover.found.map(({ line, place }) => {
      const value = line.y[place] === null ? "not a number" : exact(line.y[place]);
      return { colour: line.colour, dash: line.dash, name: nameOf(line),
        value: line.x[place] === hover.x ? value : `${value} at ${exact(line.x[place])}` };
    });
    tip.show(event, `${chart.x} ${exact(hover.x)}`, rows);
  }
  function look(event) {
    const at = scales(), px = event.clientX - canvas.getBoundingClientRect().left;
    const py = event.clientY - canvas.getBoundingClientRect().top;
    hover = chart.points ? pointAt(px, py, at) : px < LEFT || px > at.right ? null : linesAt(at.back(px), at.view);
    if (hover) showTip(event);
    else tip.hide();
    soon();
  }

  // Input: dragging zooms, a double click or Escape shows all.
  function zoom(view) {
    group.view = view;
    hover = null;
    tip.hide();
    group.members.forEach((member) => member.soon());
  }
  const placeOf = (event) =>
    Math.min(root.clientWidth - RIGHT, Math.max(LEFT, event.clientX - canvas.getBoundingClientRect().left));
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { from: placeOf(event), to: placeOf(event) };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) held.to = placeOf(event);
    look(event);
  });
  canvas.addEventListener("pointerup", () => {
    if (held && Math.abs(held.to - held.from) > 4) {
      const { back } = scales();
      zoom([held.from, held.to].map(back).sort((one, other) => one - other));
    }
    held = null;
    soon();
  });
  canvas.addEventListener("pointercancel", () => { held = null; soon(); });
  canvas.addEventListener("pointerleave", () => { hover = null; tip.hide(); soon(); });
  canvas.addEventListener("dblclick", () => zoom(null));
  canvas.addEventListener("keydown", (event) => event.key === "Escape" && zoom(null));
  const soon = steelyard.keepDrawn(root, draw);
  draw();
  const sync = () =>
    entries.forEach((button, run) => button.setAttribute("aria-pressed", String(!group.hidden.has(run))));
  group.members.push({ soon: () => { sync(); soon(); } });
  return { range: () => rangeY(group.view || wholeX()), view: () => group.view || wholeX(), lines, shown,
    update: (newer) => { lines.splice(0, lines.length, ...newer); soon(); } };
};
