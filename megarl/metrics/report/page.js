"use strict";
/* Draws the page from its data.  What comes from a run is only ever set as text, never as HTML. */

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const phone = matchMedia("(pointer: coarse)").matches;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = {
  light: ["#2563eb", "#d9730d", "#0f8a5f", "#b0338f", "#6b7280", "#c0392b", "#0891b2", "#8b6f1e"],
  dark: ["#7aa7ff", "#ffa657", "#4cc38a", "#e58fd0", "#9aa4b2", "#ff8a7a", "#56c7dd", "#d6bf6a"],
};
const drawn = new Map(); // the element of a plot -> how to draw it
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

function section(id, title) {
  document.getElementById("nav").append(make("a", { href: `#${id}` }, title));
  const box = make("section", { id }, make("h2", {}, title));
  main.append(box);
  return box;
}

function choice(label, options, value, onchange) {
  const select = make("select", {}, ...options.map(([key, text]) => make("option", { value: key }, text)));
  select.value = value;
  select.addEventListener("change", () => onchange(select.value));
  return make("label", {}, label, select);
}

/** The centred moving average: it has no lag. */
function smooth(values, window) {
  const half = Math.floor(window / 2);
  return values.map((_, at) => {
    const part = values.slice(Math.max(at - half, 0), at + half + 1).filter((value) => value !== null);
    return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null;
  });
}

/* ---------------------------------------------------------------- plots */

function layout(more = {}) {
  const axis = {
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), tickcolor: css("--line"),
    automargin: true, fixedrange: phone,
  };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    margin: { l: 44, r: 10, t: 8, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: css("--soft") },
    hovermode: "x unified", showlegend: false, dragmode: phone ? false : "zoom",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 11 } },
    xaxis: { ...axis, showgrid: false, ...xaxis },
    yaxis: { ...axis, nticks: 5, exponentformat: "power", ...yaxis },
    ...rest,
  };
}

/** Draw an element when it comes into sight; `figure()` gives {data, layout}. */
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !drawn.get(entry.target).done) draw(entry.target);
  }
}, { rootMargin: "300px" });

function plot(element, figure) {
  drawn.set(element, { figure, done: false });
  sight.observe(element);
  return element;
}

function draw(element) {
  const entry = drawn.get(element);
  entry.done = true;
  const { data: traces, layout: how } = entry.figure();
  Plotly.react(element, traces, how, { displayModeBar: false, responsive: true, doubleClick: "reset" });
}

function redraw() {
  for (const [element, entry] of drawn) if (entry.done) draw(element);
}

/** The traces of a curve: thin as it is and bold smoothed, or only as it is. */
function lines(curve, at, name, dash) {
  const line = { color: colour(at), width: 1.8, dash };
  const base = { x: curve.x, type: "scatter", name: plain(name), hovertemplate: "%{y:.4g}" };
  if (!smoothing || curve.x.length <= 30) {
    const few = curve.x.length <= 30 && dash === "solid";
    return [{ ...base, y: curve.y, line, mode: few ? "lines+markers" : "lines", marker: { size: 4, color: colour(at) } }];
  }
  return [
    { ...base, y: curve.y, mode: "lines", line: { ...line, width: 1, dash: "solid" }, opacity: 0.28, hoverinfo: "skip", hovertemplate: null },
    { ...base, y: smooth(curve.y, smoothing), mode: "lines", line },
  ];
}

function panel(content) {
  const legend = make("div", { className: "legend" });
  const names = shortNames(content.curves.map((curve) => curve.name));
  content.curves.forEach((curve, at) => {
    const dot = make("i");
    dot.dataset.colour = at;
    const last = curve.y.at(-1);
    const other = curve.other ? make("span", { className: "soft" }, ` (${short(curve.other.y.at(-1))})`) : null;
    legend.append(make("span", { title: curve.name }, dot, names[at], make("b", {}, short(last)), other));
  });
  const area = make("div", { className: "plot" });
  plot(area, () => ({
    data: content.curves.flatMap((curve, at) => [
      ...lines(curve, at, names[at], "solid"),
      ...(curve.other ? lines(curve.other, at, `${names[at]} of ${data.other}`, "dot") : []),
    ]),
    layout: layout({ yaxis: content.log ? { type: "log" } : {} }),
  }));
  return make("article", { className: "card" }, make("h3", {}, content.title), legend, area);
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
  for (const dot of document.querySelectorAll(".legend i")) dot.style.background = colour(Number(dot.dataset.colour));
}

/* ---------------------------------------------------------------- sections */

function head() {
  document.title = `${data.name} · megarl report`;
  document.getElementById("name").textContent = data.name;
  const state = document.getElementById("state");
  const finished = "wall_s" in data.summary || "steps" in data.summary;
  const step = data.status.step ?? 0;
  const [text, kind] = data.failure ? [`stopped at step ${step}`, "bad"]
    : finished ? ["finished", "good"]
    : data.status.stage === "ended" ? [`ended at step ${step}`, "soft"]
    : [`step ${step} of ${data.status.total_steps ?? "?"}: ${data.status.stage ?? "starting"}`, "busy"];
  state.textContent = text;
  state.classList.add(kind);
  const facts = document.getElementById("facts");
  for (const [name, value] of Object.entries(data.facts)) facts.append(make("span", {}, `${name} `, make("b", {}, value)));
  if (data.other) facts.append(make("span", {}, "compared with ", make("b", {}, data.other), " (dotted)"));
  document.getElementById("foot").textContent = `Made by ${data.made_by}. This page holds all its data and asks no server.`;
}

function curveOf(name) {
  for (const group of data.groups) {
    for (const { curves } of group.panels) for (const curve of curves) if (curve.name === name) return curve;
  }
  return null;
}

function tiles() {
  const box = make("div", { className: "tiles" });
  const tile = (label, value, hint) => box.append(make("div", { className: "tile" },
    make("div", { className: "label" }, label), make("div", { className: "value" }, value), make("div", { className: "hint" }, hint)));
  const change = (label, name) => {
    const y = curveOf(name)?.y.filter((value) => value !== null) ?? [];
    if (y.length) tile(label, short(y.at(-1)), y.length > 1 ? `from ${short(y[0])}` : "measured once");
  };
  const middle = (label, name, unit) => {
    const y = (curveOf(name)?.y ?? []).filter((value) => value !== null).sort((a, b) => a - b);
    if (y.length) tile(label, `${short(y[Math.floor(y.length / 2)])}${unit}`, "median of the steps");
  };
  change("Held-out score", "val/score");
  change("Training score", "critic/score/mean");
  change("Supervised loss", "sft/loss");
  change("Held-out accuracy on pairs", "val/accuracy");
  const steps = data.status.step ?? data.time.steps.at(-1);
  if (steps !== undefined) tile("Steps", short(steps), `of ${short(data.status.total_steps)}, ${duration(data.seconds)}`);
  middle("Time of a step", "timing_s/step", " s");
  middle("Tokens per second and device", "perf/throughput", "");
  middle("Model FLOPs utilization", "perf/mfu/actor", "");
  const gap = curveOf("rollout_corr/log_prob_gap_max")?.y.filter((value) => value !== null) ?? [];
  if (gap.length) tile("Largest log-prob gap", short(gap.reduce((a, b) => Math.max(a, b))), "server to trainer");
  change("Response length, tokens", "response_length/mean");
  main.append(box);
}

function notes() {
  if (!data.advice.length && !data.rollbacks.length && !data.failure) return;
  const box = section("notes", "Advice and faults");
  const note = (kind, title, text) => box.append(make("div", { className: `note ${kind}` }, make("b", {}, title), text));
  if (data.failure) note("bad", "The run stopped.", data.failure);
  for (const { step, bad_step, what } of data.rollbacks) note("bad", `Step ${bad_step}`, `${what}: back to step ${step}`);
  for (const { step, advice } of data.advice) note("", `Step ${step}`, advice);
}

function curves() {
  const box = section("curves", "Curves");
  const longest = Math.max(0, ...data.groups.flatMap((g) => g.panels.flatMap((p) => p.curves.map((c) => c.x.length))));
  smoothing = longest > 30 ? 9 : 0;
  const options = [["0", "none"], ["5", "5 steps"], ["9", "9 steps"], ["25", "25 steps"], ["75", "75 steps"]];
  const bar = make("div", { className: "bar" }, choice("Smoothing", options, String(smoothing), (value) => {
    smoothing = Number(value);
    redraw();
  }), make("span", {}, phone ? "Touch a curve for its values." : "Drag to zoom, double-click to go back."));
  box.append(bar);
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
  const box = section("time", "Where the time goes");
  const MOST = 8;
  const stages = data.time.stages.slice(0, MOST - 1);
  const rest = data.time.stages.slice(MOST - 1);
  if (rest.length) {
    stages.push({ name: "others", s: data.time.steps.map((_, at) => rest.reduce((sum, stage) => sum + stage.s[at], 0)) });
  }
  const legend = make("div", { className: "legend" });
  const total = data.time.stages.reduce((sum, stage) => sum + stage.s.reduce((a, b) => a + b, 0), 0) || 1;
  stages.forEach((stage, at) => {
    const dot = make("i");
    dot.dataset.colour = at;
    const share = stage.s.reduce((a, b) => a + b, 0) / total;
    legend.append(make("span", {}, dot, stage.name, make("b", {}, `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`)));
  });
  const area = make("div", { className: "plot wide" });
  plot(area, () => ({
    data: stages.map((stage, at) => ({
      x: data.time.steps, y: stage.s, name: plain(stage.name), type: "bar", marker: { color: colour(at) },
      hovertemplate: "%{y:.3g} s",
    })),
    layout: layout({ barmode: "stack", bargap: data.time.steps.length > 80 ? 0 : 0.15, yaxis: { title: { text: "seconds" } } }),
  }));
  box.append(make("article", { className: "card" }, make("h3", {}, "Seconds of each stage, by step"), legend, area));
}

/** One step in time: the driver's stages in two lanes, and a lane for each rank with the calls in which it worked. */
function waterfall() {
  if (!data.timeline.length) return;
  let at = data.timeline.length - 1;
  const named = make("b");
  const slowest = make("p", { className: "soft small" });
  const area = make("div", { className: "plot" });
  const names = [...new Set([...data.time.stages.map(({ name }) => name), ...data.timeline.flatMap(({ stages }) => stages.map(([name]) => name))])];
  const bars = () => {
    const { stages, calls } = data.timeline[at];
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
  const show = () => {
    const { step, calls } = data.timeline[at];
    named.textContent = `step ${step}`;
    slowest.textContent = lastRank(calls);
    if (drawn.get(area)?.done) draw(area);
  };
  const slider = make("input", { type: "range", min: 0, max: at, value: at });
  slider.setAttribute("aria-label", "step of the timeline");
  slider.addEventListener("input", () => { at = Number(slider.value); show(); });
  plot(area, figure);
  document.getElementById("time").append(make("article", { className: "card later" },
    make("h3", {}, "One step: the driver's stages, and the ranks at work"), make("div", { className: "bar" }, make("label", {}, slider, named)), slowest, area));
  show();
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

function samples() {
  if (!data.samples.length) return;
  const box = section("samples", "Samples over time");
  const list = make("div");
  const named = make("b");
  let wanted = "all";
  let at = data.samples.length - 1;
  const slider = make("input", { type: "range", min: 0, max: data.samples.length - 1, value: at });
  slider.setAttribute("aria-label", "step");
  const show = () => {
    const { step, samples: found } = data.samples[at];
    named.textContent = `step ${step}`;
    const chosen = found.filter(({ reward }) => wanted === "all" || (wanted === "high" ? reward > 0 : reward <= 0));
    list.replaceChildren(...byPrompt(chosen).map(promptCard));
    if (!chosen.length) list.append(make("p", { className: "soft" }, "None of this step."));
  };
  slider.addEventListener("input", () => { at = Number(slider.value); show(); });
  const options = [["all", "all"], ["high", "above 0"], ["low", "0 or below"]];
  box.append(make("div", { className: "bar" }, make("label", {}, slider, named),
    choice("Reward", options, wanted, (value) => { wanted = value; show(); })), list);
  show();
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
  const { reward, num_tokens: tokens, finish_reason: end, num_turns: turns, versions } = sample;
  const written = [...new Set(versions.map(([version]) => version))];
  const extra = Object.entries(sample.reward_extra ?? {}).filter(([, value]) => value !== 0).map(([name, value]) => make("span", {}, `${name} ${short(value)}`));
  return make("div", { className: "answer" },
    make("div", { className: "meta" },
      make("span", { className: `reward ${reward > 0 ? "good" : "bad"}` }, `reward ${short(reward)}`),
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
  const box = section("tokens", "Token by token");
  const list = make("div");
  const named = make("b");
  const meaning = make("p", { className: "soft small" });
  let measure = "advantage";
  let at = data.tokens.length - 1;
  const paint = () => {
    meaning.textContent = MEASURES[measure][1];
    for (const span of list.querySelectorAll(".token")) span.style.backgroundColor = MEASURES[measure][2](span.token);
  };
  const show = () => {
    named.textContent = `step ${data.tokens[at].step}`;
    list.replaceChildren(...data.tokens[at].samples.map(tokenCard));
    paint();
  };
  const slider = make("input", { type: "range", min: 0, max: data.tokens.length - 1, value: at });
  slider.setAttribute("aria-label", "step");
  slider.addEventListener("input", () => { at = Number(slider.value); show(); });
  const options = Object.entries(MEASURES).map(([key, [name]]) => [key, name]);
  box.append(make("div", { className: "bar" }, make("label", {}, slider, named),
    choice("Colour", options, measure, (value) => { measure = value; paint(); })), meaning, list);
  scheme.addEventListener("change", paint);
  show();
}

function tokenCard({ uid, reward, rows }) {
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
    make("span", { className: `reward ${reward > 0 ? "good" : "bad"}` }, `reward ${short(reward)}`),
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
  const compares = data.other !== null;
  let which = compares ? "differs" : data.recipe ? "own" : "changed";
  let word = "";
  const body = make("tbody");
  const titles = ["key", "value", "default", ...(data.recipe ? [data.recipe] : []), ...(compares ? [data.other] : [])];
  const show = () => {
    const rows = data.settings.filter((row) => (which === "all" || row[which]) && row.key.includes(word));
    body.replaceChildren(...rows.map(settingRow));
    if (!rows.length) body.append(make("tr", {}, make("td", { className: "soft", colSpan: titles.length }, "None.")));
  };
  const options = [["changed", "other than the default"], ["all", "all"]];
  if (data.recipe) options.unshift(["own", `other than in recipe ${data.recipe}`]);
  if (compares) options.unshift(["differs", `other than in ${data.other}`]);
  const search = make("input", { type: "search", placeholder: "part of a key" });
  search.setAttribute("aria-label", "part of a key");
  search.addEventListener("input", () => { word = search.value.trim(); show(); });
  box.append(make("div", { className: "bar" }, choice("Show", options, which, (value) => { which = value; show(); }), search),
    make("article", { className: "card table" }, make("table", {},
      make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", {}, title)))), body)));
  show();
}

function settingRow(row) {
  const cell = (label, value) => make("td", { className: "value", "data-label": label }, value ?? "–");
  return make("tr", { className: row.differs ? "differs" : "" },
    make("td", { className: "key" }, row.key, make("small", {}, row.meaning)),
    cell("value", row.value), make("td", { className: "value soft", "data-label": "default" }, row.default || "–"),
    data.recipe === null ? null : cell("recipe", row.recipe),
    data.other === null ? null : cell(data.other, row.other));
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
  tiles();
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
