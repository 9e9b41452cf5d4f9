"use strict";
// Draws a packed timeline (observe/report/timeline_data.py) on a canvas: a strip of all steps to choose from, and below it the
// chosen steps with three lanes per rank, and under them, pale, the compute that the planner predicts. Text from the run is added to the page only as textContent.
function steelyardTimeline(root, packed) {
  const forecast = packed.predicted?.spans || [], hasLabels = (packed.hosts || []).some(Boolean);
  const LABEL = hasLabels && root.clientWidth > 600 ? 150 : 92, LANE = 10, LANES = forecast.length ? 4 : 3;
  const GROUP = LANES * LANE + (LANES === 3 && hasLabels ? 14 : 6), GAP = 10, AXIS = 22, VIEW = 560, STRIP = 90;
  const { element, sized, theme, bytes } = steelyard;
  const data = {
    steps: new Int32Array(bytes(packed.steps)), begin: new Float64Array(bytes(packed.begin)),
    length: new Float32Array(bytes(packed.length)), sums: new Float32Array(bytes(packed.sums)),
    index: new Uint32Array(bytes(packed.index)), start: new Uint32Array(bytes(packed.start)),
    span: new Uint32Array(bytes(packed.span)), name: new Uint8Array(bytes(packed.name)),
    stage: new Int16Array(bytes(packed.stage)), micro: new Int16Array(bytes(packed.micro)),
    first: new Float32Array(bytes(packed.first)),
  };
  const { ranks, stages, names, lanes, colours, whole } = packed;
  const ms = packed.tick / 1e6, count = data.steps.length;
  const wholeAt = new Map(whole.map((place, number) => [place, number]));
  const pale = colours.map((colour) => mixed(colour, 0.38));
  let chosen = [0, 0], view = [0, 1], shown = ranks.map((_, place) => place);

  // ---- the page's parts
  root.classList.add("timeline");
  const legend = element("div", root);
  legend.className = "legend";
  names.forEach((name, number) => {
    const entry = element("span", legend);
    steelyard.swatch(entry, { colour: colours[number], area: true });
    entry.append(name);
  });
  if (forecast.length) {
    const entry = element("span", legend);
    steelyard.swatch(entry, { colour: "var(--quiet)", area: true, faded: true });
    entry.append("predicted");
  }
  const strip = element("canvas", root);
  strip.title = "every timed step; click one, or drag over several";
  const bar = element("div", root);
  bar.className = "controls";
  const field = (label, type) => {
    const wrap = element("label", bar, label + " ");
    const input = element(type, wrap);
    return input;
  };
  const from = field("steps", "input"), to = field("to", "input"), who = field("ranks", "select");
  for (const input of [from, to]) {
    input.type = "number";
    input.min = data.steps[0];
    input.max = data.steps[count - 1];
  }
  element("option", who, "all").value = "all";
  element("option", who, "one of each stage").value = "one";
  [...new Set(stages)].forEach((stage) => (element("option", who, "stage " + stage).value = String(stage)));
  const button = (text, act) => (element("button", bar, text).onclick = act);
  button("slowest step", () => choose(slowest(), slowest()));
  button("step before", () => choose(chosen[0] - 1, chosen[0] - 1));
  button("next step", () => choose(chosen[1] + 1, chosen[1] + 1));
  button("whole width", () => { view = [0, total()]; draw(); });
  const note = element("span", bar);
  note.className = "note";
  const scroller = element("div", root);
  scroller.className = "lanes";
  const tall = element("div", scroller), canvas = element("canvas", tall);
  canvas.tabIndex = 0;
  const tip = steelyard.tip(root);

  // ---- time and places
  const total = () => data.begin[chosen[1]] + data.length[chosen[1]] - data.begin[chosen[0]];
  function slowest() {
    let best = 0;
    for (let place = 1; place < count; place++) if (data.length[place] > data.length[best]) best = place;
    return best;
  }
  function placeOf(step) {
    let best = 0;
    for (let place = 0; place < count; place++) if (data.steps[place] <= step) best = place;
    return best;
  }
  function choose(first, last) {
    const inside = (place) => Math.min(count - 1, Math.max(0, place));
    chosen = [inside(Math.min(first, last)), inside(Math.max(first, last))];
    view = [0, total()];
    from.value = data.steps[chosen[0]];
    to.value = data.steps[chosen[1]];
    let missing = 0;
    for (let place = chosen[0]; place <= chosen[1]; place++) if (!wholeAt.has(place)) missing++;
    const many = chosen[1] - chosen[0] + 1;
    note.textContent = many + (many === 1 ? " step, " : " steps, ") + round(total()) + " ms" +
      (missing ? "; " + missing + " only as sums by kind (pale), not span by span" : "");
    draw();
  }
  const round = (value) => (value === 0 ? "0" : value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(2) : value.toFixed(4));
  function mixed(colour, share) {
    const part = (at) => Math.round(parseInt(colour.slice(at, at + 2), 16) * (1 - share) + 255 * share);
    return "rgb(" + part(1) + "," + part(3) + "," + part(5) + ")";
  }
  function rows() {
    const found = [];
    let y = AXIS, before = null;
    for (const place of shown) {
      if (before !== null && stages[place] !== before) y += GAP;
      before = stages[place];
      found.push({ place, y });
      y += GROUP;
    }
    return { found, height: y };
  }

  // ---- the strip of all steps: mean over ranks, by kind
  const means = new Float32Array(count * names.length);
  let longest = 0;
  for (let place = 0; place < count; place++) {
    longest = Math.max(longest, data.length[place]);
    for (let rank = 0; rank < ranks.length; rank++)
      for (let name = 0; name < names.length; name++)
        means[place * names.length + name] +=
          data.sums[(place * ranks.length + rank) * names.length + name] / ranks.length;
  }
  const stripX = (width) => (place) => LABEL + ((width - LABEL - 10) * place) / count;
  function drawStrip() {
    const width = root.clientWidth, pen = sized(strip, width, STRIP), x = stripX(width), base = STRIP - 22;
    const top = (value) => base - ((base - 6) * value) / longest;
    for (let place = 0; place < count; place++) {
      let sum = 0;
      const left = x(place), wide = Math.max(0.5, x(place + 1) - left - (count < 200 ? 1 : 0));
      for (let name = 0; name < names.length; name++) {
        const value = means[place * names.length + name];
        pen.fillStyle = colours[name];
        pen.fillRect(left, top(sum + value), wide, top(sum) - top(sum + value));
        sum += value;
      }
      if (wholeAt.has(place)) {
        pen.fillStyle = theme().ink;
        pen.fillRect(left, base + 2, Math.max(1, wide), 3);
      }
    }
    pen.strokeStyle = theme().ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x(chosen[0]) - 1, 3, Math.max(3, x(chosen[1] + 1) - x(chosen[0]) + 1), base + 4);
    pen.fillStyle = theme().quiet;
    pen.textAlign = "right";
    pen.fillText(round(longest) + " ms", LABEL - 6, 14);
    pen.fillText("0", LABEL - 6, base);
    pen.textAlign = "left";
    pen.fillText("step " + data.steps[0] + "; underlined: every span is here", LABEL, STRIP - 5);
    pen.textAlign = "right";
    pen.fillText("step " + data.steps[count - 1], width - 10, STRIP - 5);
  }

  // ---- the lanes
  function draw() {
    drawStrip();
    const { found, height } = rows(), visible = Math.min(VIEW, height + 4);
    scroller.style.height = visible + "px";
    tall.style.height = height + "px";
    const width = scroller.clientWidth, top = scroller.scrollTop, pen = sized(canvas, width, visible);
    const scale = (width - LABEL - 10) / (view[1] - view[0]);
    const x = (time) => LABEL + (time - view[0]) * scale;
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, AXIS, width - LABEL - 10, visible - AXIS);
    pen.clip();
    for (const { place, y } of found) {
      const at = y - top;
      if (at + GROUP < AXIS || at > visible) continue;
      pen.fillStyle = theme().raised;
      for (let lane = 0; lane < LANES; lane++) pen.fillRect(LABEL, at + lane * LANE, width, LANE - 1);
      for (let step = chosen[0]; step <= chosen[1]; step++) {
        const begin = data.begin[step] - data.begin[chosen[0]];
        if (begin > view[1] || begin + data.length[step] < view[0]) continue;
        if (wholeAt.has(step)) spansOf(pen, wholeAt.get(step), place, begin, at, x, scale);
        else sumsOf(pen, step, place, begin, at, x, scale);
        forecastOf(pen, step, place, begin, at, x, scale);
      }
    }
    pen.restore();
    labels(pen, found, top, visible, width);
    axis(pen, x, width, visible);
  }
  function firstAfter(low, high, tick) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.start[middle] + data.span[middle] < tick) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  function spansOf(pen, number, rank, begin, at, x, scale) {
    const cell = number * ranks.length + rank, last = data.index[cell + 1];
    const seen = [-1, -1, -1]; // The pixel up to which each lane is painted, so that spans thinner than a pixel are painted once.
    for (let i = firstAfter(data.index[cell], last, Math.max(0, (view[0] - begin) / ms)); i < last; i++) {
      const start = begin + data.start[i] * ms;
      if (start > view[1]) break;
      const name = data.name[i], lane = lanes[name], left = x(start), wide = data.span[i] * ms * scale;
      if (left + wide < seen[lane] + 0.5) continue;
      seen[lane] = left + wide;
      pen.fillStyle = data.micro[i] >= 0 && data.micro[i] % 2 ? pale[name] : colours[name];
      pen.fillRect(left, at + lane * LANE, Math.max(0.5, wide - (wide > 3 ? 0.5 : 0)), LANE - 1);
      if (data.micro[i] >= 0 && lane === 0 && wide > 15) {
        pen.fillStyle = data.micro[i] % 2 ? "#1c2733" : "#fff";
        pen.font = "8px system-ui, sans-serif";
        pen.textAlign = "left";
        pen.fillText(data.micro[i], Math.max(left, LABEL) + 2, at + LANE - 2);
      }
    }
  }
  function sumsOf(pen, step, rank, begin, at, x, scale) {
    const done = [0, 0, 0];
    pen.globalAlpha = 0.4;
    for (let name = 0; name < names.length; name++) {
      const value = data.sums[(step * ranks.length + rank) * names.length + name], lane = lanes[name];
      pen.fillStyle = colours[name];
      pen.fillRect(x(begin + done[lane]), at + lane * LANE, value * scale, LANE - 1);
      done[lane] += value;
    }
    pen.globalAlpha = 1;
  }
  // The prediction begins with the first pass of the step.
  function forecastOf(pen, step, rank, begin, at, x, scale) {
    pen.globalAlpha = 0.55;
    for (const [stage, , colour, , micro, start, span] of forecast) {
      const left = begin + data.first[step] + start;
      if (stage !== stages[rank] || left > view[1] || left + span < view[0]) continue;
      pen.fillStyle = micro % 2 ? mixed(colour, 0.38) : colour;
      pen.fillRect(x(left), at + 3 * LANE, Math.max(0.5, span * scale - (span * scale > 3 ? 0.5 : 0)), LANE - 1);
    }
    pen.globalAlpha = 1;
  }
  function labels(pen, found, top, visible, width) {
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, visible - AXIS);
    pen.clip();
    let before = null;
    for (const { place, y } of found) {
      const at = y - top;
      if (stages[place] !== before && before !== null) {
        pen.fillStyle = theme().quiet;
        pen.fillRect(0, at - GAP / 2 - 3, width, 1);
      }
      const isFirst = stages[place] !== before;
      before = stages[place];
      if (at + GROUP < AXIS || at > visible) continue;
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "right";
      pen.fillStyle = theme().ink;
      const isStaged = isFirst && new Set(stages).size > 1;
      const more = hasLabels ? [packed.hosts[place], packed.devices[place]] : isStaged ? ["stage " + stages[place]] : [];
      const name = "rank " + ranks[place] + (hasLabels && isStaged ? ", stage " + stages[place] : "");
      pen.fillText(name, LABEL - 8, at + 10, LABEL - 10);
      pen.fillStyle = theme().quiet;
      more.forEach((text, line) => pen.fillText(text, LABEL - 8, at + 23 + 12 * line, LABEL - 10));
    }
    pen.restore();
  }
  function axis(pen, x, width, visible) {
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const tick of steelyard.ticks(view[0], view[1], Math.max(2, Math.min(8, Math.floor((width - LABEL) / 75))))) {
      pen.fillStyle = theme().quiet;
      pen.fillText(round(tick) + " ms", x(tick), 12);
      pen.fillStyle = "rgba(90,107,123,.25)";
      pen.fillRect(x(tick), 16, 1, visible);
    }
    pen.fillStyle = theme().ink;
    for (let place = chosen[0] + 1; place <= chosen[1]; place++) {
      const at = x(data.begin[place] - data.begin[chosen[0]]);
      if (at > LABEL && at < width) pen.fillRect(at, 16, 1, visible);
    }
  }

  // ---- input: wheel zooms, dragging moves, a click on the strip chooses
  function zoom(factor, around) {
    const size = Math.min(total(), Math.max((view[1] - view[0]) * factor, 1e-4));
    const share = (around - view[0]) / (view[1] - view[0]);
    move(around - share * size, size);
  }
  function move(start, size) {
    start = Math.max(0, Math.min(start, total() - size));
    view = [start, start + size];
    draw();
  }
  const timeAt = (event) => {
    const box = canvas.getBoundingClientRect();
    return view[0] + ((event.clientX - box.left - LABEL) / (box.width - LABEL - 10)) * (view[1] - view[0]);
  };
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey) return; // Scrolls through the ranks.
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 400), timeAt(event));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, start: view[0], top: scroller.scrollTop };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (held = null));
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return hover(event);
    tip.hide();
    const size = view[1] - view[0];
    scroller.scrollTop = held.top - (event.clientY - held.y);
    move(held.start - ((event.clientX - held.x) / (canvas.clientWidth - LABEL - 10)) * size, size);
  });
  canvas.addEventListener("pointerleave", tip.hide);
  canvas.addEventListener("dblclick", () => { view = [0, total()]; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const size = view[1] - view[0], middle = (view[0] + view[1]) / 2;
    const act = {
      "+": () => zoom(0.5, middle), "=": () => zoom(0.5, middle), "-": () => zoom(2, middle), 0: () => zoom(1e9, middle),
      ArrowLeft: () => move(view[0] - size / 5, size), ArrowRight: () => move(view[0] + size / 5, size),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  function hover(event) {
    const box = canvas.getBoundingClientRect(), time = timeAt(event), y = event.clientY - box.top + scroller.scrollTop;
    const row = rows().found.find((each) => y >= each.y && y < each.y + LANES * LANE);
    const text = row && event.clientX > box.left + LABEL ? tooltip(row.place, Math.floor((y - row.y) / LANE), time) : null;
    if (text === null) tip.hide();
    else tip.show(event, text);
  }
  function tooltip(rank, lane, time) {
    for (let step = chosen[0]; step <= chosen[1]; step++) {
      const begin = data.begin[step] - data.begin[chosen[0]];
      if (time < begin || time > begin + data.length[step]) continue;
      const where = hasLabels ? " on " + packed.hosts[rank] + " (" + packed.devices[rank] + ")" : "";
      const head = "rank " + ranks[rank] + where + ", step " + data.steps[step];
      if (lane === 3) return forecastTold(stages[rank], time - begin - data.first[step], head);
      if (!wholeAt.has(step)) return sumsTold(step, rank, lane, head);
      const cell = wholeAt.get(step) * ranks.length + rank, slack = ((view[1] - view[0]) / canvas.clientWidth) * 2;
      let best = -1, nearest = slack;
      for (let i = data.index[cell]; i < data.index[cell + 1]; i++) {
        if (lanes[data.name[i]] !== lane) continue;
        const start = begin + data.start[i] * ms, end = start + data.span[i] * ms;
        const away = time < start ? start - time : time > end ? time - end : 0;
        if (away < nearest || (away === 0 && nearest > 0)) { best = i; nearest = away; }
      }
      if (best < 0) return null;
      return names[data.name[best]] + (data.micro[best] >= 0 ? " of micro-batch " + data.micro[best] : "") +
        (data.stage[best] >= 0 ? ", stage " + data.stage[best] : "") + "\n" + round(data.span[best] * ms) + " ms from " +
        round(data.start[best] * ms) + " ms of the step\n" + head;
    }
    return null;
  }
  function forecastTold(stage, time, head) {
    const found = forecast.find(([own, , , , , start, span]) => own === stage && time >= start && time <= start + span);
    if (!found) return null;
    const [, kind, , part, micro, , span] = found;
    return "predicted " + kind + " of micro-batch " + micro + ", stage " + part + "\n" + round(span) + " ms\n" + head;
  }
  function sumsTold(step, rank, lane, head) {
    const lines = [];
    names.forEach((name, number) => {
      const value = data.sums[(step * ranks.length + rank) * names.length + number];
      if (lanes[number] === lane && value > 0) lines.push(name + " " + round(value) + " ms in total");
    });
    return lines.length ? [...lines, head].join("\n") : null;
  }
  const stripPlace = (event) => {
    const box = strip.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left - LABEL) / (box.width - LABEL - 10)) * count);
  };
  let pressed = null;
  strip.addEventListener("pointerdown", (event) => {
    pressed = stripPlace(event);
    strip.setPointerCapture(event.pointerId);
    choose(pressed, pressed);
  });
  strip.addEventListener("pointermove", (event) => pressed !== null && choose(pressed, stripPlace(event)));
  strip.addEventListener("pointerup", () => (pressed = null));
  from.onchange = () => choose(placeOf(+from.value), Math.max(placeOf(+from.value), chosen[1]));
  to.onchange = () => choose(Math.min(chosen[0], placeOf(+to.value)), placeOf(+to.value));
  who.onchange = () => {
    const seen = new Set();
    shown = ranks.map((_, place) => place).filter((place) => {
      if (who.value === "all") return true;
      if (who.value !== "one") return String(stages[place]) === who.value;
      return !seen.has(stages[place]) && seen.add(stages[place]);
    });
    scroller.scrollTop = 0;
    draw();
  };
  const start = whole.length ? whole[whole.length >> 1] : 0;
  choose(start, start);
  scroller.addEventListener("scroll", steelyard.keepDrawn(root, draw));
  // The steps and the part of their time that are shown, for another timeline of the same run.
  const place = () => ({ steps: chosen.map((each) => data.steps[each]), view });
  function show({ steps, view: [begin, end] }) {
    const places = steps.map(placeOf);
    if (places.some((each, number) => data.steps[each] !== steps[number])) return;
    choose(...places);
    move(begin, Math.min(end - begin, total()));
  }
  return { choose: (first, last) => choose(placeOf(first), placeOf(last)), view: () => view, chosen: () => chosen, place, show };
}
