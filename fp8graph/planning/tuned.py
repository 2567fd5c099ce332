"""What ``fp8graph.tune`` returns: the policy, the scores that it comes from, and the curve of what else there is."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8graph.errors import ConfigError
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.toml_text import policy_toml


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one recipe would change in one GEMM of one layer, and how long the GEMM would take."""

    site: str  #: the full name of the layer
    op: str  #: "linear"
    group: str  #: the first of the layers that are decided together
    gemm: str  #: fprop, dgrad or wgrad
    candidate: int  #: index among the recipes
    recipe: str  #: its name
    measured: float  #: fprop: sum((dL/dY * change of Y)^2); dgrad: sum(change^2); wgrad: relative square error
    error: float  #: as a share of what FP8 everywhere makes
    seconds: float | None  #: predicted; None: the target has no such GEMM
    high_precision_seconds: float  #: predicted, in bf16


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One policy: its error as a share of that of FP8 everywhere, and the predicted speedup of the GEMMs over bf16."""

    error: float  #: 1: that of FP8 everywhere
    speedup: float  #: of the GEMMs, predicted, over bf16


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuned:
    """The result of :func:`fp8graph.tune`. ``print`` it to see the rules with their scores."""

    policy: Policy  #: what was chosen, ready for ``fp8graph.compile``
    scores: tuple[Score, ...]  #: of each layer, GEMM and recipe
    curve: tuple[CurvePoint, ...]  #: from high precision to the fastest policy
    chosen: CurvePoint  #: of the policy
    uniform: Mapping[str, CurvePoint]  #: each recipe everywhere
    target: str  #: the GPU whose speed is predicted
    left_out: tuple[str, ...] = ()  #: layers that were not measured, and why

    def __repr__(self) -> str:
        return f"<Tuned: error {self.chosen.error:.3f}, {self.chosen.speedup:.3f} x bf16 on {self.target}>"

    def __str__(self) -> str:
        lines = [
            self.summary(),
            *(f"  {name} everywhere: {p.speedup:.3f} times, {p.error:.1%}" for name, p in self.uniform.items()),
            str(self.policy),
        ]
        for (group, gemm), best in self._by_decision().items():
            tried = ", ".join(f"{s.recipe} {s.error:.2%}" for s in best)
            lines.append(f"  {group} {gemm}: {tried}")
        lines += [f"not measured: {text}" for text in self.left_out]
        return "\n".join(lines)

    def _by_decision(self) -> dict[tuple[str, str], list[Score]]:
        """The scores of each group and GEMM, one per recipe (of its first layer: the others add theirs)."""
        found: dict[tuple[str, str], dict[str, Score]] = {}
        for score in self.scores:
            own = found.setdefault((score.group, score.gemm), {})
            before = own.get(score.recipe)
            error = score.error + (0.0 if before is None else before.error)
            own[score.recipe] = dataclasses.replace(score, error=error)
        ordered = sorted(found.items(), key=lambda item: -max(score.error for score in item[1].values()))
        return {key: list(own.values()) for key, own in ordered}

    def save(self, path: str | Path) -> None:
        """Write the policy as TOML, for ``Policy.load``, ``Backend(path)`` and ``options={"policy": path}``."""
        Path(path).write_text(f"# fp8graph.tune: {self.summary()}\n{policy_toml(self.policy)}", encoding="utf-8")

    def summary(self) -> str:
        """One line: what is predicted of the policy."""
        return (
            f"On {self.target}, predicted: GEMMs {self.chosen.speedup:.3f} times as fast as in bf16, with "
            f"{self.chosen.error:.1%} of the error of FP8 everywhere."
        )

    def plot(self, path: str | Path) -> None:
        """Draw the curve, each recipe everywhere, and the chosen point. Needs matplotlib."""
        try:
            matplotlib = importlib.import_module("matplotlib")
        except ImportError:
            raise ConfigError("Tuned.plot() needs matplotlib: pip install matplotlib.") from None
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        axes.plot([p.speedup for p in self.curve], [p.error for p in self.curve], ".-", label="best choices", zorder=1)
        for name, point in self.uniform.items():
            axes.scatter(point.speedup, point.error, marker="s", label=f"{name} everywhere", zorder=2)
        axes.scatter(self.chosen.speedup, self.chosen.error, s=120, marker="*", color="black", label="chosen", zorder=3)
        axes.set(
            xlabel=f"predicted speedup of the GEMMs over bf16 on {self.target}",
            ylabel="error (FP8 everywhere = 1)",
            title="Error against time",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
