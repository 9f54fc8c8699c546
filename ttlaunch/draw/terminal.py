"""Draw a scene for a terminal: a grid of boxes with links between neighbours, or a table if the grid does not fit."""

from collections.abc import Sequence

from ttlaunch.diagnostics.count import counted
from ttlaunch.draw.grid import Cell, columns_for, place_boxes
from ttlaunch.draw.scene import Box, Scene

MOST_DRAWN = 16
"""The largest number of boxes that are drawn as a grid."""

_GAP = 7
_NARROWEST, _WIDEST = 14, 34
_MOST_DEVICE_ROWS = 4


def render_terminal(scene: Scene, *, width: int) -> str:
    """Draw the picture at most `width` characters wide, with a line end at its end."""
    head = f"{scene.title}: {scene.subtitle}\n\n"
    inner = _inner_width(scene)
    if len(scene.boxes) > MOST_DRAWN or inner + 4 > width:
        return head + _table(scene, width)
    columns = columns_for(len(scene.boxes), most=(width + _GAP) // (inner + 4 + _GAP))
    cells = place_boxes(scene, columns=columns)
    return head + _grid(scene, cells, inner=inner, columns=columns) + _further_links(scene, cells)


def _inner_width(scene: Scene) -> int:
    longest = max((len(line) for box in scene.boxes for line in [_head(box, 0), *_lines(box)]), default=0)
    return max(_NARROWEST, min(_WIDEST, longest))


def _head(box: Box, width: int) -> str:
    return f"{box.name}{' ' * max(2, width - len(box.name) - len(box.detail))}{box.detail}"


def _lines(box: Box) -> list[str]:
    lines = []
    if box.shape and box.shape[0] <= _MOST_DEVICE_ROWS and box.shape[1] * 2 <= _WIDEST:
        lines += [" ".join("▪" * box.shape[1])] * box.shape[0]
    before = box.name
    for occupant in box.occupants:
        if occupant.host != before:
            lines.append(occupant.host)
            before = occupant.host
        lines.append(str(occupant))
    if box.hidden:
        lines.append(f"and {counted(box.hidden, 'rank')} more")
    return lines


def _grid(scene: Scene, cells: Sequence[Cell], *, inner: int, columns: int) -> str:
    box_in = {cell: number for number, cell in enumerate(cells)}
    joined = {frozenset((cells[wire.a], cells[wire.b])): wire.channels for wire in scene.wires}
    text = []
    for row in range(max(row for row, _ in cells) + 1):
        boxes = [scene.boxes[box_in[row, column]] if (row, column) in box_in else None for column in range(columns)]
        height = max(len(_lines(box)) for box in boxes if box)
        drawn = [_box(box, inner, height) if box else [" " * (inner + 4)] * (height + 3) for box in boxes]
        for line in range(height + 3):
            parts = []
            for column in range(columns):
                channels = joined.get(frozenset(((row, column), (row, column + 1)))) if line == 1 else None
                parts += [drawn[column][line], f" {channels} ".center(_GAP, "─") if channels else " " * _GAP]
            text.append("".join(parts))
        below = [joined.get(frozenset(((row, column), (row + 1, column)))) for column in range(columns)]
        if any(below):
            text.append("".join((f"  │ {n}" if n else "").ljust(inner + 4 + _GAP) for n in below))
    return "".join(line.rstrip() + "\n" for line in text)


def _box(box: Box, inner: int, height: int) -> list[str]:
    lines = _lines(box)
    body = [_cut(line, inner) for line in [_head(box, inner), *lines, *[""] * (height - len(lines))]]
    edge = "─" * (inner + 2)
    return [f"╭{edge}╮", *[f"│ {line} │" for line in body], f"╰{edge}╯"]


def _cut(text: str, width: int) -> str:
    return (text if len(text) <= width else text[: width - 1] + "…").ljust(width)


def _further_links(scene: Scene, cells: Sequence[Cell]) -> str:
    """Explain the numbers, and list the links that the grid does not show because they join no neighbours."""
    if not scene.wires:
        return ""
    rest = [
        f"{scene.boxes[wire.a].name} ─ {wire.channels} ─ {scene.boxes[wire.b].name}"
        for wire in scene.wires
        if abs(cells[wire.a][0] - cells[wire.b][0]) + abs(cells[wire.a][1] - cells[wire.b][1]) != 1
    ]
    lines = ["", "numbers on links: ethernet channels"]
    lines += [f"{'further links' if number == 0 else '':15}{link}" for number, link in enumerate(rest)]
    return "\n".join(lines) + "\n"


def _table(scene: Scene, width: int) -> str:
    """Write one line per box: its ranks and the boxes that it is linked to."""
    rows = []
    for number, box in enumerate(scene.boxes):
        ranks = ", ".join(map(str, box.occupants)) + (f" and {box.hidden} more" if box.hidden else "")
        linked = [scene.boxes[other].name.removeprefix("mesh ") for other, _ in scene.neighbours(number)]
        if scene.channels is None:
            linked = [
                f"{name}×{channels}" for name, (_, channels) in zip(linked, scene.neighbours(number), strict=True)
            ]
        rows.append((box.name, box.detail, ", ".join(h for h in box.hosts if h != box.name), ranks, ", ".join(linked)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    text = [
        "  ".join(value.ljust(size) for value, size in zip(row[:4], widths, strict=False) if size)
        + (f"  ─ {row[4]}" if row[4] else "")
        for row in rows
    ]
    note = (
        f"\nafter ─: the meshes it is linked to, {counted(scene.channels, 'channel')} each\n" if scene.channels else ""
    )
    if scene.channels is None and scene.wires:
        note = "\nafter ─: the meshes it is linked to, each × its channels\n"
    return "".join(_cut(line.rstrip(), width).rstrip() + "\n" for line in text) + note
