"use strict";
// Stacked bars. A chart has
//   at         labels of the categories along x
//   y          label of the values
//   bars       [{ label, stack, colour, faded, values: [... or null] }]; bars with the same stack are stacked
steelyard.bars = function (root, chart) {
  const { element, sized, theme, ticks, short, exact } = steelyard;
  const LEFT = 54, RIGHT = 14, TOP = 20, BOTTOM = 24, LEGEND = 26;
  const hidden = new Set(), height = chart.height - LEGEND, stacks = [...new Set(chart.bars.map((bar) => bar.stack))];
  const legend = element("div", root), canvas = element("canvas", root), tip = steelyard.tip(root);
  legend.className = "legend";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${chart.y} by ${chart.at.join(", ")}`);
  for (const { label, colour, faded } of chart.bars)
    steelyard.entry(legend, { colour, faded, area: true }, label, () => {
      if (!hidden.delete(label)) hidden.add(label);
      soon();
      return !hidden.has(label);
    });
  const shown = () => chart.bars.filter((bar) => !hidden.has(bar.label));
  const sum = (place, stack) =>
    shown().reduce((total, bar) => total + (bar.stack === stack ? bar.values[place] || 0 : 0), 0);
  const slot = () => (root.clientWidth - LEFT - RIGHT) / chart.at.length;

  function draw() {
    const width = root.clientWidth, pen = sized(canvas, width, height), base = height - BOTTOM;
    const highest = Math.max(...chart.at.map((_, place) => Math.max(...stacks.map((stack) => sum(place, stack))))) || 1;
    const y = (value) => base - ((base - TOP) * value) / (highest * 1.04);
    pen.fillStyle = theme().quiet;
    pen.fillText(chart.y, 2, 10);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of ticks(0, highest, Math.max(2, Math.floor((base - TOP) / 38)))) {
      pen.fillStyle = theme().quiet;
      pen.fillText(short(value), LEFT - 7, y(value));
      pen.fillStyle = theme().line;
      pen.fillRect(LEFT, Math.round(y(value)), width - LEFT - RIGHT, 1);
    }
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    const wide = Math.min(90, (slot() * 0.76) / stacks.length);
    const every = Math.ceil((Math.max(...chart.at.map((name) => pen.measureText(name).width)) + 10) / slot());
    chart.at.forEach((name, place) => {
      const middle = LEFT + slot() * (place + 0.5);
      pen.fillStyle = theme().quiet;
      if (place % every === 0) pen.fillText(name, middle, base + 15);
      stacks.forEach((stack, number) => {
        let done = 0;
        for (const bar of shown().filter((each) => each.stack === stack)) {
          const value = bar.values[place] || 0, left = middle + (number - stacks.length / 2) * wide;
          pen.globalAlpha = bar.faded ? 0.5 : 1;
          pen.fillStyle = steelyard.colour(bar.colour);
          pen.fillRect(left, y(done + value), Math.max(1, wide - 1), y(done) - y(done + value));
          done += value;
        }
      });
      pen.globalAlpha = 1;
    });
  }
  canvas.addEventListener("pointermove", (event) => {
    const place = Math.floor((event.clientX - canvas.getBoundingClientRect().left - LEFT) / slot());
    if (place < 0 || place >= chart.at.length) return tip.hide();
    const known = shown().filter((bar) => bar.values[place] !== null);
    const rows = known.map((bar) =>
      ({ colour: bar.colour, faded: bar.faded, area: true, name: bar.label, value: exact(bar.values[place]) }));
    tip.show(event, `${chart.at[place]}, ${chart.y}`, rows);
  });
  canvas.addEventListener("pointerleave", tip.hide);
  const soon = steelyard.keepDrawn(root, draw);
  draw();
  return { bars: chart.bars };
};
