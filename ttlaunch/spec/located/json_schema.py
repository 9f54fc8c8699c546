"""Write the model of a file as JSON Schema (draft 2020-12), so that editors complete its keys and mark mistakes.

A schema knows the keys, types and bounds of one file; `ttlaunch validate` checks the rules between values and files.
"""

from collections.abc import Sequence
from typing import Any

from ttlaunch.spec.located.schema import Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(model: type[Section], *, title: str, unread: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a file.

    Args:
        model: The pydantic model of the file.
        title: The name that editors show for it.
        unread: Dotted keys of the model that this file may not have.
    """
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.get("$defs", {})
    for key in unread:
        _remove(schema, key.split("."), definitions)
    for section in [schema, *definitions.values()]:
        for name, value in section.get("properties", {}).items():
            value.pop("title", None)
            if "description" not in value and (meaning := _target(value, definitions).get("description")):
                section["properties"][name] = {**value, "description": meaning}
    return {"$schema": DIALECT, **schema, "title": title}


def _remove(section: dict[str, Any], path: list[str], definitions: dict[str, Any]) -> None:
    properties = section.get("properties", {})
    if len(path) == 1:
        properties.pop(path[0], None)
    elif path[0] in properties:
        _remove(_target(properties[path[0]], definitions), path[1:], definitions)


def _target(value: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the section that a property refers to, directly or as one of several possibilities; without one, the property itself."""
    for part in [value, *value.get("anyOf", []), *value.get("allOf", [])]:
        if "$ref" in part:
            found: dict[str, Any] = definitions[part["$ref"].rpartition("/")[2]]
            return found
    return value
