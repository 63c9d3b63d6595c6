import { useEffect, useMemo, useState } from "preact/hooks";
import { Chart } from "./chart";
import { asOne, nothing, taken } from "./curves";
import { go, type Place } from "./places";
import { ask, pathOf, type About, type Curve, type Curves } from "./server";
import { flat, number, said, titleOf } from "./words";

interface Side { name: string; about: About; curves: Curve[] }

const SIGNS = ["A", "B"];

const PAUSE_MS = 200;

// All of them: those of a long training do not come in one answer. Each costs the server much: it
// has a pause after it, and where one gets no further than the one before, it was the last.
async function curvesOf(path: string, signal: AbortSignal): Promise<Curve[]> {
  let known = nothing();
  for (let cursor = ""; ; ) {
    const news = await ask<Curves>(`curves/${path}?points=800&cursor=${cursor}`, { signal });
    known = taken(known, news);
    if (!news.more || news.cursor === cursor) return [...known.curves.values()];
    ({ cursor } = news);
    await new Promise((over) => setTimeout(over, PAUSE_MS));
  }
}

async function read(dag: string, run: string, signal: AbortSignal): Promise<Side> {
  const path = pathOf(dag, run);
  const [about, curves] = await Promise.all([ask<About>(`about/${path}`, { signal }), curvesOf(path, signal)]);
  return { name: `${dag} ${run}`, about, curves };
}

function differences(sides: Side[]): [string, string[]][] {
  const told = sides.map(({ about }) => new Map([
    ...flat(about.facts).filter(([name]) => !/^(result|run\.(started|due|experiment))/.test(name)),
  ]));
  const names = [...new Set(told.flatMap((one) => [...one.keys()]))].sort();
  return names
    .map((name) => ({ name, exact: told.map((one) => (one.has(name) ? JSON.stringify(one.get(name)) : "–")) }))
    .filter(({ exact: [one, other] }) => one !== other)
    .map(({ name, exact }): [string, string[]] => {
      const texts = told.map((one) => (one.has(name) ? said(one.get(name)) : "–"));
      // Two that are the same once they are joined are shown as they are.
      return [name, texts[0] === texts[1] ? exact : texts];
    });
}

// One metric of both; and on what each was measured, where that is not the same.
function Metric({ name, sides }: { name: string; sides: Side[] }) {
  const told = sides.map((side) => side.about.measurements.find((one) => one.metric === name));
  const differ = told.every(Boolean) && told[0]!.measured_on !== told[1]!.measured_on;
  return (
    <tr>
      <th scope="row">{name}</th>
      {told.map((one, index) => <td key={index}>{number(one?.value)}{differ && <span class="source"> ({one!.measured_on})</span>}</td>)}
    </tr>
  );
}

export function Compare({ place }: { place: Place }) {
  const [sides, setSides] = useState<Side[] | null>(null);
  const [error, setError] = useState("");
  const [weight, setWeight] = useState(0);
  const [open, setOpen] = useState("");
  const [dag, run] = place.other!;
  useEffect(() => {
    const left = new AbortController();
    Promise.all([read(place.dag, place.run, left.signal), read(dag, run, left.signal)]).then(setSides, (told: Error) => {
      if (left.signal.aborted) return; // nobody waits for it any more
      left.abort(); // nor for the other one
      setError(told.message);
    });
    return () => left.abort();
  }, [place.dag, place.run, dag, run]);
  const charts = useMemo(() => {
    if (!sides) return [];
    const names = [...new Set(sides.flatMap((side) => side.curves.map((curve) => curve.name)))];
    return names.map((name) => ({
      name,
      lines: sides.flatMap((side, index) => {
        const curve = side.curves.find((one) => one.name === name);
        return curve ? [{ ...asOne(curve.parts), name: SIGNS[index]!, colour: index, dash: index ? [8, 4] : [] }] : [];
      }),
    })).filter(({ lines }) => lines.some((line) => line.steps.length > 1));
  }, [sides]);
  if (error) return <p role="alert" class="lost">Cannot compare them: {error}</p>;
  if (!sides) return <p id="empty">Reading both …</p>;
  const metrics = [...new Set(sides.flatMap((side) => side.about.measurements.map((one) => one.metric)))];
  const known = differences(sides);
  const unknown = SIGNS.filter((_, index) => !flat(sides[index]!.about.facts).length);
  const heads = SIGNS.map((sign) => <th scope="col" key={sign}>{sign}</th>);
  return (
    <>
      <h1>Two trainings</h1>
      <dl class="facts">
        {sides.map((side, index) => (
          <div key={index}>
            <dt>{SIGNS[index]}, {index ? "broken line" : "unbroken line"}</dt>
            <dd><a href={go({ view: "run", dag: index ? dag : place.dag, run: index ? run : place.run })}>{side.name}</a></dd>
          </div>
        ))}
      </dl>
      <div class="beside">
        <section aria-labelledby="curves-title">
          <h2 id="curves-title">Curves</h2>
          <p class="row"><label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value={weight} onInput={(event) => setWeight(Number(event.currentTarget.value))} /></label></p>
          {!charts.length && <p id="empty">Neither has reported anything.</p>}
          <div id="charts">
            {charts.map(({ name, lines }) => (
              <Chart key={name} title={titleOf(name)} note="" lines={lines} weight={weight} open={open === name} toggle={(now) => setOpen((before) => (now ? name : before === name ? "" : before))} />
            ))}
          </div>
        </section>
        <section aria-labelledby="differences-title">
          <h2 id="differences-title">Differences</h2>
          <div class="wide" tabIndex={0} role="group" aria-label="Differences">
            <table id="differences">
              <thead><tr><th scope="col">what</th>{heads}</tr></thead>
              <tbody>
                {metrics.map((name) => <Metric key={`metric ${name}`} name={name} sides={sides} />)}
                {known.map(([name, values]) => (
                  <tr key={name}><th scope="row">{name}</th>{values.map((value, index) => <td key={index}>{value}</td>)}</tr>
                ))}
              </tbody>
            </table>
          </div>
          {unknown.length > 0 && <p role="status">Nothing is known yet of what made {unknown.join(" and ")}.</p>}
          {!known.length && !unknown.length && <p>Data, code, manifest, parameters and environment are the same.</p>}
        </section>
      </div>
    </>
  );
}
