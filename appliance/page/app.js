// The status page: keeps a connection to /events and shows what comes. Text from the appliance is only ever set as
// text, never as HTML: model names and log lines are not ours.

import { REASONS, drawBar, drawLine, drawShare, element, key } from "./chart.js";

const COLUMNS = 300; // points that the appliance keeps
const SILENCE_MS = 15000; // without any event for so long the connection counts as lost
const PHASES = ["import", "configure", "load", "compile", "kv_cache", "capture", "warm_up", "server", "self_test"];

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 });

let points = [];
let energy = null; // joules and tokens when the page first saw both, for joules per token

const known = (value) => value !== null && value !== undefined;
const gib = (bytes) => `${tenths.format(bytes / 2 ** 30)} GiB`;
const hertz = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(2)} GHz` : `${whole.format(value / 1e6)} MHz`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setList(list, rows) {
  list.replaceChildren(...rows.map(([name, value, note]) => {
    const row = element("div");
    const figure = element("dd", {}, value);
    if (note) figure.append(" ", element("small", {}, note));
    row.append(element("dt", {}, name), figure);
    return row;
  }));
}

// --- state ------------------------------------------------------------------------------------------------------

function showState(status) {
  const badge = $("state");
  if (badge.dataset.state !== status.state) {
    badge.dataset.state = status.state;
    setText(badge, status.state);
    setText($("spoken"), `The engine is ${status.state}.`);
  }
  const profile = known(status.profile) ? ` · ${status.profile.name ?? status.profile}` : "";
  setText($("model"), `${status.model}${profile}`);
  document.title = `${status.state} · ${status.model} · Mjolnir`;
  setText($("version"), `Mjolnir ${status.version}`);
}

function showStart(status, eta) {
  const progress = status.progress;
  $("start").hidden = !progress;
  if (!progress) return;
  const now = PHASES.indexOf(progress.phase);
  $("phases").replaceChildren(...PHASES.map((phase, index) => {
    const attributes = index === now ? { "aria-current": "step" } : index < now ? { class: "done" } : {};
    return element("li", attributes, phase.replace("_", " "));
  }));
  const bar = $("progress");
  if (known(progress.percent)) bar.value = progress.percent;
  else bar.removeAttribute("value");
  const parts = [`Phase ${progress.phase.replace("_", " ")}${known(progress.percent) ? `, ${progress.percent} %` : ""}.`];
  if (known(eta.total)) parts.push(`Ready in about ${duration(eta.total)}, going by the last start.`);
  else if (known(eta.phase)) parts.push(`About ${duration(eta.phase)} left in this phase.`);
  else parts.push("No estimate yet; a first start may compile for up to 45 minutes.");
  setText($("eta"), parts.join(" "));
}

function showNotices(status, share) {
  const notices = [];
  if (share.alert) {
    const why = share.reason ? `; most often: ${REASONS[share.reason] ?? share.reason}` : "";
    notices.push(`T5 ran only ${percent.format(share.share ?? 0)} of the last ${duration(share.window)}'s decode steps${why}.`);
  }
  for (const group of status.groups ?? []) {
    if (group.reason) notices.push(`Attention group ${group.group} runs on ${group.fallback}: ${group.reason}`);
  }
  if (status.last_fault) notices.push(`Last failure (${status.last_fault.cause}): ${status.last_fault.text}`);
  const section = $("notices");
  const text = notices.join("\n");
  if (section.dataset.text === text) return;
  section.dataset.text = text;
  section.hidden = !notices.length;
  section.replaceChildren(...notices.map((notice) => element("p", {}, notice)));
  if (notices.length) setText($("spoken"), notices[0]);
}

// --- figures ----------------------------------------------------------------------------------------------------

// The rail that stands for the whole machine: Thor's board input, else the most that any rail counts.
function mainRail(board) {
  const rails = Object.entries(board?.watts ?? {});
  return rails.find(([rail]) => rail === "VIN") ?? rails.sort((a, b) => b[1] - a[1])[0];
}

function joulesPerToken(board, engine) {
  const rail = mainRail(board)?.[0];
  const joules = board?.joules?.[rail];
  const tokens = engine.generation_tokens;
  if (!known(joules) || !known(tokens)) return null;
  if (!energy || energy.rail !== rail || tokens < energy.tokens) energy = { rail, joules, tokens };
  return tokens > energy.tokens ? (joules - energy.joules) / (tokens - energy.tokens) : null;
}

function showTiles({ status, share, engine, board }) {
  const rows = [];
  const rate = engine.tokens_per_second;
  rows.push(["Output tokens/s", known(rate) ? tenths.format(rate) : "–"]);
  rows.push(["T5 share of decode steps", known(share.share) ? percent.format(share.share) : "–",
    known(share.share) ? `last ${duration(share.window)}` : "no decode steps"]);
  if (known(engine.running)) rows.push(["Requests running", whole.format(engine.running), `${whole.format(engine.waiting ?? 0)} waiting`]);
  if (known(status.queue?.waiting)) rows.push(["In the appliance's queue", whole.format(status.queue.waiting)]);
  if (known(engine.kv_cache)) rows.push(["KV cache in use", percent.format(engine.kv_cache)]);
  if (known(board?.memory.available)) rows.push(["Memory available", gib(board.memory.available)]);
  const hottest = Object.entries(board?.temperatures ?? {}).sort((a, b) => b[1] - a[1])[0];
  if (hottest) rows.push(["Hottest zone", `${tenths.format(hottest[1])} °C`, hottest[0]]);
  const rail = mainRail(board);
  if (rail) rows.push(["Power", `${tenths.format(rail[1])} W`, rail[0]]);
  const cost = joulesPerToken(board, engine);
  if (known(cost)) rows.push(["Energy per token", `${cost.toFixed(2)} J`, "since this page opened"]);
  rows.push(["Restarts", whole.format(status.restarts)]);
  rows.push(["Ready for", known(status.ready_seconds) ? duration(status.ready_seconds) : "–"]);
  setList($("tiles"), rows);
}

function showShare(period) {
  drawShare($("share"), points, COLUMNS);
  setText($("share-from"), `${duration(COLUMNS * period)} ago`);
  const sums = { t5: 0 };
  for (const point of points) {
    sums.t5 += point.t5;
    for (const [reason, steps] of Object.entries(point.fallback)) sums[reason] = (sums[reason] ?? 0) + steps;
  }
  const all = Object.values(sums).reduce((a, b) => a + b, 0);
  const rows = [["T5", "decode steps", sums.t5, 0]];
  Object.entries(REASONS).forEach(([reason, text], index) => {
    if (sums[reason]) rows.push(["fallback", text, sums[reason], index + 1]);
  });
  $("reasons").tBodies[0].replaceChildren(...(all ? rows : []).map(([where, why, steps, series]) => {
    const row = element("tr");
    const first = element("th", { scope: "row" });
    first.append(key(series), where);
    row.append(first, element("td", {}, why), element("td", { class: "number" }, whole.format(steps)),
      element("td", { class: "number" }, percent.format(steps / all)));
    return row;
  }));
  setText($("share-text"), all
    ? `T5 ran ${percent.format(sums.t5 / all)} of ${whole.format(all)} steps, those with prompts included.`
    : "No steps in this time.");
}

function showTokens() {
  const most = drawLine($("tokens"), points.map((point) => point.tokens), COLUMNS);
  const seen = points.filter((point) => point.tokens !== null);
  setText($("tokens-text"), seen.length ? `Now ${tenths.format(seen.at(-1).tokens)}, at most ${tenths.format(most)}.` : "No figures yet.");
}

// --- board ------------------------------------------------------------------------------------------------------

function showMemory({ total, free, available, cached }) {
  $("memory").hidden = !known(total);
  if (!known(total)) return;
  const rest = free ?? available ?? 0;
  const cache = Math.min(cached ?? 0, total - rest);
  drawBar($("memory-bar"), [[total - rest - cache, 0], [cache, 1]], total);
  const parts = [`${gib(total - rest - cache)} used`];
  if (known(cached)) parts.push(`${gib(cached)} page cache`);
  if (known(free)) parts.push(`${gib(free)} free`);
  if (known(available)) parts.push(`${gib(available)} available`);
  setText($("memory-text"), `${parts.join(", ")}, of ${gib(total)}.`);
}

function showColumn(id, rows) {
  $(id).hidden = !rows.length;
  setList($(id).querySelector("dl"), rows);
}

// One row for all CPUs: their lowest and highest clock.
function clockRows(clocks) {
  const rows = [];
  const cpus = [];
  for (const [name, { current, most }] of Object.entries(clocks)) {
    if (/^cpu\d+$/.test(name)) cpus.push(current);
    else rows.push([name, hertz(current), known(most) ? `of ${hertz(most)}` : ""]);
  }
  if (cpus.length) {
    const [least, most] = [Math.min(...cpus), Math.max(...cpus)];
    rows.push([`${cpus.length} CPUs`, least === most ? hertz(least) : `${hertz(least)} – ${hertz(most)}`]);
  }
  return rows;
}

function showBoard(board) {
  if (!board) return setText($("board-text"), "No figures from the board.");
  const { model, l4t, jetpack } = board.identity;
  const words = [model, l4t && `L4T ${l4t}`, jetpack && `JetPack ${jetpack}`];
  const mode = board.power_mode;
  if (mode) words.push(`power mode ${mode.number}${mode.name ? ` (${mode.name})` : ""}`);
  setText($("board-text"), words.filter(Boolean).join(" · "));
  showMemory(board.memory);
  const rows = (values, unit) => Object.entries(values).map(([name, value]) => [name, `${tenths.format(value)} ${unit}`]);
  showColumn("temperatures", rows(board.temperatures, "°C"));
  showColumn("power", rows(board.watts, "W"));
  showColumn("clocks", clockRows(board.clocks));
  showColumn("fans", [
    ...Object.entries(board.fan_rpm).map(([name, value]) => [name, `${whole.format(value)} rpm`]),
    ...Object.entries(board.fan_duty).map(([name, value]) => [name, percent.format(value)]),
    ...Object.entries(board.overcurrent).map(([name, value]) => [`${name} events since boot`, whole.format(value)]),
  ]);
}

// --- events and log ---------------------------------------------------------------------------------------------

function showEvents(events) {
  const list = $("events");
  const text = JSON.stringify(events);
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.replaceChildren(...[...events].reverse().map((event) => {
    const row = element("li");
    if (known(event.at)) row.append(element("time", {}, typeof event.at === "number" ? clock(event.at) : event.at));
    row.append(event.text ?? event.message ?? String(event.event ?? JSON.stringify(event)));
    return row;
  }));
}

function showLog({ lines }) {
  const log = $("log");
  setText(log, lines.join("\n"));
  if ($("follow").checked) log.scrollTop = log.scrollHeight;
}

function show(message) {
  showState(message.status);
  showStart(message.status, message.eta);
  showNotices(message.status, message.share);
  showTiles(message);
  showShare(message.period);
  showTokens();
  showBoard(message.board);
  showEvents(message.events);
}

// --- the connection ---------------------------------------------------------------------------------------------

// EventSource comes back by itself after a cut, but not after an error status and not from a dead link.
function connect() {
  const source = new EventSource("events");
  let heard = Date.now();
  const link = (text, lost) => {
    setText($("link"), text);
    if (lost && !$("link").classList.contains("lost")) setText($("spoken"), text);
    $("link").classList.toggle("lost", lost);
  };
  const again = (wait) => {
    clearInterval(watch);
    source.close();
    setTimeout(connect, wait);
  };
  const on = (name, take) => source.addEventListener(name, (event) => {
    heard = Date.now();
    take(JSON.parse(event.data));
    link("live", false);
  });
  on("history", (message) => { points = message.points; show(message); });
  on("tick", (message) => { points = [...points, message.point].slice(-COLUMNS); show(message); });
  on("log", showLog);
  source.onerror = () => {
    link("connection lost, the figures are old; trying again…", true);
    if (source.readyState === EventSource.CLOSED) again(3000);
  };
  const watch = setInterval(() => {
    if (Date.now() - heard < SILENCE_MS) return;
    link("nothing heard, the figures are old; trying again…", true);
    again(0);
  }, 1000);
}

connect();
