"""An advice as text: rich tables on a terminal, plain ASCII lines where the output is a file or a pipe."""

import io
from collections.abc import Callable, Iterable, Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_lengthpool.advise.advice import Advice, Cost
from lightning_lengthpool.ordering.policies import POLICIES
from lightning_lengthpool.runs.formatting import duration, interval, megabytes, number, percent, ranks
from lightning_lengthpool.simulation.predict import Prediction

WIDTH = 110  # of plain text
_BAR = 40  # characters of the longest bar


def print_advice(advice: Advice, console: Console | None = None) -> None:
    """Print an advice, section by section.

    Args:
        advice: What `advisor.advise` said.
        console: Where to; by default the standard output, without colours and `WIDTH` columns wide where that is not a
            terminal.
    """
    console = console or Console()
    if console.is_terminal:
        _print(advice, console, is_plain=False)
        return
    text = io.StringIO()
    _print(advice, Console(file=text, width=WIDTH, color_system=None, force_terminal=False), is_plain=True)
    lines = text.getvalue().splitlines()  # which rich fills up with spaces
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def _print(advice: Advice, console: Console, is_plain: bool) -> None:
    sections = (
        ("Is the pool active?", _bullets(advice.pool)),
        ("How lengths are distributed", _distribution(advice, is_plain)),
        ("What is wasted (predicted)", _predictions(advice, is_plain, is_narrow=console.width < WIDTH)),
        ("What it costs (memory, start, restore)", _costs(advice, is_plain)),
        ("pool_size, batch_size and num_workers", _bullets(advice.relation.sentences)),
        ("Can synchronisation be the bottleneck?", _bullets(advice.bottleneck.sentences)),
        ("Checks", _checks(advice)),
        ("Recommendation", _recommendation(advice)),
    )
    for position, (title, parts) in enumerate(sections, start=1):
        console.print(Text(f"{position}. {title}", style="bold"))
        for part in parts:
            console.print(part)
        console.print()


def _bullets(sentences: Iterable[str]) -> Iterator[RenderableType]:
    return (_bullet(sentence) for sentence in sentences)


def _bullet(sentence: str, sign: str = "-", style: str = "") -> RenderableType:
    """A sentence whose further lines are indented."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=len(sign))
    grid.add_column(overflow="fold")
    grid.add_row(Text(sign, style=style), Text(sentence))
    return grid


def _table(is_plain: bool, title: str = "") -> Table:
    return Table(
        box=None if is_plain else box.SIMPLE_HEAD,
        title=Text(title, style="" if is_plain else "italic") if title else None,
        title_justify="left",
        pad_edge=not is_plain,
        padding=(0, 2, 0, 0),
    )


def _distribution(advice: Advice, is_plain: bool) -> Iterator[RenderableType]:
    known = advice.distribution
    if known.drawn_from is not None:
        yield _bullet(
            f"{known.drawn_from:,} lengths, of which {known.count:,} drawn at random were used: the figures are theirs"
        )
    words = {
        "no": "the lengths are nearly equal",
        "low": "low variance: lengths differ little",
        "moderate": "moderate variance",
        "high": "high variance: lengths differ widely",
    }
    yield _bullet(
        f"{known.count:,} samples, {number(known.mean)} tokens on average; coefficient of variation "
        f"{known.cv:.2f}: {words[known.variance]}"
    )
    for long in known.outliers:
        if long.idle < 0.01:
            continue
        yield _bullet(
            f"the longest {100 * long.share:g} % (over {number(long.above)} tokens) are the longest sample of "
            f"{percent(long.of_steps)} of the steps of {ranks(long.world_size)} without a pool, and cause "
            f"{percent(max(0.0, long.of_waiting))} of their waiting: without these samples they would be idle for "
            f"{percent(long.idle_without)} of the time in place of {percent(long.idle)}"
        )
    if known.dominates:
        yield _bullet("so a few outliers dominate the waiting")
    table = _table(is_plain)
    for q in known.percentiles:
        table.add_column("longest" if q == 100 else f"{q} %", justify="right")
    table.add_row(*(number(value) for value in known.percentiles.values()))
    yield Padding(table, (1, 0, 0, 2))
    yield Padding(_histogram(advice, is_plain), (1, 0, 0, 2))


def _histogram(advice: Advice, is_plain: bool) -> Table:
    edges, counts = advice.distribution.edges, advice.distribution.counts
    table = _table(is_plain)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("")
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        length = round(_BAR * count / counts.max())
        bar = ("#" if is_plain else "█") * length or ("." if count else "")
        table.add_row(f"{number(low)} - {number(high)}", f"{count:,}", Text(bar, style="" if is_plain else "blue"))
    return table


def _predictions(advice: Advice, is_plain: bool, is_narrow: bool) -> Iterator[RenderableType]:
    yield _bullet(
        f"idle is the share of the ranks' time spent waiting for the slowest one, in {advice.basis}; useful counts "
        "waiting and padding both. Predicted by the code that orders training, with 90 % intervals in brackets, which "
        "know of no sample longer than those that were read"
    )
    if advice.plan.accumulate > 1:
        yield _bullet(
            f"a step is {advice.plan.accumulate} micro-batches, whose costs add up; where the ranks meet before each "
            "of them, they wait more"
        )
    if advice.plan.settings.max_tokens is not None:
        yield _bullet("'no pool' has batches of as many samples as always fit into max_tokens")
    for world in dict.fromkeys(row.case.world_size for row in advice.predictions):
        rows = [row for row in advice.predictions if row.case.world_size == world]
        yield Padding(_sweep(advice, world, rows, is_plain, is_narrow), (1, 0, 0, 2))
        if world == advice.plan.world_size and advice.recommendation.not_best:
            yield Padding(_bullet(f"why the marked row: {advice.recommendation.not_best}"), (1, 0, 0, 0))


def _sweep(advice: Advice, world: int, rows: list[Prediction], is_plain: bool, is_narrow: bool) -> Table:
    table = _table(is_plain, f"{ranks(world)}, predicted")
    table.padding = (0, 1 if is_narrow else 2, 0, 0)
    for name in ("policy", "pool_size", "idle", "padding", "useful", ""):
        table.add_column(name, justify="left" if name in ("policy", "") else "right", no_wrap=True)
    notes, best = {advice.today.case: "today"}, advice.recommendation.case
    notes[best] = "keep" if is_narrow else "today, recommended"
    if best != advice.today.case:
        notes[best] = "use" if is_narrow else "recommended"
    reference = " + ref." if is_narrow else " + reference"
    for row in sorted(rows, key=_position):
        case, note, is_off = row.case, notes.get(row.case, ""), row.case.settings.is_off
        table.add_row(
            "no pool" if is_off else case.policy + (reference if case.has_reference else ""),
            "" if is_off else f"{case.pool_size:,}",
            interval(row.idle),
            percent(row.padding.mean),
            percent(row.useful.mean) if is_narrow else interval(row.useful),
            note and f"<- {note}",
            style="bold" if note and not is_plain else "",
        )
    return table


def _position(row: Prediction) -> tuple[int, bool, int]:
    settings = row.case.settings
    return POLICIES.index(settings.policy), row.case.has_reference, settings.pool_size


def _costs(advice: Advice, is_plain: bool) -> Iterator[RenderableType]:
    table = _table(is_plain)
    table.add_column("")
    names = ["today", "recommended"] if len(advice.costs) > 1 else ["today, recommended"]
    for name in names:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Cost], str]] = {
        "samples held by a worker": lambda cost: f"{cost.pool_samples:,}",
        "memory of a worker's pool": lambda cost: megabytes(cost.worker_bytes),
        "memory of a rank's pools": lambda cost: megabytes(cost.rank_bytes),
        "memory of a machine's pools": lambda cost: megabytes(cost.node_bytes),
        "until the first batch": lambda cost: duration(cost.first_batch_seconds),
        "stop for a refill": lambda cost: duration(cost.stall_seconds),
        "workers' time for a batch": lambda cost: duration(cost.batch_seconds),
        "to restore from a checkpoint, at most": lambda cost: duration(cost.restore_seconds),
    }
    for title, shown in rows.items():
        values = [shown(cost) for cost in advice.costs]
        if any(value != "not known" for value in values):
            table.add_row(title, *values)
    yield Padding(table, (0, 0, 1, 2))
    if all(cost.batch_seconds is None or cost.worker_bytes is None for cost in advice.costs):
        yield _bullet("what a sample weighs in the pool and takes to encode was not measured")
    yield from _bullets(_notes(advice.costs))


def _notes(costs: tuple[Cost, ...]) -> Iterator[str]:
    if any(cost.case.policy in ("pool", "blocks") for cost in costs):
        yield (
            "with 'pool' and 'blocks' the next pool fills, one sample in for each out, as one is handed out: both "
            "together hold pool_size samples"
        )
    if any(cost.pool_samples for cost in costs):
        yield (
            "training waits for a whole pool once, at the start; after that one sample comes in for each that leaves, "
            "so there is no stop for a refill, and a step shorter than the workers' time for a batch waits for data as "
            "it would without a pool"
        )


def _checks(advice: Advice) -> Iterator[RenderableType]:
    by_result = {
        name: [check for check in advice.checks if check.result == name] for name in ("found", "passed", "not made")
    }
    if not by_result["found"]:
        yield _bullet("nothing to fix was found")
    for check in by_result["found"]:
        yield _bullet(check.sentence, "!", "bold red")
        yield _bullet(check.action, "  what to do:")
    for check in by_result["passed"]:
        yield _bullet(check.title + (f" ({check.sentence})" if check.sentence else ""), "passed:", "green")
    for check in by_result["not made"]:
        yield _bullet(f"{check.title}: {check.sentence}", "not checked:", "dim")


def _recommendation(advice: Advice) -> Iterator[RenderableType]:
    advised = advice.recommendation
    yield Text(advised.sentence[0].upper() + advised.sentence[1:] + ".", style="bold")
    yield from _bullets(advised.reasons)
    if advised.yaml:
        yield Text("\nIn the YAML:\n")
        yield Text(advised.yaml.rstrip("\n"))
