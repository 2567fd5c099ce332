"""The tables of ``benchmarks.report``, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.goals import Line, bounds, by_gpu_time, is_profile, judge
from benchmarks.measure import kind_of
from fp8graph import Policy


def table(titles: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    lines = [[_cell(value) for value in row] for row in (titles, ["---"] * len(titles), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def of_section(lines: Iterable[Line], section: str, key: str) -> list[Line]:
    """The lines of ``section`` that have ``key``."""
    return [line for line in lines if line["section"] == section and line.get(key) is not None]


def machines(lines: Iterable[Line]) -> Iterator[str]:
    """One line per run."""
    for line in lines:
        if line["section"] == "run":
            m = line["machine"]
            where = m.get("gpu") or f"CPU ({m['cpu']})"
            versions = ", ".join(f"{k} {m[k]}" for k in ("torch", "triton", "transformers", "torchao") if k in m)
            yield f"* `{line['file']}`: {where}, {versions}, {m['date'][:10]}, commit {m['commit']}"


def goals(lines: list[Line]) -> str:
    rows = [(goal.name, goal.bar, goal.wanted, goal.found, goal.detail, goal.verdict) for goal in judge(lines)]
    return table(("goal", "bar", "times as fast", "found", "", "verdict"), rows)


def limits(lines: list[Line], section: str) -> str:
    found = bounds(lines, section)
    return "R: " + ", ".join(f"{scaling} {value:.3f}" for scaling, value in found.items()) if found else ""


def contenders(lines: list[Line], section: str) -> str:
    """Wall time kept and updated, host and GPU time, launches and memory per contender."""
    alone = of_section(lines, section, "host_ms")
    wall = {(line["contender"], line.get("weights")): line for line in of_section(lines, section, "wall_ms")}
    rows: list[Sequence[Any]] = []
    for line in alone:
        name, profile = line["contender"], line.get("profile") or {}
        kept, updated = wall.get((name, "kept"), line), wall.get((name, "updated"), {})
        rows.append((
            name, kept.get("wall_ms"), kept.get("speedup"), updated.get("speedup"), line["host_ms"],
            profile.get("gpu_ms"), profile.get("launches"), line.get("resident_mib"), line.get("peak_mib"),
        ))  # fmt: skip
    times = ("wall ms", "times bf16", "after an update", "host ms", "GPU ms")
    return table(("", *times, "launches", "resident MiB", "peak MiB"), rows)


def holding_back(lines: list[Line], section: str, count: int = 5) -> Iterator[str]:
    """Per contender: the shares of GPU time by kind, and the longest kernels that are no GEMMs."""
    for line in (line for line in lines if is_profile(line, section)):
        profile = line["profile"]
        total = profile["gpu_ms"]
        kinds = sorted(profile["by_kind_ms"].items(), key=lambda item: -item[1])
        shares = ", ".join(f"{kind} {ms / total:.0%}" for kind, ms in kinds)
        longest = [kernel for kernel in profile["kernels"] if kind_of(kernel[0]) != "gemm"][:count]
        kernels = "; ".join(f"`{kernel[:60]}` {ms / total:.1%} ({launches:g}x)" for kernel, launches, ms in longest)
        yield f"* **{line['contender']}**, {total:.2f} ms: {shares}. Longest beside GEMMs: {kernels}"


def gemms(lines: list[Line]) -> str:
    """TFLOP/s: a row per shape, a column per variant."""
    found = of_section(lines, "gemm", "tflops")
    variants = list(dict.fromkeys(line["variant"] for line in found))
    shapes = list(dict.fromkeys((line["m"], line["n"], line["k"]) for line in found))
    rates = {(line["m"], line["n"], line["k"], line["variant"]): f"{line['tflops']:.0f}" for line in found}
    rows = [(" x ".join(map(str, shape)), *(rates.get((*shape, v)) for v in variants)) for shape in shapes]
    return table(("m x n x k", *variants), rows)


def quantization(lines: list[Line]) -> str:
    """TB/s of what must be read and written once: a row per tensor and recipe, a column per option."""
    found = of_section(lines, "quant", "tb_s")
    options = list(dict.fromkeys(line["options"] for line in found))
    keys = list(dict.fromkeys((line["producer"], line["recipe"]) for line in found))
    rates = {(line["producer"], line["recipe"], line["options"]): f"{line['tb_s']:.2f}" for line in found}
    return table(("", "recipe", *options), [(*key, *(rates.get((*key, o)) for o in options)) for key in keys])


def decode(lines: list[Line]) -> str:
    rows = [
        (line["batch"], "yes" if line["cuda_graphs"] else "no", line["contender"], line["wall_ms"], line["host_ms"],
         (line.get("profile") or {}).get("gpu_ms"), line["skips"], line["copied_inputs"], line["checksum"])
        for line in of_section(lines, "decode", "wall_ms")
    ]  # fmt: skip
    titles = ("sequences", "CUDA graphs", "", "wall ms", "host ms", "GPU ms", "skipped", "copied inputs", "checksum")
    return table(titles, rows)


def whole(lines: list[Line]) -> str:
    """A row per contender of ``table``."""
    found = of_section(lines, "table", "tokens_per_s")
    profiles = {line["contender"]: line["profile"] for line in of_section(lines, "table", "profile")}
    plain = next((line["tokens_per_s"] for line in found if line["contender"] == "bf16"), None)
    rows = [
        (line["contender"], f"{line['tokens_per_s']:,.0f}", plain and line["tokens_per_s"] / plain,
         f"{line['peak_mib']:,.0f}", f"{line['compile_s']:.1f}", line["watts"] and f"{line['watts']:.0f}",
         f"{line['losses'][-1]:.4f}", (profiles.get(line["contender"]) or {}).get("launches"))
        for line in found
    ]  # fmt: skip
    titles = ("", "tokens/s", "times bf16", "peak MiB", "first step's extra s", "W", "last loss", "launches")
    return table(titles, rows)


def train(lines: list[Line]) -> str:
    rows = [
        (line["contender"], line["wall_ms"], line["host_ms"], (line.get("profile") or {}).get("gpu_ms"),
         line["losses"][-1], *line["resident_mib"])
        for line in of_section(lines, "train", "losses")
    ]  # fmt: skip
    titles = ("", "wall ms", "host ms", "GPU ms", "last loss", "MiB after 4 steps", "MiB at the end")
    checks = [
        f"* {line['check']}, {line['recipe']}: {'yes' if line['holds'] else 'NO'}, largest difference {line['worst']:g}"
        for line in of_section(lines, "train", "check")
    ]
    return "\n".join([table(titles, rows), "", *checks])


def sweep(lines: list[Line]) -> str:
    """By GPU time, the worst first."""
    found = sorted(by_gpu_time(lines).items(), key=lambda item: item[1])
    rows = [(f"{t} x {i} -> {o}", name, ratio) for (t, i, o, name), ratio in found[:12]]
    return table(("tokens x inputs -> outputs, the 12 worst", "", "times bf16 by GPU time"), rows)


def smallest(lines: list[Line]) -> str:
    """A row per layer that was measured, the narrowest first, with the GEMMs that the default policy would choose."""
    found = of_section(lines, "smallest", "speedup")
    rows: list[Sequence[Any]] = []
    for line in sorted(found, key=lambda line: (line["tokens"], line["hidden"])):
        gemms = [speedup for speedup in line["predicted"].values() if speedup is not None]
        chosen = sum(speedup >= Policy().min_speedup for speedup in gemms)
        rows.append((line["hidden"], line["tokens"], line["speedup"], f"{chosen} of {len(gemms)}"))
    narrowest = [
        f"* {line['tokens']} tokens: " + (f"from a hidden size of {line['narrowest']}" if line["narrowest"] else "none")
        for line in lines
        if line["section"] == "smallest" and "narrowest" in line
    ]
    titles = ("hidden size", "tokens", "times bf16, all in FP8", "GEMMs that the speed model would choose")
    return "\n".join([table(titles, rows), "", *narrowest])


def host(lines: Iterable[Line]) -> str:
    """A row per contender, a column per number of layers and kind of call."""
    found = of_section(lines, "host", "more_us")
    cases = list(dict.fromkeys((line["mode"], line["layers"]) for line in found))
    cell = {
        (line["contender"], line["mode"], line["layers"]): f"{line['us']:.0f} ({line['more_us']:+.0f})"
        + (f", {line['more_functions']:+d} functions" if line.get("more_functions") else "")
        for line in found
    }
    titles = ("us per call (more than plain)", *(f"{mode}, {layers} layers" for mode, layers in cases))
    names = dict.fromkeys(line["contender"] for line in found)
    return table(titles, [(name, *(cell.get((name, *case)) for case in cases)) for name in names])


def compile_time(results: dict[str, Any]) -> str:
    """Seconds of a training step's compile, and how often each contender traced and generated."""
    rows: list[Sequence[Any]] = []
    for layers, found in results["compile"].items():
        for case in found["seconds"]:
            name, _, cache = case.rpartition(" ")
            counts, used = found.get("counts", {}).get(case, {}), found.get("cpu_seconds", {})
            rows.append((
                layers, name, cache, *_times_plain(found["seconds"], case), *_times_plain(used, case),
                counts.get("traces"), counts.get("code_generations"), counts.get("kernels"),
            ))  # fmt: skip
        rows += [(layers, case, "", f"failed: {reason}") for case, reason in found.get("failed", {}).items()]
    titles = ("layers", "", "cache", "seconds", "times plain", "CPU seconds", "times plain (CPU)",
              "traces", "code generations", "C++ files")  # fmt: skip
    return table(titles, rows)


def _times_plain(measured: Mapping[str, Sequence[float]], case: str) -> tuple[str, str]:
    """The median of a case, and how many times plain torch's that is."""
    if case not in measured:
        return "", ""
    median, plain = statistics.median(measured[case]), measured.get(f"inductor {case.rpartition(' ')[2]}")
    return f"{median:.1f}", f"{median / statistics.median(plain):.2f}" if plain else ""


def gpu_code_time(results: dict[str, list[dict[str, Any]]]) -> str:
    """CPU seconds of a layer's code for a GPU, with the kernels that were generated and compiled."""
    rows: list[Sequence[Any]] = []
    plain = None
    for name, found in results.items():
        done = [one for one in found if "failed" not in one]
        if not done:
            rows.append((name, f"failed: {found[-1]['failed']}"))
            continue
        generated, compiled = (statistics.median(one[part] for one in done) for part in ("generate", "compile"))
        plain = plain or generated + compiled
        counts = (done[-1][count] for count in ("kernels", "distinct", "configurations"))
        ratio = (generated + compiled) / plain
        rows.append((name, f"{generated:.1f}", f"{compiled:.1f}", f"{ratio:.2f}", *counts))
    titles = ("", "generate", "compile", "both, times bf16's", "launches", "distinct kernels", "configurations")
    return table(titles, rows)


def checkpointing(rows: Iterable[Line]) -> str:
    """Bytes that a layer keeps until backward, kernels and their traffic, and what runs again."""
    titles = (
        "", "run again", "save", "kept MiB", "forward: kernels", "MiB moved", "backward: kernels", "MiB moved",
        "GEMMs again", "x, w quantized again", "amaxes again",
    )  # fmt: skip
    found: list[Sequence[Any]] = []
    for row in rows:
        forward, backward = row["forward"], row["backward"]
        again = backward["inputs"] + backward["weights"]
        found.append((
            row["recipe"], row["recomputed"], row["save"], f"{row['kept_mib']:,.0f}", forward["kernels"],
            f"{forward['mib']:,}", backward["kernels"], f"{backward['mib']:,}", row["gemms_again"], again,
            backward["amaxes"],
        ))  # fmt: skip
    return table(titles, found)


def left_out(lines: Iterable[Line]) -> Iterator[str]:
    """Rows of the parts that failed, were stopped or were skipped."""
    named = ("contender", "variant", "scaling", "producer", "recipe", "options")
    sized = ("m", "n", "k", "tokens", "inputs")
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for word in ("failed", "stopped", "skipped"):
            if word in line:
                names, sizes = ([str(line[key]) for key in keys if key in line] for keys in (named, sized))
                reason = str(line[word]).splitlines()[0]
                case = f"{line['section']} {', '.join(names)}".rstrip(), f"{word}: {reason[:100]}"
                found.setdefault(case, []).append(" x ".join(sizes) + (reason[100:200] if not sizes else ""))
    for (what, reason), cases in found.items():
        sizes = [case for case in cases if case]
        where = f" ({', '.join(sizes[:3])}{', ...' if len(sizes) > 3 else ''})" if " x " in "".join(sizes) else ""
        yield f"* {what}: {reason}{'' if where else cases[0]}{where}"
