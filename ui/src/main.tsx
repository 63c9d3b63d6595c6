import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { followTheme } from "./around";
import { Compare } from "./compare";
import { Lineage } from "./graph";
import { go, here, ownDag } from "./places";
import { Training } from "./training";
import { Trainings } from "./trainings";

const NAMES = { list: "Trainings", run: "Training", graph: "Lineage", compare: "Two trainings" };

function Page() {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const moved = () => {
      setPlace(here());
      scrollTo(0, 0);
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const key = `${place.view} ${place.dag} ${place.run} ${place.other}`;
  const main = useRef<HTMLElement>(null);
  const before = useRef(key);
  useEffect(() => {
    document.title = place.run ? `${place.dag} ${place.run}` : "Trainings";
    // Who followed a link by the keyboard goes on behind it, and a screen reader says where one is.
    if (before.current !== key) main.current?.focus({ preventScroll: true });
    before.current = key;
  }, [key]);
  return (
    <>
      {place.view !== "list" && (
        <nav aria-label="Trainings">
          <a href={go({ dag: ownDag() })}>← Trainings</a>
          {place.view === "run" && <a href={go({ ...place, view: "graph" })}>Lineage</a>}
        </nav>
      )}
      <main key={key} ref={main} tabIndex={-1} aria-label={NAMES[place.view]}>
        {place.view === "list" && <Trainings dag={place.dag} />}
        {place.view === "run" && <Training place={place} />}
        {place.view === "graph" && <Lineage place={place} />}
        {place.view === "compare" && <Compare place={place} />}
      </main>
    </>
  );
}

followTheme();
render(<Page />, document.getElementById("page")!);
