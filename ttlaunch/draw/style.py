"""Colours and fonts of the SVG, for light and for dark pages; the reader's preference decides."""

_LIGHT = {
    "page": "#ffffff", "box": "#f6f8fa", "edge": "#c9d1d9", "text": "#1f2328", "quiet": "#59636e", "link": "#768390",
    "device-0": "#57606a", "device-1": "#afb8c1", "role-none": "#e4e8ec",
    "role-0": "#d3e5fd", "role-1": "#ffe3c2", "role-2": "#d2f1d9", "role-3": "#ecdcfc", "role-4": "#fddbe2", "role-5": "#d0f0f2",
}  # fmt: skip
_DARK = {
    "page": "#0d1117", "box": "#161b22", "edge": "#3d444d", "text": "#f0f6fc", "quiet": "#9198a1", "link": "#7d8590",
    "device-0": "#9ea7b3", "device-1": "#57606a", "role-none": "#2d333b",
    "role-0": "#0f3768", "role-1": "#5a3206", "role-2": "#0f4a24", "role-3": "#412562", "role-4": "#641b2e", "role-5": "#0b474c",
}  # fmt: skip
_MONOSPACE = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
_PROPORTIONAL = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"


def _rules(colours: dict[str, str]) -> str:
    fills = [name for name in colours if name.startswith(("device", "role"))]
    return (
        f".page{{fill:{colours['page']}}}.box{{fill:{colours['box']};stroke:{colours['edge']}}}"
        f"text{{fill:{colours['text']}}}.quiet{{fill:{colours['quiet']}}}.link{{stroke:{colours['link']}}}"
        + "".join(f".{name}{{fill:{colours[name]}}}" for name in fills)
    )


STYLE = (
    f"text{{font:11px {_MONOSPACE}}}.heading{{font:600 20px {_PROPORTIONAL}}}.name{{font-size:13px;font-weight:600}}"
    ".end{text-anchor:end}.middle{text-anchor:middle}.link{fill:none;stroke-linejoin:round}"
    f"{_rules(_LIGHT)}@media(prefers-color-scheme:dark){{{_rules(_DARK)}}}"
)
