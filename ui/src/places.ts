// Which view is shown: in the address behind #, since Airflow's frame keeps one document.

export interface Place {
  view: "list" | "run" | "graph" | "compare";
  dag: string;
  run: string;
  rank: number | null;
  other: [string, string] | null;
}

export function go(place: Partial<Place>): string {
  const words = [place.view ?? "list", place.dag ?? "", place.run ?? "", ...(place.other ?? [])];
  while (words.at(-1) === "") words.pop();
  return `#/${words.map(encodeURIComponent).join("/")}`;
}

// What Airflow's tab was opened for. It leaves what a place has not as it is, as `{RUN_ID}`.
function tabOf(name: string): string {
  const said = new URLSearchParams(location.search).get(name) ?? "";
  return /^\{.*\}$/.test(said) ? "" : said;
}

// Of whose trainings the table was in which one began: a DAG's in the tab of a DAG, else all.
export const ownDag = (): string => (tabOf("run_id") ? "" : tabOf("dag_id"));

// What the address says; without #, what Airflow's tab was opened for.
export function here(): Place {
  const none: Place = { view: "list", dag: "", run: "", rank: null, other: null };
  if (!location.hash.startsWith("#/")) {
    const [dag, run] = [tabOf("dag_id"), tabOf("run_id")];
    const rank = /^#rank-(\d{1,9})$/.exec(location.hash);
    return { ...none, view: run ? "run" : "list", dag, run, rank: rank ? Number(rank[1]) : null };
  }
  let words: string[];
  try {
    words = location.hash.slice(2).split("/").map(decodeURIComponent);
  } catch {
    return none;
  }
  const [view, dag = "", run = "", otherDag, otherRun] = words;
  if (view === "compare" && otherDag && otherRun) return { ...none, view, dag, run, other: [otherDag, otherRun] };
  if ((view === "run" || view === "graph") && run) return { ...none, view, dag, run };
  return { ...none, dag };
}
