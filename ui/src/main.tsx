import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { followTheme } from "./around";
import { Compare } from "./compare";
import { Lineage } from "./graph";
import { go, here, ownDag } from "./places";
import { Training } from "./training";
import { Trainings } from "./trainings";

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
  useEffect(() => {
    document.title = place.run ? `${place.dag} ${place.run}` : "Trainings";
  }, [key]);
  return (
    <>
      {place.view !== "list" && (
        <nav aria-label="Trainings">
          <a href={go({ dag: ownDag() })}>← Trainings</a>
          {place.view === "run" && <a href={go({ ...place, view: "graph" })}>Lineage</a>}
        </nav>
      )}
      <main key={key}>
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
