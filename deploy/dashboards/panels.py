"""The parts that all dashboards are made of: panels with one look, variables, annotations, links.

`SITES` and `ALL` go into every query, so that the variables of the dashboard apply to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

RUNBOOK = "${docs}/operations.md"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
ALL = 'instance=~"$instance"'
SITES = f'{ALL},site=~"$site"'
RATE = "$__rate_interval"
REFS = "ABCDEFGHIJ"

Panel = timeseries.Panel | stat.Panel | table.Panel
Queries = Sequence[tuple[str, str]]  # expression, legend
Steps = Sequence[tuple[float | None, str]]  # from this value on, colour

GOOD_WHEN_ANY: Steps = ((None, "red"), (1, "green"))
BAD_WHEN_ANY: Steps = ((None, "green"), (1, "red"))


def lines(
    title: str,
    description: str,
    queries: Queries,
    *,
    unit: str,
    width: int = 12,
    steps: Steps = (),
    stacked: bool = False,
    log: bool = False,
    low: float | None = 0,
) -> timeseries.Panel:
    """A chart over time. `steps` draws threshold lines, `low` is the least top of the axis."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(8)
        .line_width(1.5)
        .fill_opacity(60 if stacked else 8)
        .legend(legend.placement(LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if low is not None:
        panel.axis_soft_min(low)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if log:
        scale = common.ScaleDistributionConfig()
        panel.scale_distribution(scale.type("log").log(10))  # type: ignore[arg-type]
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode("line"))  # type: ignore[arg-type]
    for ref, (expr, label) in zip(REFS, queries, strict=False):
        panel.with_target(_query(ref, expr, label))
    return panel


def number(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "none",
    width: int = 4,
    steps: Steps = ((None, "text"),),
    decimals: int | None = None,
    runbook: str = "",
) -> stat.Panel:
    """One number; `runbook` names the section of docs/operations.md that it links to."""
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(4)
        .reduce_options(reduce)
        .thresholds(_thresholds(steps))
        .with_target(_query("A", expr, ""))
    )
    if decimals is not None:
        panel.decimals(decimals)
    if runbook:
        panel.links([link("Runbook", f"{RUNBOOK}#{runbook}")])
    return panel


def by_site(title: str, description: str, queries: Queries) -> table.Panel:
    """A row a site, a column a query."""
    panel = (
        table.Panel().title(title).description(description).datasource(SOURCE).span(24).height(9)
    )
    for ref, (expr, _) in zip(REFS, queries, strict=False):
        panel.with_target(_query(ref, expr, "").instant().format(PromQueryFormat.TABLE))
    names = {f"Value #{ref}": label for ref, (_, label) in zip(REFS, queries, strict=False)}
    hidden = dict.fromkeys(("Time", "instance", "job", "__name__", "direction", "phase"), True)
    return panel.transformations(
        [
            DataTransformerConfig(id_val="merge", options={}),
            DataTransformerConfig(
                id_val="organize", options={"renameByName": names, "excludeByName": hidden}
            ),
        ]
    )


def _query(ref: str, expr: str, label: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(ref).expr(expr).legend_format(label).datasource(SOURCE)


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=color) for value, color in steps])
    )


def link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True)


def board(uid: str, title: str, description: str, *, site: bool) -> dashboard.Dashboard:
    """An empty dashboard with its variables, annotations and links to the others."""
    others = dashboard.DashboardLink("loco").type(DashboardLinkType.DASHBOARDS).tags(["loco"])
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["loco"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .link(others.include_vars(True).keep_time(True).as_dropdown(True))
        .link(link("Runbooks", RUNBOOK))
        .with_variable(
            dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus")
        )
        .with_variable(dashboard.TextBoxVariable("docs").label("Docs at").default_value("/docs"))
        .with_variable(_variable("instance", "Coordinator", "label_values(loco_round, instance)"))
    )
    if site:
        values = f"label_values(loco_site_alive{{{ALL}}}, site)"
        made.with_variable(_variable("site", "Site", values))
    for name, expr, colour in _ANNOTATIONS:
        annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True)
        made.annotation(annotation.icon_color(colour).expr(expr))
    return made


# Marks on every chart; each kind can be switched off at the top of the dashboard.
_ANNOTATIONS = (
    ("Rounds", f"changes(loco_round{{{ALL}}}[{RATE}]) > 0", "rgba(120,120,120,0.35)"),
    (
        "Operator",
        f"sum by (instance, order) (increase(loco_orders_total{{{ALL}}}[{RATE}])) > 0",
        "purple",
    ),
    (
        "Sites come and go",
        f'changes(loco_sites{{{ALL},state="alive"}}[{RATE}]) > 0',
        "orange",
    ),
    (
        "Coordinator restarted",
        f"changes(process_start_time_seconds{{{ALL}}}[{RATE}]) > 0",
        "red",
    ),
)


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def filled(made: dashboard.Dashboard, *rows: tuple[str, list[Panel]]) -> dashboard.Dashboard:
    """Add rows of panels, each under its title."""
    for title, panels in rows:
        made.with_row(dashboard.Row(title))
        for panel in panels:
            made.with_panel(panel)
    return made
