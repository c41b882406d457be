// A click on a column's head sorts its table within each group: rising, falling, as it was.
"use strict";
for (const table of document.querySelectorAll("figure.table table")) {
  const heads = [...table.tHead.rows[0].cells];
  const bodies = [...table.tBodies].map((body) => [...body.rows]);
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const order = { ascending: "descending", descending: null }[head.ariaSort];
      const wanted = order === undefined ? "ascending" : order;
      for (const other of heads) other.removeAttribute("aria-sort");
      if (wanted) head.setAttribute("aria-sort", wanted);
      bodies.forEach((rows, place) => arrange(table.tBodies[place], rows, column, wanted));
    });
  });
}

function arrange(body, rows, column, wanted) {
  const heading = rows.filter((row) => row.className === "group");
  const units = []; // a row and those that belong to it
  for (const row of rows) {
    if (row.className === "under" && units.length) units.at(-1).push(row);
    else if (row.className !== "group") units.push([row]);
  }
  if (wanted) {
    const sign = wanted === "ascending" ? 1 : -1;
    units.sort(([a], [b]) => compare(a.cells[column], b.cells[column], sign));
  }
  body.append(...heading, ...units.flat());
}

// Cells of a number column without a number stand last, whatever the order.
function compare(a, b, sign) {
  if (a.classList.contains("text"))
    return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  const [x, y] = [a, b].map((cell) => parseFloat(cell.dataset.sort));
  return isNaN(x) - isNaN(y) || sign * (x - y) || 0;
}
