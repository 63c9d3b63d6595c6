import { useEffect, useRef, useState } from "preact/hooks";
import { go, type Place } from "./places";
import { again, API, ask, instancesOf, pathOf, tasksOf, type Graph, type Named, type Node, type Task } from "./server";
import { at, bytes, number, parsed, said, spoken, zone } from "./words";

const COLUMNS: Record<string, number> = { data: 0, code: 0, manifest: 0, run: 1, model: 2, pointer: 3 };
const [WIDTH, HEIGHT, GAP_X, GAP_Y] = [210, 76, 60, 20];

function laid(nodes: Node[]): Map<string, { x: number; y: number }> {
  const columns = new Map<number, Node[]>();
  for (const node of nodes) columns.set(COLUMNS[node.kind] ?? 0, [...(columns.get(COLUMNS[node.kind] ?? 0) ?? []), node]);
  const tallest = Math.max(...[...columns.values()].map((of) => of.length));
  const places = new Map<string, { x: number; y: number }>();
  // Those that are there, from the left: of a run that has staged nothing it is alone.
  const shown = [...columns].sort(([a], [b]) => a - b);
  for (const [column, [, of]] of shown.entries())
    of.forEach((node, index) => {
      const y = ((tallest - of.length) / 2 + index) * (HEIGHT + GAP_Y);
      places.set(node.id, { x: column * (WIDTH + GAP_X), y });
    });
  return places;
}

function Picture({ graph, chosen, choose }: { graph: Graph; chosen: string; choose: (id: string) => void }) {
  const places = laid(graph.nodes);
  const right = Math.max(...[...places.values()].map(({ x }) => x)) + WIDTH;
  const bottom = Math.max(...[...places.values()].map(({ y }) => y)) + HEIGHT;
  return (
    <div class="wide" tabIndex={0} role="group" aria-label="Lineage as a graph">
      <div class="graph" style={{ width: `${right}px`, height: `${bottom}px` }}>
        <svg width={right} height={bottom} aria-hidden="true">
          {graph.edges.map(([from, to]) => {
            const [a, b] = [places.get(from)!, places.get(to)!];
            const [x0, y0, x1, y1] = [a.x + WIDTH, a.y + HEIGHT / 2, b.x, b.y + HEIGHT / 2];
            const half = (x0 + x1) / 2;
            return <path key={`${from} ${to}`} d={`M${x0},${y0} C${half},${y0} ${half},${y1} ${x1 - 5},${y1} M${x1 - 10},${y1 - 4} L${x1 - 3},${y1} L${x1 - 10},${y1 + 4}`} />;
          })}
        </svg>
        <ol>
          {graph.nodes.map((node) => {
            const { x, y } = places.get(node.id)!;
            const from = graph.edges.filter(([, to]) => to === node.id).map(([one]) => one);
            return (
              <li key={node.id} style={{ left: `${x}px`, top: `${y}px`, width: `${WIDTH}px`, height: `${HEIGHT}px` }}>
                <button type="button" class={`node ${node.kind}${node.names === false ? " elsewhere" : ""}`} aria-pressed={node.id === chosen} onClick={() => choose(node.id)}>
                  <span class="source">{node.kind}{node.names === true && " ★"}{node.names === false && ", to another model"}</span>
                  <b>{node.title}</b>
                  {from.length > 0 && <span class="unseen"> from {from.join(", ")}</span>}
                </button>
              </li>
            );
          })}
        </ol>
      </div>
    </div>
  );
}

const MOMENTS = new Set(["started", "since"]);

// Of a model: its metrics, which alone are no whole numbers.
const isMetric = (value: unknown): value is number => typeof value === "number" && !Number.isInteger(value);

function Fact({ name, value }: { name: string; value: unknown }) {
  const seconds = MOMENTS.has(name) ? parsed(value) : null;
  return (
    <div>
      <dt>{name}</dt>
      {seconds === null ? <dd><code>{isMetric(value) ? number(value) : name === "state" ? spoken(said(value)) : said(value)}</code></dd> : <dd title={zone}>{at(seconds)}</dd>}
    </div>
  );
}

function About({ node }: { node: Node }) {
  return (
    <section aria-labelledby="node-title" aria-live="polite">
      <h2 id="node-title">{node.kind}: {node.title}</h2>
      <dl class="facts">{node.facts.map(([name, value]) => <Fact key={name} name={name} value={value} />)}</dl>
      {node.files && (
        <div class="wide" tabIndex={0} role="group" aria-label="Files of the model">
          <table>
            <thead><tr><th scope="col">file</th><th scope="col">size</th><th scope="col">SHA-256</th></tr></thead>
            <tbody>{node.files.map((file) => <tr key={file.key}><th scope="row">{file.key}</th><td>{bytes(file.size)}</td><td><code>{file.sha256}</code></td></tr>)}</tbody>
          </table>
        </div>
      )}
    </section>
  );
}

// The DAG by which production is set in these results, if the site has one: as production_dag of
// ddl_airflow.operators.production makes it, whose description names them.
interface Dag { dag_id: string; is_paused: boolean; description: string | null; tags: { name: string }[] }

async function productionDag(results: string): Promise<Dag | null> {
  for (let seen = 0, total = 1; seen < total; ) {
    // Airflow gives no more than 100 at a time, unless the site has set another limit.
    const told = await ask<{ dags: Dag[]; total_entries: number }>(`${API}/dags?tags=ddl&limit=100&offset=${seen}`);
    if (!told.dags.length) break;
    total = told.total_entries;
    seen += told.dags.length;
    for (const found of told.dags) {
      const { dag_id, description, tags } = found;
      // Those of manifests have their framework's tag, too.
      if (tags.length !== 1 || !description?.includes(` in ${results}, `)) continue;
      const { tasks } = await ask<{ tasks: { operator_name: string }[] }>(`${API}/dags/${encodeURIComponent(dag_id)}/tasks`);
      if (tasks.some((task) => task.operator_name === "SetProductionOperator")) return found;
    }
  }
  return null;
}

// What somebody decides over: as it was when they began, whatever is shown meanwhile.
interface Decision { move: "rollback" | "promote"; publication: string; instead_of: string | null; earlier: Named[] }

function Decide({ graph, dag, done }: { graph: Graph; dag: string; done: () => void }) {
  const [by, setBy] = useState<Dag | null>(null);
  const [to, setTo] = useState("");
  const [reason, setReason] = useState("");
  const [told, setTold] = useState("");
  const [refused, setRefused] = useState("");
  const [asked, setAsked] = useState(false);
  const [begun, setBegun] = useState<Decision | null>(null);
  const dialog = useRef<HTMLDialogElement>(null);
  const model = graph.nodes.find((node) => node.kind === "model");
  useEffect(() => {
    (async () => {
      const found = graph.results && (await productionDag(graph.results));
      if (found && (await ask<{ trigger: boolean }>(`rights/${encodeURIComponent(found.dag_id)}`)).trigger) setBy(found);
    })().catch(() => undefined); // without the right nothing is offered
  }, [graph.results]);
  // Until the store has answered, what serves is not known, and then what is to be done is not either.
  if (!by || !model || graph.pending) return null;
  const serves = graph.nodes.some((node) => node.id === "production" && node.names);
  const now: Decision = {
    move: serves ? "rollback" : "promote",
    publication: String(Object.fromEntries(model.facts).place ?? "").split("/").slice(-2).join("/"),
    // Of another that serves by then nothing is changed, nor is it when this is done twice.
    instead_of: graph.production?.publication ?? (graph.unknown ? null : "nothing"),
    earlier: graph.production?.before ?? [],
  };
  const { move, publication, instead_of, earlier } = begun ?? now;
  const end = (words: string) => {
    setTold(words);
    dialog.current?.close();
    done();
  };
  const decide = async (event: Event) => {
    event.preventDefault();
    if (asked) return;
    if (now.instead_of !== instead_of || now.move !== move) {
      end("Nothing was sent: what is in production has changed meanwhile. Look at it, and decide again.");
      return;
    }
    setAsked(true);
    setRefused("");
    // "The one before" is not named here: which models are the same, the markers of all have to say.
    const conf = { model: dag, action: move, to: (move === "promote" ? publication : to) || null, instead_of, reason };
    try {
      const { is_paused } = await ask<Dag>(`${API}/dags/${encodeURIComponent(by.dag_id)}`);
      const body = JSON.stringify({ logical_date: null, conf });
      const run = await ask<{ dag_run_id: string }>(`${API}/dags/${encodeURIComponent(by.dag_id)}/dagRuns`, { method: "POST", body });
      end(`Asked for: run ${run.dag_run_id} of ${by.dag_id}.${is_paused ? " It waits: that DAG is paused. Switch it on." : ""}`);
    } catch (error) {
      setRefused(`Airflow did not take it: ${(error as Error).message}`);
    } finally {
      setAsked(false);
    }
  };
  const begin = () => {
    setBegun(now);
    setTo("");
    setRefused("");
    dialog.current?.showModal();
  };
  const what = move === "rollback" ? "Go back to an earlier model" : "Put this model into production";
  const offered = now.move === "promote" || now.earlier.length > 0;
  if (!offered && !begun) return told ? <p class="row"><span role="status">{told}</span></p> : null;
  return (
    <>
      <p class="row">{offered && <button type="button" onClick={begin}>{what} …</button>}<span role="status">{told}</span></p>
      <dialog ref={dialog} aria-labelledby="decide-title" onClose={() => setBegun(null)}>
        <form onSubmit={(event) => void decide(event)}>
          <h2 id="decide-title">{what}</h2>
          {move === "rollback" && (
            <p><label>To{" "}
              <select value={to} onChange={(event) => setTo(event.currentTarget.value)}>
                <option value="">the one before</option>
                {earlier.map((one) => <option key={one.publication} value={one.publication}>{one.publication}</option>)}
              </select>
            </label></p>
          )}
          {instead_of === null && <p>What serves is not known here: whatever it is, this model takes its place.</p>}
          <p><label>Why, for the history <input value={reason} maxLength={500} onInput={(event) => setReason(event.currentTarget.value)} /></label></p>
          {refused && <p role="alert">{refused}</p>}
          <p class="row"><button type="submit" class="primary" disabled={asked}>{what}</button><button type="button" onClick={() => dialog.current?.close()}>Leave it</button></p>
        </form>
      </dialog>
    </>
  );
}

const waits = (task: Task) => task.state === "awaiting_input";

function Approve({ place, task, say, done }: { place: Place; task: Task; say: (words: string) => void; done: () => void }) {
  const [may, setMay] = useState(false);
  useEffect(() => {
    ask<{ approve: boolean }>(`rights/${encodeURIComponent(place.dag)}`).then((rights) => setMay(rights.approve), () => setMay(false));
  }, [place.dag]);
  if (!may) return null;
  const answer = async (option: string) => {
    const path = `${instancesOf(place.dag, place.run)}/${encodeURIComponent(task.task_id)}`;
    try {
      // Airflow takes an answer to whatever waits by then, and to a task that has ended.
      const now = await ask<Task>(path);
      if (!waits(now) || now.id !== task.id) {
        say(`Nothing was sent: ${waits(now) ? "another model waits for approval now, shown here" : "this model no longer waits for approval"}.`);
        done();
        return;
      }
      await ask(`${path}/-1/hitlDetails`, { method: "PATCH", body: JSON.stringify({ chosen_options: [option], params_input: {} }) });
      say(`${option}: said.`);
      done();
    } catch (error) {
      say(`Airflow did not take it: ${(error as Error).message}`);
    }
  };
  return (
    <p class="row">
      <span>This model waits for approval.</span>
      <button type="button" class="primary" onClick={() => void answer("Approve")}>Approve</button>
      <button type="button" onClick={() => void answer("Reject")}>Reject</button>
    </p>
  );
}

// So long stores are asked anew for what has become of a decision.
const DECIDED_MS = 60_000;

export function Lineage({ place }: { place: Place }) {
  const path = pathOf(place.dag, place.run);
  const [graph, setGraph] = useState<Graph | null>(null);
  const [waiting, setWaiting] = useState<Task | null>(null);
  const [answered, setAnswered] = useState("");
  const [error, setError] = useState("");
  const [chosen, setChosen] = useState("");
  const [decided, setDecided] = useState(0); // when, in ms
  useEffect(() => {
    let before = "";
    let pending = false;
    return again(async () => {
      // Before the graph, and shown with it: so an answer is never to a later model than the one shown.
      const tasks = await tasksOf(place.dag, place.run).catch(() => []);
      // Not while a store has yet to answer: it would be asked anew each time.
      const fresh = Date.now() - decided < DECIDED_MS && !pending;
      const told = await ask<Graph>(`graph/${path}${fresh ? "?fresh=true" : ""}`);
      const waiting = tasks.find((task) => waits(task) && task.operator_name === "ApproveOperator") ?? null;
      setGraph(told);
      setWaiting(waiting);
      pending = told.pending;
      const text = JSON.stringify([told, waiting]);
      const isNew = text !== before;
      before = text;
      return isNew;
    }, (told) => setError(told ? told.message : ""));
  }, [path, decided]);
  const decide = () => setDecided(Date.now());
  const failed = error && <p role="alert" class="lost">Cannot read the lineage: {error}</p>;
  if (!graph) return failed || <p id="empty">Reading …</p>;
  const node = graph.nodes.find((one) => one.id === chosen) ?? graph.nodes.find((one) => one.kind === "model") ?? graph.nodes.at(-1)!;
  return (
    <>
      <h1>Lineage <span class="source">of <a href={go({ view: "run", dag: place.dag, run: place.run })}>{place.dag} {place.run}</a></span></h1>
      {failed}
      {waiting && <Approve place={place} task={waiting} say={setAnswered} done={decide} />}
      <div role="status">{answered && <p>{answered}</p>}</div>
      <Picture graph={graph} chosen={node.id} choose={setChosen} />
      {graph.unknown && <p class="source">Whether it is in production is not known: {graph.unknown}.</p>}
      <Decide graph={graph} dag={place.dag} done={decide} />
      <About node={node} />
    </>
  );
}
