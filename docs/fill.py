"""Fill the generated regions of Markdown pages: `python docs/generate.py` runs it on every page.

A region is `<!-- generated: NAME ARGUMENTS -->text<!-- end -->`, inside a line or over several lines. The text is what
`PARTS[NAME](root, *ARGUMENTS)` returns; it depends on the committed files of `results/` and on the code, on nothing else. All
prose stands in the pages. A part over several lines ends with a line break.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REGION = re.compile(r"(<!-- generated: ([^>]+) -->\n?)(.*?)(<!-- end -->)", flags=re.DOTALL)
PARTS: dict[str, Callable[..., str]] = {}
PUBLISHED = Path("src", "shippo_lab", "experiments", "tracking", "published.json")
# Column of the published table of words -> our row of it.
WORD_ROWS = {"A5, 12": "a5-12", "S5, 4": "s5-4", "S5, 8": "s5-8"}
MEMORIES = {"fixed": "ordinary HiPPO", "lifted": "SHiPPO, gyroscope alone", "limit": "the limit"}


def part(function: Callable[..., str]) -> Callable[..., str]:
    """Register a function under its name, with hyphens."""
    PARTS[function.__name__.replace("_", "-")] = function
    return function


def fill(text: str, root: Path = ROOT) -> str:
    """`text` with every generated region filled again."""

    def again(region: re.Match[str]) -> str:
        name, *arguments = region[2].split()
        return region[1] + PARTS[name](root, *arguments) + region[4]

    return REGION.sub(again, text)


def pages(root: Path = ROOT) -> list[Path]:
    """Every page that has a generated region."""
    found = [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts)]
    return [path for path in found if REGION.search(path.read_text(encoding="utf-8"))]


def load(root: Path, name: str) -> dict[str, Any]:
    """A committed result, or an empty one."""
    path = root / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rows_of(root: Path, name: str) -> dict[str, dict[str, Any]]:
    """The rows of a committed experiment by name."""
    return {row["name"]: row for row in load(root, name).get("rows", ())}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    head = list(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *rows])


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def benchmark(name: str) -> Any:
    """A module of `benchmarks/`, which stands beside `docs/`."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"benchmarks.{name}")


@part
def metric(root: Path, experiment: str, row: str, key: str) -> str:
    """The mean over seeds of one number of an experiment, in three digits."""
    found = rows_of(root, experiment).get(row)
    if not found or key not in found["metrics"]:
        return "–"
    value = mean(found["metrics"][key])
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


@part
def scan_speed(root: Path, what: str, run: str = "bench") -> str:
    """Of the scan with gradients in a run: `time`, `roof` (share of its speed), `machine`, or times faster than a peer."""
    result = load(root, run)
    if what == "machine":
        return f"{result['machine']['processor'].replace('(R)', '')}, {result['machine']['simd']}"
    scan = result["sections"]["scan"]
    both = {record["name"]: record["both"]["median"] for record in scan["candidates"] if "both" in record}
    ours = both["shippo fused"]
    if what == "time":
        return f"{1e3 * ours:.0f} ms"
    if what == "roof":
        return f"{100 * scan['roofs']['both']['seconds'] / ours:.0f} %"
    return f"{both[what.replace('_', ' ')] / ours:.0f} times"


@part
def parameters(root: Path, d_model: str) -> str:
    """Parameters of `Shippo(d_model)`, in millions."""
    from shippo_ssm import Shippo

    return f"{sum(weight.numel() for weight in Shippo(int(d_model), device='meta').parameters()) / 1e6:.2f} M"


def lab_pages(root: Path) -> Any:
    from docs.result_pages import Pages
    from shippo_lab.experiments import all_experiments

    return Pages(root, all_experiments())


@part
def results(root: Path, what: str, *names: str) -> str:
    """Of all experiments: `highlights`, `overview`, `contents`, or `page NAME`."""
    return getattr(lab_pages(root), what)(*names)


@part
def architecture(root: Path, what: str, *arguments: str) -> str:
    """`folders PACKAGE`, `call_path DIRECTION` or `decisions`."""
    from docs import architecture

    return getattr(architecture, what)(*arguments)


@part
def beside(root: Path, what: str) -> str:
    """`tokens` of a timed step, or the number of `seeds` of a task of the comparison with Mamba."""
    result = load(root, "beside-mamba")
    if what == "tokens":
        return f"{result['time']['tokens']:,}"
    return str(min(len(rows["runs"]) for rows in result["tasks"][what].values()))


@part
def beside_scores(root: Path, task: str, *columns: str) -> str:
    """Scores of a task of the comparison with Mamba, means over seeds, one line per layer; a column is `key=label`."""
    rows = []
    keys, labels = zip(*(column.split("=") for column in columns))
    for name, found in load(root, "beside-mamba")["tasks"][task].items():
        runs = found["runs"]
        values = (f"{mean(run['scores'][key] for run in runs):.3f}" for key in keys)
        rows.append([name, str(runs[0]["width"]), f"{runs[0]['parameters']:,.0f}", f"{runs[0]['rate']:g}", *values])
    return table(["layer", "width", "parameters", "learning rate", *(label.replace("_", " ") for label in labels)], rows)


@part
def beside_time(root: Path) -> str:
    """Milliseconds of a training step."""
    time = load(root, "beside-mamba")["time"]
    rows = ([name, *(f"{times[size]:.1f}" for size in ("16", "512"))] for name, times in time["milliseconds"].items())
    return table(["layer", "words of 16", "words of 512"], rows) + f"\n{time['machine']}.\n"


@part
def decode_targets(root: Path) -> str:
    """The lines of the committed run with their targets."""
    return benchmark("decode").table(load(root, "decode")) + "\n"


@part
def decode_rates(root: Path) -> str:
    """Tokens per second by batch and context."""
    run = load(root, "decode")
    names = {"ours": "SHiPPO", "transformer": "Transformer", "bfloat16": "SHiPPO, bfloat16", "int8": "SHiPPO, int8"}
    rows = []
    for key, rate in run["tokens_per_second"].items():
        who, batch, *context = key.split()
        label = f"{names[who]}, batch {batch}" + "".join(f", context {int(length):,}" for length in context)
        rows.append([label, f"{rate:,.0f}"])
    rows.append(["a prompt of 512 tokens, in one scan", f"{run['prefill_tokens_per_second']:,.0f}"])
    return table(["batch and context", "tokens per second"], rows)


@part
def gpu_code(root: Path) -> str:
    """One line per kernel in its first configuration, one column per target: registers / stack / shared memory."""
    code = load(root, "gpu")
    targets = list(dict.fromkeys(record["target"] for record in code["kernels"]))
    found: dict[str, dict[str, str]] = {}
    for record in code["kernels"]:
        sizes = f"{record['registers']} / {record['stack']} / {record['shared']}"
        found.setdefault(record["kernel"], {}).setdefault(record["target"], sizes)
    rows = ([kernel, *(line.get(target, "") for target in targets)] for kernel, line in found.items() if ", P " not in kernel)
    return table(["kernel", *targets], rows)


@part
def triton_version(root: Path) -> str:
    return f"Triton {load(root, 'gpu')['triton']}"


@part
def gpu_bound(root: Path) -> str:
    """The largest fraction of the roof that memory allows forward and backward, at the first shape."""
    first = next(row for row in load(root, "gpu")["model"]["predictions"] if row["pass"] == "both")
    return f"{first['roof'] / sum(part['terms']['memory'] for part in first['parts']):.2f}"


@part
def gpu_model(root: Path) -> str:
    """Predicted times of a forward and backward pass, with the number of segments that is used."""
    rows = []
    for row in load(root, "gpu")["model"]["predictions"]:
        # Few long sequences are cut into segments; the rows without are in the file.
        if row["pass"] == "both" and (row["segments"] > 1 or not row["shape"].startswith("B1 ")):
            limits = ", ".join(f"{part['kernel'].removeprefix('scan ')}: {part['binds']}" for part in row["parts"])
            times = f"{1e6 * row['roof']:.0f}", f"{1e6 * row['seconds']:.0f}", f"{row['fraction']:.2f}"
            rows.append([row["shape"], row["gpu"], str(row["segments"]), *times, limits])
    return table(["shape", "GPU", "segments", "roof, µs", "predicted, µs", "fraction", "limited by"], rows)


@part
def gpu_cpu(root: Path) -> str:
    """The same model on a CPU, beside what was measured there."""
    keys = ("memory", "issue", "predicted", "measured")
    rows = ([row["pass"], *(f"{1e3 * row[key]:.1f}" for key in keys)] for row in load(root, "gpu")["model"]["cpu"])
    return table(["pass", *(f"{key}, ms" for key in keys)], rows)


@part
def cluster_estimate(root: Path) -> str:
    return benchmark("cluster").table(benchmark("cluster").Cluster())


@part
def cluster_measured(root: Path) -> str:
    """What `python -m benchmarks.distributed` found."""
    run = load(root, "distributed")
    memory, wire = run["memory"], run["wire"]
    one, four = memory["one"]["peak_bytes"][0] / 2**20, max(memory["four"]["peak_bytes"]) / 2**20
    length = f"{run['memory_shape']['length']:,}"
    rows = [
        [f"one sequence of {length} steps, forward and backward: peak memory of one process", f"{one:,.0f} MiB"],
        ["the same over four processes, largest peak", f"{four:,.0f} MiB, {memory['ratio']:.2f} of it"],
        [
            f"two processes, T = {run['speed_shape']['length']:,}, G = 64",
            f"{run['speed']['speedup']:.2f} times faster than one",
        ],
        [
            "bytes sent by a rank per layer and row, G = 64, N = 32, P = 4",
            f"{wire['forward_bytes']:,} forward, {wire['backward_bytes']:,} backward",
        ],
    ]
    return table(["measured", ""], rows)


def tracked(row: dict[str, Any] | None, key: str) -> str:
    """The mean over seeds and the worst seed, in percent; a dash where it was not measured."""
    if row is None or key not in row["metrics"]:
        return "–"
    return f"{100 * mean(row['metrics'][key]):.1f} ({100 * min(row['metrics'][key]):.1f})"


@part
def tracking_words(root: Path) -> str:
    """Words of few elements: published columns that we have as well."""
    published, ours = json.loads((root / PUBLISHED).read_text(encoding="utf-8"))["words"], rows_of(root, "words")
    places = [published["columns"].index(column) for column in WORD_ROWS]
    rows = [[name, *(str(numbers[place]) for place in places)] for name, numbers in published["rows"].items()]
    rows.append(["**SHiPPO**", *(tracked(ours.get(row), "prefix_256") for row in WORD_ROWS.values())])
    rows.append(
        ["SHiPPO without right action", *(tracked(ours.get(f"{row}-none"), "prefix_256") for row in WORD_ROWS.values())]
    )
    return table(["", *(f"{column} elements" for column in WORD_ROWS)], rows) + f"\nPublished: {published['source']}.\n"


@part
def tracking_languages(root: Path) -> str:
    """Languages: every published row, and ours."""
    published, ours = json.loads((root / PUBLISHED).read_text(encoding="utf-8"))["languages"], rows_of(root, "languages")
    rows = [[name, *map(str, numbers)] for name, numbers in published["rows"].items()]
    for row in ours.values():
        name = f"**{row['label']}**, {row['config']['steps']:,} steps in all, seeds {', '.join(map(str, row['seeds']))}"
        rows.append([name, *(tracked(row, key) for key in published["columns"])])
    return table(["", *published["columns"]], rows) + f"\nPublished: {published['source']}.\n"


def accuracies(label: str, numbers: dict[str, Any], lengths: list[int], name: str) -> list[str]:
    """A line with coordinate / exact accuracy of a predictor at every length."""
    return [label, *(f"{numbers[f'{name}_coordinate_{n}']:.3f} / {numbers[f'{name}_exact_{n}']:.3f}" for n in lengths)]


@part
def mqar_predictors(root: Path) -> str:
    """What every predictor scores."""
    from shippo_lab.experiments.mqar.ceilings import PREDICTORS

    row = rows_of(root, "mqar")["untouched"]
    lengths, found = row["config"]["eval_lengths"], {name: values[0] for name, values in row["metrics"].items()}
    rows = (accuracies(words, found, lengths, name) for name, (words, _) in PREDICTORS.items())
    return table(["known, the rest guessed", *(f"{length:,} events" for length in lengths)], rows)


@part
def mqar_depth(root: Path, name: str = "mqar-depth", *depths: str) -> str:
    """Exact accuracy of the models of some depths, with and without their right action; means over seeds.

    At each length, and at the training length for queries with one operation since the binding.
    """
    rows, found = [], [row for row in rows_of(root, name).values() if str(row["config"]["n_layers"]) in (depths or "1")]
    lengths = found[0]["config"]["eval_lengths"]

    def scores(row: dict[str, Any], prefix: str) -> Iterator[str]:
        yield from (f"{mean(row['metrics'][f'{prefix}exact_{length}']):.4f}" for length in lengths)
        profile = row["curves"][f"{prefix}exact_{row['config']['length']}_by_operations"]
        yield f"{mean(profile[row['notes']['operation_bins'].index(1)]):.3f}"

    for row in found:
        kinds = {"": row["label"], "zeroed_": "its right coordinates zeroed", "identity_": "its right action replaced by I"}
        for prefix, label in kinds.items():
            if f"{prefix}exact_{lengths[0]}" in row["metrics"]:
                rows.append([label, *scores(row, prefix)])
    rows.append(["predictor", *scores(row, "untouched_")])
    return table(["model", *map("{:,}".format, lengths), f"one operation, {row['config']['length']}"], rows)


@part
def mqar_operations(root: Path) -> str:
    """Exact accuracy of each model at the training length, by the number of operations since the binding."""
    counts, found = (0, 1, 2, 3), rows_of(root, "mqar")
    models = [row for name, row in found.items() if name != "untouched" and not name.startswith("gru-slots")]
    rows = []
    for label, row, name in [
        *((row["label"], row, "exact") for row in models),
        ("untouched coordinates", models[-1], "untouched_exact"),
    ]:
        curve = row["curves"][f"{name}_{row['config']['length']}_by_operations"]
        profile = dict(zip(row["notes"]["operation_bins"], curve))
        rows.append([label, *(f"{mean(profile[count]):.3f}" for count in counts)])
    return table(["model", *(f"{count} operation{'s' * (count != 1)}" for count in counts)], rows)


def body_rows(result: dict[str, Any], name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of errors of one recording with these entries."""
    found = result["recordings"][name]["errors"]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


@part
def body_targets(root: Path) -> str:
    """Both targets, for both sensors together, the last second, one line per order."""
    result, rows = load(root, "body-frame"), []
    for name in result["recordings"]:
        for row in body_rows(result, name, stretch="turning", sensor="both", theta=1.0):
            if row["N"] >= 8:
                to_fixed, to_limit = row["lifted"] / row["fixed"], row["lifted"] / row["limit"]
                met = "yes" if to_fixed <= 0.5 else "no", "yes" if to_limit <= 1.3 else "no"
                errors = [percent(row[key]) for key in MEMORIES]
                size = f"{row['theta']:.0f} s, N = {row['N']}"
                rows.append([name, size, *errors, f"{to_fixed:.2f}, {met[0]}", f"{to_limit:.2f}, {met[1]}"])
    return table(["recording", "memory", *MEMORIES.values(), "over ordinary, ≤ 0.5?", "over the limit, ≤ 1.3?"], rows)


@part
def body_drift(root: Path) -> str:
    keys = [*MEMORIES, "off by 5 degrees/s"]
    found = load(root, "body-frame")["drift"]
    rows = ([f"{row['theta']:.0f} s", str(row["N"]), *(percent(row[key]) for key in keys)] for row in found)
    return table(["window", "N", *MEMORIES.values(), "SHiPPO, rate off by 5 degrees/s"], rows)


@part
def body_cost(root: Path) -> str:
    found = load(root, "body-frame")["cost"]
    rows = ([name, f"{value:.1f}"] for name, value in found["microseconds"].items())
    size = f"two sensors with three axes, N = {found['N']}, {found['theta']:.0f} s at 256 Hz"
    return table([size, "µs of CPU time per sample"], rows) + f"\n{found['machine']}.\n"


@part
def body_error(root: Path, sensor: str, theta: str, order: str, memory: str) -> str:
    """A relative error of the x-IMU while it turns."""
    result = load(root, "body-frame")
    (row,) = body_rows(result, "x-IMU", stretch="turning", sensor=sensor, theta=float(theta), N=int(order))
    return percent(row[memory])


@part
def body_slow(root: Path, memory: str) -> str:
    """A relative error of the x-IMU at its slowest."""
    return percent(load(root, "body-frame")["recordings"]["x-IMU"]["speeds"][0][memory])


@part
def body_accuracy(root: Path, memory: str) -> str:
    return f"{mean(load(root, 'body-frame')['classifier'][memory]):.2f}"


@part
def performance(root: Path, what: str) -> str:
    """Of the committed benchmark runs: `machines`, `targets` or `details`."""
    report = benchmark("report")
    return getattr(report, what)(*report.load(root / "results" / "bench.json"))


def outcomes(root: Path) -> Iterable[tuple[str, dict[str, dict[str, Any]]]]:
    """Integration and the outcomes of its tests, in alphabetical order."""
    result = sorted(load(root, "works-with").items())
    for name in sorted({outcome["route"] for _, outcome in result}, key=str.lower):
        if tests := {test: outcome for test, outcome in result if outcome["route"] == name}:
            yield name, tests


@part
def works_with(root: Path) -> str:
    """Versions, outcome and tests of every integration."""
    rows = []
    for name, tests in outcomes(root):
        versions = {f"{package} {version}" for outcome in tests.values() for package, version in outcome["versions"].items()}
        words = {"passed": "passed", "failed": "FAILED", "skipped": "skipped"}
        counts = {word: sum(len(outcome[kind]) for outcome in tests.values()) for kind, word in words.items()}
        shown = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        sentences = (test.split("::")[1].removeprefix("test_").removeprefix("Test").replace("_", " ") for test in tests)
        rows.append([name, ", ".join(sorted(versions)), shown, "; ".join(sentences)])
    return table(["integration", "versions", "outcome", "what the tests check"], rows)


@part
def works_with_skipped(root: Path) -> str:
    """How many cases did not run, and why."""
    reasons: dict[str, int] = {}
    for _, tests in outcomes(root):
        for why in (why for outcome in tests.values() for why in (outcome["failed"] | outcome["skipped"]).values()):
            reasons[why] = reasons.get(why, 0) + 1
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return "".join(f"{why.rstrip('.').replace('<', '&lt;')} ({count}); " for why, count in ordered).removesuffix("; ") + ".\n"
