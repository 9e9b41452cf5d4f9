"use strict";
// The list of runs: state, verdict, search, and boxes to choose runs to compare.
function runList(page) {
  const find = make("input", { type: "search", placeholder: "name, state or verdict" });
  const compare = make("a", { hidden: true }), count = make("span", { class: "quiet" }), rows = part();
  const ticked = new Set();
  let data = null;
  find.setAttribute("aria-label", "find a run");
  page.append(make("div", { class: "top" }, find, count, compare), rows);
  find.addEventListener("input", show);

  function counted(runs) {
    const states = {};
    for (const run of runs) states[run.state] = (states[run.state] || 0) + 1;
    const parts = Object.entries(states).map(([state, many]) => `${many} ${state}`);
    return `${runs.length} ${runs.length === 1 ? "run" : "runs"}${parts.length > 1 ? `: ${parts.join(", ")}` : ""}`;
  }
  function row(run) {
    const box = make("input", { type: "checkbox", checked: ticked.has(run.id) });
    box.setAttribute("aria-label", `compare ${run.id}`);
    box.onchange = () => {
      if (!ticked.delete(run.id)) ticked.add(run.id);
      offer();
    };
    return make("tr", {}, make("td", { class: "tick" }, box),
      make("td", { class: "name" }, dot(run.verdict), make("a", { href: linkTo([run.id]) }, run.id === "." ? run.name : run.id)),
      make("td", { class: "state" }, run.state), make("td", { class: "number step" }, progressText(run.progress)),
      make("td", { class: "number left" }, run.progress.seconds_left === null ? "" : duration(run.progress.seconds_left)),
      make("td", { class: "number loss" }, run.loss === null ? "" : number(run.loss)),
      make("td", { class: "said" }, run.verdict.message));
  }
  function offer() {
    compare.hidden = ticked.size < 2;
    compare.href = linkTo([...ticked]);
    compare.textContent = `compare ${ticked.size} runs`;
  }
  function show() {
    document.getElementById("folder").textContent = data.folder;
    document.title = "Steelyard";
    const wanted = find.value.trim().toLowerCase();
    const found = data.runs.filter((run) => `${run.id} ${run.state} ${run.verdict.message}`.toLowerCase().includes(wanted));
    count.textContent = counted(found);
    rows.show(found, () => [found.length
      ? table(["", "run", "state", "step", "left", "loss", "verdict"], found.map(row), "runs")
      : make("p", { class: "note" }, data.runs.length ? "No run matches." : "There are no runs here yet.")]);
  }
  return { refresh: async () => { data = await ask("/api/runs"); show(); } };
}
