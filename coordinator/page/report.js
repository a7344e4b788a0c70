// Draws the report of `loco report` from the document that is written into the page.
"use strict";

const report = JSON.parse(document.getElementById("report").textContent);
const history_ = mergeHistory(null, report.history);
const at = (id) => document.getElementById(id);
const known = (column) => column.filter((v) => v != null);
const sum = (column) => known(column).reduce((total, v) => total + v, 0);
const mean = (column) => (known(column).length ? sum(column) / known(column).length : null);

function showSummary() {
  const { run, rounds } = history_;
  at("run-id").textContent = report.run_id;
  at("state").textContent = report.committed_rounds >= report.planned_rounds ? "finished" : "not finished";
  at("rounds").textContent = `${report.committed_rounds} of ${report.planned_rounds} rounds`;
  const begun = known(run.opened_at)[0], ended = known(run.committed_at).at(-1);
  if (ended) at("left").textContent = `${new Date(begun * 1000).toLocaleString("en-GB")}, ${humanSeconds(ended - begun)}`;
  const losses = known(run.validation_bits_per_byte);
  const up = mean(Object.values(history_.sites).flatMap((s) => s.contribution_bytes));
  const down = mean(run.update_bytes);
  const dense = (bytes) => (bytes ? `1/${Math.round(report.dense_bytes / bytes)} of dense` : "");
  const figures = [
    ["validation", losses.at(-1)?.toFixed(3) ?? "–", losses.length > 1 ? `bits per byte, from ${losses[0].toFixed(3)}` : "bits per byte"],
    ["up a site and round", up ? humanBytes(up) : "–", dense(up)],
    ["down a site and round", down ? humanBytes(down) : "–", dense(down)],
    ["sites", `${Object.keys(history_.sites).length}`, `${(mean(run.num_included) ?? 0).toFixed(1)} included a round`],
    ["parameters", report.params.toLocaleString("en"), `${humanBytes(report.dense_bytes)} dense`],
    ["rounds shown", `${rounds.length ? `${rounds[0]} to ${rounds.at(-1)}` : "none"}`, "the last 1,000 are kept"],
  ];
  at("figures").append(...figures.map(([name, value, under]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("span", { className: "under" }, under)))));
}

function showSites() {
  const head = at("sites").tHead.insertRow();
  for (const name of ["site", "rounds", "first loss", "last loss", "sent", "mean a round"]) head.append(element("th", { scope: "col" }, name));
  for (const [name, columns] of Object.entries(history_.sites)) {
    const losses = known(columns.train_bits_per_byte), bytes = known(columns.contribution_bytes);
    const cells = [name, `${bytes.length}`, losses[0]?.toFixed(3) ?? "–", losses.at(-1)?.toFixed(3) ?? "–", humanBytes(sum(bytes)), humanBytes(mean(bytes) ?? 0)];
    const row = at("sites").tBodies[0].insertRow();
    row.append(...cells.map((text) => element("td", {}, text)));
  }
}

function showConfig() {
  for (const [section, keys] of Object.entries(report.config)) {
    const list = element("dl", {}, element("div", { className: "section" }, section));
    for (const [key, value] of Object.entries(keys)) {
      list.append(element("dt", {}, key), element("dd", {}, typeof value === "object" ? JSON.stringify(value) : `${value}`));
    }
    at("config").append(list);
  }
}

function columnChart(box, columns) {
  return new RoundChart(box, (history) => ({
    series: columns.map(([name, label, stroke]) => ({ label, stroke: colour(stroke), width: 2, value: legend((v) => v.toPrecision(3)), spanGaps: true })),
    data: columns.map(([name]) => history.run[name]),
    axis: {},
  }));
}

showSummary();
lossChart(at("loss")).show(history_);
bytesChart(at("bytes"), () => report.dense_bytes).show(history_);
timeChart(at("time")).show(history_);
columnChart(at("norm"), [["update_norm", "norm", "accent"]]).show(history_);
columnChart(at("support"), [["update_density", "density", "pull"], ["support_overlap", "overlap", "push"]]).show(history_);
showSites();
showConfig();
