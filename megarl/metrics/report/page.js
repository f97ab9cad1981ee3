"use strict";
/* Draws the page from its data.  What comes from a run is only ever set as text, never as HTML. */

const data = JSON.parse(document.getElementById("data").textContent);
const { runs } = data;
const many = runs.length > 1; // then a colour is a run, else a metric
const main = document.getElementById("main");
const phone = matchMedia("(pointer: coarse)").matches;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = {
  light: ["#2563eb", "#d9730d", "#0f8a5f", "#b0338f", "#6b7280", "#c0392b", "#0891b2", "#8b6f1e", "#65a30d", "#8b5cf6"],
  dark: ["#7aa7ff", "#ffa657", "#4cc38a", "#e58fd0", "#9aa4b2", "#ff8a7a", "#56c7dd", "#d6bf6a", "#b5e361", "#b79cff"],
};
const DASHES = { solid: "solid", dash: "dashed", dot: "dotted" }; // Plotly's name -> that of CSS
const drawn = new Map(); // the element of a plot -> how to draw it
const ofFirst = many ? `: ${runs[0].name}` : ""; // what only one run is shown of
let smoothing = 0; // steps of the moving average; 0: none

/* ---------------------------------------------------------------- small tools */

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(at) {
  const list = COLOURS[scheme.matches ? "dark" : "light"];
  return list[at % list.length];
}

/** Beyond the last colour they begin anew, dashed. */
function dash(at) {
  return Object.keys(DASHES)[Math.min(Math.floor(at / COLOURS.light.length), 2)];
}

function dot(at) {
  const mark = make("i");
  mark.dataset.at = at;
  return mark;
}

/** A number as a person writes it: 0.9180, 1,664, 3.2e-7. */
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${(s / 86400).toFixed(1)} days`;
}

/** Plotly reads a few tags in its texts: none may come from a name. */
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function section(id, title, more = "") {
  document.getElementById("nav").append(make("a", { href: `#${id}` }, title));
  const box = make("section", { id }, make("h2", {}, title + more));
  main.append(box);
  return box;
}

function choice(label, options, value, onchange) {
  const select = make("select", {}, ...options.map(([key, text]) => make("option", { value: key }, text)));
  select.value = value;
  select.addEventListener("change", () => onchange(select.value));
  return make("label", {}, label, select);
}

/** The centred moving average over so many steps, also where a curve has only some of them: it has no lag. */
function smooth({ x, y }, steps) {
  return x.map((here) => {
    const part = y.filter((value, at) => value !== null && Math.abs(x[at] - here) <= steps / 2);
    return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null;
  });
}

/** A slider over the steps of a section, its ends in reach; `show(step)` draws one, `at` the first that is seen. */
function stepper(label, steps, at, show) {
  const named = make("b");
  const slider = make("input", { type: "range", min: 0, max: steps.length - 1, "aria-label": label });
  const go = (to) => {
    slider.value = to;
    named.textContent = `step ${steps[to].step}`;
    show(steps[to]);
  };
  const jump = (text, to) => make("button", { type: "button", onclick: () => go(to) }, text);
  slider.addEventListener("input", () => go(Number(slider.value)));
  const bar = make("div", { className: "bar" }, make("label", {}, slider, named));
  if (steps.length > 1) bar.append(jump("first", 0), jump("last", steps.length - 1));
  go(at);
  return bar;
}

/* ---------------------------------------------------------------- plots */

function layout(more = {}) {
  const axis = {
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), tickcolor: css("--line"),
    automargin: true, fixedrange: phone,
  };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    margin: { l: 44, r: 10, t: 8, b: 38 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: css("--soft") },
    hovermode: "x unified", showlegend: false, dragmode: phone ? false : "zoom",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 11 }, namelength: -1 },
    xaxis: { ...axis, showgrid: false, ...xaxis },
    yaxis: { ...axis, nticks: 5, ...yaxis },
    ...rest,
  };
}

/** Draw an element when it comes into sight; `figure()` gives {data, layout}. */
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !drawn.get(entry.target).done) draw(entry.target);
  }
}, { rootMargin: "300px" });

/** Plotly looks at the window alone, and later: a card also becomes narrower by a scroll bar. */
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) if (drawn.get(target).done && target.clientWidth) draw(target);
});

function plot(element, figure) {
  drawn.set(element, { figure, done: false });
  sight.observe(element);
  sizes.observe(element);
  return element;
}

function draw(element) {
  const entry = drawn.get(element);
  entry.done = true;
  const { data: traces, layout: how } = entry.figure();
  const { clientWidth: width, clientHeight: height } = element;
  Plotly.react(element, traces, { ...how, width, height }, { displayModeBar: false, doubleClick: "reset" });
}

function redraw() {
  for (const [element, entry] of drawn) if (entry.done) draw(element);
}

/** The traces of a line: thin as it is and bold smoothed, or only as it is, as all that no chance has a part in. */
function traces({ at, name, points, exact }) {
  const line = { color: colour(at), dash: dash(at), width: 1.8 };
  const base = { ...points, type: "scatter", mode: "lines", name: plain(name), hovertemplate: "%{y:.4g}", line };
  if (!smoothing || exact) {
    return [points.x.length > 30 ? base : { ...base, mode: "lines+markers", marker: { size: 4, color: colour(at) } }];
  }
  const thin = { ...base, line: { ...line, width: 1, dash: "solid" }, opacity: 0.28, hoverinfo: "skip", hovertemplate: null };
  return [thin, { ...base, y: smooth(points, smoothing) }];
}

/** How the numbers of an axis are written: 0.25, 20k, 3e-5. */
function ticks(values) {
  const size = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  return size >= 1e4 ? "~s" : size > 0 && size < 1e-3 ? "~e" : "";
}

function stepAxis(steps) {
  const [low, high] = [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), -Infinity)];
  return { title: { text: "step", standoff: 2, font: { size: 11 } }, nticks: 7, tickformat: ticks(steps) || ",d", ...(high - low <= 12 ? { dtick: 1 } : {}) };
}

/** A curve that does not move lies in the middle of an axis that begins at 0. */
function valueAxis(values) {
  const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const flat = high - low <= 1e-6 * Math.abs(high);
  return { tickformat: ticks(values), ...(flat ? { range: high > 0 ? [0, 2 * high] : high < 0 ? [2 * high, 0] : [0, 1] } : {}) };
}

/** A diagram: of one run a line for each metric, of several a line of each run for one metric that can be chosen. */
function panel({ title, log, curves }) {
  const names = shortNames(curves.map(({ name }) => name));
  const legend = make("div", { className: "legend" });
  const why = make("div", { className: "why", hidden: true });
  const area = make("div", { className: "plot" });
  let chosen = 0;
  const lines = () => (many
    ? runs.map(({ name }, at) => ({ at, name, metric: curves[chosen], points: curves[chosen].runs[at] }))
    : curves.map((metric, at) => ({ at, name: names[at], metric, points: metric.runs[0] }))).filter(({ points }) => points);
  const show = () => {
    legend.replaceChildren(...lines().map(({ at, name, metric, points }) =>
      make("span", { title: [metric.name, ...metric.meaning].join("\n") }, dot(at), name, make("b", {}, short(points.y.at(-1))))));
    why.replaceChildren(...(many ? [curves[chosen]] : curves).map(({ name, meaning: [what, how] }) =>
      make("p", {}, make("b", {}, name), ` ${what ?? "a metric of this run"}.`, how ? ` How to read it: ${how}.` : null)));
    paintLegends();
    if (drawn.get(area)?.done) draw(area);
  };
  plot(area, () => {
    const found = lines();
    const values = found.flatMap(({ points }) => points.y).filter((value) => value !== null);
    return {
      data: found.flatMap(({ metric, ...line }) => traces({ ...line, exact: metric.exact })),
      layout: layout({ xaxis: stepAxis(found.flatMap(({ points }) => points.x)), yaxis: log ? { type: "log" } : valueAxis(values) }),
    };
  });
  const ask = make("button", { type: "button", className: "ask", onclick: () => { why.hidden = !why.hidden; } }, "?");
  ask.setAttribute("aria-label", `what ${title} means`);
  const choose = (value) => { chosen = Number(value); show(); };
  const metric = !many ? null : curves.length === 1 ? make("p", { className: "soft small" }, curves[0].name)
    : make("p", { className: "small" }, choice("", curves.map(({ name }, at) => [String(at), name]), "0", choose));
  show();
  return make("article", { className: "card" }, make("h3", {}, title, ask), metric, legend, why, area);
}

/** Names without the part that all of them begin with: actor/entropy alone stays as it is. */
function shortNames(names) {
  if (names.length < 2) return names;
  const parts = names.map((name) => name.split("/"));
  let shared = 0;
  while (parts.every((part) => part.length > shared + 1 && part[shared] === parts[0][shared])) shared += 1;
  return parts.map((part) => part.slice(shared).join("/"));
}

function paintLegends() {
  for (const mark of document.querySelectorAll("i[data-at]")) {
    mark.style.borderTop = `3px ${DASHES[dash(mark.dataset.at)]} ${colour(mark.dataset.at)}`;
  }
}

/* ---------------------------------------------------------------- sections */

/** What a run came to, in words, and their class. */
function stateOf({ status, summary, failure }) {
  const step = status.step ?? 0;
  if (failure) return [`stopped at step ${step}`, "bad"];
  if ("wall_s" in summary || "steps" in summary) return ["finished", "good"];
  if (status.stage === "ended") return [`ended at step ${step}`, "soft"];
  return [`step ${step} of ${status.total_steps ?? "?"}: ${status.stage ?? "starting"}`, "busy"];
}

function head() {
  document.title = `${data.name} · megarl report`;
  document.getElementById("name").textContent = data.name;
  const state = document.getElementById("state");
  const [text, kind] = many ? [`${runs.length} runs`, "soft"] : stateOf(runs[0]);
  state.textContent = text;
  state.classList.add(kind);
  const facts = document.getElementById("facts");
  for (const [name, value] of Object.entries(data.facts)) facts.append(make("span", {}, `${name} `, make("b", {}, value)));
  document.getElementById("foot").textContent = `Made by ${data.made_by}. This page holds all its data and asks no server.`;
}

/** The last value and the first, the median, or the largest of a metric's numbers: [value, hint]. */
const ENDS = (y) => [short(y.at(-1)), y.length > 1 ? `from ${short(y[0])}` : "measured once"];
const MEDIAN = (y) => [short([...y].sort((a, b) => a - b)[Math.floor(y.length / 2)]), "median of the steps"];
const LARGEST = (y) => [short(y.reduce((a, b) => Math.max(a, b))), "server to trainer"];
const HEADLINES = [
  ["Held-out score", "val/score", ENDS], ["Training score", "critic/score/mean", ENDS],
  ["Held-out accuracy on pairs", "val/accuracy", ENDS], ["Held-out margin", "val/margin", ENDS], ["Held-out loss", "val/loss", ENDS],
  ["Training loss", "sft/loss", ENDS], ["Training loss", "rm/loss", ENDS], ["Training loss", "dpo/loss", ENDS],
  ["Seconds of a step", "timing_s/step", MEDIAN], ["Tokens per second and device", "perf/throughput", MEDIAN],
  ["Model FLOPs utilization", "perf/mfu/actor", MEDIAN], ["Largest log-prob gap", "rollout_corr/log_prob_gap_max", LARGEST],
  ["Response length, tokens", "response_length/mean", ENDS],
];

/** The numbers that one looks for first: [label, value, hint]. */
function headlines(at) {
  const curves = data.groups.flatMap(({ panels }) => panels.flatMap((each) => each.curves));
  const { status, summary, seconds } = runs[at];
  const step = status.step ?? curves.reduce((most, { runs: of }) => Math.max(most, of[at]?.x.at(-1) ?? 0), 0);
  const found = [["Steps", short(step), `of ${short(status.total_steps)}, ${duration(seconds)}`]];
  for (const [label, metric, of] of HEADLINES) {
    const y = (curves.find(({ name }) => name === metric)?.runs[at]?.y ?? []).filter((value) => value !== null);
    if (y.length) found.push([label, ...of(y)]);
  }
  const { accuracy_after: after, accuracy_before: before } = summary;
  if (after !== undefined && runs.some((run) => "score_after" in run.summary)) { // else it is the score
    found.splice(1, 0, ["Held-out accuracy", short(after), before === undefined ? "" : `from ${short(before)}`]);
  }
  return found;
}

function tiles() {
  const tile = ([label, value, hint]) => make("div", { className: "tile" },
    make("div", { className: "label" }, label), make("div", { className: "value" }, value), make("div", { className: "hint" }, hint));
  main.append(make("div", { className: "tiles" }, ...headlines(0).map(tile)));
}

/** Several runs: their colours, and their headlines below each other. */
function overview() {
  const found = runs.map((_, at) => headlines(at));
  const labels = [...new Set(found.flat().map(([label]) => label))];
  const rows = runs.map((run, at) => {
    const [text, kind] = stateOf(run);
    const cell = (label) => {
      const [, value, hint] = found[at].find((each) => each[0] === label) ?? [label, "–", ""];
      return make("td", { "data-label": label }, make("b", {}, value), make("small", {}, hint));
    };
    return make("tr", {}, make("td", { className: "run" }, dot(at), run.page ? make("a", { href: run.page }, run.name) : run.name,
      make("small", { className: kind }, text)), ...labels.map(cell));
  });
  section("runs", "Runs").append(make("article", { className: "card table wide" }, make("table", {},
    make("thead", {}, make("tr", {}, ...["run", ...labels].map((label) => make("th", {}, label)))), make("tbody", {}, ...rows))));
}

function notes() {
  const found = new Map(); // what is said -> the runs of which it is said
  const note = (run, ...words) => found.set(JSON.stringify(words), [...(found.get(JSON.stringify(words)) ?? []), run.name]);
  for (const run of runs) {
    if (run.failure) note(run, "bad", "The run stopped.", run.failure);
    for (const { step, bad_step, what } of run.rollbacks) note(run, "bad", `Step ${bad_step}`, `${what}: back to step ${step}`);
    for (const { step, advice } of run.advice) note(run, "", `Step ${step}`, advice);
  }
  if (!found.size) return;
  section("notes", "Advice and faults").append(...[...found].map(([words, names]) => {
    const [kind, title, text] = JSON.parse(words);
    return make("div", { className: `note ${kind}` }, make("b", {}, many ? `${names.join(", ")}: ${title}` : title), text);
  }));
}

function curves() {
  if (!data.groups.length) return;
  const box = section("curves", "Curves");
  const steps = data.groups.flatMap((g) => g.panels.flatMap((p) => p.curves.flatMap((c) => c.runs.map((run) => run?.x.length ?? 0))));
  const longest = steps.reduce((a, b) => Math.max(a, b), 0);
  const amounts = [75, 25, 9, 5, 0];
  smoothing = amounts.find((amount) => amount * 10 <= longest);
  const options = amounts.reverse().map((amount) => [String(amount), amount ? `${amount} steps` : "none"]);
  box.append(make("div", { className: "bar" }, choice("Smoothing", options, String(smoothing), (value) => {
    smoothing = Number(value);
    redraw();
  }), make("span", {}, `Beside each name is its last value. ${phone ? "Touch a curve for its values." : "Drag to zoom, double-click to go back."}`)));
  for (const group of data.groups) {
    const count = make("span", { className: "soft" }, `${group.panels.length}`);
    const grid = make("div", { className: "grid" });
    const details = make("details", { className: "group", open: group.open }, make("summary", {}, group.title, count), grid);
    const fill = () => { if (!grid.children.length) { grid.append(...group.panels.map(panel)); paintLegends(); } };
    if (group.open) fill();
    details.addEventListener("toggle", fill);
    box.append(details);
  }
}

function times() {
  if (!data.time.steps.length) return;
  const box = section("time", "Where the time goes", ofFirst);
  const MOST = 8;
  const stages = data.time.stages.slice(0, MOST - 1);
  const rest = data.time.stages.slice(MOST - 1);
  if (rest.length) {
    stages.push({ name: "others", s: data.time.steps.map((_, at) => rest.reduce((sum, stage) => sum + stage.s[at], 0)) });
  }
  const legend = make("div", { className: "legend" });
  const total = data.time.stages.reduce((sum, stage) => sum + stage.s.reduce((a, b) => a + b, 0), 0) || 1;
  stages.forEach((stage, at) => {
    const share = stage.s.reduce((a, b) => a + b, 0) / total;
    legend.append(make("span", {}, dot(at), stage.name, make("b", {}, `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`)));
  });
  const area = make("div", { className: "plot wide" });
  plot(area, () => ({
    data: stages.map((stage, at) => ({
      x: data.time.steps, y: stage.s, name: plain(stage.name), type: "bar", marker: { color: colour(at) },
      hovertemplate: "%{y:.3g} s",
    })),
    layout: layout({ barmode: "stack", bargap: data.time.steps.length > 80 ? 0 : 0.15, xaxis: stepAxis(data.time.steps), yaxis: { title: { text: "seconds" } } }),
  }));
  box.append(make("article", { className: "card" }, make("h3", {}, "Seconds of each stage, by step"), legend, area));
}

/** One step in time: the driver's stages in two lanes, and a lane for each rank with the calls in which it worked. */
function waterfall() {
  if (!data.timeline.length) return;
  let shown = data.timeline.at(-1);
  const slowest = make("p", { className: "soft small" });
  const area = make("div", { className: "plot" });
  const names = [...new Set([...data.time.stages.map(({ name }) => name), ...data.timeline.flatMap(({ stages }) => stages.map(([name]) => name))])];
  const bars = () => {
    const { stages, calls } = shown;
    const found = stages.map(([name, begin, seconds, depth]) => ({ lane: depth ? "inside" : "driver", name, stage: name, begin, seconds }));
    const stageAt = (time) => stages.find(([, begin, seconds, depth]) => !depth && begin <= time && time <= begin + seconds)?.[0];
    for (const [group, name, begin, ranks] of calls) {
      for (const [rank, seconds] of Object.entries(ranks)) found.push({ lane: laneOf(group, rank), name, stage: stageAt(begin), begin, seconds });
    }
    return found;
  };
  const laneOf = (group, rank) => (group === "ranks_0" ? `rank ${rank}` : `${group.replace("ranks_", "group ")}, ${rank}`);
  const figure = () => {
    const found = bars();
    const lanes = [...new Set(found.map(({ lane }) => lane))].sort((a, b) => order(a) - order(b) || a.localeCompare(b, "en", { numeric: true }));
    area.style.height = `${70 + 24 * lanes.length}px`;
    return {
      data: [...new Set(found.map(({ name }) => name))].map((name) => {
        const mine = found.filter((bar) => bar.name === name);
        return {
          type: "bar", orientation: "h", name: plain(name), y: mine.map(({ lane }) => plain(lane)), base: mine.map(({ begin }) => begin),
          x: mine.map(({ seconds }) => seconds), marker: { color: mine.map(({ stage }) => colour(Math.max(names.indexOf(stage), 0))) },
          text: mine.map(() => plain(name)), textposition: "inside", insidetextanchor: "middle", textangle: 0,
          customdata: mine.map(({ begin }) => begin), hovertemplate: "%{x:.3g} s from %{customdata:.3g} s",
        };
      }),
      layout: layout({
        uniformtext: { minsize: 9, mode: "hide" }, barmode: "overlay", bargap: 0.25, hovermode: "closest", xaxis: { showgrid: true, title: { text: "seconds since the step began" } },
        yaxis: { type: "category", categoryorder: "array", categoryarray: lanes.map(plain), autorange: "reversed", showgrid: false, nticks: lanes.length },
      }),
    };
  };
  const order = (lane) => ["driver", "inside"].indexOf(lane) + (lane === "driver" || lane === "inside" ? 0 : 3);
  plot(area, figure);
  const bar = stepper("step of the timeline", data.timeline, data.timeline.length - 1, (step) => {
    shown = step;
    slowest.textContent = lastRank(step.calls);
    if (drawn.get(area)?.done) draw(area);
  });
  document.getElementById("time").append(make("article", { className: "card later" },
    make("h3", {}, "One step: the driver's stages, and the ranks at work"), bar, slowest, area));
}

/** Which rank worked longest in the longest call: the others may have waited for it. */
function lastRank(calls) {
  let [longest, best] = [null, 0];
  for (const [, name, , ranks] of calls) {
    for (const [rank, seconds] of Object.entries(ranks)) if (seconds > best) [longest, best] = [[name, rank, Object.values(ranks)], seconds];
  }
  if (!longest) return "";
  const [name, rank, all] = longest;
  const quickest = all.reduce((a, b) => Math.min(a, b));
  return `Longest call: ${name}, ${short(best)} s on rank ${rank}, ${short(quickest)} s on the quickest. A rank's time includes its waits for other ranks.`;
}

/* ---------------------------------------------------------------- samples */

const rewards = data.samples.flatMap((step) => step.samples.map(({ reward }) => reward));
const [worst, best] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
const isExact = rewards.includes(1); // what a right answer gets; else rewards are a matter of degree

/** 1 for a right answer, 0 for a wrong one, between them by degree. */
function rightness({ reward, reward_extra: extra }) {
  return extra?.acc ?? extra?.audit ?? (isExact ? Number(reward >= 1) : (reward - worst) / (best - worst));
}

function rewardMark(sample) {
  const mark = make("span", { className: "reward" }, `reward ${short(sample.reward)}`);
  mark.style.color = `color-mix(in srgb, var(--good) ${Math.round(100 * rightness(sample))}%, var(--bad))`;
  return mark;
}

const differs = (group) => group.some(({ reward }) => reward !== group[0].reward);

/** The last step in which a prompt has answers with different rewards: the others teach nothing, and show less. */
function telling(steps) {
  const at = steps.findLastIndex(({ samples: found }) => byPrompt(found).some(differs));
  return at < 0 ? steps.length - 1 : at;
}

function samples() {
  if (!data.samples.length) return;
  const box = section("samples", "Samples over time", ofFirst);
  const list = make("div");
  let wanted = "all";
  let shown;
  const show = (step = shown) => {
    shown = step;
    const chosen = step.samples.filter((sample) => wanted === "all" || (rightness(sample) > 0.5) === (wanted === "right"));
    list.replaceChildren(...byPrompt(chosen).sort((a, b) => differs(b) - differs(a)).map(promptCard));
    if (!chosen.length) list.append(make("p", { className: "soft" }, "None of this step."));
  };
  const bar = stepper("step", data.samples, telling(data.samples), show);
  bar.append(choice("Answers", [["all", "all"], ["right", "right"], ["wrong", "wrong"]], wanted, (value) => { wanted = value; show(); }));
  box.append(bar, list);
}

function byPrompt(found) {
  const groups = new Map();
  for (const sample of found) groups.set(sample.uid, [...(groups.get(sample.uid) ?? []), sample]);
  return [...groups.values()];
}

function promptCard(group) {
  const mean = group.reduce((sum, { reward }) => sum + reward, 0) / group.length;
  const { prompt, ground_truth: truth } = group[0];
  return make("article", { className: "card sample" },
    make("div", { className: "meta" }, make("span", {}, "prompt ", make("b", {}, group[0].uid)),
      truth === null ? null : make("span", {}, "expected ", make("b", {}, truth)),
      make("span", {}, "mean reward ", make("b", {}, short(mean)))),
    make("div", { className: "text prompt" }, prompt), ...different(group).map(answer));
}

/** Equal answers once, with their number. */
function different(group) {
  const found = new Map();
  for (const sample of group) {
    const key = JSON.stringify([sample.completion, sample.reward, sample.versions]);
    found.set(key, { ...sample, times: (found.get(key)?.times ?? 0) + 1 });
  }
  return [...found.values()];
}

function answer(sample) {
  const { num_tokens: tokens, finish_reason: end, num_turns: turns, versions } = sample;
  const written = [...new Set(versions.map(([version]) => version))];
  const extra = Object.entries(sample.reward_extra ?? {}).filter(([, value]) => value !== 0).map(([name, value]) => make("span", {}, `${name} ${short(value)}`));
  return make("div", { className: "answer" },
    make("div", { className: "meta" },
      rewardMark(sample),
      sample.times > 1 ? make("b", {}, `${sample.times} times`) : null,
      make("span", {}, `${tokens} tokens`), turns > 1 ? make("span", {}, `${turns} turns`) : null,
      make("span", {}, `weights ${written.join(", ")}`), end === "stop" ? null : make("span", {}, `ended by ${end}`), ...extra),
    ...(sample.messages ?? []).map(message), sample.messages ? null : make("div", { className: "text" }, sample.completion || "(empty)"));
}

/** A block of a conversation: who speaks, what is thought and said, and the calls of tools. */
function message({ role, text, reasoning, calls = [] }) {
  const block = (kind, ...content) => make("div", { className: `text ${kind}` }, ...content);
  return make("div", { className: role === "assistant" ? "message own" : "message" }, make("b", {}, role),
    reasoning ? block("reasoning", reasoning) : null, text ? block("said", text) : null,
    ...calls.map((call) => block("call", `${call.name} `, make("span", {}, call.arguments))));
}

/* ---------------------------------------------------------------- token by token */

const ratio = (token) => Math.exp(token.log_prob - token.rollout_log_prob);
const tint = (name, strength) => `color-mix(in srgb, var(${name}) ${Math.round(65 * Math.min(Math.max(strength, 0), 1))}%, transparent)`;

/** What a token may be coloured by: its name, what the colours mean, and the colour of a token. */
const MEASURES = {
  advantage: ["advantage", "blue: above 0, orange: below 0; full colour from 2",
    (token) => tint(token.advantage > 0 ? "--cold" : "--hot", Math.abs(token.advantage) / 2)],
  probability: ["log-prob", "the more orange, the less likely; full colour from -5",
    (token) => tint("--hot", -token.log_prob / 5)],
  ratio: ["ratio", "of the trainer's probability to the server's; blue: above 1, orange: below 1; full colour from a factor of 2",
    (token) => tint(ratio(token) > 1 ? "--cold" : "--hot", Math.abs(Math.log2(ratio(token))))],
  version: ["weight version", "a colour for each version of the weights", (token) =>
    `color-mix(in srgb, ${colour(token.version)} 32%, transparent)`],
};

function tokens() {
  if (!data.tokens.length) return;
  const box = section("tokens", "Token by token", ofFirst);
  const list = make("div");
  const meaning = make("p", { className: "soft small" });
  let measure = "advantage";
  const paint = () => {
    meaning.textContent = MEASURES[measure][1];
    for (const span of list.querySelectorAll(".token")) span.style.backgroundColor = MEASURES[measure][2](span.token);
  };
  const bar = stepper("step", data.tokens, telling(data.tokens), (step) => {
    list.replaceChildren(...step.samples.map(tokenCard));
    paint();
  });
  const options = Object.entries(MEASURES).map(([key, [name]]) => [key, name]);
  bar.append(choice("Colour", options, measure, (value) => { measure = value; paint(); }));
  box.append(bar, meaning, list);
  scheme.addEventListener("change", paint);
}

function tokenCard(sample) {
  const { uid, rows } = sample;
  const detail = make("output", { className: "detail" }, phone ? "Touch a token." : "Point at a token.");
  const tell = ({ target: { token } }) => {
    if (!token) return;
    const parts = [["log-prob", token.log_prob], ["of the server", token.rollout_log_prob], ["ratio", ratio(token)],
      ["advantage", token.advantage], ["weights", token.version]];
    detail.replaceChildren(make("code", {}, JSON.stringify(token.text)),
      ...parts.map(([name, value]) => make("span", {}, `${name} `, make("b", {}, short(value)))));
  };
  const texts = rows.map((parts) => make("div", { className: "text tokens" }, ...parts.flatMap(spans)));
  const card = make("article", { className: "card sample" }, make("div", { className: "meta" },
    rewardMark(sample),
    make("span", {}, "prompt ", make("b", {}, uid)), rows.length > 1 ? make("span", {}, `${rows.length} rows`) : null),
  ...texts, detail);
  card.addEventListener("pointerover", tell);
  card.addEventListener("click", tell);
  return card;
}

/** The elements of a part of a row: context as it is, what the policy wrote token by token. */
function spans(part) {
  if (!("pieces" in part)) return [make("span", { className: "context" }, part.text)];
  return part.pieces.map((text, at) => {
    const span = make("span", { className: "token" }, text.replaceAll("\n", "↵\n"));
    span.token = {
      text, version: part.version, log_prob: part.log_probs[at],
      rollout_log_prob: part.rollout_log_probs[at], advantage: part.advantages[at],
    };
    return span;
  });
}

/* ---------------------------------------------------------------- settings */

function settings() {
  if (!data.settings.length) return;
  const box = section("settings", "Settings");
  const recipe = many ? null : data.recipe;
  let which = many ? "differs" : recipe ? "own" : "changed";
  let word = "";
  const body = make("tbody");
  const titles = ["key", ...(many ? runs.map(({ name }) => name) : ["value"]), "default", ...(recipe ? [recipe] : [])];
  const settingRow = ({ key, meaning, values, differs: unequal, ...row }) => make("tr", {},
    make("td", { className: "key" }, key, make("small", {}, meaning)),
    ...values.map((value, at) => make("td", { className: unequal && value !== values[0] ? "value other" : "value", "data-label": titles[at + 1] }, value ?? "–")),
    make("td", { className: "value soft", "data-label": "default" }, row.default || "–"),
    recipe ? make("td", { className: "value", "data-label": "recipe" }, row.recipe ?? "–") : null);
  const show = () => {
    const rows = data.settings.filter((row) => (which === "all" || row[which]) && row.key.includes(word));
    body.replaceChildren(...rows.map(settingRow));
    if (!rows.length) body.append(make("tr", {}, make("td", { className: "soft", colSpan: titles.length }, "None.")));
  };
  const options = [["changed", "other than the default"], ["all", "all"]];
  if (recipe) options.unshift(["own", `other than in recipe ${recipe}`]);
  if (many) options.unshift(["differs", "different between the runs"]);
  const search = make("input", { type: "search", placeholder: "part of a key", "aria-label": "part of a key" });
  search.addEventListener("input", () => { word = search.value.trim(); show(); });
  box.append(make("div", { className: "bar" }, choice("Show", options, which, (value) => { which = value; show(); }), search),
    make("article", { className: many ? "card table wide" : "card table" }, make("table", {},
      make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", {}, title)))), body)), ...data.files.map(changedFile));
  show();
}

/** A file of a reward, a plug-in or an agent that is not the first run's. */
function changedFile({ file, what, diff }) {
  const kind = (line) => ({ "+": "good", "-": "bad" }[line[0]] ?? "soft");
  return make("details", { className: "card later", open: true }, make("summary", {}, make("b", {}, file), `: ${what}`),
    make("div", { className: "text" }, ...diff.map((line) => make("div", { className: kind(line) }, line || " "))));
}

/* ---------------------------------------------------------------- all of it */

/** Unpack plotly.js, which the page holds compressed, and run it: the page's policy knows its digest. */
async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

async function start() {
  head();
  await loadPlotly();
  if (many) overview();
  else tiles();
  notes();
  curves();
  times();
  waterfall();
  samples();
  tokens();
  settings();
  paintLegends();
  scheme.addEventListener("change", () => { paintLegends(); redraw(); });
  document.documentElement.dataset.ready = "yes";
}

start();
