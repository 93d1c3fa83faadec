// Numbers as text: the same units as `walmere status`.

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let size = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1024) return unit === "B" ? `${Math.round(size)} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TB`;
}

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 120) return `${count.toFixed(1)} s`;
  const minutes = Math.floor(count / 60);
  if (minutes < 120) return `${minutes} min ${Math.floor(count) % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function number(count) {
  return count === null || count === undefined ? "–" : Math.round(count).toLocaleString("en");
}

export function rate(count) {
  if (count === null || count === undefined) return "–";
  return count >= 100 || count === 0 ? number(count) : count.toFixed(count < 10 ? 1 : 0);
}

export function clock(unixSeconds, milliseconds = false) {
  const at = new Date(unixSeconds * 1000);
  const text = at.toLocaleTimeString("en-GB", { hour12: false });
  return milliseconds ? `${text}.${String(at.getMilliseconds()).padStart(3, "0")}` : text;
}

// An LSN is a byte position: two hexadecimal halves of 32 bits.
export function lsn(text) {
  if (!text) return null;
  const [high, low] = text.split("/");
  return (BigInt(`0x${high}`) << 32n) | BigInt(`0x${low}`);
}

export function distance(end, begin) {
  const from = lsn(begin), to = lsn(end);
  if (!from || to === null) return null; // 0/0: nothing yet
  return to > from ? Number(to - from) : 0;
}
