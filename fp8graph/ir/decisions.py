"""Everything outside a graph that decides about its sites, as one value: no name is looked up after it is made.

Recipes are objects in it. Their names are resolved at three doors: those of a policy when it is set (``Policies.set``),
that of a region around compiled code when it is entered (``autocast``), and those of regions in a graph when the graph
is first seen (``DynamoGraph``). :meth:`Decisions.of` is the answer for one site, and all that ``assign`` asks.
:meth:`Decisions.key` is equal where all answers are: layers, steps of a schedule and processes share code if it is.

A recipe may want more precision in the last blocks of a model under the default policy. The names of layers tell which
these are: "model.layers.30.mlp.up_proj" is in block 30 of the stack "model.layers".
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar, cast

import torch

from fp8graph.errors import Fp8GraphError
from fp8graph.ir.naming import Place
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Site
from fp8graph.recipes import GEMMS, Recipe
from fp8graph.recipes.autocast import Region
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import DEFAULT_OPS, INHERIT, OPS, Op, Resolution
from fp8graph.records import SiteRecord

OneCondition = TypeVar("OneCondition", bound="Condition")
Row = TypeVar("Row", bound=SiteRecord)
Stacks = frozenset[tuple[str, frozenset[int]]]  # prefixes of names, and the numbers of the blocks behind each
_DIGITS: Final = frozenset("0123456789")


class Condition:
    """A part of a call's situation that a store decides. It is frozen.

    Attributes:
        passes: calls under it are exceptions: a report shows the graphs of the others.
        returns: it holds for a repeated forward as well if it held for the first, whatever else holds by then.
    """

    passes: ClassVar[bool] = False
    returns: ClassVar[bool] = False

    def says_of(self, fqn: str) -> Hashable:
        """Return its meaning for the site called ``fqn``. Layers share code if it is the same for the sites of both."""
        return None

    @property
    def for_all(self) -> Hashable:
        """The part of its meaning that is the same for all sites."""
        return self


@dataclass(frozen=True)
class GatheredInFP8(Condition):
    """The parameters that were gathered in FP8 only, by graph input."""

    parameters: frozenset[int]


@dataclass(frozen=True)
class InitialScales(Condition):
    """Some tensors that delayed scaling quantizes have no amax of an earlier step: they take scales from their own."""

    passes: ClassVar[bool] = True
    returns: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions:
    """Everything outside a graph that decides about its sites.

    Attributes:
        policy: with the rules of the model's families, and recipes in place of their names.
        settings: of the backend; those that decide are a part of the key.
        region: the autocast region around the call; None: there is none.
        regions: the regions in the graph, by the text in its nodes; an error for a recipe that does not exist.
        stacks: the blocks of the whole model, as far as it is known.
        amax_group: the name of the group over which amaxes are reduced; None: this rank alone.
        conditions: what stores say of the call.
    """

    policy: Policy
    settings: Settings = field(default_factory=Settings)
    region: Region | None = None
    regions: Mapping[Any, Region | Fp8GraphError] = field(default_factory=dict[Any, "Region | Fp8GraphError"])
    stacks: Stacks = frozenset()
    amax_group: str | None = None
    conditions: tuple[Condition, ...] = ()

    def of(self, site: Site) -> Resolution:
        """Return the recipes for ``site``: of the innermost region that says something, else of the policy.

        Raises:
            Fp8GraphError: the region's recipe does not exist.
        """
        if site.op == "product":
            return Resolution(dict.fromkeys(GEMMS), source="")
        resolution = self.policy.resolve(site.fqn, site.op, site.head)
        if site.why_no_linear and resolution.rule is None:
            resolution = dataclasses.replace(resolution, source=f"{resolution.source}; {site.why_no_linear}")
        region = self.region if site.region is None else self.regions[site.region]
        if isinstance(region, Fp8GraphError):
            raise type(region)(f"{site.fqn or 'the model'}: autocast: {region}") from None
        if region is None or region.recipe is INHERIT or (region.recipe is not None and site.op not in DEFAULT_OPS):
            is_default = self.policy.keep_heads and resolution.by == "default"
            return self._without_the_last_blocks(site.fqn, resolution) if is_default else resolution
        recipes = dict.fromkeys(GEMMS, region.recipe)
        by_user = region.recipe is not None
        return Resolution(recipes, source=region.source, by="region", rule=resolution.rule, by_user=by_user)

    def key(self, sites: Iterable[Site]) -> tuple[Hashable, tuple[Hashable, ...], Hashable]:
        """Return a value that is equal where the code for ``sites`` is: all the answers, and what decides beside them.

        Linears of one module may be fused, so that it says which of the sites share a module.
        """
        modules: dict[str, int] = {}
        places: list[Hashable] = []
        answers: list[Hashable] = []
        for site in sites:
            places.append((modules.setdefault(site.fqn.rpartition(".")[0], len(modules)), site.index))
            answers.append((self.of(site).key, tuple(each.says_of(site.fqn) for each in self.conditions)))
        settings = self.settings
        rest = (
            (self.policy.min_speedup, self.policy.keep_heads, self.amax_group, self.reduces_amaxes),
            tuple(each.for_all for each in self.conditions),
            (settings.strict, *settings.decisions().values(), settings.hardware, settings.cuda_graphs),
        )
        return tuple(places), tuple(answers), rest

    def text(self, names: Iterable[str]) -> str:
        """Return the key as a text that other processes understand, of a graph whose sites may have these ``names``.

        It is made before the sites are known: more names make it differ where the code would not, never the reverse.
        """
        ops = {op for rule in self.policy.rules for op in (OPS[:-1] if rule.op == "*" else (rule.op,))}
        nowhere = Place(root="", path="", parameter=None)
        every = [("", op) for op in OPS[:-1]] + [(name, op) for name in names for op in sorted(ops | {"linear"})]
        within = [text for text, region in self.regions.items() if isinstance(region, Region)]
        sites = [
            Site(place=nowhere, fqn=name, op=cast(Op, op), region=region)
            for region in (None, *within)
            for name, op in every
        ]
        regions = sorted((str(text), region) for text, region in self.regions.items())
        places, answers, rest = self.key(sites)
        numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}  # thousands are a few
        return stable_text((places, [numbers[answer] for answer in answers], [*numbers], rest, regions))

    @functools.cached_property
    def recipes(self) -> frozenset[Recipe]:
        """All recipes that may apply to a site."""
        regions = (self.region, *self.regions.values())
        wanted = (region.recipe for region in regions if isinstance(region, Region))
        return frozenset({*self.policy.recipes(), *(recipe for recipe in wanted if isinstance(recipe, Recipe))})

    @property
    def reduces_amaxes(self) -> bool:
        """Whether some of these recipes reduce amaxes over ranks: a graph without them takes part in that, too."""
        return any(recipe.reduces_amax for recipe in self.recipes)

    @property
    def may_rewrite(self) -> bool:
        """Whether any site could get a recipe. If none could, Inductor's options stay exactly the user's."""
        return bool(self.recipes) or any(isinstance(region, Fp8GraphError) for region in self.regions.values())

    def condition(self, kind: type[OneCondition]) -> OneCondition | None:
        """Return the condition of a kind; None without one."""
        return next((each for each in self.conditions if isinstance(each, kind)), None)

    def _without_the_last_blocks(self, name: str, resolution: Resolution) -> Resolution:
        """Return the default policy's ``resolution`` in high precision where its recipe wants that for layer ``name``.

        A recipe's share of blocks is rounded to the nearest number: 15 % are none of 3, 1 of 4 to 9, and 5 of 32.
        """
        recipe, place = resolution.recipes["fprop"], place_in_stack(name)  # a default has one for all GEMMs
        if recipe is None or place is None:
            return resolution
        prefix, number = place
        blocks = sorted(dict(self.stacks).get(prefix, ()))
        count = int(recipe.last_blocks * len(blocks) + 0.5)
        if not count or number not in blocks[-count:]:
            return resolution
        which = f"the last of {len(blocks)}" if count == 1 else f"one of the last {count} of {len(blocks)}"
        source = f"{which} blocks: {recipe.name} needs more precision there"
        return Resolution(dict.fromkeys(GEMMS), source=source, by="block")


def explained(row: Row, site: Site, resolution: Resolution) -> Row:
    """Return a row as the report has it: of ``site``, and with the rule and the source of ``resolution``."""
    return row.moved(site.fqn, site.index, rule=resolution.rule, reason=resolution.explain(row.reason, row.recipe))


def place_in_stack(name: str) -> tuple[str, int] | None:
    """Return the prefix before the first number of ``name``, and the number; None without one."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part and _DIGITS.issuperset(part):
            return ".".join(parts[:position]), int(part)
    return None


def stacks_of(names: Iterable[str]) -> Stacks:
    """Return the stacks of blocks that layers called ``names`` are in."""
    stacks: dict[str, set[int]] = {}
    for name in names:
        if (place := place_in_stack(name)) is not None:
            stacks.setdefault(place[0], set()).add(place[1])
    return frozenset((prefix, frozenset(numbers)) for prefix, numbers in stacks.items())


def stable_text(value: Any) -> str:
    """Return a text of plain data that is the same in every process: sets have an order, and nothing an address.

    Raises:
        TypeError: a part of it is no plain data.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.compare}
        return f"{type(value).__module__}.{type(value).__qualname__}{stable_text(fields)}"
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return f"{{{', '.join(sorted(f'{stable_text(key)}: {stable_text(each)}' for key, each in items))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(stable_text, cast('frozenset[Any]', value))))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(stable_text, cast('Sequence[Any]', value)))})"
    if isinstance(value, (Fp8GraphError, enum.Enum, torch.dtype)):
        return f"{type(value).__name__} {value}"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    raise TypeError(f"a decision depends on {value!r}, which other processes cannot compare")
