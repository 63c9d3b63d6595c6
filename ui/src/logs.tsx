import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { again, ask, type Found, type LogPart } from "./server";
import { bytes, count, printed } from "./words";

interface Shown { text: string; start: number; end: number; size: number }

const LONGEST = 2 * 1024 * 1024; // characters; of what was read long ago, the file has it
const BEHIND = 128 * 1024; // bytes; two answers
const nothing: Shown = { text: "", start: 0, end: 0, size: 0 };

// A rank's log: its end first, then what is added; earlier lines and the whole on request.
export function Logs(
  { run, dag, ranks, rank, choose }: {
    run: string; dag: string; ranks: number[]; rank: number; choose: (rank: number) => void;
  },
) {
  const [shown, setShown] = useState<Shown | null>(null);
  const [error, setError] = useState("");
  const [words, setWords] = useState("");
  const [found, setFound] = useState<(Found & { of: string }) | null>(null);
  const pre = useRef<HTMLPreElement>(null);
  const text = useMemo(() => printed(shown?.text ?? ""), [shown]);
  const held = useRef({ shown: null as Shown | null, stays: true, keep: null as number | null, follow: true });
  held.current.shown = shown;
  const place = `${rank}/${run}`;

  useEffect(() => {
    held.current = { shown: null, stays: true, keep: null, follow: true };
    setShown(null);
    setFound(null);
    return again(async () => {
      if (!held.current.follow) return false;
      const known = held.current.shown;
      let part = await ask<LogPart>(`log-part/${place}${known?.end ? `?after=${known.end}` : ""}`);
      const box = pre.current;
      held.current.stays = !known || !box || box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      // Far behind, as after hours in a tab that nobody saw: who looks at the end is shown the end.
      if (held.current.stays && part.size - part.end > BEHIND) part = await ask<LogPart>(`log-part/${place}`);
      if (known && part.start === known.end) {
        if (part.text) {
          const text = (known.text + part.text).slice(-LONGEST); // as it was printed
          const cut = known.text.length + part.text.length > LONGEST;
          setShown({ text, start: cut ? Math.max(known.start, part.end - LONGEST) : known.start, end: part.end, size: part.size });
        }
      } else setShown(part);
      return part.text !== "";
    }, (said) => setError(said ? `Cannot be read: ${said.message}` : ""));
  }, [place]);

  // What is read stays in its place, unless one looks at the end.
  useEffect(() => {
    const box = pre.current;
    if (!box) return;
    if (held.current.keep !== null) {
      box.scrollTop += box.scrollHeight - held.current.keep;
      held.current.keep = null;
    } else if (held.current.stays) box.scrollTop = box.scrollHeight;
  }, [shown]);

  const earlier = async () => {
    if (!shown) return;
    const part = await ask<LogPart>(`log-part/${place}?before=${shown.start}`);
    if (part.end > shown.start) return;
    held.current.keep = pre.current?.scrollHeight ?? null;
    setShown({ ...shown, text: part.text + shown.text, start: part.start });
  };
  const search = async (event: Event) => {
    event.preventDefault();
    if (!words.trim()) return setFound(null);
    try {
      const told = await ask<Found>(`log-lines/${place}?words=${encodeURIComponent(words.trim())}`);
      setFound({ ...told, of: words.trim() });
    } catch (said) {
      setError((said as Error).message);
    }
  };
  const show = async (end: number) => {
    held.current.follow = false;
    held.current.stays = true;
    setShown({ ...nothing, ...(await ask<LogPart>(`log-part/${place}?before=${end}`)) });
    pre.current?.focus();
  };
  const follow = () => {
    held.current.follow = true;
    held.current.stays = true;
    held.current.shown = null;
    setShown(null);
  };

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
        {!held.current.follow && <button type="button" onClick={follow}>Follow its end again</button>}
      </p>
      <pre ref={pre} tabIndex={0} role="region" aria-label={`Log of rank ${rank}`}>{text}</pre>
    </section>
  );
}
