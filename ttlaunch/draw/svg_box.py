"""One box of the SVG: its names, its grid of devices, and the ranks on it."""

from html import escape

from ttlaunch.diagnostics.count import counted
from ttlaunch.draw.scene import Box, Scene

Point = tuple[float, float]

SMALL_CHARACTER = 6.7
"""Width of a letter of small text, a little more than in fonts, so that text fits into the shape drawn around it."""

_CHARACTER = 7.9
_PADDING, _LINE = 14, 24
_DEVICE, _GRID_WIDTH, _GRID_HEIGHT = 11, 216, 88
_MOST_DRAWN_DEVICES = 2048
_COLOURS = 6


def box_size(scene: Scene) -> tuple[float, float]:
    """Return the width and height that every box gets, so that the text of each fits."""
    width = height = 0.0
    for box in scene.boxes:
        host = _one_host(box)
        lines = [len(box.name) * _CHARACTER + len(host) * SMALL_CHARACTER + (18 if host else 0)]
        lines += [_line_width(box, number) for number in range(len(box.occupants))]
        grid = _device_grid(box)
        lines += [grid[1], (len(box.detail)) * SMALL_CHARACTER]
        width = max(width, *lines)
        count = len(box.occupants) + (1 if box.hidden else 0)
        height = max(height, 48 + grid[2] + (8 if grid[2] else 0) + count * _LINE + (6 if count else 0))
    return max(120, width + 2 * _PADDING), height


def _line_width(box: Box, number: int) -> float:
    occupant = box.occupants[number]
    host = "" if _one_host(box) or occupant.host == box.name else occupant.host
    return len(str(occupant)) * SMALL_CHARACTER + 16 + (len(host) * SMALL_CHARACTER + 12 if host else 0)


def _one_host(box: Box) -> str:
    return box.hosts[0] if len(box.hosts) == 1 and box.hosts[0] != box.name else ""


def _device_grid(box: Box) -> tuple[float, float, float]:
    """Return the pitch of the device grid, its width and its height."""
    if box.shape is None or box.shape[0] * box.shape[1] > _MOST_DRAWN_DEVICES:
        return 0, 0, 0
    rows, columns = box.shape
    pitch = min(_DEVICE + 3, _GRID_WIDTH / columns, _GRID_HEIGHT / rows)
    return pitch, columns * pitch, rows * pitch


def render_box(scene: Scene, box: Box, corner: Point, *, size: tuple[float, float]) -> str:
    """Draw a box with its upper left corner at `corner`."""
    x, y = corner
    host = _one_host(box)
    ranks = ", ".join(f"{occupant} on {occupant.host}" for occupant in box.occupants)
    parts = [
        f"<g><title>{svg_text(f'{box.name}, {box.detail}' + (f': {ranks}' if ranks else ''))}</title>",
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" rx="8"/>',
        f'<text class="name" x="{x + _PADDING:.1f}" y="{y + 23:.1f}">{svg_text(box.name)}</text>',
    ]
    if host:
        parts.append(
            f'<text class="quiet end" x="{x + size[0] - _PADDING:.1f}" y="{y + 23:.1f}">{svg_text(host)}</text>'
        )
    detail = box.detail + (" devices" if box.shape else "")
    parts.append(f'<text class="quiet" x="{x + _PADDING:.1f}" y="{y + 40:.1f}">{svg_text(detail)}</text>')
    pitch, _, height = _device_grid(box)
    parts += _devices(box, (x + _PADDING, y + 50), pitch)
    below = y + 48 + (height + 8 if height else 0)
    for number, occupant in enumerate(box.occupants):
        top = below + number * _LINE
        width = len(str(occupant)) * SMALL_CHARACTER + 16
        colour = scene.roles.index(occupant.role) % _COLOURS if occupant.role in scene.roles else "none"
        parts.append(
            f'<rect class="rank role-{colour}" x="{x + _PADDING:.1f}" y="{top:.1f}" width="{width:.1f}" height="19" rx="9.5"/>'
            f'<text class="small" x="{x + _PADDING + 8:.1f}" y="{top + 13.5:.1f}">{svg_text(str(occupant))}</text>'
        )
        if not host and occupant.host != box.name:
            right = x + size[0] - _PADDING
            parts.append(
                f'<text class="quiet end" x="{right:.1f}" y="{top + 13.5:.1f}">{svg_text(occupant.host)}</text>'
            )
    if box.hidden:
        top = below + len(box.occupants) * _LINE
        more = f"and {counted(box.hidden, 'rank')} more"
        parts.append(f'<text class="quiet" x="{x + _PADDING:.1f}" y="{top + 13.5:.1f}">{more}</text>')
    return "".join(parts) + "</g>"


def _devices(box: Box, corner: Point, pitch: float) -> list[str]:
    """Draw all devices in two shades, one path for each, so that the hosts of a mesh can be told apart."""
    if not pitch or box.shape is None:
        return []
    (x, y), (rows, columns) = corner, box.shape
    high, wide = rows // box.host_shape[0], columns // box.host_shape[1]
    gap = min(3.0, pitch / 4)
    side = pitch - gap
    paths: list[list[str]] = [[], []]
    for row in range(rows):
        for column in range(columns):
            square = f"M{x + column * pitch:.1f} {y + row * pitch:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z"
            paths[(row // high + column // wide) % 2].append(square)
    return [f'<path class="device-{number}" d="{"".join(path)}"/>' for number, path in enumerate(paths) if path]


def svg_text(text: str) -> str:
    """Escape a text between tags, with a replacement mark for each unprintable character."""
    return escape("".join(c if c.isprintable() else "�" for c in text), quote=False)
