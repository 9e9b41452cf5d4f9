"use strict";
// The logs of a run, host by host, with a search. The server searches the end of large logs.
function runLogs(root, id) {
  const host = make("select"), stream = make("select"), find = make("input", { type: "search", placeholder: "search the logs" });
  const lines = part("div"), box = make("div", { class: "logs" });
  host.setAttribute("aria-label", "host");
  stream.setAttribute("aria-label", "stream");
  find.setAttribute("aria-label", "search the logs");
  for (const [value, text] of [["", "all output"], ["out", "standard output"], ["err", "standard error"]])
    stream.append(make("option", { value }, text));
  box.append(make("div", { class: "controls" }, host, stream, find), lines);
  root.append(make("h2", {}, "Logs"), box);
  let hosts = "";
  for (const input of [host, stream]) input.onchange = () => refresh();
  find.oninput = () => refresh();

  function marked(line, wanted) {
    if (!wanted) return [line + "\n"];
    const found = [], lower = line.toLowerCase();
    let at = 0;
    for (let next = lower.indexOf(wanted); next >= 0; next = lower.indexOf(wanted, at)) {
      found.push(line.slice(at, next), make("mark", {}, line.slice(next, next + wanted.length)));
      at = next + wanted.length;
    }
    return [...found, line.slice(at) + "\n"];
  }
  function shown({ logs, wanted }) {
    const nodes = logs.flatMap((log) => {
      if (!log.lines.length) return [];
      const count = log.found === null ? "" : `, ${log.is_all ? "" : "the last "}${log.found} ${log.found === 1 ? "line" : "lines"} found`;
      const rest = log.searched < log.size && log.found !== null ? `, the last ${size(log.searched)} searched` : "";
      const title = { out: "standard output", err: "standard error", log: "launcher" }[log.stream];
      const text = make("pre", { class: log.stream }, log.lines.flatMap((line) => marked(line, wanted)));
      return [make("p", { class: "note title" }, `${title}, ${size(log.size)}${count}${rest}`), text];
    });
    return nodes.length ? nodes : [make("p", { class: "note" }, wanted ? "No line matches." : "Nothing was printed yet.")];
  }
  async function refresh() {
    if (!host.value) return;
    const wanted = find.value.trim(), asked = { id, host: host.value, find: wanted, stream: stream.value };
    const answer = await ask("/api/logs", asked).catch((error) => {
      if (!error.isAnswer) throw error;
      return { logs: [] };
    });
    if (find.value.trim() !== wanted || host.value !== asked.host || stream.value !== asked.stream) return;
    const old = [...lines.querySelectorAll("pre")].map((each) => [each.scrollTop, each.scrollHeight - each.clientHeight]);
    lines.show({ logs: answer.logs, wanted: wanted.toLowerCase(), host: host.value }, shown);
    lines.querySelectorAll("pre").forEach((each, place) => {
      const [top, most] = old[place] || [0, 0];
      each.scrollTop = top >= most - 4 ? each.scrollHeight : top; // Follow the end unless somebody scrolled up.
    });
  }
  return { refresh, hosts: (names) => {
    if (names.join("\n") === hosts) return;
    hosts = names.join("\n");
    const chosen = host.value;
    host.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) host.value = chosen;
  } };
}
