// Curves that grow: what each answer brings is put to what is there, by job and step.

import type { Curve, Curves, Part, Points } from "./server";

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
    const means = meansOf([known, more], (all) => ({
      steps: all.flatMap((one) => one.steps), values: all.flatMap((one) => one.values),
    }));
    return { ...known, steps, values, means, gaps: gapsOf(steps, values, known.gaps.concat(more.gaps)) };
  }
  return { ...asOne([known, more], false), job: known.job };
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

// Of parts of which some are thinned: of the others each point is its own mean.
const meansOf = (parts: Part[], joined: (all: Points[]) => Points): Points | null =>
  parts.some((part) => part.means) ? joined(parts.map((part) => part.means ?? part)) : null;

// Exponential, without the pull to zero at the start; what is no number stays a gap. A point counts
// for the steps since the one before, so that where many are left out they weigh no less.
export function smoothed({ steps, values, means }: Omit<Part, "job">, weight: number): Points {
  const each = (steps.at(-1)! - steps[0]!) / (steps.length - 1) || 1;
  const from = means ?? { steps, values };
  let sum = 0;
  let norm = 0;
  const smooth = from.values.map((value, index) => {
    if (value === null) return null;
    const left = index ? weight ** ((from.steps[index]! - from.steps[index - 1]!) / each) : weight;
    sum = sum * left + value * (1 - left);
    norm = norm * left + (1 - left);
    return sum / norm;
  });
  return { steps: from.steps, values: smooth };
}

// Of a step that several reported, what the last one did; of tries of a whole stretch, for where
// points are left out, each has others.
function joined(all: Points[], tries: boolean): Points {
  let known = new Map<number, number | null>();
  for (const one of all) {
    const [first, last] = [one.steps[0] ?? Infinity, one.steps.at(-1) ?? -Infinity];
    if (tries) known = new Map([...known].filter(([step]) => step < first || step > last));
    one.steps.forEach((step, index) => known.set(step, one.values[index] ?? null));
  }
  const steps = [...known.keys()].sort((a, b) => a - b);
  return { steps, values: steps.map((step) => known.get(step)!) };
}

// One curve of all parts, as of all tries.
export function asOne(parts: Part[], tries = true): Part {
  const { steps, values } = joined(parts, tries);
  const gaps = gapsOf(steps, values, parts.flatMap((part) => part.gaps));
  return { job: 0, steps, values, gaps, means: meansOf(parts, (all) => joined(all, tries)) };
}
