"""The page that `report` fills: style for light and dark, and the tooltip. Nothing is loaded from anywhere."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ground: #fbfaf7; --card: #ffffff; --ink: #22252b; --soft: #666c76; --rule: #dfe1e5;
  --tint: #f4f1e8; --c0: #2563c9; --c1: #d4690a; --c2: #16885c; --c3: #9142b8; --c4: #b5323f; }
@media (prefers-color-scheme: dark) { :root { --ground: #14161a; --card: #1d2026; --ink: #e7e8ea; --soft: #9ba1ab;
  --rule: #343840; --tint: #25241e; --c0: #6ea4ff; --c1: #ff9d45; --c2: #4cc794; --c3: #cb8cec; --c4: #ff7f8c; } }
body { margin: 0 auto; max-width: 1440px; padding: 20px 24px 48px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 14px; } h2 { font-size: 18px; margin: 30px 0 10px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 8px 18px; }
.tile span { display: block; color: var(--soft); font-size: 13px; } .tile b { font-size: 24px; line-height: 1.25; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; padding: 10px 10px 4px; }
.warmup figure { background: var(--tint); }
figcaption { padding-left: 4px; overflow-wrap: anywhere; } figcaption div { min-height: 20px; }
.key { color: var(--soft); font-size: 13px; margin-right: 14px; } .key i { display: inline-block;
  width: 16px; height: 3px; margin: 0 6px 4px 0; border-radius: 2px; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; } svg text { fill: var(--soft); font-size: 11px; }
svg path { fill: none; stroke-width: 2; stroke-linejoin: round; } svg .raw { opacity: .3; stroke-width: 1; }
svg .grid { stroke: var(--rule); } svg .axis, svg .cross { stroke: var(--soft); } svg .cross { stroke-dasharray: 3 3; }
path.c0 { stroke: var(--c0); } circle.c0 { fill: var(--c0); } i.c0 { background: var(--c0); }
path.c1 { stroke: var(--c1); } circle.c1 { fill: var(--c1); } i.c1 { background: var(--c1); }
path.c2 { stroke: var(--c2); } circle.c2 { fill: var(--c2); } i.c2 { background: var(--c2); }
path.c3 { stroke: var(--c3); } circle.c3 { fill: var(--c3); } i.c3 { background: var(--c3); }
path.c4 { stroke: var(--c4); } circle.c4 { fill: var(--c4); } i.c4 { background: var(--c4); }
#tip { position: fixed; display: none; pointer-events: none; background: var(--ink); color: var(--ground);
  padding: 5px 9px; border-radius: 6px; font-size: 13px; white-space: pre; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); margin-bottom: 10px; }
.tables { display: flex; flex-wrap: wrap; gap: 30px; align-items: flex-start; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; } caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } .number { text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
details > pre { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; }
.note { color: var(--soft); font-size: 13px; }
</style>
</head>
<body>
<h1>$title</h1>
<div class="tiles">$headlines</div>
$sections
<p class="note">Faint: every step. Bold: the running mean over about a tenth of the steps. Point at a chart to read its
values.</p>
$samples
<section><h2>All metrics</h2><div class="wide tables">$values</div></section>
<details><summary>Resolved configuration</summary><pre>$config</pre></details>
<div id="tip"></div>
<script>
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), cross = svg.querySelector(".cross");
  const nearest = (steps, x) => steps.reduce((best, s, i) => Math.abs(s - x) < Math.abs(steps[best] - x) ? i : best, 0);
  const show = event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const x = chart.low + (at - chart.left) / (chart.right - chart.left) * (chart.high - chart.low);
    const lines = chart.lines.filter(line => line.steps.length);
    if (!lines.length) return;
    const step = lines[0].steps[nearest(lines[0].steps, x)];
    const place = chart.left + (step - chart.low) / (chart.high - chart.low) * (chart.right - chart.left);
    cross.setAttribute("x1", place); cross.setAttribute("x2", place);
    tip.textContent = "step " + step + lines.map(line => {
      const i = nearest(line.steps, step);
      const elsewhere = line.steps[i] === step ? "" : " (step " + line.steps[i] + ")";
      return "\\n" + line.label + " " + line.values[i] + elsewhere;
    }).join("");
    tip.style.display = "block";
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, room)) + "px";
    tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + "px";
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => {
    tip.style.display = "none"; cross.setAttribute("x1", -9); cross.setAttribute("x2", -9);
  });
}
</script>
</body>
</html>
"""
