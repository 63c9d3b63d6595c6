import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const OUT = "../ddl_airflow/plugin/built";
// Whose code is in the output, which their licences ask to say.
const INSIDE = ["preact", "uplot"];

// What the output was made of, so that a test can tell, without Node, whether it is of these
// sources: SHA-256 over name, NUL, content, NUL of each.
function sources(): string[] {
  const inner = readdirSync("src").map((name) => `src/${name}`);
  return [...inner, "index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"].sort();
}

function beside(): Plugin {
  return {
    name: "beside",
    closeBundle() {
      const digest = createHash("sha256");
      for (const name of sources()) digest.update(`${name}\0`).update(readFileSync(name)).update("\0");
      writeFileSync(`${OUT}/sources.sha256`, `${digest.digest("hex")}\n`);
      const texts = INSIDE.map((name) => {
        const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
        return `${name} ${version}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
      });
      writeFileSync(`${OUT}/licenses.txt`, texts.join("\n\n"));
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [beside()],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: {
        // Names that stay: a browser asks whether they have changed.
        entryFileNames: "assets/page.js",
        assetFileNames: "assets/page[extname]",
      },
    },
  },
});
