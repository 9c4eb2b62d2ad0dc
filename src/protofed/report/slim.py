"""Matplotlib's SVG in a fraction of its bytes, and looking the same.

A report has thousands of points and cells: what matplotlib repeats for each of them (styles, clip
paths, groups, ids, six digits) is said once.
"""

from __future__ import annotations

import re
from itertools import groupby
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

_NUMBERS = ("x", "y", "d", "transform", "width", "height", "points")
FEW = 3
"""Runs of so many alike elements are worth a group."""


def slim(text: str, prefix: str) -> str:
    """An ``<svg>`` without what is not needed; ids that are become ``prefix-1``, ``prefix-2``, ...

    It must not have names with namespaces: plain ``href``, no ``xmlns``.
    """
    root = ElementTree.fromstring(text)
    names = {old: f"{prefix}-{i}" for i, old in enumerate(_references(text))}
    shapes = {f"#{names[i]}": e for e in root.iter() if (i := e.get("id", "")) in names}
    for element in root.iter():
        _plain(element, names)
    _flatten(root)
    _join(root, shapes, prefix)
    still = _references(ElementTree.tostring(root, encoding="unicode"))
    for definitions in root.iter("defs"):
        definitions[:] = [e for e in definitions if e.get("id") in still]
    _flatten(root)
    return ElementTree.tostring(root, encoding="unicode")


def _references(text: str) -> dict[str, None]:
    return dict.fromkeys(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))


def _plain(element: Element, names: dict[str, str]) -> None:
    """Short numbers; no ids that nothing refers to, no turns by nothing."""
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
    """Groups that say nothing are replaced by what is in them, what draws nothing goes."""
    children = []
    for child in element:
        _flatten(child)
        if child.tag in ("g", "defs") and len(child) == 0:
            continue
        if child.get("style") == "fill: none":  # cells of nothing, backgrounds
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


def _join(element: Element, shapes: dict[str, Element], prefix: str) -> None:
    """Neighbors of the same style get it from a group; equal marks are a path with markers."""
    children: list[Element] = []
    for child in element:
        if child.tag != "defs":
            _join(child, shapes, prefix)
    for (tag, style, href, clip), some in groupby(element, _look):
        run = list(some)
        if len(run) < FEW or tag not in ("use", "text", "path"):
            children += run
        elif tag == "use" and href in shapes:
            children.append(_marked(run, shapes[href], style, len(shapes), prefix))
            shapes[f"#{len(shapes)}"] = run[0]  # counts: the next marker has another name
        else:
            shared = {"style": style, "clip-path": clip}
            group = Element("g", {k: v for k, v in shared.items() if v})
            for one in run:
                one.attrib.pop("style", None)
                one.attrib.pop("clip-path", None)
            group.extend(run)
            children.append(group)
    element[:] = children


def _look(element: Element) -> tuple[str, str, str, str]:
    own = element.attrib
    return element.tag, own.get("style", ""), own.get("href", ""), own.get("clip-path", "")


def _marked(run: list[Element], shape: Element, style: str, number: int, prefix: str) -> Element:
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
