"use strict";
const run = JSON.parse(document.getElementById("content").textContent);
const SVG = ["svg", "path", "rect", "text", "title"];

// Make an element. Texts of models are only ever inserted as text, never as HTML.
function el(tag, attributes, ...children) {
  const node = SVG.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return node;
}
function format(value) {
  if (value == null) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  const short = +value.toPrecision(3);
  return Math.abs(value) < 1e-4 ? short.toExponential() : String(short);
}
const percent = (share, digits = 1) => (100 * share).toFixed(digits) + "%";
const note = (...children) => el("p", { class: "note" }, ...children);
const cell = (value) => value == null || typeof value === "number" ? format(value) : value;
const key = (colour) => el("i", { class: "key", style: `background: ${colour}` });

function table(head, rows) {
  const top = head.map((name) => el("th", { scope: "col" }, name));
  const body = rows.map(([first, ...rest]) =>
    el("tr", {}, el("th", { scope: "row" }, first), rest.map((value) => el("td", {}, cell(value)))));
  const parts = [head.length > 0 && el("thead", {}, el("tr", {}, top)), el("tbody", {}, body)];
  return el("div", { class: "scroll", tabindex: 0 }, el("table", {}, parts));
}

// -- charts: lines differ by colour and by dash. The pointer or the arrow keys choose a step.

const WIDTH = 640, HEIGHT = 200, LEFT = 60, RIGHT = 632, BOTTOM = 176, TOP = 10;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 4", "12 3", "1 3", "6 2 1 2"];

function ticksOf(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => power * factor).find((one) => one >= rough);
  const first = Math.floor(low / size), last = Math.ceil(high / size);
  return Array.from({ length: last - first + 1 }, (_, i) => +((first + i) * size).toPrecision(12));
}

// `lines` are { name, points: [[step, value], ...], dots }.
function chart(title, unit, lines, words) {
  lines = lines.filter((line) => line.points.length);
  if (!lines.length) return null;
  const steps = [...new Set(lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
  const values = lines.flatMap((line) => line.points.map(([, value]) => value));
  const low = Math.min(0, ...values), high = Math.max(0, ...values), ticks = ticksOf(low, high > low ? high : low + 1);
  const first = steps[0], last = Math.max(steps.at(-1), first + 1), span = ticks.at(-1) - ticks[0];
  const x = (step) => LEFT + (step - first) / (last - first) * (RIGHT - LEFT);
  const y = (value) => BOTTOM - (value - ticks[0]) / span * (BOTTOM - TOP);
  const style = (i) => `color: var(--c${i % 8})`;
  const stroke = (i, d) => el("path", { class: "line", d, style: style(i), "stroke-dasharray": lines[i].dots ? "" : DASHES[i % 8] });
  const path = ({ points, dots }) => dots || points.length === 1
    ? points.map(([step, value]) => `M${x(step) - 5} ${y(value)}h10m-5-5v10`).join("")
    : "M" + points.map(([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
  const cursor = el("path", { class: "cursor" }), out = el("output", { "aria-live": "polite" });
  const label = `${title}${unit && ", " + unit}, over steps`;
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": label },
    ticks.map((tick) => [el("path", { class: "grid", d: `M${LEFT} ${y(tick)}H${WIDTH}` }),
      el("text", { x: LEFT - 6, y: y(tick) + 4, class: "end" }, format(tick))]),
    el("text", { x: LEFT, y: HEIGHT - 6 }, first), el("text", { x: RIGHT, y: HEIGHT - 6, class: "end" }, last),
    lines.map((line, i) => stroke(i, path(line))), cursor);
  let at = steps.length - 1;
  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], here = lines.map((line) => [line.name, line.points.find((point) => point[0] === step)]);
    cursor.setAttribute("d", `M${x(step)} 0V${BOTTOM}`);
    const words = here.filter(([, point]) => point).map(([name, point]) => `${name} ${format(point[1])}`);
    out.textContent = `step ${step}: ${words.join(", ")} ${unit}`;
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), away = (step) => Math.abs(x(step) - (event.clientX - box.left) / box.width * WIDTH);
    show(steps.reduce((best, step, i) => away(step) < away(steps[best]) ? i : best, 0));
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
  });
  const legend = lines.map(({ name, dots }, i) => el("li", { style: style(i) },
    el("svg", { viewBox: "0 0 24 8", "aria-hidden": true }, stroke(i, dots ? "M7 4h10m-5-4v8" : "M0 4H24")), name));
  return el("figure", { class: "chart" }, el("figcaption", {}, title, " ", el("small", {}, unit)), svg, out,
    el("ul", { class: "legend" }, legend), words && note(words));
}

// Return a chart of some columns of metrics.jsonl, [[name, path], ...].
function curve(title, unit, paths, words) {
  const lines = paths.map(([name, path]) => {
    const points = run.columns[path] || [];
    return { name, points, dots: points.length < run.num_steps };
  });
  return chart(title, unit, lines, words);
}

// Return [[name, path], ...] of the columns that match, with the first group of the pattern as name.
function matching(pattern) {
  return Object.keys(run.columns).map((path) => [path.match(pattern)?.[1], path]).filter(([name]) => name);
}
const used = (path) => run.columns[path]?.some(([, value]) => value);

// -- where the time went

const KINDS = {  // name of a kind of work -> name of its colour in page.html, if they differ
  commit: "decode", "other decoding": "decode", "look-ahead": "ahead", "drafter training": "spot",
};
const kind = (name) => "--" + (KINDS[name] || name.replace(/\W/g, "-"));
const colour = (name) => `var(${kind(name)}, var(--other))`;

function bar(seconds) {
  const parts = Object.entries(seconds), total = parts.reduce((sum, [, spent]) => sum + spent, 0);
  if (!total) return [];
  const numbers = ([name, spent]) => [name, format(spent) + " s", percent(spent / total)];
  let x = 0;
  const rects = parts.map((part) => {
    const width = 100 * part[1] / total, place = { style: `fill: ${colour(part[0])}`, x, width, height: 10 };
    x += width;
    return el("rect", place, el("title", {}, numbers(part).join(", ")));
  });
  const label = "Worker seconds by kind of work";
  return [el("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, rects),
    table([], parts.map(numbers).map(([name, ...rest]) => [[key(colour(name)), name], ...rest]))];
}

// -- the sections

const UNMEASURED = ["Not measured: set ", el("code", {}, "run.compare_every"), " to decode some steps by plain decoding too."];

function againstPlain({ gain, columns }) {
  if (!gain) return [el("p", {}, UNMEASURED)];
  const { times, median, low, high, pairs, accept_length, verdict } = gain;
  const row = [el("strong", {}, times ? times.toFixed(2) : "no gain was measured"), median.toFixed(2),
    `${low.toFixed(2)} to ${high.toFixed(2)}`, pairs, accept_length.toFixed(2)];
  const head = ["times as fast", "median of steps", "interval", "steps", "accept length of drafts"];
  const line = (name, path, dots) => ({ name, points: columns[path] || [], dots });
  return [el("p", {}, `${verdict}.`), table(head, [row]), chart("Seconds of each rollout", "s", [
    line("tlt", "seconds/rollout", false), line("plain decoding", "seconds/compare", true)])];
}

const COUNTERS = {
  gpu_joules: ["GPU energy, whole cards (NVML)", " J"],
  cpu_joules: ["CPU energy, whole packages (RAPL)", " J"],
  cpu_seconds: ["CPU time of the run's processes", " s"],
};

function energy({ sums, per_step, per_million_tokens, compared }) {
  if (!sums) return [];
  const row = (name, ...parts) => [COUNTERS[name][0],
    ...parts.map((part) => part[name] == null ? "–" : format(part[name]) + COUNTERS[name][1])];
  const known = Object.keys(COUNTERS).filter((name) => name in sums);
  const { plain = {}, ours = {}, steps } = compared, both = known.filter((name) => plain[name] && name in ours);
  const blocks = [table(["", "the run", "per step", "per million tokens"],
    known.map((name) => row(name, sums, per_step, per_million_tokens)))];
  if (both.length) blocks.push(el("h3", {}, "Does speculation save energy?"),
    table([`same tokens, ${format(steps)} step(s)`, "plain decoding", "tlt", "tlt / plain"],
      both.map((name) => [...row(name, plain, ours), (ours[name] / plain[name]).toFixed(2)])),
    note("Above 1, speculation used more than plain decoding. The rollout of tlt includes look-ahead and drafter training in idle time, ",
      "which plain decoding does without."));
  return [...blocks, note("NVML and RAPL count all users of the machine.",
    both.length > 0 && " These sums include the comparisons with plain decoding.",
    !("gpu_joules" in sums) && " No GPU counter was read.",
    !("cpu_joules" in sums) && " No CPU energy counter was readable.")];
}

const SECTIONS = {
  words: ["In words", [
    el("div", { class: "lead" }, run.sentences.map((sentence) => el("p", {}, sentence))),
    run.advice.length && el("details", {}, el("summary", {}, "More advice"), el("ul", {}, run.advice.map((line) => el("li", {}, line)))),
    run.faults.length && el("ul", { class: "faults" }, run.faults.map((fault) => el("li", {}, fault)))]],
  plain: ["Against plain decoding, on the same tokens", [...againstPlain(run), note(
    "Whole steps were decoded a second time by plain decoding (run.compare_every). Slower steps count too.")]],
  proof: ["Proof", [
    table([], [["policy sha256", el("code", {}, run.policy_sha256 || "known when the run ends")], ...Object.entries(run.proof)])]],
  time: ["Where the time went", [
    run.useful_share != null && el("p", {}, "Useful share of worker time: ", el("strong", {}, percent(run.useful_share)), "."),
    ...bar(run.worker_seconds), run.has_trace && note("trace.json has the timeline: open it in ui.perfetto.dev.")]],
  learning: ["Learning", [
    curve("Mean reward", "", [["all", "reward"], ...matching(/^tasks\/(.*)\/mean$/).slice(0, 7)]),
    curve("Held-out reward", "", matching(/^eval\/((?:mean|pass)@.*)/)),
    curve("Length of responses", "tokens", [["median", "lengths/median"], ["p99", "lengths/p99"], ["max", "lengths/max"]]),
    curve("Shares", "", [["truncated responses", "lengths/truncated"], ["groups of equal rewards", "batch/without_spread_share"]]),
    curve("Gradient norm before clipping", "", [["gradient norm", "update/grad_norm"]]),
    curve("Entropy", "nats", [["entropy", "update/entropy"]]),
    curve("Divergence from the first model", "nats", [["KL", "update/kl"]]),
    curve("Mismatch between trainer and rollout", "nats", [["mean", "update/mismatch_mean"], ["99.9 % of tokens", "update/mismatch_p999"]])]],
  drafter: ["The drafter", [
    ...[...new Set(matching(/^rollout\/by_depth\/(.*)\/\d+$/).map(([drafter]) => drafter))].map((drafter) =>
      curve("Acceptance rate by depth: " + drafter, "",
        [1, 2, 3, 4, 6, 8, 12, 16].map((depth) => [`depth ${depth}`, `rollout/by_depth/${drafter}/${depth}`]),
        "A depth counts only drafts whose earlier tokens were all accepted.")),
    curve("Accept length", "tokens", [["tokens per target pass", "accept_length"]]),
    curve("Accept length on the last rollout's data", "tokens",
      [["drafter in use", "rollout/spot/accept_length"], ["drafter in training", "rollout/spot/candidate"]]),
    used("rollout/spot/version") && curve("Version of the drafter", "", [["version", "rollout/spot/version"]]),
    used("rollout/drafter_tokens") && curve("Training of the drafter", "tokens", [["drafter tokens", "rollout/drafter_tokens"]]),
    used("rollout/spot_seconds") && curve("Rollout blocked by drafter training", "s", [["spot seconds", "rollout/spot_seconds"]])]],
  energy: ["Energy", energy(run.energy)],
};

document.querySelector("h1").textContent = run.name;
document.title = run.name + " · tlt report";
for (const [id, [name, blocks]] of Object.entries(SECTIONS)) {
  if (!blocks.some(Boolean)) continue;
  document.querySelector("nav").append(el("a", { href: "#" + id }, name));
  document.querySelector("main").append(el("section", { id }, el("h2", {}, name), blocks));
}
