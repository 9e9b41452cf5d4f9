"use strict";
// Parallel coordinates: an axis for each setting and one for the result, and a line for each trial. A chart has
//   axes       [{ label, values, marks, texts }]: texts are the values as shown in tooltips, marks are pairs of a value
//              and its tick label, for values that are not numbers; the last axis determines the colours of the lines
//   names      of the lines
//   less       whether less is better on the last axis
// Dragging along an axis keeps only the lines that cross it there; a double click shows all lines again.
steelyard.coordinates = function (root, chart) {
  const { element, sized, theme, ticks, short, exact } = steelyard;
  const SIDE = 70, TOP = 30, BOTTOM = 16, height = chart.height;
  const axes = chart.axes, canvas = element("canvas", root), tip = steelyard.tip(root), kept = axes.map(() => null);
  let hover = null, held = null;
  for (const axis of axes) {
    const all = axis.marks ? [...axis.values, ...axis.marks.map(([value]) => value)] : axis.values;
    [axis.low, axis.high] = [Math.min(...all), Math.max(...all)];
    if (axis.low === axis.high) [axis.low, axis.high] = [axis.low - 1, axis.high + 1];
  }
  const last = axes[axes.length - 1];
  const x = (place) => SIDE + ((root.clientWidth - 2 * SIDE) * place) / Math.max(1, axes.length - 1);
  const share = (axis, value) => (value - axis.low) / (axis.high - axis.low);
  const y = (axis, value) => height - BOTTOM - (height - TOP - BOTTOM) * share(axis, value);
  const back = (axis, place) => axis.low + ((axis.high - axis.low) * (height - BOTTOM - place)) / (height - TOP - BOTTOM);
  const isInside = (value, range) => range === null || (value >= range[0] && value <= range[1]);
  const isKept = (number) => axes.every((axis, place) => isInside(axis.values[number], kept[place]));
  const written = (axis, number) => (axis.texts ? axis.texts[number] : exact(axis.values[number]));

  function draw() {
    const pen = sized(canvas, root.clientWidth, height);
    const order = chart.names.map((_, number) => number).sort((one, other) => goodness(one) - goodness(other));
    for (const number of order) stroke(pen, number, isKept(number) ? 0.15 + 0.75 * goodness(number) : 0.04, 1.2);
    if (hover !== null) stroke(pen, hover, 1, 3);
    axes.forEach((axis, place) => draft(pen, axis, place));
  }
  function goodness(number) {
    const value = share(last, last.values[number]);
    return chart.less ? 1 - value : value;
  }
  function stroke(pen, number, strength, wide) {
    pen.globalAlpha = strength;
    pen.strokeStyle = theme().link;
    pen.lineWidth = wide;
    pen.beginPath();
    axes.forEach((axis, place) => pen.lineTo(x(place), y(axis, axis.values[number])));
    pen.stroke();
    pen.globalAlpha = 1;
  }
  function draft(pen, axis, place) {
    pen.fillStyle = theme().ink;
    pen.fillRect(x(place), TOP, 1, height - TOP - BOTTOM);
    pen.textAlign = "center";
    const room = axes.length > 1 ? x(1) - x(0) - 6 : 2 * SIDE;
    pen.fillText(fitted(pen, axis.label, room), x(place), 14 + (pen.measureText(axis.label).width > room ? 0 : 4));
    pen.textAlign = place === axes.length - 1 ? "left" : "right";
    const aside = place === axes.length - 1 ? 6 : -5;
    Object.assign(pen, { fillStyle: theme().quiet, strokeStyle: theme().paper, lineWidth: 3 }); // Above the lines.
    for (const [value, text] of axis.marks || ticks(axis.low, axis.high, 5).map((value) => [value, short(value)]))
      for (const write of ["strokeText", "fillText"])
        pen[write](fitted(pen, text, SIDE), x(place) + aside, y(axis, value) + 4);
    if (!kept[place]) return;
    const [low, high] = kept[place].map((value) => y(axis, value));
    pen.fillStyle = theme().link;
    pen.globalAlpha = 0.45;
    pen.fillRect(x(place) - 4, high, 9, low - high);
    pen.globalAlpha = 1;
  }
  // Shortens a name at its start: parallel.tensor and parallel.pipeline differ only at the end.
  function fitted(pen, text, room) {
    if (pen.measureText(text).width <= room) return text;
    let from = 1;
    while (from < text.length && pen.measureText("…" + text.slice(from)).width > room) from++;
    return "…" + text.slice(from);
  }

  // Mouse input.
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  function lineAt(px, py) {
    const gap = Math.floor((px - SIDE) / (x(1) - x(0))), left = Math.min(axes.length - 2, Math.max(0, gap));
    const part = (px - x(left)) / (x(left + 1) - x(left));
    let best = null, least = 12;
    chart.names.forEach((_, number) => {
      const [one, other] = [axes[left], axes[left + 1]].map((axis) => y(axis, axis.values[number]));
      const away = Math.abs(one + (other - one) * part - py);
      if (isKept(number) && away < least) [best, least] = [number, away];
    });
    return best;
  }
  canvas.addEventListener("pointerdown", (event) => {
    const [px, py] = place(event), nearest = axes.findIndex((_, number) => Math.abs(x(number) - px) < 14);
    if (nearest < 0) return;
    held = { axis: nearest, from: py };
    kept[nearest] = null;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = place(event);
    if (held) {
      const axis = axes[held.axis];
      kept[held.axis] = [held.from, py].map((at) => back(axis, at)).sort((one, other) => one - other);
    }
    hover = held || axes.length < 2 ? null : lineAt(px, py);
    if (hover === null) tip.hide();
    else tip.show(event, chart.names[hover], axes.map((axis) => ({ name: axis.label, value: written(axis, hover) })));
    soon();
  });
  canvas.addEventListener("pointerup", () => { held = null; soon(); });
  canvas.addEventListener("pointerleave", () => { hover = null; tip.hide(); soon(); });
  canvas.addEventListener("dblclick", () => { kept.fill(null); soon(); });
  const soon = steelyard.keepDrawn(root, draw);
  draw();
  return { axes, kept };
};
