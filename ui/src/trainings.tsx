import { useEffect, useMemo, useState } from "preact/hooks";
import { go } from "./places";
import { again, endKilled, idOf, listing, type Line, type Listed } from "./server";
import { sign, SILENT } from "./training";
import { around, count, number, parsed, percent, short, spoken, time, zone } from "./words";

type Key = "name" | "state" | "metric" | "duration" | "speed" | "data" | "started";

const MOST_ROWS = 100;
const NUMBERS = new Set<Key>(["metric", "duration", "speed"]);
const NAMES: Record<Key, string> = {
  name: "training", state: "state", metric: "metric", duration: "duration", speed: "steps/s", data: "data", started: "started",
};
const started = (line: Line) => parsed(line.started);
const speed = (line: Line) => line.steps_per_s ?? line.pace?.steps_per_s ?? null;

function duration(line: Line): number | null {
  if (line.held_s !== null) return line.held_s;
  const from = started(line);
  const to = line.state === "running" ? Date.now() / 1000 : line.changed;
  return from === null || to === null ? null : Math.max(0, to - from);
}

function compared(a: string | number | null, b: string | number | null): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // what is not known is last
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

// What one has chosen in the table of a DAG, or of all: it is so again when one comes back to it.
const kept = new Map<string, unknown>();

function useKept<T>(name: string, first: T) {
  const [value, set] = useState<T>(() => (kept.has(name) ? (kept.get(name) as T) : first));
  kept.set(name, value);
  return [value, set] as const;
}

export function Trainings({ dag }: { dag: string }) {
  const [listed, setListed] = useState<Listed | null>(null);
  const [error, setError] = useState("");
  const [words, setWords] = useKept(`words ${dag}`, "");
  const [state, setState] = useKept(`state ${dag}`, "");
  const [serving, setServing] = useKept(`serving ${dag}`, false);
  const [metric, setMetric] = useKept(`metric ${dag}`, "");
  const [sort, setSort] = useKept<{ key: Key; up: boolean }>(`sort ${dag}`, { key: "started", up: false });
  const [chosen, setChosen] = useKept<string[]>(`chosen ${dag}`, []);
  const [pages, setPages] = useKept(`pages ${dag}`, 1);

  useEffect(() => {
    let before = "";
    const read = listing(dag);
    setListed(null);
    return again(async () => {
      const told = await read();
      const trainings = await endKilled(told.trainings).catch(() => told.trainings); // as recorded
      const rest = [told.left_out, told.no_workspace, trainings.map((line) => line.state)];
      const text = JSON.stringify(rest);
      const isNew = told.parts.length > 0 || text !== before;
      before = text;
      if (isNew) setListed({ ...told, trainings });
      return isNew;
    }, (said) => setError(said ? said.message : ""));
  }, [dag]);

  const mine = listed?.trainings ?? [];
  const metrics = useMemo(() => [...new Set(mine.flatMap((line) => Object.keys(line.metrics)))].sort(), [mine]);
  const states = useMemo(() => [...new Set(mine.map((line) => line.state))].sort(), [mine]);
  const shownMetric = metrics.includes(metric) ? metric : (metrics.find((one) => /acc/.test(one)) ?? metrics[0] ?? "");
  const values: Record<Key, (line: Line) => string | number | null> = {
    name: idOf,
    state: (line) => line.state,
    metric: (line) => (Object.hasOwn(line.metrics, shownMetric) ? Number(line.metrics[shownMetric]) : null),
    duration,
    speed,
    data: (line) => (line.facts.dataset?.fingerprint as string | undefined) ?? null,
    started,
  };
  const found = useMemo(() => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const value = values[sort.key];
    return mine
      .filter((line) => !state || line.state === state)
      .filter((line) => !serving || line.production)
      .filter((line) => {
        const text = [line.dag_id, line.run_id, line.training_id, line.failure, line.facts.dataset?.uri, line.facts.dataset?.fingerprint, line.facts.code?.digest, line.facts.code?.git_commit, line.facts.manifest?.digest].join(" ").toLowerCase();
        return wanted.every((word) => text.includes(word));
      })
      .map((line, index) => ({ line, index, value: value(line) }))
      .sort((a, b) => {
        const order = compared(a.value, b.value);
        const known = a.value !== null && b.value !== null;
        return (known && !sort.up ? -order : order) || a.index - b.index;
      })
      .map(({ line }) => line);
  }, [mine, words, state, serving, shownMetric, sort]);

  const choose = (id: string) =>
    setChosen((before) => (before.includes(id) ? before.filter((one) => one !== id) : [...before, id].slice(-2)));
  const [one, other] = chosen.map((id) => mine.find((line) => idOf(line) === id));
  const head = (key: Key) => (
    <th scope="col" key={key} class={NUMBERS.has(key) ? "number" : undefined} aria-sort={sort.key === key ? (sort.up ? "ascending" : "descending") : "none"}>
      <button type="button" class="head" onClick={() => setSort({ key, up: sort.key === key ? !sort.up : false })}>
        {key === "metric" ? shownMetric || "metric" : NAMES[key]} <span aria-hidden="true">{sort.key === key ? (sort.up ? "▲" : "▼") : "↕"}</span>
      </button>
    </th>
  );
  return (
    <>
      <h1>Trainings{dag && <span class="source"> of {dag}, <a href={go({})} onClick={() => history.replaceState(null, "", location.pathname)}>see all</a></span>}</h1>
      <div role="status">{error && <p class="lost">Cannot read the trainings: {error}</p>}</div>
      <form class="row" role="search" onSubmit={(event) => event.preventDefault()}>
        <label>Filter <input type="search" value={words} onInput={(event) => setWords(event.currentTarget.value)} placeholder="name, digest, cause" /></label>
        <label>State{" "}
          <select value={state} onChange={(event) => setState(event.currentTarget.value)}>
            <option value="">any</option>
            {states.map((name) => <option key={name} value={name}>{spoken(name)}</option>)}
          </select>
        </label>
        {metrics.length > 0 && (
          <label>Metric{" "}
            <select value={shownMetric} onChange={(event) => setMetric(event.currentTarget.value)}>
              {metrics.map((name) => <option key={name} value={name}>{name}</option>)}
            </select>
          </label>
        )}
        <label><input type="checkbox" checked={serving} onChange={(event) => setServing(event.currentTarget.checked)} /> in production</label>
        {one && other
          ? <a class="button" href={go({ view: "compare", dag: one.dag_id, run: one.run_id, other: [other.dag_id, other.run_id] })}>Compare the two</a>
          : mine.length > 1 && <span class="source">Tick two to compare them.</span>}
      </form>
      {listed && !found.length && <p id="empty">{mine.length ? "No training is like that." : listed.no_workspace || "No training yet that you may read."}</p>}
      {found.length > 0 && (
        <div class="wide" tabIndex={0} role="group" aria-label="Trainings">
          <table id="trainings">
            <caption class="unseen">Trainings, {found.length} of {mine.length}</caption>
            <thead>
              <tr><th scope="col"><span class="unseen">compare</span></th>{(["name", "state", "metric", "duration", "speed", "data"] as Key[]).map(head)}<th scope="col">model</th>{head("started")}</tr>
            </thead>
            <tbody>
              {found.slice(0, pages * MOST_ROWS).map((line) => (
                <tr key={`${line.dag_id}/${line.training_id}`} class={line.state}>
                  <td><input type="checkbox" aria-label={`Compare ${idOf(line)}`} checked={chosen.includes(idOf(line))} onChange={() => choose(idOf(line))} /></td>
                  <th scope="row"><a href={go({ view: "run", dag: line.dag_id, run: line.run_id })}>{line.dag_id}<span class="source">{line.run_id}</span></a></th>
                  <td title={line.failure ?? undefined}>
                    <span class="state"><span aria-hidden="true">{sign(line.state)}</span> {spoken(line.state)}</span>
                    {line.state === SILENT && <span class="cause source" title={zone}>since {around(line.signed)}</span>}
                    {line.state === "running" && line.pace && line.pace.done !== null && ` ${percent(line.pace.done)}`}
                    {line.failure && <span class="cause source">{line.failure}</span>}
                  </td>
                  <td class="number">{Object.hasOwn(line.metrics, shownMetric) ? number(line.metrics[shownMetric]) : "–"}</td>
                  <td class="number">{time(duration(line))}</td>
                  <td class="number">{number(speed(line))}</td>
                  <td><code>{line.facts.dataset?.fingerprint ? short(line.facts.dataset.fingerprint) : "–"}</code></td>
                  <td>
                    {line.publication ? <a href={go({ view: "graph", dag: line.dag_id, run: line.run_id })} aria-label={`Lineage of ${idOf(line)}`}>Lineage</a> : "–"}
                    {line.production && <b class="serving"> ★ in production</b>}
                  </td>
                  <td class="moment" title={zone}>{around(started(line))}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {listed !== null && listed.left_out > 0 && (
        <p id="left-out" class="source">These are the newest; {count(listed.left_out)} older ones are not in the table.{!dag && " A DAG's own page has more of them."}</p>
      )}
      {found.length > pages * MOST_ROWS && <p><button type="button" onClick={() => setPages(pages + 1)}>Show {MOST_ROWS} more of {found.length}</button></p>}
    </>
  );
}
