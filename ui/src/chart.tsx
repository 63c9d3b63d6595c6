import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { smoothed } from "./curves";
import type { Part } from "./server";
import { count, number, ticks } from "./words";

export interface Drawn extends Omit<Part, "job"> {
  name: string;
  dash: number[];
  colour: number; // which of the theme's
}

const MOST_ROWS = 24;
const MOST_GAPS = 3;
const HEIGHT = 210;
// Between two marks along the steps: with parts of a step uPlot would never come to the end of an
// axis whose numbers are so large that they have none.
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

const style = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function options(lines: Drawn[], smooth: boolean, width: number, told: (index: number | null) => void): uPlot.Options {
  const ink = style("--dim");
  const grid = { stroke: style("--line"), width: 1 };
  const series: uPlot.Series[] = [{ label: "step" }];
  for (const line of lines) {
    const stroke = style(`--c${line.colour % 4}`);
    const points = { show: line.steps.length < 3 };
    if (smooth) series.push({ label: line.name, stroke: `${stroke}55`, width: 1, dash: line.dash, points });
    series.push({ label: line.name, stroke, width: 2, dash: line.dash, points });
  }
  return {
    width,
    height: HEIGHT,
    series,
    scales: { x: { time: false } },
    axes: [
      { stroke: ink, grid, ticks: grid, incrs: WHOLE, values: (_, at) => at.map(count) },
      { stroke: ink, grid, ticks: grid, size: 64, values: (_, at, _axis, _space, step) => ticks(at, step) },
    ],
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { show: false } },
    hooks: { setCursor: [(plot) => told(plot.cursor.idx ?? null)] },
  };
}

// What stands for the picture where it cannot be seen, and for who wants the numbers.
function Rows({ lines }: { lines: Drawn[] }) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const every = Math.max(1, Math.ceil(steps.length / MOST_ROWS));
  const shown = steps.filter((_, index) => index % every === 0 || index === steps.length - 1);
  const values = lines.map((line) => new Map(line.steps.map((step, index) => [step, line.values[index]])));
  return (
    <table>
      <thead>
        <tr><th scope="col">step</th>{lines.map((line) => <th scope="col" key={line.name}>{line.name}</th>)}</tr>
      </thead>
      <tbody>
        {shown.map((step) => (
          <tr key={step}>
            <th scope="row">{count(step)}</th>
            {values.map((of, index) => <td key={index}>{!of.has(step) ? "" : of.get(step) === null ? "no number" : number(of.get(step))}</td>)}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function Chart(
  { title, note, lines, weight, open, toggle }: {
    title: string; note: string; lines: Drawn[]; weight: number; open: boolean; toggle: (open: boolean) => void;
  },
) {
  const place = useRef<HTMLDivElement>(null);
  const said = useRef<HTMLElement>(null);
  const plot = useRef<uPlot | null>(null);
  const data = useMemo(() => {
    const tables = lines.flatMap((line): uPlot.AlignedData[] => {
      const raw: uPlot.AlignedData = [line.steps, line.values];
      if (!weight) return [raw];
      const { steps, values } = smoothed(line, weight);
      return [raw, [steps, values]];
    });
    return tables.length ? uPlot.join(tables) : ([[]] as unknown as uPlot.AlignedData);
  }, [lines, weight]);
  const shape = `${weight > 0} ${lines.map((line) => `${line.name}${line.colour}${line.dash}${line.steps.length < 3}`).join()}`;
  const newest = useRef({ lines, data });
  newest.current = { lines, data };

  // The value under the pointer, in a place that is always there.
  const tell = (index: number | null) => {
    if (!said.current) return;
    const { lines: now, data: drawn } = newest.current;
    const step = index === null ? undefined : drawn[0][index];
    if (step === undefined) {
      said.current.textContent = "\u00a0";
      return;
    }
    const found = now.flatMap((line) => {
      const value = line.values[line.steps.indexOf(step)];
      return value === undefined ? [] : [`${now.length > 1 ? `${line.name} ` : ""}${value === null ? "no number" : number(value)}`];
    });
    said.current.textContent = `step ${count(step)}: ${found.join(" · ")}`;
  };

  useEffect(() => {
    const inner = place.current!;
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(lines, weight > 0, inner.clientWidth, tell), newest.current.data, inner);
    };
    make();
    const sized = new ResizeObserver(() => {
      const width = inner.clientWidth;
      if (plot.current && width && width !== plot.current.width) plot.current.setSize({ width, height: HEIGHT });
    });
    sized.observe(inner);
    addEventListener("theme", make);
    return () => {
      sized.disconnect();
      removeEventListener("theme", make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    const drawn = plot.current;
    if (!drawn) return;
    const { min, max } = drawn.scales.x!;
    const [first, last] = [drawn.data[0][0], drawn.data[0].at(-1)];
    // Who looks closer goes on looking there.
    const closer = min != null && max != null && first !== undefined && (min > first || max < last!);
    const there = closer && (data[0][0] ?? Infinity) <= max && (data[0].at(-1) ?? -Infinity) >= min;
    drawn.setData(data, !there);
    if (there) drawn.setScale("x", { min, max });
  }, [data]);

  const last = lines.at(-1);
  const gaps = lines.flatMap((line) => line.gaps);
  const value = last?.values.at(-1);
  const words = last
    ? `${title} by step, to step ${count(last.steps.at(-1) ?? 0)}, where it is ${value === null ? "no number" : number(value)}. The numbers are in the table below.`
    : title;
  return (
    <figure>
      <figcaption>
        <h3>{title}</h3> {note && <span class="source">{note}</span>}
      </figcaption>
      <div class="plot" role="img" aria-label={words} ref={place} />
      <p class="source under" aria-hidden="true"><span ref={said}>{"\u00a0"}</span></p>
      {gaps.length > 0 && (
        <p class="lost">
          ⚠ {gaps.slice(0, MOST_GAPS).map(([from, to, word]) => (from === to ? `${word} at step ${count(from)}` : `${word} from step ${count(from)} to ${count(to)}`)).join(", ")}
          {gaps.length > MOST_GAPS && `, and ${gaps.length - MOST_GAPS} more`}
        </p>
      )}
      <details open={open} onToggle={(event) => toggle((event.currentTarget as HTMLDetailsElement).open)}>
        <summary>Table of {title}</summary>
        {open && <div class="wide" tabIndex={0} role="group" aria-label={`Table of ${title}`}><Rows lines={lines} /></div>}
      </details>
    </figure>
  );
}
