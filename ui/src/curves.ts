// Curves that grow: what each answer brings is put to what is there, by job and step.

import type { Curve, Curves, Part } from "./server";

export interface Known { curves: Map<string, Curve>; points: number }

export const nothing = (): Known => ({ curves: new Map(), points: 0 });

// First and last step, and the word, of each stretch that has no numbers: of what was told, where
// later words count, without what is a number by now. One that was told in pieces is one.
function gapsOf(steps: number[], values: (number | null)[], told: Part["gaps"]): Part["gaps"] {
  if (!told.length) return told;
  const A_NUMBER = "";
  const words = new Map<number, string | undefined>();
  steps.forEach((step, index) => words.set(step, values[index] === null ? undefined : A_NUMBER));
  for (const [from, to, word] of told)
    for (const step of [from, to]) if (words.get(step) !== A_NUMBER) words.set(step, word);
  const gaps: Part["gaps"] = [];
  let after = A_NUMBER;
  // From the last: a step within a stretch has the word of the stretch's end.
  for (const [step, said] of [...words].sort(([a], [b]) => b - a)) {
    const word = said ?? after;
    if (word && word === after) gaps.at(-1)![0] = step;
    else if (word) gaps.push([step, step, word]);
    after = word;
  }
  return gaps.reverse();
}

function merged(known: Part, more: Part): Part {
  const first = more.steps[0];
  if (first === undefined) return known;
  // Nearly always it goes on behind what is there.
  if (first > (known.steps.at(-1) ?? -1)) {
    const steps = known.steps.concat(more.steps);
    const values = known.values.concat(more.values);
    return { ...known, steps, values, gaps: gapsOf(steps, values, known.gaps.concat(more.gaps)) };
  }
  return { ...asOne([known, more]), job: known.job };
}

export function taken(known: Known, news: Curves): Known {
  if (!news.again && !news.curves.length) return known;
  const curves = news.again ? new Map<string, Curve>() : new Map(known.curves);
  let points = news.again ? 0 : known.points;
  for (const curve of news.curves) {
    const parts = [...(curves.get(curve.name)?.parts ?? [])];
    for (const part of curve.parts) {
      const place = parts.findIndex((one) => one.job === part.job);
      points += part.steps.length;
      if (place < 0) parts.push(part);
      else parts[place] = merged(parts[place]!, part);
    }
    curves.set(curve.name, { ...curve, parts });
  }
  return { curves, points };
}

// Exponential, without the pull to zero at the start; what is no number stays a gap.
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

// One curve of all parts, as of all tries: of a step that several reported, what the last one did.
export function asOne(parts: Part[]): Part {
  const known = new Map<number, number | null>();
  for (const part of parts) part.steps.forEach((step, index) => known.set(step, part.values[index] ?? null));
  const steps = [...known.keys()].sort((a, b) => a - b);
  const values = steps.map((step) => known.get(step)!);
  return { job: 0, steps, values, gaps: gapsOf(steps, values, parts.flatMap((part) => part.gaps)) };
}
