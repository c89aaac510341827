// Charts as SVG paths. Time runs to the right, one column a point; widths are in points, so the CSS scales them.

const SVG = "http://www.w3.org/2000/svg";

// The fallback's reasons in the order in which they are stacked above T5: first those that are no fault of anyone's.
export const REASONS = {
  prefill: "prompts being read (by design)",
  mixed: "prompts and decodes in one step (by design)",
  q_len: "more query tokens than T5 is configured for",
  non_uniform: "decodes whose numbers of query tokens differ",
  causal_tensor: "the mask differs between requests",
  batch: "more requests than T5 has buffers for",
  context_parallel: "the KV cache is spread over ranks",
  draft: "a drafter kept on the fallback",
  ineligible: "the attention group can't run on T5",
  disabled: "T5 is switched off",
};

export function element(name, attributes = {}, text = "") {
  const made = name === "svg" || name === "path" || name === "rect"
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// A square in a series' colour. Decoration: the text beside it says the same.
export function key(series) {
  const square = element("svg", { class: "key", viewBox: "0 0 1 1", "aria-hidden": "true" });
  square.append(element("rect", { width: 1, height: 1, class: `c${series}` }));
  return square;
}

// Shares of each point's steps stacked to full height: T5 at the bottom. Points without steps stay empty.
export function drawShare(svg, points, columns) {
  const names = Object.keys(REASONS);
  const paths = Array(names.length + 1).fill("");
  points.forEach((point, index) => {
    const x = columns - points.length + index;
    const values = [point.t5, ...names.map((name) => point.fallback[name] ?? 0)];
    const sum = values.reduce((a, b) => a + b, 0);
    let top = 100;
    values.forEach((value, series) => {
      if (!value) return;
      const height = (value / sum) * 100;
      top -= height;
      paths[series] += `M${x} ${top.toFixed(2)}h1v${height.toFixed(2)}h-1z`;
    });
  });
  svg.setAttribute("viewBox", `0 0 ${columns} 100`);
  svg.replaceChildren(...paths.flatMap((d, series) => (d ? [element("path", { d, class: `c${series}` })] : [])));
}

// A line over the points that have a value; it breaks where one is missing. The result is the highest value.
export function drawLine(svg, values, columns) {
  const most = Math.max(...values.filter((value) => value !== null), 0);
  let d = "";
  let pen = false;
  values.forEach((value, index) => {
    const x = columns - values.length + index + 0.5;
    if (value !== null) d += `${pen ? "L" : "M"}${x} ${(96 - (most ? value / most : 0) * 92).toFixed(2)}`;
    pen = value !== null;
  });
  svg.setAttribute("viewBox", `0 0 ${columns} 100`);
  svg.replaceChildren(...(d ? [element("path", { d, class: "line" })] : []));
  return most;
}

// Parts of a whole in one bar; parts are [size, series].
export function drawBar(svg, parts, whole) {
  let x = 0;
  svg.setAttribute("viewBox", "0 0 1000 10");
  svg.replaceChildren(...parts.map(([size, series]) => {
    const width = (Math.max(0, size) / whole) * 1000;
    x += width;
    return element("rect", { x: (x - width).toFixed(1), width: width.toFixed(1), height: 10, class: `c${series}` });
  }));
}
