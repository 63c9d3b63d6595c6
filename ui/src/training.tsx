import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { lead, leave } from "./around";
import { Chart, type Drawn } from "./chart";
import { nothing, taken, type Known } from "./curves";
import { Logs } from "./logs";
import { go, type Place } from "./places";
import {
  again, ask, endedJobs, isOver, pathOf, Refused, tasksOf,
  type About, type Curve, type Curves, type Facts, type Job, type Task,
} from "./server";
import { at, bytes, cores, count, isTime, number, percent, said, short, spoken, time, titleOf, zone } from "./words";

const POINTS = 800;
const OURS = new Set(["StageDataOperator", "TrainOperator", "TransformOperator", "EvaluateOperator", "UploadResultsOperator"]);
const DASHES = [[], [8, 4], [3, 3], [12, 3, 3, 3]];
const SIGNS: Record<string, string> = {
  success: "✓", published: "✓", done: "✓", failed: "✗", upstream_failed: "✗", running: "▶", made_room: "⏸", no_sign_of_life: "?",
};

const trainOf = (tasks: Task[]) => tasks.find((task) => task.operator_name === "TrainOperator");

// Of a run without Airflow that says no more that it is at work.
export const SILENT = "no_sign_of_life";

export const sign = (state: string): string => (Object.hasOwn(SIGNS, state) ? SIGNS[state]! : "○");

function Failed({ about, tasks, showLog }: { about: About; tasks: Task[]; showLog: (rank: number) => void }) {
  const { failure } = about;
  const task = tasks.find((one) => one.task_id === failure?.step);
  if (!failure || task?.state === "success") return null; // a later try did better
  return (
    <section id="failure" aria-labelledby="failure-title">
      <h2 id="failure-title">Why it failed</h2>
      <p>{failure.cause}</p>
      {failure.fix && <p><b>What to do:</b> {failure.fix}</p>}
      <p class="row">
        {failure.line && <span>Line: <code>{failure.line}</code></span>}
        <span class="source">{task?.task_display_name ?? failure.step}, try {failure.try}, {failure.error}</span>
        {failure.rank !== null && about.logs.includes(failure.rank) && (
          <button type="button" onClick={() => showLog(failure.rank!)}>Log of rank {failure.rank}</button>
        )}
      </p>
    </section>
  );
}

function Steps({ tasks }: { tasks: Task[] }) {
  return (
    <ol id="tasks" aria-label="Steps">
      {tasks.map((task) => (
        <li key={task.task_id} class={task.state ?? "waiting"}>
          <span aria-hidden="true">{sign(task.state ?? "waiting")}</span> {task.task_display_name}: {spoken(task.state ?? "waiting")}
        </li>
      ))}
    </ol>
  );
}

// In place of Airflow's steps, of a run without it.
function ByHand({ about }: { about: About }) {
  const { state, step, signed } = about;
  const silent = state === SILENT;
  return (
    <>
      <ol id="tasks" aria-label="Steps">
        <li class={silent ? "failed" : state}>
          <span aria-hidden="true">{sign(state)}</span> {step && `${spoken(step)}: `}{spoken(state)}{silent && ` since ${at(signed)}`}
        </li>
      </ol>
      {silent && (
        <p id="silent">
          <code>ddl-airflow run</code> was ended without a word, or is frozen, or its host is away. If it has ended,{" "}
          <code>--step</code> goes on with it.
        </p>
      )}
    </>
  );
}

function Now({ about, tasks, curves }: { about: About; tasks: Task[]; curves: Known }) {
  const { pace } = about;
  const trained = trainOf(tasks)?.state;
  const stopped = pace.stopped_early || (trained === "success" && pace.step !== null && pace.steps !== null && pace.step + 1 < pace.steps);
  const done = trained === "success" ? 1 : pace.done;
  const values = new Map<string, [number | string | null, string]>();
  for (const curve of curves.curves.values()) {
    const part = curve.parts.reduce((a, b) => (b.job >= a.job ? b : a));
    const value = part.values.at(-1) ?? null;
    const gap = part.gaps.findLast(([, to]) => to === part.steps.at(-1));
    values.set(curve.name, [value ?? gap?.[2] ?? null, curve.measured_on]);
  }
  for (const one of about.measurements) values.set(one.metric, [one.value, one.measured_on]);
  const examples = values.get("examples_per_s");
  values.delete("examples_per_s");
  const left = isOver(trained) || about.jobs.at(-1)?.over ? null : pace.left_s;
  return (
    <section aria-label="How far it is">
      {done !== null && (
        <p class="progress">
          <progress max={1} value={done} aria-label="Progress of the training" />
          <span>{percent(done)}{stopped && ", stopped early"}</span>
        </p>
      )}
      <dl id="now">
        {pace.step !== null && (
          <div><dt>step</dt><dd>{count(pace.step)}{pace.steps !== null && ` / ${count(pace.steps)}`}</dd></div>
        )}
        {pace.epoch !== null && <div><dt>epoch</dt><dd>{count(pace.epoch)}</dd></div>}
        {left !== null && <div><dt>left</dt><dd>{time(left)}</dd></div>}
        {pace.steps_per_s !== null && <div><dt>steps/s</dt><dd>{number(pace.steps_per_s)}</dd></div>}
        {examples && <div><dt>examples/s</dt><dd>{number(examples[0])}</dd></div>}
        {[...values].map(([name, [value, source]]) => {
          const lost = value === null || !Number.isFinite(Number(value));
          return (
            <div key={name}>
              <dt>{name}</dt>
              <dd class={lost ? "lost" : undefined}>{lost && "⚠ "}{number(value)}</dd>
              {source && <dd class="source">{source}</dd>}
            </div>
          );
        })}
      </dl>
    </section>
  );
}

export function drawn(curve: Curve, jobs: Job[]): Drawn[] {
  const parts = [...curve.parts].sort((a, b) => a.job - b.job);
  return parts.map((part, index) => ({
    name: jobs[part.job]?.name ?? `try ${part.job + 1}`,
    steps: part.steps,
    values: part.values,
    gaps: part.gaps,
    means: part.means,
    dash: DASHES[(parts.length - 1 - index) % DASHES.length]!,
    colour: part.job,
  }));
}

function Curved({ known, jobs }: { known: Known; jobs: Job[] }) {
  const [weight, setWeight] = useState(0);
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  const names = jobs.map((job) => job.name).join();
  const charts = useMemo(
    () => [...known.curves.values()].filter((c) => c.parts.some((p) => p.steps.length > 1)).map((c) => ({ curve: c, lines: drawn(c, jobs) })),
    [known, names],
  );
  if (!charts.length) return null;
  const tries = new Set(charts.flatMap(({ lines }) => lines.map((line) => line.name)));
  return (
    <section aria-labelledby="curves-title">
      <h2 id="curves-title">Curves</h2>
      <p class="row">
        <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value={weight} onInput={(event) => setWeight(Number(event.currentTarget.value))} /></label>
        <output>{percent(weight)}</output>
        {tries.size > 1 && <span class="source">A line for each try, the last one unbroken: {[...tries].join(", ")}</span>}
      </p>
      <div id="charts">
        {charts.map(({ curve, lines }) => (
          <Chart
            key={curve.name} title={titleOf(curve.name)} note={curve.measured_on}
            lines={lines} weight={weight} open={open.has(curve.name)}
            toggle={(now) => setOpen((before) => {
              if (before.has(curve.name) === now) return before;
              const after = new Set(before);
              if (now) after.add(curve.name);
              else after.delete(curve.name);
              return after;
            })}
          />
        ))}
      </div>
    </section>
  );
}

// Why there is no progress to show.
function without(about: About, tasks: Task[]): string {
  if (about.no_workspace) return about.no_workspace;
  const trained = trainOf(tasks)?.state;
  if (about.by_hand ? about.state === "running" : !isOver(trained)) return "No progress yet. It appears when the training reports its first steps.";
  if (about.jobs.length || Object.keys(about.facts).length) return "It has reported no progress.";
  return "Its folder is not in the workspace: cleaning has removed it, or it never began. What it published is where it was.";
}

const LANES = [["computing_s", "computing"], ["reducing_s", "reducing"], ["waiting_s", "waiting"]] as const;

function Lanes({ about }: { about: About }) {
  const told = about.communication;
  if (!told) return null;
  return (
    <section aria-labelledby="lanes-title">
      <h2 id="lanes-title">How ranks spend their time</h2>
      <p class="source">
        {told.ended ? "Of the last job, which has ended." : "Of the last job, so far."}
        {told.straggler !== null && ` The others waited most for rank ${told.straggler}.`}
      </p>
      <div class="wide" tabIndex={0} role="group" aria-label="How ranks spend their time">
        <table id="lanes">
          <thead><tr><th scope="col">rank</th><th scope="col" class="lane"><span class="unseen">as a bar</span></th>{LANES.map(([key, name]) => <th scope="col" key={key}><i class={`key ${name}`} aria-hidden="true" /> {name}</th>)}</tr></thead>
          <tbody>
            {told.ranks.map((one) => (
              <tr key={one.rank}>
                <th scope="row">{one.rank}{one.host && ` on ${one.host}`}{told.straggler === one.rank && " (slowest)"}</th>
                <td class="lane"><span class="bar" aria-hidden="true">{LANES.map(([key, name]) => <i key={key} class={name} style={{ width: `${(100 * one[key]) / (one.run_s || 1)}%` }} />)}</span></td>
                {LANES.map(([key]) => <td key={key}>{percent(one[key] / (one.run_s || 1))} <span class="source">{time(one[key])}</span></td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Tries({ jobs }: { jobs: Job[] }) {
  if (!jobs.length) return null;
  return (
    <section aria-labelledby="tries-title">
      <h2 id="tries-title">What happened in each try</h2>
      <ol id="tries">
        {jobs.map((job) => (
          <li key={job.name} class={job.state}>
            <span aria-hidden="true">{sign(job.state)}</span> <b>{job.name}</b>
            {job.hosts.length > 0 && ` on ${job.hosts.slice(0, 4).join(", ")}${job.hosts.length > 4 ? " …" : ""}`}: {job.words}
            {isTime(job.started) && <span class="source" title={zone}> {at(job.started)}{job.ended !== null && `, ${time(job.ended - job.started)}`}</span>}
          </li>
        ))}
      </ol>
    </section>
  );
}

function memory(now: number | null, peak: number | null): string {
  const most = peak === null ? "" : `at most ${bytes(peak)}`;
  return now === null ? most || "–" : `${bytes(now)}${most && `, ${most}`}`;
}

function Where({ job, logs, showLog }: { job: Job | undefined; logs: number[]; showLog: (rank: number) => void }) {
  if (!job?.ranks.length) return null;
  const onGpus = job.ranks.some((one) => one.usage.gpu !== null || one.usage.gpu_peak !== null);
  const names = ["rank", "host", "processor", "GPUs", "cores used", "memory", ...(onGpus ? ["GPU used", "GPU memory"] : []), "state", "log"];
  return (
    <section aria-labelledby="where-title">
      <h2 id="where-title">Where it runs</h2>
      <div class="wide" tabIndex={0} role="group" aria-label="Where it runs">
        <table>
          <thead><tr>{names.map((name) => <th scope="col" key={name}>{name}</th>)}</tr></thead>
          <tbody>
            {job.ranks.map((one) => (
              <tr key={one.rank}>
                <th scope="row">{one.rank}{one.task && ` (${one.task})`}</th>
                <td>{one.host || "–"}</td>
                <td>{one.cpu || "–"}</td>
                <td>{one.gpus.join(", ") || "–"}</td>
                <td>{one.usage.cores === null ? "–" : cores(one.usage.cores)}</td>
                <td>{memory(one.usage.memory, one.usage.peak)}</td>
                {onGpus && <td>{one.usage.gpu === null ? "–" : percent(one.usage.gpu / 100)}</td>}
                {onGpus && <td>{memory(one.usage.gpu_memory, one.usage.gpu_peak)}</td>}
                <td>{one.ended === null ? (job.over ? "said no more" : "at work") : one.asked ? "was ended with the others" : one.exit_code ? `exit code ${one.exit_code}` : "ended well"}</td>
                <td>{logs.includes(one.rank) && <button type="button" aria-label={`Log of rank ${one.rank}`} onClick={() => showLog(one.rank)}>Log</button>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Checkpoints({ found }: { found: About["checkpoints"] }) {
  if (!found.length) return null;
  return (
    <section aria-labelledby="checkpoints-title">
      <h2 id="checkpoints-title">Checkpoints</h2>
      <div class="wide" tabIndex={0} role="group" aria-label="Checkpoints">
        <table>
          <thead><tr><th scope="col">name</th><th scope="col">step</th><th scope="col">size</th><th scope="col">written</th></tr></thead>
          <tbody>
            {found.map((one) => (
              <tr key={one.name}><th scope="row">{one.name}</th><td>{one.step === null ? "–" : count(one.step)}</td><td>{bytes(one.bytes)}</td><td title={zone}>{at(one.at)}</td></tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Made({ facts, place }: { facts: Facts; place: Place }) {
  const rows: [string, unknown][] = [
    ["data", facts.dataset?.uri], ["fingerprint", facts.dataset && short(facts.dataset.fingerprint)],
    ["code", facts.code && short(facts.code.digest)], ["commit", facts.code?.git_commit],
    ["manifest", facts.manifest && short(facts.manifest.digest)],
    ["parameters", facts.run?.parameters], ["launcher", facts.environment?.launcher],
    ["ranks", facts.environment?.world_size], ["hosts", facts.environment?.hosts],
    ["versions", facts.environment?.versions],
  ];
  const known = rows.filter(([, value]) => value != null && said(value) !== "");
  if (!known.length) return null;
  return (
    <section aria-labelledby="made-title">
      <h2 id="made-title">What it is made of</h2>
      <dl class="facts">{known.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{said(value)}</dd></div>)}</dl>
      <p><a href={go({ ...place, view: "graph" })}>Lineage, with all digests</a></p>
    </section>
  );
}

function TensorBoard({ about, path }: { about: About; path: string }) {
  const [words, setWords] = useState("");
  const [starting, setStarting] = useState(false);
  if (!about.tensorboard && !about.tensorboards) return null;
  const open = async () => {
    setStarting(true);
    setWords("TensorBoard starts …");
    try {
      const { path: found } = await ask<{ path: string }>(`tensorboard-of/${path}`, { method: "POST" });
      setWords("");
      lead(new URL(found, location.href).href);
    } catch (error) {
      setWords((error as Error).message);
    }
    setStarting(false);
  };
  return (
    <section aria-labelledby="tensorboard-title">
      <h2 id="tensorboard-title">TensorBoard</h2>
      {about.tensorboards && (
        <p><button type="button" disabled={starting} onClick={open}>TensorBoard of this training</button></p>
      )}
      <p role="status">{words}</p>
      {about.tensorboard && <p><a href={about.tensorboard} onClick={leave}>TensorBoard, over all experiments</a></p>}
    </section>
  );
}

export function Training({ place }: { place: Place }) {
  const { dag, run } = place;
  const path = pathOf(dag, run);
  const [about, setAbout] = useState<About | null>(null);
  const [tasks, setTasks] = useState<Task[]>([]);
  const [known, setKnown] = useState<Known>(nothing);
  const [error, setError] = useState("");
  const [rank, setRank] = useState<number | null>(place.rank);
  const [foreign, setForeign] = useState(false);
  const state = useRef({ cursor: "", known: nothing(), said: "", whole: 0 });

  useEffect(() => {
    state.current = { cursor: "", known: nothing(), said: "", whole: 0 };
    setKnown(nothing());
    setAbout(null);
    return again(async () => {
      const now = state.current;
      const [found, told, news] = await Promise.all([
        tasksOf(dag, run).catch((error: unknown) => {
          // By hand, or without the right: the rest is shown. Else all stays as it was.
          if (error instanceof Refused && [403, 404].includes(error.status)) return [] as Task[];
          throw error;
        }),
        ask<About>(`about/${path}`),
        ask<Curves>(`curves/${path}?points=${POINTS}&cursor=${now.cursor}`),
      ]);
      const none = found.length > 0 && !found.some((task) => OURS.has(task.operator_name));
      setForeign(none);
      if (none) return false;
      told.jobs = endedJobs(told.jobs, trainOf(found), told.signed !== null);
      now.cursor = news.cursor;
      const after = taken(now.known, news);
      if (after !== now.known) setKnown(after);
      now.known = after;
      if (news.more || !now.whole) now.whole = after.points; // a long one comes in several answers
      // Of a training that goes on for days: all of it in fewer points again, once it has doubled.
      if (after.points > 2 * now.whole + 8 * POINTS * Math.max(1, after.curves.size)) {
        now.cursor = "";
        now.known = nothing();
        now.whole = 0;
      }
      const text = JSON.stringify([told, found]);
      const isNew = text !== now.said || news.curves.length > 0;
      if (text !== now.said) {
        setAbout(told);
        setTasks(found);
      }
      now.said = text;
      return isNew;
    }, (said_) => setError(said_ ? said_.message : ""));
  }, [path]);

  const showLog = (one: number) => {
    setRank(one);
    setTimeout(() => {
      const title = document.getElementById("logs-title");
      title?.scrollIntoView();
      title?.parentElement?.querySelector("select")?.focus({ preventScroll: true });
    });
  };
  if (foreign) return <p id="none">This DAG has no training: none of its tasks is of ddl-airflow.</p>;
  const shown = rank ?? about?.logs[0] ?? null;
  return (
    <>
      <h1>{dag} <span class="source">{run}</span></h1>
      <div role="status">{error && <p class="lost">Cannot read the training: {error}</p>}</div>
      {about && <Failed about={about} tasks={tasks} showLog={showLog} />}
      {about?.by_hand && !tasks.length ? <ByHand about={about} /> : <Steps tasks={tasks} />}
      {about && (
        <>
          <Now about={about} tasks={tasks} curves={known} />
          {known.curves.size === 0 && about.pace.step === null && (
            <p id="empty">{without(about, tasks)}</p>
          )}
          <Curved known={known} jobs={about.jobs} />
          <Lanes about={about} />
          <Tries jobs={about.jobs} />
          <Where job={about.jobs.at(-1)} logs={about.logs} showLog={showLog} />
          <Checkpoints found={about.checkpoints} />
          <Made facts={about.facts} place={place} />
          <TensorBoard about={about} path={path} />
          {shown !== null && (
            <Logs run={path} dag={dag} ranks={about.logs} rank={shown} choose={setRank} />
          )}
        </>
      )}
    </>
  );
}
