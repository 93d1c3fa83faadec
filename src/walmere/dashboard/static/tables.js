// The tables: phase, progress of a copy, lag, size. Rows are kept from one reading to the next, so that nothing jumps.

import { bytes, number, seconds } from "./format.js";

const $ = (id) => document.getElementById(id);
const FILTER_FROM = 12; // tables
const copies = new Map(); // by subscription and table: { rows, time, rate }

$("filter").addEventListener("input", () => {
  for (const row of $("tables").tBodies[0].rows) row.hidden = !row.dataset.name.includes($("filter").value.toLowerCase());
});

export function showTables(tables, its, resync) {
  const body = $("tables").tBodies[0];
  if (body.dataset.subscription !== its.now.name) body.replaceChildren();
  body.dataset.subscription = its.now.name;
  const before = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const busy = (table) => (table.published && table.phase === "r" && !table.error ? 1 : 0);
  const sorted = [...tables].sort((a, b) => busy(a) - busy(b) || a.name.localeCompare(b.name));
  const rows = sorted.map((table) => {
    const row = before.get(table.name) ?? makeRow(table.name, resync);
    fill(row, table, its);
    return row;
  });
  if (rows.length !== body.rows.length || rows.some((row, index) => body.rows[index] !== row)) body.replaceChildren(...rows);
  $("filter").hidden = tables.length < FILTER_FROM;
  const ready = tables.filter((table) => table.phase === "r").length;
  $("table_counts").textContent = `${ready} of ${tables.length} ready`;
}

function makeRow(name, resync) {
  const row = document.createElement("tr");
  row.dataset.key = name;
  row.dataset.name = name.toLowerCase();
  const labels = ["table", "phase", "rows copied", "lag", "size", "written/h", "rejects", ""];
  for (const label of labels) {
    const cell = row.insertCell();
    cell.dataset.label = label;
    if (["rows copied", "lag", "size", "written/h", "rejects"].includes(label)) cell.className = "n";
  }
  row.cells[0].textContent = name;
  row.cells[0].className = "name";
  const button = document.createElement("button");
  button.className = "quiet";
  button.type = "button";
  button.textContent = "Copy again";
  button.addEventListener("click", () => resync(name));
  row.cells[7].append(button);
  return row;
}

function fill(row, table, its) {
  const [, phase, copied, lag, size, written, rejects, buttons] = row.cells;
  const pill = phase.firstChild ?? phase.appendChild(document.createElement("span"));
  const level = !table.published ? "off" : table.error ? "problem" : table.phase === "r" ? "good" : "busy";
  pill.className = `pill ${level}`;
  pill.textContent = table.published ? `${its.phases[table.phase] ?? table.phase} (${table.phase})` : "no longer published";
  pill.title = `srsubstate ${table.phase}`;
  set(lag, table.lag_seconds === null ? "–" : seconds(table.lag_seconds));
  lag.title = table.lag_bytes === null ? "" : `${bytes(table.lag_bytes)} of WAL`;
  set(size, bytes(table.bytes));
  size.title = table.files === null ? "" : `${number(table.files)} files, ${number(table.deleted_rows)} rows marked as deleted`;
  set(written, bytes(table.written_bytes_per_hour));
  set(rejects, number(table.rejects));
  rejects.classList.toggle("warning", table.rejects > 0);
  buttons.firstChild.disabled = !table.published || table.phase === "i" || table.phase === "d";
  progress(copied, table, its.now);
}

// While a table is being copied: how much of it, how fast, and how long it may still take.
function progress(cell, table, now) {
  const key = `${now.name} ${table.name}`;
  if (table.phase !== "d" || !table.published) {
    copies.delete(key);
    set(cell, number(table.rows_copied));
    return;
  }
  const last = copies.get(key) ?? { rows: table.rows_copied, time: now.time, rate: null };
  const elapsed = now.time - last.time;
  if (elapsed > 0 && table.rows_copied >= last.rows) {
    const current = (table.rows_copied - last.rows) / elapsed;
    copies.set(key, { rows: table.rows_copied, time: now.time, rate: last.rate === null ? current : 0.7 * last.rate + 0.3 * current });
  } else copies.set(key, last);
  const { rate } = copies.get(key);
  const all = Math.max(table.rows_estimated ?? 0, table.rows_copied);
  if (!cell.querySelector("progress")) {
    cell.replaceChildren(document.createElement("span"), document.createElement("progress"));
  }
  const left = rate && all > table.rows_copied ? `, about ${seconds((all - table.rows_copied) / rate)} left` : "";
  cell.firstChild.textContent = all ? `${number(table.rows_copied)} of ~${number(all)}` : number(table.rows_copied);
  cell.lastChild.max = all || 1;
  cell.lastChild.value = table.rows_copied;
  cell.title = rate === null ? "" : `${number(rate)} rows per second${left}`;
}

function set(cell, text) {
  if (cell.textContent !== text || cell.children.length) cell.textContent = text;
}
