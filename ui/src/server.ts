// What the plugin's server and Airflow's API answer, and how often they are asked.

export interface Points { steps: number[]; values: (number | null)[] }
export interface Part extends Points {
  job: number;
  gaps: [number, number, string][];
  means?: Points | null; // where points were left out, and extremes kept
}
export interface Curve { name: string; measured_on: string; parts: Part[] }
export interface Curves { curves: Curve[]; cursor: string; more: boolean; again: boolean }

export interface Pace {
  step: number | null; steps: number | null; epoch: number | null; done: number | null;
  stopped_early: boolean; steps_per_s: number | null; examples_per_s: number | null;
  left_s: number | null;
}
export interface Failure {
  step: string; try: number; error: string; message: string; rank: number | null;
  cause: string; fix: string; line: string;
}
export interface Rank {
  rank: number; host: string; task: string; cpu: string; gpus: string[];
  started: number | null; ended: number | null; exit_code: number | null; asked: boolean;
  usage: Record<"cores" | "memory" | "peak" | "gpu" | "gpu_memory" | "gpu_peak", number | null>;
}
export interface Job {
  name: string; try: number; state: string; words: string; over: boolean;
  started: number | null; ended: number | null; hosts: string[]; ranks: Rank[];
}
export interface Spent {
  rank: number; host: string; run_s: number;
  computing_s: number; reducing_s: number; waiting_s: number;
}
export interface Measured { metric: string; value: number | string; measured_on: string }
export type Facts = Record<string, Record<string, unknown>>;
export interface About {
  training_id: string; no_workspace: string; pace: Pace; failure: Failure | null; jobs: Job[];
  state: string; step: string; signed: number | null; by_hand: boolean;
  communication: { ended: boolean; straggler: number | null; ranks: Spent[] } | null;
  checkpoints: { name: string; step: number | null; bytes: number; at: number }[];
  measurements: Measured[]; facts: Facts; logs: number[]; tensorboard: string | null; tensorboards: boolean;
}
export interface Line {
  dag_id: string; run_id: string; training_id: string; state: string; step: string;
  signed: number | null; by_hand: boolean;
  started: string | null; changed: number | null; pace: Pace | null;
  metrics: Record<string, number | string>; held_s: number | null; steps_per_s: number | null;
  failure: string | null; publication: string | null; production: boolean | null; facts: Facts;
}
export interface Listed {
  trainings: Line[]; left_out: number; no_workspace: string;
  parts: [number, string, number][]; // of what is told: which, its tag, and how many trainings
}
export interface Node {
  id: string; kind: string; title: string; facts: [string, unknown][];
  files?: { key: string; size: number | null; sha256: string }[]; names?: boolean;
}
export interface Named { publication: string; training_id: string; model: string; set: string }
export interface Graph {
  nodes: Node[]; edges: [string, string][]; unknown: string; pending: boolean;
  results: string;
  production: (Named & { before: Named[] }) | null;
}
export interface LogPart { text: string; start: number; end: number; size: number }
export interface Found { found: { text: string; end: number }[]; more: number; searched: number; size: number }
export interface Task {
  // Of the task instance: Airflow gives it a new one when it is cleared.
  id: string;
  task_id: string; task_display_name: string; operator_name: string; state: string | null;
  try_number: number;
}

export class Refused extends Error {
  constructor(readonly status: number, words: string) {
    super(words);
  }
}

export async function ask<T>(path: string, how: RequestInit = {}): Promise<T> {
  const answer = await fetch(path, { headers: { "Content-Type": "application/json" }, ...how });
  if (answer.ok) return (await answer.json()) as T;
  let detail: unknown;
  try {
    detail = ((await answer.json()) as { detail?: unknown }).detail;
  } catch { /* no JSON */ }
  const why = typeof detail === "string" ? detail : answer.statusText;
  if (answer.status === 401) throw new Refused(401, "You are not logged in any more: log in, and come back.");
  if (answer.status === 403) throw new Refused(403, "Airflow gives you no right to read this.");
  throw new Refused(answer.status, why || `the server answered ${answer.status}`);
}

// Airflow's own, which may be below a path: as it is seen from this page's /ddl/training.
export const API = "../api/v2";

export const pathOf = (dag: string, run: string): string =>
  `${encodeURIComponent(dag)}/${encodeURIComponent(run)}`;

const FIRST_MS = 2000;
const LONGEST_MS = 30_000;
const ENDED = new Set(["success", "failed", "upstream_failed", "skipped", "removed"]);
export const isOver = (state: string | null | undefined): boolean => ENDED.has(state ?? "");

// A task that was deferred, and is queued to go on, is still in the same try.
const TRY_OVER = new Set([...ENDED, "up_for_retry"]);

// Whose worker was killed with its ranks, of that one nobody has noted an end: Airflow says that the
// try is over, by the state of its task, or since that is in another try. Without Airflow it is
// `silent`.
export function endedJobs(jobs: Job[], train: Task | undefined, silent: boolean): Job[] {
  const last = jobs.at(-1);
  if (!last || last.over) return jobs;
  const over = train !== undefined && (TRY_OVER.has(train.state ?? "") || train.try_number > last.try);
  if (!over && !silent) return jobs;
  const words = over ? "was ended, and its ranks said no more" : "its ranks say no more";
  const ended = last.state === "running" ? { state: "ended", words } : {};
  // What it took last it takes no more.
  const none = { cores: null, memory: null, gpu: null, gpu_memory: null };
  const ranks = last.ranks.map((one) => (one.ended === null ? { ...one, usage: { ...one.usage, ...none } } : one));
  return [...jobs.slice(0, -1), { ...last, ...ended, over: true, ranks }];
}

// Calls again and again until it is stopped: less often while nothing happens or nobody answers,
// and not at all while nobody looks. `work` says whether there was anything new.
export function again(work: () => Promise<boolean>, failed: (error: Error | null) => void): () => void {
  let wait = FIRST_MS;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let stopped = false;
  let busy = false;
  const turn = async () => {
    clearTimeout(timer);
    if (stopped || busy || document.hidden) return;
    busy = true;
    try {
      wait = (await work()) ? FIRST_MS : Math.min(wait * 1.5, LONGEST_MS / 2);
      if (!stopped) failed(null);
    } catch (error) {
      wait = Math.min(wait * 2, LONGEST_MS);
      if (!stopped) failed(error as Error);
    }
    busy = false;
    if (!stopped) timer = setTimeout(turn, wait);
  };
  const looked = () => {
    wait = FIRST_MS;
    void turn();
  };
  document.addEventListener("visibilitychange", looked);
  void turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", looked);
  };
}

// Of a run, in the order of the DAG: each after those that it waits for.
const orders = new Map<string, Promise<Map<string, number>>>();

async function orderOf(dag: string): Promise<Map<string, number>> {
  interface Told { task_id: string; downstream_task_ids: string[] | null }
  const { tasks } = await ask<{ tasks: Told[] }>(`${API}/dags/${encodeURIComponent(dag)}/tasks`);
  const byId = new Map(tasks.map((task) => [task.task_id, task]));
  const waits = new Map(tasks.map((task) => [task.task_id, 0]));
  for (const task of tasks)
    for (const next of task.downstream_task_ids ?? []) waits.set(next, (waits.get(next) ?? 0) + 1);
  const ready = tasks.filter((task) => waits.get(task.task_id) === 0);
  const order = new Map<string, number>();
  for (const task of ready) {
    // It grows meanwhile.
    order.set(task.task_id, order.size);
    for (const next of task.downstream_task_ids ?? []) {
      const left = (waits.get(next) ?? 0) - 1;
      waits.set(next, left);
      const found = byId.get(next);
      if (left === 0 && found) ready.push(found);
    }
  }
  return order;
}

export const instancesOf = (dag: string, run: string): string =>
  `${API}/dags/${encodeURIComponent(dag)}/dagRuns/${encodeURIComponent(run)}/taskInstances`;

export async function tasksOf(dag: string, run: string): Promise<Task[]> {
  interface Told { task_instances: Task[]; total_entries: number }
  const found: Task[] = [];
  for (let total = 1; found.length < total; ) {
    // Airflow gives 50 if it is not told how many, and no more than 100.
    const told = await ask<Told>(`${instancesOf(dag, run)}?limit=100&offset=${found.length}`);
    if (!told.task_instances.length) break;
    total = told.total_entries;
    found.push(...told.task_instances);
  }
  if (!orders.has(dag)) orders.set(dag, orderOf(dag));
  const order = await orders.get(dag)!.catch(() => {
    orders.delete(dag); // the next one asks again
    return new Map<string, number>();
  });
  const place = (task: Task) => order.get(task.task_id) ?? order.size;
  return found.sort((a, b) => place(a) - place(b));
}

// Runs of some DAGs in some states, as Airflow says, by DAG and run: the newest.
async function runsOf(lines: Line[], states: string[], most = Infinity): Promise<Set<string>> {
  interface Told { dag_runs: { dag_id: string; dag_run_id: string }[]; total_entries: number }
  const dag_ids = [...new Set(lines.map((line) => line.dag_id))];
  const found = new Set<string>();
  for (let seen = 0, total = 1; seen < Math.min(total, most); ) {
    const asked = { dag_ids, states, order_by: "-run_after", page_limit: 100, page_offset: seen };
    const told = await ask<Told>(`${API}/dags/~/dagRuns/list`, { method: "POST", body: JSON.stringify(asked) });
    if (!told.dag_runs.length) break;
    total = told.total_entries;
    seen += told.dag_runs.length;
    for (const run of told.dag_runs) found.add(`${run.dag_id}/${run.dag_run_id}`);
  }
  return found;
}

export const idOf = (line: Line) => `${line.dag_id}/${line.run_id}`;

// Gives those their state that Airflow no longer runs: of one whose task was killed without a word,
// the record in the workspace says that it runs.
export async function endKilled(lines: Line[]): Promise<Line[]> {
  // A run of `ddl-airflow run` is none of Airflow's.
  const running = lines.filter((line) => line.state === "running" && !line.by_hand);
  if (!running.length) return lines;
  const open = await runsOf(running, ["queued", "running"]);
  const ended = new Set(running.filter((line) => !open.has(idOf(line))));
  if (!ended.size) return lines;
  const failed = await runsOf([...ended], ["failed"], 100);
  return lines.map((line) => (ended.has(line) ? { ...line, state: failed.has(idOf(line)) ? "failed" : "ended" } : line));
}

// All trainings, or a DAG's, the newest first. The server sends what has changed since it was asked
// last, by parts of all; a training stays in its part.
export function listing(dag: string): () => Promise<Listed> {
  const parts: { tag: string; lines: Line[] }[] = [];
  return async () => {
    const headers = { "DDL-Known-Parts": parts.map(({ tag }) => tag).join("") };
    const told = await ask<Listed>(dag ? `trainings?dag_id=${encodeURIComponent(dag)}` : "trainings", { headers });
    let at = 0;
    for (const [part, tag, many] of told.parts) parts[part] = { tag, lines: told.trainings.slice(at, (at += many)) };
    const trainings = parts.flatMap(({ lines }) => lines).sort((a, b) => (b.changed ?? 0) - (a.changed ?? 0));
    return { ...told, trainings };
  };
}
