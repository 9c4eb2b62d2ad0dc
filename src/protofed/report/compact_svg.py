"""Matplotlib's SVG in a fraction of the bytes, with the same appearance.

A report has thousands of points and cells. What matplotlib repeats for each of them (styles, clip
paths, groups, ids, six digits) is written once.
"""

from __future__ import annotations

import re
from itertools import groupby
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

_NUMBERS = ("x", "y", "d", "transform", "width", "height", "points")
SHORTEST_GROUP = 3
"""This many neighbors of the same style are worth a group."""


def compact(text: str, prefix: str) -> str:
    """An ``<svg>`` without what it does not need; its ids become ``prefix-0``, ``prefix-1``, ...

    It must not use namespaces: plain ``href``, no ``xmlns``.
    """
    root = ElementTree.fromstring(text)
    names = {old: f"{prefix}-{i}" for i, old in enumerate(_references(text))}
    shapes = {f"#{names[i]}": e for e in root.iter() if (i := e.get("id", "")) in names}
    for element in root.iter():
        _simplify(element, names)
    _flatten(root)
    _group(root, shapes, prefix)
    still = _references(ElementTree.tostring(root, encoding="unicode"))
    for definitions in root.iter("defs"):
        definitions[:] = [e for e in definitions if e.get("id") in still]
    _flatten(root)
    return ElementTree.tostring(root, encoding="unicode")


def _references(text: str) -> dict[str, None]:
    return dict.fromkeys(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))


def _simplify(element: Element, names: dict[str, str]) -> None:
    """Shorten numbers; drop ids that nothing refers to and rotations by 0."""
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    own = element.attrib
    if "id" in own:
        if own["id"] in names:
            own["id"] = names[own["id"]]
        else:
            del own["id"]
    for name, value in own.items():
        if name in _NUMBERS:
            value = re.sub(
                r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), value
            )
            own[name] = re.sub(r"\s*([A-Za-z])\s*", r"\1", value.strip()) if name == "d" else value
        elif "#" in value:
            own[name] = re.sub(r"#([^\")]+)", lambda m: f"#{names.get(m[1], m[1])}", value)
    if own.get("transform", "").startswith(("rotate(-0 ", "rotate(0 ")):
        del own["transform"]


def _flatten(element: Element) -> None:
    """Replace groups without attributes by their content; drop what draws nothing."""
    children = []
    for child in element:
        _flatten(child)
        if child.tag in ("g", "defs") and len(child) == 0:
            continue
        if child.get("style") == "fill: none":  # empty cells, backgrounds
            continue
        if child.tag == "g" and not child.attrib:
            children += list(child)
        elif (
            children
            and child.tag == "g" == children[-1].tag
            and child.attrib == children[-1].attrib
        ):
            children[-1].extend(list(child))
        else:
            children.append(child)
    element[:] = children


def _group(element: Element, shapes: dict[str, Element], prefix: str) -> None:
    """Move the style that neighbors share into a group; turn equal marks into a path's markers."""
    children: list[Element] = []
    for child in element:
        if child.tag != "defs":
            _group(child, shapes, prefix)
    for (tag, style, href, clip), some in groupby(element, _style_of):
        run = list(some)
        if len(run) < SHORTEST_GROUP or tag not in ("use", "text", "path"):
            children += run
        elif tag == "use" and href in shapes:
            children.append(_markers(run, shapes[href], style, len(shapes), prefix))
            shapes[f"#{len(shapes)}"] = run[0]  # so that the next marker has another name
        else:
            shared = {"style": style, "clip-path": clip}
            group = Element("g", {k: v for k, v in shared.items() if v})
            for one in run:
                one.attrib.pop("style", None)
                one.attrib.pop("clip-path", None)
            group.extend(run)
            children.append(group)
    element[:] = children


def _style_of(element: Element) -> tuple[str, str, str, str]:
    own = element.attrib
    return element.tag, own.get("style", ""), own.get("href", ""), own.get("clip-path", "")


def _markers(run: list[Element], shape: Element, style: str, number: int, prefix: str) -> Element:
    name = f"{prefix}-m{number}"
    group = Element("g")
    marker = SubElement(
        group, "marker", {"id": name, "overflow": "visible", "markerUnits": "userSpaceOnUse"}
    )
    both = "; ".join(s for s in (style, shape.get("style", "")) if s)
    SubElement(marker, "path", {"d": shape.get("d", ""), "style": both})
    places = "L".join(f"{e.get('x', '0')} {e.get('y', '0')}" for e in run)
    at = dict.fromkeys(("marker-start", "marker-mid", "marker-end"), f"url(#{name})")
    SubElement(group, "path", {"d": f"M{places}", "style": "fill: none; stroke: none", **at})
    return group
