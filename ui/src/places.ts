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

// What the address says; without #, what Airflow's tab was opened for.
export function here(): Place {
  const asked = new URLSearchParams(location.search);
  const none: Place = { view: "list", dag: "", run: "", rank: null, other: null };
  // Airflow leaves what a place has not as it is, as `{RUN_ID}`.
  const known = (name: string) => (/^\{.*\}$/.test(asked.get(name) ?? "{}") ? "" : asked.get(name)!);
  if (!location.hash.startsWith("#/")) {
    const [dag, run] = [known("dag_id"), known("run_id")];
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
