// The page of a run: draws `data` of page_data.py, and if it is live, what /events tells. All texts go in as text.
"use strict";
const $ = id => document.getElementById(id);
const make = (tag, text, name) => { const el = document.createElement(tag); if (text != null) el.textContent = text; if (name) el.className = name; return el; };
let D = JSON.parse($("data").textContent);

// Each chart: title, subtitle, series as [column, colour, options]. `%x` is a phase's share of a version's time, `~x` the
// moving mean of x, `youngest k3` the k3 of the youngest tokens of a version. Options: w width, a opacity, y2 right axis,
// lacks: drawn only where some version lacks that column. x: which table the columns are of.
const CHARTS = {
  learn: [
    { t: "reward", p: "mean of a batch; bold: mean of 20 versions", s: [["reward/mean", 0, { w: 1, a: .35 }], ["~reward/mean", 0, { w: 2.5 }]] },
    { t: "reverse KL to the teacher, nat", p: "mean of log policy - log teacher over sampled tokens; bold: mean of 20 versions; right axis: share of tokens with a teacher", only: "teacher/share", s: [["teacher/reverse_kl", 0, { w: 1, a: .35 }], ["~teacher/reverse_kl", 0, { w: 2.5 }], ["teacher/share", 7, { y2: true }]] },
    { t: "loss", p: "mean over trained tokens of a batch; bold: mean of 20 versions", only: "tokens_trained", s: [["loss", 0, { w: 1, a: .35 }], ["~loss", 0, { w: 2.5 }]] },
    { t: "evaluation", p: "on problems kept out of training", x: "evaluations", dots: true },
    { t: "groups all right, none right", p: "what is left between them is what teaches", s: [["groups/solved_all", 2], ["groups/solved_none", 5]], range: [0, 1] },
    { t: "problems by solved share", p: "never drawn, never solved, in between, always solved; retired are among these", s: [["problems/unseen", 7], ["problems/unsolved", 5], ["problems/between", 0, { w: 2 }], ["problems/solved", 2], ["problems/retired", 6]] },
    { t: "groups with equal rewards", p: "of all that were made for a batch; they teach nothing", s: [["groups/flat", 0, { w: 1, a: .35 }], ["~groups/flat", 0, { w: 2.5 }]], range: [0, 1] },
    { t: "answer length, tokens", p: "right axis: share cut off", s: [["length/mean", 0, { w: 2 }], ["length/max", 6], ["length/truncated", 5, { y2: true }]] },
    { t: "entropy, nat", p: "of the policy at the sampled tokens", s: [["entropy/mean", 3, { w: 2 }]] }],
  sound: [
    { t: "mismatch and off-policy, nat", p: "k3, log scale: fresh tokens are the engines' noise, all tokens the age", s: [["youngest k3", 6, { lacks: "mismatch/k3_fresh" }], ["mismatch/k3_fresh", 0], ["offpolicy/k3", 1]], log: true },
    { t: "effective sample size", p: "share of the batch", s: [["ess/token", 0], ["ess/sequence", 2]], range: [0, 1] },
    { t: "age of tokens, versions", p: "share of the batch by age", stack: true, range: [0, 1], s: ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+"].map((b, i) => ["age/share_" + b, "a" + i]) },
    { t: "critic: explained variance", p: "of the returns; right axis: mean value and mean return", only: "critic/loss", s: [["critic/explained_variance", 0, { w: 1.5 }], ["critic/value", 2, { y2: true }], ["critic/return", 5, { y2: true }]] },
    { t: "gradient norm before clipping", p: "log scale; right axis: learning rate", s: [["gradient/norm", 0, { w: 1.5 }], ["lr", 7, { y2: true }]], log: true },
    { t: "largest ratio; share of tokens masked", p: "right axis: masked", s: [["ratio/max", 3], ["limit/masked_negative", 5, { y2: true }], ["limit/masked_positive", 1, { y2: true }]], log: true }],
  fast: [
    { t: "share of a version's time", p: "what the learner did; the rest is at the top", stack: true, range: [0, 1], s: [["%time/wait_s", 5], ["%time/train_s", 0], ["%time/publish_s", 2], ["%time/checkpoint_s", 4]] },
    { t: "seconds of a version", p: "cut at the 98th percentile", cut: true, s: [["time/version_s", 7, { w: 1.5 }], ["time/wait_s", 5]] },
    { t: "trained tokens/s", p: "of all time", s: [["tokens_per_s", 0, { w: 1.5 }]] },
    { t: "weights: pause and lag, s", p: "log scale", s: [["weights/pause_s", 1], ["weights/lag_s", 6]], log: true },
    { t: "memory of rank 0, GiB", p: "peak", s: [["memory/host_gib", 0], ["memory/gpu_gib", 2]] }],
  servers: [
    { t: "sampled tokens/s", p: "of each server", x: "looks", each: "tokens_per_s" },
    { t: "teacher", p: "samples that wait for it; right axis: tokens/s that it scores", x: "looks", s: [["servers/teacher", 5], ["servers/teacher_tokens_per_s", 0, { y2: true }]] },
    { t: "sequences", p: "of all servers", x: "looks", s: [["servers/places", 7], ["servers/running", 0, { w: 2 }], ["servers/waiting", 5]] },
    { t: "KV cache in use, preemptions", p: "right axis: preemptions so far", x: "looks", each: "kv_usage", also: [["servers/preempted", 5, { y2: true }]] },
    { t: "servers", p: "known, heard, asked for", x: "looks", s: [["servers/known", 7], ["servers/heard", 2, { w: 2 }], ["servers/wanted", 1]] },
    { t: "versions", p: "next batch to be formed; oldest that a server runs", x: "looks", s: [["buffer/version", 0], ["servers/oldest_version", 5]] },
    { t: "items in the buffer", p: "leased: being generated; stored: ready to be trained", x: "looks", s: [["buffer/items_leased", 0], ["buffer/items_stored", 2], ["buffer/items_waiting", 7]] }],
};
const PHASES = { wait: "c5", train: "c0", publish: "c2", checkpoint: "c4", rest: "c7", generating: "c0", queued: "c4", "in task": "c3", moving: "c6", free: "c5" };
const SAID = { running: "--ok", waiting: "--warn", silent: "--bad", ended: "--dim" };

// colours: a canvas knows no CSS, so they are read through a hidden element
const probe = document.body.appendChild(make("i")); probe.hidden = true;
const paint = (name, alpha) => { probe.style.color = `var(--${name})`; const c = getComputedStyle(probe).color; return alpha == null ? c : c.replace(/^rgba?\(([^,]+,[^,]+,[^,)]+).*$/, `rgba($1,${alpha})`); };
const tint = c => typeof c === "string" ? c : "c" + c;
const figure = v => { if (v == null) return "–"; const a = Math.abs(v); return a >= 1e6 || (a < 1e-3 && a > 0) ? v.toExponential(2) : a >= 100 || Number.isInteger(v) ? String(Math.round(v)) : a >= 1 ? v.toFixed(2) : v.toFixed(3); };
const last = list => { for (let i = list.length - 1; i >= 0; i--) if (list[i] != null) return list[i]; return null; };

// columns, derived ones kept until there are more records
let kept = new Map();
const blank = () => D.version.map(() => null);
function movingMean(values, n) {
  let sum = 0; const seen = [];
  return values.map(v => { if (v == null) return null; seen.push(v); sum += v; if (seen.length > n) sum -= seen.shift(); return sum / seen.length; });
}
function column(name) {
  if (kept.has(name)) return kept.get(name);
  let found;
  if (name === "version") found = D.version;
  else if (name === "hours") { let t = 0; found = column("time/version_s").map((v, i) => (t += (v || 0) * (i ? D.version[i] - D.version[i - 1] : 1)) / 3600); }
  else if (name[0] === "~") found = movingMean(column(name.slice(1)), 20);
  else if (name[0] === "%") { const all = column("time/version_s"); found = column(name.slice(1)).map((v, i) => all[i] ? (v || 0) / all[i] : null); }
  else if (name === "youngest k3") found = D.version.map((_, i) => { const at = k => (D.columns[k] || [])[i] ?? null; const key = Object.keys(D.youngest.ages).find(k => at(k) != null && (at("age/share_" + D.youngest.ages[k]) ?? 1) >= D.youngest.least); return key ? at(key) : null; });
  else found = D.columns[name] || blank();
  kept.set(name, found);
  return found;
}
const byHours = () => $("axis").value === "hours";
const timed = chart => chart.x === "looks" || byHours();
const VERSIONS = [1, 2, 5].flatMap(n => [...Array(8).keys()].map(e => n * 10 ** e)).sort((a, b) => a - b);
const SECONDS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map(n => 60 * n), ...[1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 960, 1920].map(n => 3600 * n)];
const times = seconds => { const top = Math.max(...seconds), [unit, n] = top < 120 ? ["s", 1] : top < 7200 ? ["min", 60] : ["h", 3600]; return seconds.map(s => `${+(s / n).toFixed(2)} ${unit}`); };
function tableOf(chart) {  // x, and a function that gives a column
  const seconds = () => column("hours").map(h => 3600 * h);
  if (chart.x === "looks") { const t0 = D.looks.length ? D.looks[0].time : 0; return [D.looks.map(l => l.time - t0), k => D.looks.map(l => l[k] ?? null)]; }
  if (chart.x === "evaluations") { const all = seconds(), at = v => byHours() ? all[D.version.indexOf(v)] ?? 0 : v; return [D.evaluations.map(e => at(e.version)), k => D.evaluations.map(e => e.figures[k] ?? null)]; }
  return [byHours() ? seconds() : column("version"), column];
}
function seriesOf(chart) {
  if (chart.s) return chart.s.filter(([, , o]) => !o || !o.lacks || column(o.lacks).some(v => v == null));
  const names = new Set(), also = chart.also || [];
  if (chart.x === "evaluations") for (const e of D.evaluations) for (const k of Object.keys(e.figures)) names.add(k);
  else for (const look of D.looks) for (const k of Object.keys(look)) if (k.startsWith("server/") && k.endsWith("/" + chart.each)) names.add(k);
  return [...[...names].slice(0, 12).map((k, i) => [k, i % 7, { w: 1.4 }]), ...also];
}
function dataOf(chart, series) {
  const [x, get] = tableOf(chart), cols = series.map(s => get(s[0]));
  if (chart.stack) { let top = null; const none = x.map((_, i) => cols.every(c => c[i] == null)); return [x, ...cols.map(c => top = c.map((v, i) => none[i] ? null : (v || 0) + (top ? top[i] : 0)))]; }
  return [x, ...cols.map((c, n) => chart.log && !(series[n][2] || {}).y2 ? c.map(v => v == null || v <= 0 ? null : Math.max(v, 1e-8)) : c)];
}
const median = list => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];
function breaksOf(chart) {  // by point: whether no line leads to it, because the learner or the run was started before it
  const table = chart.x || "versions", name = "broken " + table;
  if (kept.has(name)) return kept.get(name);
  let found = [];
  if (table === "looks") {
    const gaps = D.looks.map((look, i) => i ? look.time - D.looks[i - 1].time : 0);
    found = gaps.map((gap, i) => i > 0 && gap > 4 * median(gaps.slice(Math.max(1, i - 5), i + 6)));
  } else if (table === "versions") {  // as `began_between` of actors/watch/figures.py
    const time = column("time"), took = column("time/version_s"), seconds = i => took[i] * (D.version[i] - D.version[i - 1]);
    found = time.map((t, i) => i > 0 && t != null && time[i - 1] != null && took[i] != null && t - time[i - 1] > 1.2 * seconds(i) + 5);
  }
  kept.set(name, found);
  return found;
}
function gapsOf(chart) {  // uPlot's gaps of a series, in pixels: where values are missing, and where a line is broken
  return (u, s, from, to, nulls) => {
    const x = u.data[0], at = i => Math.round(u.valToPos(x[i], "x", true)), breaks = breaksOf(chart), all = [...nulls], joined = [];
    for (let i = Math.max(1, from); i <= to; i++) if (breaks[i]) all.push([at(i - 1), at(i)]);
    for (const [a, b] of all.sort((one, two) => one[0] - two[0])) { const before = joined[joined.length - 1]; if (before && a <= before[1]) before[1] = Math.max(before[1], b); else joined.push([a, b]); }
    return joined;
  };
}
function alone(chart, values) {  // points that no line leads to
  const breaks = breaksOf(chart), joined = i => i > 0 && i < values.length && values[i] != null && values[i - 1] != null && !breaks[i];
  return values.flatMap((v, i) => v == null || joined(i) || joined(i + 1) ? [] : [i]);
}
function missing(chart) {  // why it lacks what it lacks
  if (chart.x) return D[chart.x].length || !D.reasons[chart.x] ? [] : [D.reasons[chart.x]];
  const all = D.version.length;
  return seriesOf(chart).flatMap(([name]) => {
    const lacking = (D.columns[name] || blank()).filter(v => v == null).length, why = D.reasons[name];
    if (!lacking || chart.stack || "~%".includes(name[0]) || name === "youngest k3" || (lacking === all && !why)) return [];
    return [`${name} is missing in ${lacking === all ? "all" : `${lacking} of ${all}`} versions${why ? ": " + why : ""}`];
  });
}
const has = chart => { if (chart.only && !D.columns[chart.only]) return false; const [, get] = tableOf(chart), base = k => chart.x ? k : k.replace(/^[~%]/, ""); return seriesOf(chart).some(s => get(base(s[0])).some(v => v != null)); };

const drawn = [];
function addChart(chart, grid) {
  const card = make("div", null, "card");
  chart.plot = make("div"); chart.keys = make("div", null, "keys"); chart.note = make("p", "", "missing");
  card.append(make("h3", chart.t), make("p", chart.p || ""), chart.plot, chart.keys, chart.note);
  grid.append(card); chart.card = card; drawn.push(chart);
}
function arrange(grid) {  // rows of about the same number of cards
  const n = grid.children.length, most = Math.max(1, Math.floor(grid.clientWidth / 300)), rows = Math.ceil(n / most) || 1;
  grid.style.setProperty("--columns", Math.max(1, Math.ceil(n / rows)));
}
const height = () => innerWidth < 600 ? 150 : 180;
function draw(chart) {
  if (chart.u) chart.u.destroy();
  const series = chart.series = seriesOf(chart), right = series.some(s => s[2] && s[2].y2);
  const tick = vs => vs.map(v => v == null ? "" : Math.abs(v) >= 1e6 ? v / 1e6 + "M" : Math.abs(v) >= 1e4 ? v / 1e3 + "k" : v && Math.abs(v) < 1e-3 ? v.toExponential(0) : String(+v.toPrecision(3)));
  const axis = { stroke: paint("dim"), grid: { stroke: paint("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 42, values: (u, vs) => tick(vs) };
  const first = v => +(v / 10 ** Math.floor(+Math.log10(v).toFixed(6))).toFixed(6);
  const tens = (u, vs) => { const shown = vs.filter(v => first(v) === 1).length > 1 ? [1] : [1, 2, 5]; return vs.map(v => shown.includes(first(v)) ? v : null); };  // less than a decade has 2 and 5 too
  const powers = { filter: tens, grid: { ...axis.grid, filter: tens }, values: (u, vs) => vs.map(v => v == null ? "" : v.toExponential(0)) };
  const along = { ...axis, size: 26, space: 60, incrs: () => timed(chart) ? SECONDS : VERSIONS, values: (u, vs) => timed(chart) ? times(vs) : tick(vs) };
  const top = u => { const vs = column(series[0][0]).filter(v => v != null).sort((a, b) => a - b); return [0, (vs[Math.floor(.98 * (vs.length - 1))] || 1) * 1.1]; };
  const padded = (u, low, high) => low === 0 && high === 0 ? [0, 1] : low == null ? [null, null] : uPlot.rangeNum(low, high, .1, true);  // uPlot draws nothing but zeros up to 100
  const few = dataOf(chart, series)[0].length < 3;
  chart.u = new uPlot({
    width: Math.max(200, chart.card.clientWidth - 24), height: height(), legend: { show: false },
    cursor: { sync: { key: chart.x === "looks" ? "looks" : "versions" }, drag: { x: true, y: false }, points: { size: 5 } },
    scales: { x: { time: false }, y: chart.cut ? { range: top } : chart.range ? { range: chart.range } : chart.log ? { distr: 3 } : { range: padded }, z: { range: padded } },
    axes: [along, chart.log ? { ...axis, ...powers } : axis, ...(right ? [{ ...axis, scale: "z", side: 1, grid: { show: false }, size: 46 }] : [])],
    series: [{}, ...series.map(([name, c, o = {}]) => ({
      label: name, stroke: paint(tint(c), o.a), width: chart.stack ? 0 : o.w || 1.2, scale: o.y2 ? "z" : "y", spanGaps: false, gaps: gapsOf(chart),
      points: { show: !!chart.dots || few, filter: (u, s, show) => show || chart.stack ? null : alone(chart, u.data[s]), size: chart.dots || few ? 6 : 4, fill: paint(tint(c)) }, fill: chart.stack ? paint(tint(c), tint(c)[0] === "a" ? .95 : .6) : undefined }))],
    bands: chart.stack ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : undefined,
    hooks: { setLegend: [u => showKeys(chart, u.cursor.idx)] },
  }, dataOf(chart, series), chart.plot);
  showKeys(chart, null);
}
function showKeys(chart, index) {
  const [x, get] = tableOf(chart), named = [];
  for (const [name, c] of chart.series || []) {
    const values = get(name), v = index == null ? last(values) : values[index];
    if (v == null || (name.startsWith("age/share_") && !values.some(one => one > 0))) continue;
    const item = make("span"), box = make("i");
    box.style.background = `var(--${tint(c)})`;
    item.append(box, `${name.replace("~", "mean of ").replace("%", "").replace(/^server\/(.*)\/\w+$/, "$1")} ${figure(v)}`);
    named.push(item);
  }
  if (index != null) named.push(make("span", chart.x === "looks" ? times([x[index]])[0] : "version " + (chart.x ? D.evaluations[index].version : D.version[index])));
  chart.keys.replaceChildren(...named);
  chart.note.textContent = missing(chart).join("; ");
}

function fill(id, head, rows) {  // a table; its section is hidden while there is nothing in it
  $(id).hidden = !rows.length;
  const table = $(id).querySelector("table"), line = (cells, tag) => { const tr = make("tr"); tr.append(...cells.map(v => make(tag, v))); return tr; };
  table.replaceChildren(...(head ? [line(head, "th")] : []), ...rows.map(row => line(row, "td")));
}
function answer(e) {
  const card = make("div", null, "card");
  card.append(make("p", `${e.source}${e.source ? ", " : ""}reward ${figure(e.reward)}`));
  if (!e.episode.length) { const own = make("div", null, "sampled"); own.append(make("pre", e.answer)); const given = make("div", null, "given"); given.append(make("pre", e.prompt)); card.append(given, own); }
  for (const chapter of e.episode) {
    if (chapter.title) card.append(make("h3", chapter.title));
    if (chapter.repeated) card.append(make("p", chapter.repeated));
    for (const passage of chapter.passages) {
      const part = make("div", null, passage.sampled ? "sampled" : "given"), text = make("pre");
      for (const [words, isCall] of passage.pieces) text.append(isCall ? make("span", words, "call") : words);
      part.append(make("div", passage.title, "what"), text);
      card.append(part);
    }
  }
  return card;
}
function showProcesses(rows) {
  $("processes").hidden = !rows.length;
  const shown = [];
  for (const [name, shares] of rows) {
    const cell = make("div"), stack = make("div", null, "stack"), keys = make("div", null, "keys");
    for (const [phase, share] of Object.entries(shares)) {
      if (share < .005) continue;
      const part = make("i"), box = make("i"), key = make("span");
      part.style.width = 100 * share + "%"; part.style.background = box.style.background = `var(--${PHASES[phase] || "c6"})`;
      key.append(box, `${phase} ${Math.round(100 * share)} %`);
      stack.append(part); keys.append(key);
    }
    cell.append(stack, keys); shown.push(make("b", name), cell);
  }
  const box = make("div", null, "shares"); box.append(...shown);
  $("processes").querySelector(".card").replaceChildren(box);
}
function showOverview(lost) {
  const o = D.overview, state = lost ? "silent" : o.status;
  document.title = `${D.name} ${o.version}/${o.versions}`;
  $("name").textContent = D.name; $("status").textContent = lost ? "no news" : state; $("status").style.color = `var(${SAID[state]})`;
  $("told").textContent = lost ? "`python -m actors watch` does not answer" : o.summary;
  $("figures").replaceChildren(...Object.entries(o.figures).map(([name, value]) => { const div = make("div"); div.append(make("dt", name), make("dd", value)); return div; }));
  $("bar").style.width = 100 * o.version / o.versions + "%";
  $("says").replaceChildren(make("div", o.advice, "say advice"), ...o.alerts.map(([level, text]) => make("div", text, "say " + level)), ...(D.trouble ? [make("div", D.trouble, "say bad")] : []));
  fill("waits", o.wait_columns, o.waits); fill("servers", o.server_columns, o.servers); fill("failures", ["reason", "count"], o.failures);
  showProcesses(o.processes);
}
function showEvaluations() {
  const names = [...new Set(D.evaluations.flatMap(e => Object.keys(e.figures)))];
  fill("evaluations", ["version", ...names], D.evaluations.map(e => [e.version, ...names.map(k => k in e.figures ? figure(e.figures[k]) : "")]));
  const read = $("evaluations").querySelector(".read");
  read.replaceChildren(...Object.entries(D.evaluated).flatMap(([title, some]) => some.length ? [make("h3", title), ...some.map(answer)] : []));
  fill("models", ["model", "reward", "solved"], D.models);
}
async function showSamples() {
  const batch = $("batch").value, read = $("samples").querySelector(".read");
  if (batch === "") return;
  if (!(batch in D.samples)) D.samples[batch] = await (await fetch("samples?batch=" + batch)).json();
  if (batch === $("batch").value) read.replaceChildren(...D.samples[batch].map(answer), ...(D.samples[batch].length ? [] : [make("p", "none are stored any more")]));
}
function offerSamples() {
  const chosen = $("batch").value || String(D.batches[D.batches.length - 1] ?? "");
  $("samples").hidden = !D.batches.length;
  $("batch").replaceChildren(...D.batches.map(b => make("option", b)));
  $("batch").value = chosen;
}
function showTables() {
  const n = D.version.length - 1, keys = Object.keys(D.columns);
  $("ends").hidden = n < 0;
  if (n >= 0) fill("ends", ["metric", "version " + D.version[0], "version " + D.version[n]], keys.map(k => [k, figure(D.columns[k][0]), figure(D.columns[k][n])]));
  fill("settings", null, D.settings);
  fill("certificate", D.certificate.columns, D.certificate.rows);
  if (D.certificate.summary) { $("certificate").hidden = false; $("certificate").querySelector("p").textContent = D.certificate.summary; }
  const some = Object.entries(D.examples);
  $("examples").hidden = !some.length;
  $("examples").querySelector("h2").textContent = D.comparison[0]; $("examples").querySelector("p").textContent = D.comparison[1];
  $("examples").querySelector(".read").replaceChildren(...some.flatMap(([title, list]) => [make("h3", title), ...list.map(answer)]));
}
function findMetrics() {
  const grid = $("rest").querySelector(".grid"), words = $("find").value.trim();
  for (let i = drawn.length - 1; i >= 0; i--) if (drawn[i].found) { drawn[i].u.destroy(); drawn.splice(i, 1); }
  grid.replaceChildren();
  const found = words ? Object.keys(D.columns).filter(k => k.includes(words)).slice(0, 24) : [];
  for (const name of found) addChart({ t: name, s: [[name, 0]], found: true }, grid);
  arrange(grid); drawn.filter(c => c.found).forEach(draw);
}
let shape = "";
const shapeOf = () => JSON.stringify([Object.keys(D.columns), D.looks.length > 0, Object.values(CHARTS).flat().map(seriesOf)]);
function showCharts() {  // builds the charts again if there are other columns, else gives them the new data
  kept = new Map();
  const now = shapeOf();
  if (now === shape) { for (const c of drawn) { c.u.setData(dataOf(c, c.series)); showKeys(c, null); } return; }
  shape = now;
  for (const c of drawn.splice(0)) c.u.destroy();
  for (const section of document.querySelectorAll("section[data-charts]")) {
    const grid = section.querySelector(".grid"), charts = CHARTS[section.dataset.charts].filter(has);
    const absent = new Map();  // titles of what is not drawn, by reason
    for (const c of CHARTS[section.dataset.charts]) if (!c.only && !has(c)) for (const why of missing(c).slice(0, 1)) absent.set(why, [...absent.get(why) || [], c.t]);
    section.querySelector(".missing").textContent = [...absent].map(([why, titles]) => `Not drawn: ${titles.join("; ")}: ${why}.`).join(" ");
    grid.replaceChildren(); section.hidden = !charts.length && !absent.size;
    for (const c of charts) { c.u = null; addChart(c, grid); }
    arrange(grid);
  }
  drawn.forEach(draw); findMetrics();
}
function showAll() { showCharts(); showOverview(); showEvaluations(); showTables(); offerSamples(); showSamples(); }

const MOST = { versions: 4000, looks: 1500, batches: 40 };
function thin() {  // a page that is open for days: of older points every second one goes, again and again
  const keep = (n, most) => (_, i) => i < 20 || i >= n - most / 2 || i % 2 === 1;
  while (D.version.length > MOST.versions) {
    const chosen = keep(D.version.length, MOST.versions);
    D.version = D.version.filter(chosen);
    for (const key of Object.keys(D.columns)) D.columns[key] = D.columns[key].filter(chosen);
  }
  while (D.looks.length > MOST.looks) D.looks = D.looks.filter(keep(D.looks.length, MOST.looks));
  if (Object.keys(D.samples).length > MOST.batches) D.samples = {};
}
function take(news) {  // what /events told
  for (const record of news.records) {
    if ("eval/version" in record) continue;
    let i = D.version.indexOf(record.version);
    if (i < 0) i = D.version.push(record.version) - 1;
    for (const key of new Set([...Object.keys(D.columns), ...Object.keys(record)])) {
      if (key === "version") continue;
      const values = D.columns[key] || (D.columns[key] = new Array(i).fill(null));
      while (values.length < i) values.push(null);
      values[i] = record[key] ?? null;
    }
  }
  for (const e of news.evaluations) { D.evaluations = D.evaluations.filter(one => one.version !== e.version); D.evaluations.push(e); }
  D.looks.push(...news.looks); D.overview = news.overview; thin();
  if (news.records.length || news.looks.length || news.evaluations.length) showCharts();
  if (news.evaluations.length) showEvaluations();
  if (news.records.length) { D.batches = news.batches; offerSamples(); if ($("ends").querySelector("details").open) showTables(); }
  showOverview();
  document.body.dataset.seen = D.version.length;
}
function follow() {
  const events = new EventSource("events?after=" + encodeURIComponent(D.position));
  events.onmessage = event => take(JSON.parse(event.data));
  events.addEventListener("replaced", async () => {  // the learner restored an earlier version
    events.close();
    D = await (await fetch("data")).json(); shape = ""; showAll(); document.body.dataset.seen = D.version.length; follow();
  });
  events.onerror = () => showOverview(true);
}

let wide = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === wide) return;
  wide = innerWidth;
  document.querySelectorAll(".grid").forEach(arrange);
  for (const c of drawn) c.u.setSize({ width: Math.max(200, c.card.clientWidth - 24), height: height() });
});
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => drawn.forEach(draw));
$("theme").onclick = () => {
  const root = document.documentElement.classList, now = root.contains("dark") || (dark.matches && !root.contains("light"));
  root.toggle("dark", !now); root.toggle("light", now); drawn.forEach(draw);
};
$("axis").onchange = () => { for (const c of drawn) c.u.setData(dataOf(c, c.series)); };
$("find").oninput = findMetrics;
$("batch").onchange = showSamples;
showAll();
document.body.dataset.seen = D.version.length;
if (D.live) follow();
requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.ready = "true"; }));
