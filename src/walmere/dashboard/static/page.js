// The page: takes events from the server, and shows the chosen subscription. All texts are set as text, never as HTML.

import { Chart } from "./charts.js";
import { ask } from "./asking.js";
import { bytes, clock, distance, rate, seconds } from "./format.js";
import { showTables } from "./tables.js";

const $ = (id) => document.getElementById(id);
const KEPT_SECONDS = 900;
const known = new Map(); // by number: { now, points, phases }
let chosen = null;

// As far back as there is something to show: at least a minute, at most five.
function chartSeconds(points) {
  const known = points.length ? points.at(-1)[0] - points[0][0] : 0;
  return Math.min(Math.max(60, Math.ceil(known / 60) * 60), window.innerWidth < 700 ? 120 : 300);
}

const rateChart = new Chart($("rate_chart"), [
  { name: "received", label: "received", index: 3, area: false },
  { name: "applied", label: "applied", index: 4, area: true },
], { format: rate, smallest: 10 });
const lagChart = new Chart($("lag_chart"), [{ name: "lag", label: "lag", index: 1, area: true }], {
  format: (value) => (value < 120 ? `${+value.toFixed(1)} s` : `${+(value / 60).toFixed(1)} min`), smallest: 2,
});

function entry(number) {
  if (!known.has(number)) known.set(number, { now: null, points: [], phases: {} });
  return known.get(number);
}

function listen() {
  const events = new EventSource("/events");
  events.addEventListener("history", (event) => {
    const { number, points, phases } = JSON.parse(event.data);
    Object.assign(entry(number), { points, phases });
  });
  events.addEventListener("now", (event) => {
    const now = JSON.parse(event.data);
    const its = entry(now.number);
    its.now = now;
    if (now.point && now.point[0] > (its.points.at(-1)?.[0] ?? 0)) its.points.push(now.point);
    while (its.points.length && its.points[0][0] < now.time - KEPT_SECONDS) its.points.shift();
    choose();
    if (now.number === chosen) show(its);
    showSubscriptions();
    live(true);
  });
  events.onerror = () => live(false);
}

function live(connected) {
  const now = known.get(chosen)?.now;
  $("live").textContent = connected ? "live" : "connection lost";
  $("live").classList.toggle("lost", !connected);
  $("live").title = now ? `last reading at ${clock(now.time)}` : "";
}

// The subscription in the address (#name), or the first one.
function choose() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const numbers = [...known.keys()].sort((a, b) => a - b);
  chosen = numbers.find((each) => known.get(each).now?.name === wanted) ?? numbers[0] ?? null;
}

function showSubscriptions() {
  const nav = $("subscriptions");
  nav.hidden = known.size < 2;
  const links = [...known].filter(([, its]) => its.now).sort(([a], [b]) => a - b).map(([number, { now }]) => {
    const link = document.createElement("a");
    link.href = `#${encodeURIComponent(now.name)}`;
    if (number === chosen) link.setAttribute("aria-current", "page");
    const state = document.createElement("span");
    state.className = `state ${now.summary.level}`;
    state.textContent = now.summary.text;
    const name = document.createElement("strong");
    name.textContent = now.name;
    link.append(name, state);
    return link;
  });
  nav.replaceChildren(...links);
}

function show(its) {
  const { now } = its;
  document.title = `${now.name}: ${now.summary.text}`;
  $("name").textContent = now.name;
  $("summary").textContent = now.summary.text;
  $("summary").className = `pill ${now.summary.level}`;
  showFindings(now.findings);
  const { status } = now;
  document.body.classList.toggle("unknown", !status);
  $("pause").hidden = !status;
  if (!status) return;
  $("pause").textContent = status.paused ? "Resume" : "Pause";
  $("pause").classList.toggle("go", Boolean(status.paused));
  showFlow(status, now.running, its);
  rateChart.show(its.points, chartSeconds(its.points));
  lagChart.show(its.points, chartSeconds(its.points));
  $("lag_now").textContent = status.lag_seconds === null ? bytes(status.lag_bytes) : `${seconds(status.lag_seconds)}, ${bytes(status.lag_bytes)}`;
  showTables(status.tables, its, (table) => resync(now, table));
  showTransactions(now.transactions);
}

function showFindings(findings) {
  $("findings").hidden = !findings.length;
  $("findings").replaceChildren(...findings.map((each) => {
    const item = document.createElement("article");
    item.className = each.level;
    const what = document.createElement("p");
    if (each.table) {
      const name = document.createElement("strong");
      name.textContent = `${each.table}: `;
      what.append(name);
    }
    what.append(each.what);
    item.append(what);
    if (each.do) {
      const todo = document.createElement("p");
      todo.className = "do";
      todo.textContent = each.do;
      item.append(todo);
    }
    return item;
  }));
}

function facts(id, lines) {
  $(id).replaceChildren(...lines.filter(Boolean).map((line) => {
    const item = document.createElement("li");
    const [text, level] = Array.isArray(line) ? line : [line, ""];
    item.textContent = text;
    if (level) item.className = level;
    return item;
  }));
}

function showFlow(status, running, its) {
  const { slot, receiver, disk } = status;
  for (const stage of ["source", "received", "durable", "applied"]) $(`${stage}_lsn`).textContent = status[`${stage}_lsn`] ?? "–";
  const point = its.points.at(-1) ?? [];
  hop("hop_received", distance(status.source_lsn, status.received_lsn), receiver.lag_seconds, receiver.running);
  hop("hop_durable", distance(status.received_lsn, status.durable_lsn), null, receiver.running);
  hop("hop_applied", distance(status.durable_lsn, status.applied_lsn), status.lag_seconds, running && !status.paused);
  facts("source_facts", [
    status.source_lsn === null ? ["does not answer", "problem"] : `WAL grows by ${bytes(point[5] ?? 0)}/s`,
    slot && [`keeps ${bytes(slot.retained_bytes)} of WAL`, slot.wal_status === "lost" || slot.wal_status === "unreserved" ? "problem" : ""],
    slot && [`slot ${slot.active ? "active" : "not active"}, ${slot.wal_status}`, slot.active ? "" : "warning"],
  ]);
  facts("received_facts", [
    receiver.running ? "receiver is running" : ["receiver is not running", "warning"],
    `${rate(point[3])} changes/s`,
  ]);
  facts("durable_facts", [disk && disk.log_bytes !== null && `change log ${bytes(disk.log_bytes)}`, slot && `confirmed ${slot.confirmed_lsn ?? "–"}`]);
  const written = status.tables.reduce((sum, each) => sum + (each.written_bytes_per_hour ?? 0), 0);
  facts("applied_facts", [
    status.paused ? ["paused", "warning"] : running ? `${rate(point[4])} changes/s` : ["no process applies", "warning"],
    disk && disk.lake_bytes !== null && `lake ${bytes(disk.lake_bytes)}`,
    `${bytes(written)}/h written`,
  ]);
}

function hop(id, lagBytes, lagSeconds, moving) {
  const its = $(id);
  its.querySelector(".lag_bytes").textContent = lagBytes === null ? "–" : lagBytes ? `${bytes(lagBytes)} behind` : "up to date";
  its.querySelector(".lag_seconds").textContent = lagSeconds === null ? "" : seconds(lagSeconds);
  its.classList.toggle("still", !moving);
  its.classList.toggle("late", (lagSeconds ?? 0) > 60);
}

const MANY = 4; // more new transactions at once are not pointed out
const SIGNS = { inserts: "+", updates: "~", deletes: "−", truncates: "TRUNCATE ", changes: "" };

function showTransactions(transactions) {
  const list = $("transactions");
  const before = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const keyOf = (each) => `${each.commit_lsn} ${each.xid}`;
  const added = transactions.filter((each) => !before.has(keyOf(each))).length;
  const items = transactions.map((each) => {
    const key = keyOf(each);
    const item = before.get(key) ?? transactionItem(each, before.size > 0 && added <= MANY);
    item.dataset.key = key;
    item.classList.toggle("applied", each.applied);
    item.title = each.applied ? "applied" : "received, not applied yet";
    return item;
  });
  if (!items.length) {
    const none = document.createElement("li");
    none.className = "none";
    none.textContent = "No transaction was received yet.";
    items.push(none);
  }
  list.replaceChildren(...items);
}

function transactionItem(each, fresh) {
  const item = document.createElement("li");
  if (fresh) item.className = "fresh";
  const part = (name, text) => {
    const made = document.createElement("span");
    made.className = name;
    made.textContent = text;
    item.append(made);
    return made;
  };
  part("dot", "");
  part("time", clock(each.time, true));
  part("xid", each.xid === null ? `${each.count} transactions` : `xid ${each.xid}`);
  const tables = part("changed", "");
  for (const { name, ...counts } of each.tables) {
    const chip = document.createElement("span");
    const shown = Object.entries(counts).map(([kind, count]) => `${SIGNS[kind]}${kind === "truncates" ? "" : count}`);
    chip.textContent = `${name.replace(/^public\./, "")} ${shown.join(" ")}`;
    chip.title = `${name}: ${Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ")}`;
    tables.append(chip);
  }
  part("lsn", each.commit_lsn);
  return item;
}

async function act(number, action, body = {}) {
  const page = document.querySelector('meta[name="walmere-page"]').content;
  const answer = await fetch(`/api/${number}/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Walmere-Page": page },
    body: JSON.stringify(body),
  });
  if (answer.ok) return;
  const text = await answer.text();
  let wrong = text;
  try {
    const error = JSON.parse(text);
    wrong = `${error.doing}: ${error.wrong}${error.hint ? ` (${error.hint})` : ""}`;
  } catch { /* a refusal is plain text */ }
  throw new Error(wrong);
}

function resync(now, table) {
  ask({
    title: `Copy ${table} again?`,
    text: "All rows are read from the source again. Until the new copy is complete, readers see the old rows, and the other tables go on.",
    yes: "Copy again",
    action: () => act(now.number, "resync", { tables: [table] }),
  });
}

$("pause").addEventListener("click", () => {
  const { now } = known.get(chosen);
  const resume = Boolean(now.status.paused);
  ask({
    title: resume ? `Resume ${now.name}?` : `Pause ${now.name}?`,
    text: resume
      ? "Copying and applying go on from where they stopped."
      : "Nothing is copied or applied until you resume it. The receiver goes on: changes wait in the change log, and the source keeps no WAL for them.",
    yes: resume ? "Resume" : "Pause",
    action: () => act(now.number, resume ? "resume" : "pause"),
  });
});

$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
});
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");

addEventListener("hashchange", () => {
  choose();
  const its = known.get(chosen);
  if (its?.now) show(its);
  showSubscriptions();
});
listen();
