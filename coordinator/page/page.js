// Polls the coordinator's documents and shows them. Everything on the page comes from there.
"use strict";

const POLL_MILLIS = 2000;
const AWAY_AFTER = 2; // failed polls
const byId = (id) => document.getElementById(id);

const columns = [
  // [heading, class, value of a site]
  ["site", "", (s) => `${s.name}`],
  ["state", "words rare", (s) => s.status],
  ["doing", "words rare", (s) => (isAlive(s) ? s.phase : "")],
  ["bound by", "words", (s) => s.bound ?? "–"],
  ["time by phase", "words rare", (s) => shares(s.phase_seconds_lately)],
  ["round", "rare", (s) => `${s.round}`],
  ["loss", "", (s) => s.train_bits_per_byte?.toFixed(3) ?? "–"],
  ["up", "", (s) => humanBytes(s.bytes_up)],
  ["down", "", (s) => humanBytes(s.bytes_down)],
  ["up, rate", "rare", (s) => rate(s.goodput_up)],
  ["down, rate", "rare", (s) => rate(s.goodput_down)],
  ["included", "rare", (s) => `${s.rounds_included}`],
  ["tokens", "rare", (s) => s.tokens.toLocaleString("en")],
  ["EF norm", "rare", (s) => s.ef_norm?.toPrecision(3) ?? "–"],
  ["ranks", "rare", (s) => `${s.ranks}`],
];

let status = null;
let history_ = null;
let timeline = { now: 0, sites: {} };
let failures = 0;
const charts = {};

const isAlive = (site) => site.status === "syncing" || site.status === "ready";
const rate = (bytes) => (bytes == null ? "–" : `${humanBytes(bytes)}/s`);
const time = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

async function fetchJson(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function poll() {
  try {
    const before = status;
    const news = await fetchJson("status.json");
    if (before && before.run_id !== news.run_id) {
      history_ = null;
      timeline = { now: 0, sites: {} };
    }
    // The last rounds may still change: reports come after a round has closed.
    const since = history_ ? Math.max(0, history_.rounds.at(-1) - 3) : 0;
    const [rounds, spans] = await Promise.all([
      fetchJson(`history.json?since=${since}`),
      fetchJson(`timeline.json?since=${timeline.now ? timeline.now - 60 : 0}`),
    ]);
    status = news;
    history_ = mergeHistory(history_, rounds);
    mergeTimeline(spans);
    failures = 0;
    show();
  } catch (error) {
    failures += 1;
    if (failures >= AWAY_AFTER) showAway(error);
  }
}

async function pollForEver() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, POLL_MILLIS));
  }
}

function mergeTimeline(news) {
  const oldest = news.now - timelineSeconds() - 60;
  const sites = {};
  for (const [name, spans] of Object.entries(news.sites)) {
    const known = (timeline.sites[name] ?? []).filter((s) => s[2] + s[3] > oldest);
    const last = known.at(-1)?.[2] ?? 0;
    sites[name] = known.concat(spans.filter((s) => s[2] > last + 1e-3));
  }
  timeline = { now: news.now, sites };
}

// --- showing ------------------------------------------------------------------------------------

function show() {
  byId("away").hidden = true;
  setText("run-id", status.run_id);
  document.title = `${status.round}/${status.rounds} ${status.run_id}`;
  const late = status.notes[0]?.what === "late" && status.phase === "open";
  const held = status.hold !== "none" && status.phase === "gathering";
  byId("state").className = `pill ${late ? "late" : status.phase}`;
  setText("state", late ? "late" : held ? status.hold : { open: "training" }[status.phase] ?? status.phase);
  byId("progress").value = status.rounds ? status.round / status.rounds : 1;
  setText("rounds", `round ${status.round} of ${status.rounds}`);
  setText("left", timeLeft());
  setText("waiting-for", status.waiting_for);
  showFigures();
  charts.loss.show(history_);
  charts.bytes.show(history_);
  charts.time.show(history_);
  showTimeline();
  showSites();
  showNotes("refusals", status.refusals, "no request was refused since the coordinator started");
  showNotes("notes", status.notes, "nothing yet");
  showConfig();
}

function showAway(error) {
  byId("state").className = "pill away";
  setText("state", "away");
  byId("away").hidden = false;
  setText("away", `The coordinator does not answer (${error.message}); the numbers below are old. Trying again.`);
}

function timeLeft() {
  const rounds = status.rounds - status.round;
  if (!rounds || status.seconds_a_round == null) return "";
  return `${humanSeconds(rounds * status.seconds_a_round)} left, ${humanSeconds(status.seconds_a_round)} a round`;
}

function showFigures() {
  const alive = status.sites.filter(isAlive);
  const measured = status.validation.at(-1);
  const included = status.sites.filter((s) => s.contribution_bytes);
  const up = included.length ? included.reduce((sum, s) => sum + s.contribution_bytes, 0) / included.length : 0;
  const against = (bytes) => (bytes ? `1/${Math.round(status.dense_bytes_per_round / bytes)} of dense` : "");
  const figures = [
    ["validation", measured ? measured.bits_per_byte.toFixed(3) : "–", measured ? `bits per byte, round ${measured.round}` : "bits per byte"],
    ["sites alive", `${status.sites_alive}`, `${status.sites_registered} registered, ${status.sites_included} included`],
    ["up a site and round", up ? humanBytes(up) : "–", against(up)],
    ["down a site and round", status.update_bytes ? humanBytes(status.update_bytes) : "–", against(status.update_bytes)],
    ["bits a sent value", status.bits_per_value_up?.toFixed(2) ?? "–", "all in, uplink"],
    ["tokens", compact(status.sites.reduce((sum, s) => sum + s.tokens, 0)), `${compact(status.params)} parameters`],
    ["theta", status.theta_digest.slice(0, 8), alive.length ? digestsAgree(alive) : `round ${status.round}`],
  ];
  const list = byId("figures");
  if (!list.children.length) {
    for (const [name] of figures) {
      list.append(element("div", {}, element("dt", {}, name), element("dd", {}, "", element("span", { className: "under" }))));
    }
  }
  figures.forEach(([, value, under], i) => {
    const dd = list.children[i].lastChild;
    if (dd.firstChild.nodeType !== Node.TEXT_NODE) dd.prepend("");
    dd.firstChild.data = value;
    dd.lastChild.textContent = under;
  });
}

const compact = (count) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(count);

function digestsAgree(sites) {
  const wrong = sites.filter((s) => s.theta_agrees === false);
  if (wrong.length) return `NOT the same at ${wrong.map((s) => s.name).join(", ")}`;
  return `the same at ${sites.filter((s) => s.theta_agrees).length} of ${sites.length} sites`;
}

function timelineSeconds() {
  return Math.min(3600, Math.max(10, 6 * (status?.seconds_a_round ?? 10)));
}

function showTimeline() {
  const names = Object.keys(timeline.sites);
  const alive = new Set(status.sites.filter(isAlive).map((s) => s.name));
  const ends = names.flatMap((name) => timeline.sites[name].slice(-1).map((s) => s[2] + s[3]));
  // After the run the strip stays on its end instead of running empty.
  const to = alive.size || !ends.length ? timeline.now : Math.max(...ends);
  const doing = new Map(status.sites.map((s) => [s.name, s.phase]));
  const rows = names.map((name) => {
    const spans = timeline.sites[name];
    const last = spans.at(-1);
    const end = last ? last[2] + last[3] : to;
    const going = alive.has(name) && last ? [[doing.get(name), last[1], end, to - end, true]] : [];
    return { name, spans: spans.concat(going) };
  });
  const commits = history_.rounds
    .map((round, i) => ({ round, at: history_.run.committed_at[i] }))
    .filter((c) => c.at != null);
  if (rows.length) drawTimeline(byId("timeline"), { rows, commits, from: to - timelineSeconds(), to });
}

function shares(phaseSeconds) {
  const total = PHASES.reduce((sum, phase) => sum + (phaseSeconds[phase] ?? 0), 0);
  const bar = element("div", { className: "share" });
  for (const phase of PHASES) {
    const part = (phaseSeconds[phase] ?? 0) / total;
    if (!(part > 0)) continue;
    const piece = element("span", { title: `${phase} ${Math.round(100 * part)} %` });
    piece.style.width = `${100 * part}%`;
    piece.style.background = `var(--${phase})`;
    bar.append(piece);
  }
  return bar;
}

function showSites() {
  const head = byId("sites").tHead;
  if (!head.rows.length) {
    const row = head.insertRow();
    for (const [heading, kind] of columns) row.append(element("th", { className: kind, scope: "col" }, heading));
  }
  const sites = [...status.sites].sort((a, b) => isAlive(b) - isAlive(a));
  setText("sites-note", sites.length ? "time and bound over the last 10 rounds; bytes since the coordinator started" : "none has joined yet");
  const body = element("tbody");
  for (const site of sites) {
    const row = body.insertRow();
    row.dataset.site = site.name;
    for (const [heading, kind, value] of columns) {
      const cell = element("td", { className: kind }, value(site));
      cell.dataset.column = heading;
      row.append(cell);
    }
    row.cells[0].classList.add(isAlive(site) ? "alive" : "dead");
    if (!isAlive(site) && site.status !== "left") row.cells[0].classList.add("lost");
  }
  byId("sites").tBodies[0].replaceWith(body);
}

function showNotes(id, notes, nothing) {
  const items = notes.map((note) => element("li", {},
    element("time", { dateTime: new Date(note.at * 1000).toISOString() }, time(note.at)),
    element("b", {}, note.what), note.message));
  byId(id).replaceChildren(...(items.length ? items : [element("li", { className: "empty" }, nothing)]));
}

function showConfig() {
  if (byId("config").children.length) return;
  byId("config").parentElement.open = matchMedia("(min-width: 761px)").matches;
  for (const [section, keys] of Object.entries(status.config)) {
    const list = element("dl", {}, element("div", { className: "section" }, section));
    for (const [key, value] of Object.entries(keys)) {
      list.append(element("dt", {}, key), element("dd", {}, typeof value === "object" ? JSON.stringify(value) : `${value}`));
    }
    byId("config").append(list);
  }
}

function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

// --- start --------------------------------------------------------------------------------------

charts.loss = lossChart(byId("loss"));
charts.bytes = bytesChart(byId("bytes"), () => status.dense_bytes_per_round);
charts.time = timeChart(byId("time"));
byId("phases").append(...PHASES.map((phase) => {
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = `var(--${phase})`;
  return element("li", {}, swatch, phase);
}));
new ResizeObserver(() => status && showTimeline()).observe(byId("timeline").parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => status && showTimeline());
document.addEventListener("visibilitychange", () => document.hidden || poll());
pollForEver();
