// Numbers, times and sizes as people here write them.

const locale = navigator.language;
const plain = new Intl.NumberFormat(locale, { maximumFractionDigits: 0 });
const significant = new Intl.NumberFormat(locale, { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
const tiny = new Intl.NumberFormat(locale, { notation: "scientific", maximumSignificantDigits: 3 });
const tenths = new Intl.NumberFormat(locale, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const share = new Intl.NumberFormat(locale, { style: "percent", maximumFractionDigits: 0 });
const moment = inZone({ dateStyle: "short", timeStyle: "medium" });
const minute = inZone({ dateStyle: "medium", timeStyle: "short" });
// Of all times here.
export const zone = moment.resolvedOptions().timeZone;

// In the zone that was chosen in Airflow, which keeps it as JSON; else in the system's.
function inZone(how: Intl.DateTimeFormatOptions): Intl.DateTimeFormat {
  try {
    const timeZone = JSON.parse(localStorage.getItem("timezone")!) as string | null;
    return new Intl.DateTimeFormat(locale, { ...how, timeZone: timeZone ?? undefined });
  } catch {
    return new Intl.DateTimeFormat(locale, how);
  }
}

export const count = (value: number): string => plain.format(value);
export const cores = (value: number): string => tenths.format(value);
export const percent = (value: number): string => share.format(value);

const exponent = (value: number) =>
  Number.isFinite(value) && value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9);

// Of a metric: always as many digits, so that nothing moves while it changes; but of a whole number
// all, which comes as a text if JavaScript would round it.
export function number(value: number | string | null | undefined): string {
  if (typeof value === "string" && /^-?\d+$/.test(value)) return plain.format(BigInt(value));
  const known = typeof value === "string" ? Number(value) : value;
  if (known == null) return "–";
  if (Number.isSafeInteger(known) && Math.abs(known) >= 1000) return plain.format(known);
  if (!Number.isFinite(known)) return String(value);
  return exponent(known) ? tiny.format(known) : significant.format(known);
}

// Along an axis: in as few digits as tell each from the next, and no more than fit beside it.
export function ticks(values: readonly number[], step: number): string[] {
  const most = Math.max(...values.map(Math.abs));
  const digits = Math.min(15, Math.max(1, Math.ceil(Math.log10(most / step) || 0) + 2));
  const small = most !== 0 && most < 1e-4;
  const format = new Intl.NumberFormat(locale, {
    notation: small ? "scientific" : most >= 1e5 ? "compact" : "standard",
    maximumSignificantDigits: digits,
  });
  return values.map((value) => (value === 0 ? plain.format(0) : format.format(value)));
}

// Records hold what ranks and their clocks say, which may be anything; at what is no time, Intl throws.
const YEAR_10000 = 253_402_300_800;
const LONGEST_S = 1e10; // three centuries
export const isTime = (seconds: unknown): seconds is number =>
  typeof seconds === "number" && seconds >= 0 && seconds < YEAR_10000;

// Of a text, in unix seconds.
export function parsed(moment: unknown): number | null {
  const seconds = typeof moment === "string" ? Date.parse(moment) / 1000 : null;
  return isTime(seconds) ? seconds : null;
}

export function time(seconds: unknown): string {
  if (typeof seconds !== "number" || !(seconds >= 0 && seconds < LONGEST_S)) return "–";
  if (seconds < 100) return `${plain.format(Math.ceil(seconds))} s`;
  const minutes = Math.ceil(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${plain.format(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

export const at = (seconds: unknown): string => (isTime(seconds) ? moment.format(seconds * 1000) : "–");

// In a table of many, where seconds tell nothing.
export const around = (seconds: unknown): string => (isTime(seconds) ? minute.format(seconds * 1000) : "–");

export function bytes(value: number | null): string {
  if (value === null) return "–";
  if (value < 1024) return `${plain.format(value)} B`;
  const names = ["KiB", "MiB", "GiB", "TiB"];
  let left = value / 1024;
  while (left >= 1024 && names.length > 1) {
    left /= 1024;
    names.shift();
  }
  return `${new Intl.NumberFormat(locale, { maximumFractionDigits: 1 }).format(left)} ${names[0]}`;
}

export const short = (digest: unknown): string => {
  const text = said(digest);
  const [, , end] = /^(sha256:)?(v\d+:)?(.*)$/s.exec(text) ?? [];
  return text.replace(/^sha256:(v\d+:)?/, "").slice(0, 12) || (end ?? "");
};

// Of a curve.
export const titleOf = (metric: string): string => (metric === "examples_per_s" ? "examples/s" : metric);

// What a terminal would show in the end of what was printed: without colours, and of a line that
// was begun again only the last.
export const printed = (text: string): string =>
  text.replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "").split("\n").map(last).join("\n");

// Without a regular expression, which would look at a long run of such beginnings again and again.
function last(line: string): string {
  let end = line.length;
  while (end > 0 && line[end - 1] === "\r") end -= 1;
  return line.slice(end && line.lastIndexOf("\r", end - 1) + 1, end);
}

export const spoken = (state: string): string => state.replaceAll("_", " ");

// A fact of a record, whatever it is: as it is.
export function said(value: unknown): string {
  if (Array.isArray(value)) return value.map(said).join(", ");
  if (value !== null && typeof value === "object")
    return Object.entries(value).map(([name, one]) => `${name} ${said(one)}`).join(", ");
  return String(value);
}

export function flat(value: unknown, name = ""): [string, unknown][] {
  if (value !== null && typeof value === "object" && !Array.isArray(value))
    return Object.entries(value).flatMap(([key, one]) => flat(one, name ? `${name}.${key}` : key));
  return [[name, value]];
}
