"use strict";
// Curves and points over one axis. A chart has
//   x, y       labels of the axes
//   lines      [{ run, label, colour, dash, marks, x: [...], y: [... or null], texts }]; x ascends unless `points` is set
//   group      charts of one group zoom together, and a run that is hidden in one is hidden in all
//   log        whether the y axis starts as a log scale
//   limits     [low, high] that the y axis never exceeds; with `fixed` it always spans them
//   points     the tooltip shows the nearest point, rather than all lines at one x
// The group of curves.js also has
//   axis       { label, ticks, short, exact } of the shared x axis
//   smoothed   the moving average of a line, null without smoothing
//   paint      draws markers; near(px, at) returns the texts of those at a place
steelyard.groups = {};
steelyard.lines = function (root, chart) {
  const { element, sized, theme, colour, ticks, powers, short, exact } = steelyard;
  const LEFT = 54, RIGHT = 14, TOP = 20, BOTTOM = 32, LEGEND = 26, DASHES = { dash: [6, 4], dot: [2, 3] };
  const alone = { view: null, hidden: new Set(), members: [] };
  const group = chart.group ? (steelyard.groups[chart.group] ??= alone) : alone;
  const hidden = new Set(), lines = chart.lines, height = chart.height - LEGEND;
  let isLog = Boolean(chart.log), hover = null, held = null, labels = [], entries = new Map(), named = "";

  const legend = element("div", root), canvas = element("canvas", root), tip = steelyard.tip(root);
  legend.className = "legend";
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const axis = () => group.axis || { label: chart.x, ticks, short, exact };
  const toggle = (set, name) => () => {
    if (!set.delete(name)) set.add(name);
    group.members.forEach((member) => member.soon());
    return !set.has(name);
  };
  // The legend is made again only if its entries change, so that a live chart keeps the focus.
  function makeLegend() {
    const runs = [...new Set(lines.map((line) => line.run).filter(Boolean))];
    labels = [...new Set(lines.map((line) => line.label))];
    const names = JSON.stringify([runs, labels, mayBeLog()]);
    if (names === named) return;
    named = names;
    canvas.setAttribute("aria-label", `${chart.title || labels.join(", ")} over ${axis().label}`);
    legend.replaceChildren();
    entries = new Map();
    for (const run of runs) {
      const look = lines.find((line) => line.run === run);
      entries.set(run, steelyard.entry(legend, { colour: look.colour }, run, toggle(group.hidden, run)));
    }
    if (!runs.length || labels.length > 1)
      for (const label of labels) {
        const { colour: own, dash, marks } = lines.find((line) => line.label === label);
        const look = { colour: runs.length ? "var(--quiet)" : own, dash, area: marks === "only" };
        const button = steelyard.entry(legend, look, label, toggle(hidden, label));
        button.setAttribute("aria-pressed", String(!hidden.has(label)));
      }
    if (mayBeLog()) {
      const scale = element("button", legend);
      scale.className = "scale";
      scale.type = "button";
      const setLabel = () => { scale.textContent = isLog ? "linear scale" : "log scale"; };
      scale.onclick = () => { isLog = !isLog; setLabel(); soon(); };
      setLabel();
    }
    sync();
  }
  const sync = () =>
    entries.forEach((button, run) => button.setAttribute("aria-pressed", String(!group.hidden.has(run))));

  // Visible lines and their ranges.
  const shown = () => lines.filter((line) => !group.hidden.has(line.run) && !hidden.has(line.label));
  const cut = (name) => (name.length > 32 ? name.slice(0, 14) + "…" + name.slice(-16) : name);
  const nameOf = (line) => (line.run && labels.length > 1 ? `${cut(line.run)}, ${line.label}` : cut(line.run) || line.label);
  function mayBeLog() {
    const [low, high] = extent(lines.map((line) => line.y));
    return low > 0 && !chart.fixed && high / low > (group.axis ? 1.2 : 4);
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
  const xs = () => (shown().length ? shown() : lines).map((line) => line.x);
  function wholeX() {
    const [low, high] = extent(group.members.length > 1 ? group.members.flatMap((member) => member.xs()) : xs());
    if (low > high) return [0, 1];
    if (low === high) return chart.points && low > 0 ? [0, 2 * low] : [low - 1, low + 1];
    const margin = chart.points ? 0.02 * (high - low) : 0; // A point on the edge would be clipped.
    return [low - margin, high + margin];
  }
  function rangeY(view) {
    if (chart.fixed && !isLog) return chart.limits;
    const [low, high] = freeY(view), [least, most] = chart.limits || [-Infinity, Infinity];
    return [isLog ? low : Math.max(low, least), Math.min(high, most)];
  }
  function freeY([from, to]) {
    const inside = (line, y) => y.filter((value, at) => line.x[at] >= from && line.x[at] <= to && !(isLog && value <= 0));
    const [low, high] = extent(shown().flatMap((line) => [inside(line, line.y), inside(line, group.smoothed?.(line) || [])]));
    if (low > high) return isLog ? [1, 10] : [0, 1];
    const isFlat = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // but for rounding
    if (isFlat) return low === 0 ? [-1, 1] : isLog ? [low / 2, low * 2] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
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
    group.paint?.(pen, { ...at, top: TOP });
    for (const line of shown()) {
      const smooth = group.smoothed?.(line);
      if (smooth) pen.globalAlpha = 0.25;
      trace(pen, line, line.y, at);
      pen.globalAlpha = 1;
      if (smooth) trace(pen, { ...line, marks: "" }, smooth, at);
    }
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
    pen.fillText(group.view ? `${axis().label}; double click shows all` : axis().label, at.right, height - 3);
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
    for (const value of axis().ticks(at.view[0], at.view[1], Math.max(2, Math.floor((at.right - LEFT) / 70)))) {
      pen.fillText(axis().short(value), at.x(value), at.base + 14);
      pen.fillRect(Math.round(at.x(value)), at.base, 1, 4);
    }
  }
  // A value that is not a number interrupts the line; a single value between two gaps is drawn as a dot.
  function trace(pen, line, y, at) {
    pen.strokeStyle = pen.fillStyle = colour(line.colour);
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.setLineDash(DASHES[line.dash] || []);
    const is = (place) => y[place] != null && !(isLog && y[place] <= 0);
    if (line.marks !== "only") {
      pen.beginPath();
      for (let place = 0, before = false; place < line.x.length; place++) {
        if (is(place)) pen[before ? "lineTo" : "moveTo"](at.x(line.x[place]), at.y(y[place]));
        before = is(place);
      }
      pen.stroke();
    }
    pen.setLineDash([]);
    for (let place = 0; place < line.x.length; place++)
      if (is(place) && (line.marks || !(is(place - 1) || is(place + 1))))
        dot(pen, at.x(line.x[place]), at.y(y[place]), line.marks === "only" ? 3.5 : 2.5);
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
    const found = shown().filter((line) => line.x.length).map((line) => ({ line, place: nearest(line.x, wanted) }));
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
      const smooth = group.smoothed?.(line)?.[place] ?? null, own = line.y[place];
      const value = own === null ? "not a number" : smooth === null ? exact(own) : `${exact(smooth)} (${exact(own)})`;
      return { colour: line.colour, dash: line.dash, name: nameOf(line),
        value: line.x[place] === hover.x ? value : `${value} at ${axis().exact(line.x[place])}` };
    });
    tip.show(event, `${axis().label} ${axis().exact(hover.x)}`, rows, hover.near.join("\n"));
  }
  function look(event) {
    const at = scales(), px = event.clientX - canvas.getBoundingClientRect().left;
    const py = event.clientY - canvas.getBoundingClientRect().top;
    hover = chart.points ? pointAt(px, py, at) : px < LEFT || px > at.right ? null : linesAt(at.back(px), at.view);
    if (hover) {
      hover.near = group.near?.(px, at) ?? [];
      showTip(event);
    }
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
  makeLegend();
  draw();
  group.members.push({ soon: () => { sync(); soon(); }, xs });
  return { range: () => rangeY(group.view || wholeX()), view: () => group.view || wholeX(), lines, shown,
    isLog: () => isLog, update: (newer) => { lines.splice(0, lines.length, ...newer); makeLegend(); soon(); } };
};
