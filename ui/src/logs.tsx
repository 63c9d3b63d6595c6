import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { again, ask, type Found, type LogPart } from "./server";
import { bytes, count, printed } from "./words";

interface Shown { text: string; start: number; end: number; size: number }

const LONGEST = 2 * 1024 * 1024; // characters; of what was read long ago, the file has it
const BEHIND = 128 * 1024; // bytes; two answers

// In the file: U+FFFD stands for a byte there that is no UTF-8.
const bytesOf = (text: string) => new TextEncoder().encode(text).length - 2 * (text.split("\ufffd").length - 1);

// A rank's log: its end first, then what is added; earlier lines and the whole on request.
export function Logs(
  { run, dag, ranks, rank, choose }: {
    run: string; dag: string; ranks: number[]; rank: number; choose: (rank: number) => void;
  },
) {
  const [shown, setShown] = useState<Shown | null>(null);
  const [error, setError] = useState("");
  const [refused, setRefused] = useState(""); // what was asked for by a click
  const [turn, setTurn] = useState(0);
  const [words, setWords] = useState("");
  const [found, setFound] = useState<(Found & { of: string }) | null>(null);
  const pre = useRef<HTMLPreElement>(null);
  const text = useMemo(() => printed(shown?.text ?? ""), [shown]);
  const place = `${rank}/${run}`;
  const anew = (follow: boolean) => ({ place, shown: null as Shown | null, stays: true, keep: null as number | null, follow });
  // Another one for each log, and each place in it: an answer that was asked for by the one before
  // comes too late.
  const held = useRef(anew(true));
  held.current.shown = shown;

  useEffect(() => {
    setFound(null);
    setRefused("");
  }, [place]);
  useEffect(() => {
    held.current = anew(true);
    setShown(null);
    return again(async () => {
      const mine = held.current;
      if (!mine.follow) return false;
      const after = mine.shown?.end;
      let part = await ask<LogPart>(`log-part/${place}${after ? `?after=${after}` : ""}`);
      const box = pre.current;
      mine.stays = !mine.shown || !box || box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      // Far behind, as after hours in a tab that nobody saw: who looks at the end is shown the end.
      if (mine.stays && part.size - part.end > BEHIND) part = await ask<LogPart>(`log-part/${place}`);
      if (held.current !== mine) return false;
      const known = mine.shown; // perhaps with earlier lines by now
      if (known && part.start === known.end) {
        if (part.text) {
          const text = (known.text + part.text).slice(-LONGEST); // as it was printed
          const cut = known.text.length + part.text.length > LONGEST;
          const start = cut ? Math.max(known.start, part.end - bytesOf(text)) : known.start;
          setShown({ text, start, end: part.end, size: part.size });
        }
      } else setShown(part);
      return part.text !== "";
    }, (said) => setError(said ? `Cannot be read: ${said.message}` : ""));
  }, [place, turn]);

  // What is read stays in its place, unless one looks at the end.
  useEffect(() => {
    const box = pre.current;
    if (!box) return;
    if (held.current.keep !== null) {
      box.scrollTop += box.scrollHeight - held.current.keep;
      held.current.keep = null;
    } else if (held.current.stays) box.scrollTop = box.scrollHeight;
  }, [shown]);

  async function asked<T>(path: string, take: (told: T) => void): Promise<void> {
    setRefused("");
    try {
      const told = await ask<T>(path);
      if (held.current.place === place) take(told);
    } catch (said) {
      if (held.current.place === place) setRefused(`Cannot be read: ${(said as Error).message}`);
    }
  }
  const earlier = () =>
    asked<LogPart>(`log-part/${place}?before=${shown!.start}`, (part) => {
      const now = held.current.shown; // which has grown meanwhile, or is of another place
      if (now?.start !== shown!.start || part.end > now.start) return;
      held.current.keep = pre.current?.scrollHeight ?? null;
      setShown({ ...now, text: part.text + now.text, start: part.start });
    });
  const search = (event: Event) => {
    event.preventDefault();
    const of = words.trim();
    if (!of) return setFound(null);
    void asked<Found>(`log-lines/${place}?words=${encodeURIComponent(of)}`, (told) => setFound({ ...told, of }));
  };
  const show = (end: number) =>
    asked<LogPart>(`log-part/${place}?before=${end}`, (part) => {
      held.current = anew(false);
      setShown(part);
      pre.current?.focus();
    });

  return (
    <section id="logs" aria-labelledby="logs-title">
      <h2 id="logs-title">Logs of the ranks</h2>
      <form class="row" role="search" onSubmit={search}>
        <label>Rank{" "}
          <select value={String(rank)} onChange={(event) => choose(Number(event.currentTarget.value))}>
            {ranks.map((one) => <option key={one} value={String(one)}>{one}</option>)}
          </select>
        </label>
        <label>Search{" "}
          <input type="search" maxLength={200} value={words} onInput={(event) => setWords(event.currentTarget.value)} />
        </label>
        <button type="submit">Find lines</button>
        <a href={`log/${place}`} download={`${dag}-rank-${rank}.log`}>Whole log</a>
        <span id="shown" class="source">
          {shown && (shown.start === 0 ? `all ${bytes(shown.end)}` : `${bytes(shown.end - shown.start)} of ${bytes(shown.size)}`)}
        </span>
      </form>
      <div role="status">
        {error && <p class="lost">{error}</p>}
        {refused && <p class="lost">{refused}</p>}
        {found && (
          <p>{found.found.length ? `${count(found.found.length + found.more)} lines with “${found.of}”` : `No line with “${found.of}”`}
            {found.searched < found.size && ` in the last ${bytes(found.searched)}`}
            {found.more > 0 && `, the newest ${count(found.found.length)} here`}</p>
        )}
      </div>
      {found && found.found.length > 0 && (
        <ol class="found" tabIndex={0} aria-label="Lines that were found">
          {found.found.map((line) => <li key={line.end}><button type="button" class="line" onClick={() => void show(line.end)}>{printed(line.text)}</button></li>)}
        </ol>
      )}
      <p class="row">
        <button type="button" disabled={!shown || shown.start === 0} onClick={() => void earlier()}>Earlier lines</button>
        {!held.current.follow && <button type="button" onClick={() => setTurn(turn + 1)}>Follow its end again</button>}
      </p>
      <pre ref={pre} tabIndex={0} role="region" aria-busy={!shown} aria-label={`Log of rank ${rank}`}>{text}</pre>
    </section>
  );
}
