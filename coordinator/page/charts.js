// What the page and the report draw alike. Classic script: the report inlines it, file:// included.
"use strict";

const PHASES = ["compute", "encode", "push", "wait", "pull", "apply", "eval", "sync"];
const SITE_COLOURS = ["#3f83d4", "#e07b2f", "#2e9e6b", "#8a63d2", "#c94f7c", "#b58a12", "#45b0a0", "#7d8590"];
const MANY_SITES = SITE_COLOURS.length; // above, a band from the lowest to the highest site

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function humanBytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return unit === "B" ? `${Math.round(count)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function humanSeconds(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

// element("td", {className: "x"}, "text", child): text is always text, never markup.
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function faded(hex, alpha) {
  return hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

// --- charts over rounds -------------------------------------------------------------------------

// A chart whose series may change from one document to the next: it is made anew when they do.
class RoundChart {
  constructor(box, describe) {
    this.box = box;
    this.describe = describe; // history -> {series, data, bands?, scales?, axis?}
    this.plot = null;
    this.key = "";
    new ResizeObserver(() => this.fit()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
  }

  show(history) {
    this.history = history;
    const wanted = this.describe(history);
    const key = JSON.stringify(wanted.series.map((s) => s.label));
    const rounds = history.rounds;
    if (this.plot && key === this.key) {
      this.plot.setData([rounds, ...wanted.data]);
    } else {
      this.key = key;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(wanted), [rounds, ...wanted.data], this.box);
    }
    this.rest();
  }

  // Without a pointer on the chart the legend tells what is known last.
  rest() {
    if (!(this.plot?.cursor.left >= 0)) this.plot?.setLegend({ idx: this.history.rounds.length - 1 });
  }

  restyle() {
    this.key = "";
    if (this.history) this.show(this.history);
  }

  fit() {
    if (this.plot && this.box.clientWidth) this.plot.setSize(this.size());
  }

  size() {
    return { width: this.box.clientWidth, height: 230 };
  }

  options({ series, bands, scales, axis }) {
    const grid = { stroke: colour("line"), width: 1 };
    const common = { stroke: colour("soft"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    return {
      ...this.size(),
      cursor: { points: { size: 5 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, ...scales },
      axes: [
        { ...common, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
        { ...common, size: 62, ...axis, grid: { ...grid, ...axis.grid } },
      ],
      series: [{ label: "round", value: (_, v) => v ?? "–" }, ...series],
      bands,
      hooks: { ready: [() => setTimeout(() => this.rest())] },
    };
  }
}

// For a legend: the value at the pointer, or the last one known before it.
function legend(format) {
  return (plot, value, series, index) => {
    for (let i = index; value == null && i >= 0; i--) value = plot.data[series][i];
    return value == null ? "–" : format(value);
  };
}

const loss = legend((v) => v.toFixed(3));

function lossChart(box) {
  return new RoundChart(box, (history) => {
    const names = Object.keys(history.sites);
    const columns = names.map((name) => history.sites[name].train_bits_per_byte);
    const train = names.length > MANY_SITES
      ? spread(columns, colour("accent"), "train", loss)
      : {
        series: names.map((name, i) => ({ label: name, stroke: SITE_COLOURS[i], width: 1.5, value: loss, spanGaps: true })),
        data: columns,
      };
    const validation = {
      label: "validation", stroke: colour("ink"), width: 2, value: loss, spanGaps: true,
      points: { show: true, size: 6 },
    };
    return {
      series: [...train.series, validation],
      data: [...train.data, history.run.validation_bits_per_byte],
      bands: train.bands,
      axis: { values: (_, ticks) => ticks.map((v) => v.toFixed(1)) },
    };
  });
}

function bytesChart(box, denseBytes) {
  return new RoundChart(box, (history) => {
    const value = legend(humanBytes);
    const up = spread(Object.values(history.sites).map((s) => s.contribution_bytes), colour("push"), "up", value);
    const line = (label, stroke, dash) => ({ label, stroke, dash, width: 2, value, spanGaps: true });
    return {
      series: [...up.series, line("down", colour("pull")), line("dense fp32", colour("soft"), [6, 5])],
      data: [...up.data, history.run.update_bytes, history.rounds.map(() => denseBytes())],
      bands: up.bands,
      scales: { y: { distr: 3 } },
      axis: { grid: { filter: (_, ticks) => ticks.map(decade) }, values: (_, ticks) => ticks.map((v) => (decade(v) ? humanBytes(v).replace(".0", "") : "")) },
    };
  });
}

const decade = (v) => (v && Number.isInteger(Math.log10(v)) ? v : null);

function timeChart(box) {
  return new RoundChart(box, (history) => {
    const whole = history.run.committed_at.map((at) => at != null);
    let below = history.rounds.map(() => 0);
    const series = [];
    const data = [];
    for (const phase of PHASES.filter((p) => p !== "sync")) {
      const column = history.mean[phase];
      const own = column.slice();
      below = below.map((sum, i) => sum + (column[i] ?? 0));
      data.push(below.map((sum, i) => (whole[i] && history.mean.compute[i] != null ? sum : null)));
      series.push({
        label: phase, stroke: colour(phase), width: 1, points: { show: false },
        value: (_, __, ___, index) => humanSeconds(own.slice(0, index + 1).findLast((v) => v != null) ?? 0),
      });
    }
    const bands = series.slice(1).map((s, i) => ({ series: [i + 2, i + 1], fill: faded(colour(s.label), 0.75) }));
    series[0].fill = faded(colour("compute"), 0.75);
    return { series, data, bands, scales: { y: { range: (_, __, max) => [0, max || 1] } }, axis: { values: (_, ticks) => ticks.map(humanSeconds) } };
  });
}

// Median of the sites as a line, from the lowest to the highest site as a band.
function spread(columns, stroke, label, value) {
  const length = columns[0]?.length ?? 0;
  const low = [], middle = [], high = [];
  for (let i = 0; i < length; i++) {
    const known = columns.map((c) => c[i]).filter((v) => v != null).sort((a, b) => a - b);
    low.push(known[0] ?? null);
    middle.push(known[known.length >> 1] ?? null);
    high.push(known[known.length - 1] ?? null);
  }
  const edge = { class: "edge", stroke: faded(stroke, 0.35), width: 1, value, points: { show: false }, spanGaps: true };
  return {
    series: [{ ...edge, label: `${label}, highest` }, { ...edge, label: `${label}, lowest` }, { label, stroke, width: 2, value, spanGaps: true }],
    data: [high, low, middle],
    bands: [{ series: [1, 2], fill: faded(stroke, 0.18) }],
  };
}

// Take the columns of a new document over: its rounds replace the same and later ones.
function mergeHistory(history, news) {
  const keep = Math.max(0, news.first_round - (history?.first_round ?? news.first_round));
  const join = (old, fresh, length) => {
    const head = (old ?? []).slice(0, keep);
    while (head.length < keep) head.push(null);
    return head.concat(fresh ?? new Array(length).fill(null));
  };
  const fold = (old, fresh) => Object.fromEntries(Object.keys(fresh).map((k) => [k, join(old?.[k], fresh[k], news.num_rounds)]));
  const names = new Set([...Object.keys(keep ? history.sites : {}), ...Object.keys(news.sites)]);
  const unknown = { train_bits_per_byte: undefined, contribution_bytes: undefined };
  const sites = {};
  for (const name of [...names].sort()) sites[name] = fold(history?.sites[name], news.sites[name] ?? unknown);
  const first = keep ? history.first_round : news.first_round;
  return {
    first_round: first,
    rounds: Array.from({ length: keep + news.num_rounds }, (_, i) => first + i),
    run: fold(history?.run, news.run),
    mean: fold(history?.mean, news.mean),
    sites,
  };
}

// --- Gantt strip --------------------------------------------------------------------------------

// Rows of sites over [from, to] in Unix seconds; commits are vertical lines.
function drawTimeline(canvas, { rows, commits, from, to }) {
  const width = canvas.parentElement.clientWidth;
  const labels = Math.min(120, Math.max(...rows.map((r) => r.name.length), 4) * 7.5 + 14);
  const rowHeight = rows.length > 24 ? 14 : 22;
  const height = rows.length * rowHeight + 22;
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12.5px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const x = (at) => labels + ((at - from) / (to - from)) * (width - labels);
  rows.forEach((row, i) => {
    const y = i * rowHeight;
    pen.fillStyle = colour("ink");
    pen.fillText(row.name, 0, y + rowHeight / 2, labels - 8);
    row.spans.forEach(([phase, , start, seconds, going], k) => {
      // Spans follow each other; what lies between is the jitter of the heartbeats that told of them.
      const next = row.spans[k + 1]?.[2];
      const end = next && Math.abs(next - start - seconds) < 1 ? next : start + seconds;
      const left = Math.max(x(start), labels);
      const right = Math.min(x(end), width);
      if (right <= left) return;
      pen.globalAlpha = going ? 0.55 : 1;
      pen.fillStyle = colour(phase);
      pen.fillRect(left, y + 3, Math.max(right - left - 0.5, 0.8), rowHeight - 6);
    });
    pen.globalAlpha = 1;
  });
  pen.strokeStyle = colour("ink");
  pen.fillStyle = colour("soft");
  pen.globalAlpha = 0.45;
  let free = labels;
  for (const { at } of commits) {
    const line = Math.round(x(at)) + 0.5;
    if (line < labels || line > width) continue;
    pen.beginPath();
    pen.moveTo(line, 0);
    pen.lineTo(line, height - 20);
    pen.stroke();
  }
  pen.globalAlpha = 1;
  for (const { round, at } of commits) {
    const text = `round ${round}`;
    const left = x(at) - pen.measureText(text).width - 3;
    if (left < free) continue;
    pen.fillText(text, left, height - 9);
    free = x(at) + 8;
  }
}
