// The page around this frame: Airflow's. Its theme is ours, and links into it are followed there.

const dark = matchMedia("(prefers-color-scheme: dark)");

function outside(): Document | null {
  try {
    return parent === window ? null : parent.document;
  } catch {
    return null; // of another origin
  }
}

// The theme that Airflow's user chose; alone, what the system says.
function showTheme(): void {
  const chosen = outside()?.documentElement.classList;
  const isDark = chosen?.contains("dark") || (dark.matches && !chosen?.contains("light"));
  const root = document.documentElement;
  const before = root.className;
  root.classList.toggle("dark", Boolean(isDark));
  // What is painted behind this frame.
  let paper = "";
  for (let at = outside() && frameElement; at && !paper; at = at.parentElement) {
    const painted = parent.getComputedStyle(at).backgroundColor;
    if (!["transparent", "rgba(0, 0, 0, 0)"].includes(painted)) paper = painted;
  }
  if (paper) root.style.setProperty("--paper", paper);
  else root.style.removeProperty("--paper");
  if (root.className !== before) dispatchEvent(new Event("theme"));
}

export function followTheme(): void {
  showTheme();
  dark.addEventListener("change", showTheme);
  const around = outside();
  if (around) new MutationObserver(showTheme).observe(around.documentElement, { attributeFilter: ["class"] });
}

// Airflow's frame may neither open a tab nor lead the page around it away; that page itself may.
export function lead(address: string): void {
  const around = outside();
  if (!around) {
    location.assign(address);
    return;
  }
  const link = around.createElement("a");
  link.href = address;
  link.hidden = true;
  around.body.append(link);
  link.click();
  link.remove();
}

export function leave(event: MouseEvent): void {
  if (!outside() || !(event.currentTarget instanceof HTMLAnchorElement)) return;
  event.preventDefault();
  lead(event.currentTarget.href);
}
