"use strict";
// Shared by all charts of a page: high-resolution canvases, the page's colours, axes, numbers, legends and tooltips.
// Text from a run is set as textContent or drawn on a canvas, never inserted as HTML.
const steelyard = (function () {
  const FONT = "11px system-ui, sans-serif", SERIES = 8;

  function element(tag, parent, text) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // Resizes a canvas at the resolution of the screen; returns its cleared 2D context.
  function sized(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) {
      Object.assign(canvas, { width: wide, height: high });
      Object.assign(canvas.style, { width: width + "px", height: height + "px" });
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return Object.assign(pen, { font: FONT, textAlign: "left", textBaseline: "alphabetic" });
  }

  // The page's colours, light or dark. A chart's colour is a CSS colour or an index into the series.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let known = null;
  function theme() {
    if (known === null) {
      const style = getComputedStyle(document.documentElement);
      const of = (name) => style.getPropertyValue(name).trim();
      known = { ink: of("--ink"), quiet: of("--quiet"), paper: of("--paper"), raised: of("--raised"),
        line: of("--line"), link: of("--link"),
        series: Array.from({ length: SERIES }, (_, place) => of("--series-" + place)) };
    }
    return known;
  }
  const colour = (given) => (typeof given === "number" ? theme().series[given % SERIES] : given);

  // Redraws when the width, the screen's resolution or the colour scheme changes, and when the returned function is
  // called.
  let drawings = [];
  function keepDrawn(root, draw) {
    let width = root.clientWidth, due = false;
    const soon = () => {
      if (due || !root.isConnected) return;
      due = true;
      requestAnimationFrame(() => { due = false; draw(); });
    };
    new ResizeObserver(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      soon();
    }).observe(root);
    drawings.push({ root, soon });
    return soon;
  }
  function redraw() {
    drawings = drawings.filter(({ root }) => root.isConnected); // A live page removes charts.
    drawings.forEach(({ soon }) => soon());
  }
  dark.addEventListener("change", () => { known = null; redraw(); });
  window.addEventListener("resize", redraw);

  // Round numbers from `low` to `high`, about `count` of them.
  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(1, count), power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step);
    return found;
  }
  // The same for a log scale: powers of ten, and the numbers between them if there are few.
  function powers(low, high, count) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.max(1, Math.ceil((last - first) / count)), found = [];
    for (const parts of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      found.length = 0;
      for (let power = first; power <= last; power += every)
        for (const part of parts) {
          const value = part * Math.pow(10, power);
          if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
        }
      if (found.length >= 3 || every > 1) break;
    }
    return found.length >= 2 ? found : ticks(low, high, count);
  }

  const plain = (value, digits) => String(Number(value.toPrecision(digits)));
  function short(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15))
      return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return plain(value / (letter === "k" ? 1e3 : unit), 4) + letter;
    return plain(value, 5);
  }
  function exact(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(3).replace("e+", "e");
    if (size >= 1e5) return Math.round(value).toLocaleString("en");
    return Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 });
  }

  // A tooltip with lines of text, or with rows of a colour, a name and a value.
  function tip(root) {
    const box = element("div", root);
    box.className = "tip";
    box.hidden = true;
    return {
      hide: () => { box.hidden = true; },
      show: (event, head, rows = [], foot = "") => {
        box.replaceChildren(document.createTextNode(head));
        const table = rows.length ? element("table", box) : null;
        for (const row of rows) {
          const line = element("tr", table), name = element("td", line);
          if (row.colour !== undefined) swatch(name, row);
          name.append(row.name);
          element("td", line, row.value);
        }
        if (foot) box.append(foot);
        box.hidden = false;
        const bounds = root.getBoundingClientRect(), left = event.clientX - bounds.left;
        const isRight = left + 18 + box.offsetWidth > bounds.width;
        box.style.left = Math.max(0, isRight ? left - 14 - box.offsetWidth : left + 16) + "px";
        box.style.top = event.clientY - bounds.top + 14 + "px";
      },
    };
  }
  function swatch(parent, { colour: given, dash, area, faded }) {
    const made = element("span", parent);
    made.className = "swatch " + (area ? "area" : dash || "");
    if (faded) made.style.opacity = 0.5;
    made.style.setProperty("--colour", typeof given === "number" ? `var(--series-${given % SERIES})` : given);
  }
  // An entry of a legend: a button that shows and hides; `press` returns whether it is visible now.
  function entry(parent, look, name, press) {
    const button = element("button", parent);
    button.type = "button";
    button.title = `${name}: click to hide or show`;
    if (look) swatch(button, look);
    button.append(name);
    button.setAttribute("aria-pressed", "true");
    button.onclick = () => button.setAttribute("aria-pressed", String(press()));
    return button;
  }

  // Decodes base64 to an ArrayBuffer, for typed arrays.
  function bytes(text) {
    const letters = atob(text), found = new Uint8Array(letters.length);
    for (let place = 0; place < letters.length; place++) found[place] = letters.charCodeAt(place);
    return found.buffer;
  }

  // Draws the chart whose container and data are the two elements before the calling script.
  const charts = [];
  function here() {
    const data = document.currentScript.previousElementSibling, root = data.previousElementSibling;
    const chart = JSON.parse(data.textContent);
    charts.push(Object.assign(steelyard[chart.kind](root, chart), { root }));
  }
  return { element, sized, theme, colour, keepDrawn, ticks, powers, short, exact, tip, swatch, entry, bytes, here, charts };
})();
