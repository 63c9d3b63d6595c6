// Curves that grow: what each answer brings is put to what is there, by job and step.

import type { Curve, Curves, Part } from "./server";

export interface Known { curves: Map<string, Curve>; points: number }

export const nothing = (): Known => ({ curves: new Map(), points: 0 });

function merged(known: Part, more: Part): Part {
  const first = more.steps[0];
  if (first === undefined) return known;
  // Nearly always it goes on behind what is there.
  if (first > (known.steps.at(-1) ?? -1))
    return {
      ...known,
      steps: known.steps.concat(more.steps),
      values: known.values.concat(more.values),
      gaps: known.gaps.concat(more.gaps),
    };
  const values = new Map(known.steps.map((step, index) => [step, known.values[index] ?? null]));
  more.steps.forEach((step, index) => values.set(step, more.values[index] ?? null));
  const steps = [...values.keys()].sort((a, b) => a - b);
  return { ...known, steps, values: steps.map((step) => values.get(step)!), gaps: known.gaps.concat(more.gaps) };
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

// One curve of all tries: of a step that several reported, what the last one did.
export function asOne(curve: Curve): Part {
  const values = new Map<number, number | null>();
  for (const part of curve.parts) part.steps.forEach((step, index) => values.set(step, part.values[index] ?? null));
  const steps = [...values.keys()].sort((a, b) => a - b);
  return { job: 0, steps, values: steps.map((step) => values.get(step)!), gaps: curve.parts.flatMap((p) => p.gaps) };
}
