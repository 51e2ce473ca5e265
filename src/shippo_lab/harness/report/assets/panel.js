// The panel: a stored memory C [24, 2], a right action R made of a turn and a shear, and what two memories read back.
// Everything is computed here from the coefficients in #panel-data; the library's `read_back` is the same computation.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("panel-data").textContent);
  const signal = data.signal;
  const coefficients = data.coefficients;
  const find = (id) => document.getElementById(id);
  const turn = find("turn");
  const shear = find("shear");
  const keep = find("keep");
  const play = find("play");

  // LegS at t = 1: sqrt(2n + 1) P_n(2 tau - 1), by the three-term recurrence.
  const basis = signal.map((_, index) => {
    const x = (2 * index) / (signal.length - 1) - 1;
    const row = [1, x];
    for (let n = 1; n + 1 < coefficients.length; n += 1) {
      row.push(((2 * n + 1) * x * row[n] - n * row[n - 1]) / (n + 1));
    }
    return row.map((value, n) => value * Math.sqrt(2 * n + 1));
  });

  const multiply = (a, b) => [
    [a[0][0] * b[0][0] + a[0][1] * b[1][0], a[0][0] * b[0][1] + a[0][1] * b[1][1]],
    [a[1][0] * b[0][0] + a[1][1] * b[1][0], a[1][0] * b[0][1] + a[1][1] * b[1][1]],
  ];
  const act = (points, matrix) =>
    points.map(([x, y]) => [x * matrix[0][0] + y * matrix[1][0], x * matrix[0][1] + y * matrix[1][1]]);
  const norm = (points) => Math.sqrt(points.reduce((sum, [x, y]) => sum + x * x + y * y, 0));
  const minus = (a, b) => a.map(([x, y], index) => [x - b[index][0], y - b[index][1]]);

  // Rotation sign of the library: columns are multiplied by [[cos, -sin], [sin, cos]].
  const rotation = (angle) => [
    [Math.cos(angle), -Math.sin(angle)],
    [Math.sin(angle), Math.cos(angle)],
  ];
  const shearing = (amount) => [
    [1, amount],
    [0, 1],
  ];

  function setting() {
    const a = rotation((Number(turn.value) * Math.PI) / 180);
    const b = shearing(Number(shear.value));
    const turnFirst = find("turn-first").checked;
    const ab = multiply(a, b);
    const ba = multiply(b, a);
    return { right: turnFirst ? ab : ba, other: turnFirst ? ba : ab, count: Number(keep.value) };
  }

  const evaluate = (kept) =>
    basis.map((row) => kept.reduce(([x, y], c, n) => [x + row[n] * c[0], y + row[n] * c[1]], [0, 0]));

  function compute({ right, other, count }) {
    const kept = coefficients.slice(0, count);
    // A later operation is a matrix. The fixed memory has nowhere to put it; the transported one acts on its coefficients.
    const read = {
      wanted: (matrix) => act(signal, matrix),
      fixed: (_) => evaluate(kept),
      transported: (matrix) => evaluate(act(kept, matrix)),
    };
    const lines = {};
    const errors = {};
    const gaps = {};
    const wanted = read.wanted(right);
    const size = norm(wanted);
    for (const [name, memory] of Object.entries(read)) {
      lines[name] = memory(right);
      errors[name] = norm(minus(lines[name], wanted)) / size;
      gaps[name] = norm(minus(lines[name], memory(other))) / size;
    }
    return { lines, errors, gaps };
  }

  const path = (points, x, y) =>
    points.map((point, index) => `${index ? "L" : "M"}${x(point, index).toFixed(1)} ${y(point, index).toFixed(1)}`).join("");
  const percent = (value) => `${(100 * value).toFixed(1)}\u00a0%`;
  const fixedNumber = (value) => value.toFixed(2).replace("-", "−");

  function draw() {
    const now = setting();
    const shown = compute(now);
    for (const [name, points] of Object.entries(shown.lines)) {
      find(`plane-${name}`).setAttribute("d", path(points, ([x]) => 180 + 100 * x, ([, y]) => 180 - 100 * y));
      for (const channel of [0, 1]) {
        find(`channel${channel}-${name}`).setAttribute(
          "d",
          path(points, (_, index) => (index * 600) / (points.length - 1), (point) => 75 - 42 * point[channel])
        );
      }
    }
    // The axes of the frame in which the memory was written, as they stand now.
    now.right.forEach(([x, y], index) => {
      const arrow = find(`axis${index}`);
      arrow.setAttribute("x2", (180 + 62 * x).toFixed(1));
      arrow.setAttribute("y2", (180 - 62 * y).toFixed(1));
    });
    find("turn-out").textContent = `${turn.value.replace("-", "−")}°`;
    find("shear-out").textContent = fixedNumber(Number(shear.value));
    find("keep-out").textContent = keep.value;
    find("wanted-gap").textContent = percent(shown.gaps.wanted);
    for (const name of ["fixed", "transported"]) {
      find(`${name}-error`).textContent = percent(shown.errors[name]);
      find(`${name}-gap`).textContent = percent(shown.gaps[name]);
    }
    now.right.forEach((row, i) => row.forEach((value, j) => (find(`r${i}${j}`).textContent = fixedNumber(value))));
  }

  let timer = 0;
  function stop() {
    window.clearInterval(timer);
    timer = 0;
    play.textContent = "Let it turn";
    play.setAttribute("aria-pressed", "false");
  }
  play.addEventListener("click", () => {
    if (timer) {
      stop();
      return;
    }
    play.textContent = "Stop";
    play.setAttribute("aria-pressed", "true");
    timer = window.setInterval(() => {
      turn.value = String(Number(turn.value) >= 180 ? -178 : Number(turn.value) + 2);
      draw();
    }, 50);
  });
  for (const input of [turn, shear, keep, find("turn-first"), find("shear-first")]) {
    input.addEventListener("input", draw);
  }
  turn.addEventListener("pointerdown", stop);
  turn.addEventListener("keydown", stop);
  find("reset").addEventListener("click", () => {
    stop();
    turn.value = "0";
    shear.value = "0";
    keep.value = keep.max;
    find("turn-first").checked = true;
    draw();
  });
  draw();
})();
