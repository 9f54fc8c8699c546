"""Where a checkpoint comes from: what computed it, and by hash which checkpoint it was computed from, back to the first one.

Each checkpoint has a **link**: the hash of its own content, the hash of what computed it (code, configuration, data, libraries, vector
instructions), and the hash of the link of its predecessor. Its manifest has this link and those before it, across `--resume` and
restarts, so a checkpoint that is copied away says where it comes from. Nothing of this is in the files of the weights.

    seed ── step 10 ── step 20   (run a)
                          └── step 30 ── step 40   (run b, which resumed)

A chain shows accidents and edits of single files. It is no signature: whoever can write all files can make a chain that fits. Only
computing the steps again shows that it is true (`ttlaunch verify`).
"""

from __future__ import annotations  # the parser reads the annotations of a record as texts

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.records.parser import BadRecord, Count, Step, Word, parse, record, shown
from ttlaunch.running.runs.files import read_object_if_any

KEY = "provenance"
"""The key of a manifest that has the chain."""
MOST_LINKS = 500
"""The most links that a manifest has; of a longer chain, the oldest ones are left out, and only the hash of the last of them is known."""


@record
class Conditions:
    """What computed the steps of a run: hashes, or None for what is not known.

    Attributes:
        recipe: The recipe's name.
        code: Of the recipe's folder.
        ttlaunch: Of ttlaunch itself, as the run kept it.
        configuration: Of all keys.
        data: Of the training text.
        libraries: The versions of libraries that compute.
        cpu: The class of the launching machine's vector instructions.
        start: `hash_of_state` of the checkpoint or the weights from which the run began; None if its seed made them.
    """

    recipe: Word
    code: Word | None
    ttlaunch: Word | None
    configuration: Word
    data: Word | None
    libraries: dict[str, Word]
    cpu: Word | None
    start: Word | None


@record
class Link:
    """One checkpoint of a chain.

    Attributes:
        after: The step from which its run had computed; 0 for the beginning of a training.
        conditions: The hash of its `Conditions`.
        state: `hash_of_state` of the checkpoint.
        predecessor: The hash of the link of step `after`; None if training began there, or if that checkpoint has no provenance.
    """

    run: Word
    step: Step
    after: Step
    conditions: Word
    state: Word
    predecessor: Word | None


@record
class Provenance:
    """The chain of a checkpoint.

    Attributes:
        links: From the oldest to the checkpoint's own.
        conditions: By their hash, those that the links name.
        left_out: The number of links before the oldest.
        sha256: The hash of the last link.
    """

    links: tuple[Link, ...]
    conditions: dict[str, Conditions]
    left_out: Count
    sha256: Word

    @property
    def own(self) -> Link:
        """The link of the checkpoint itself."""
        return self.links[-1]

    @property
    def own_conditions(self) -> Conditions:
        """What computed the checkpoint itself."""
        return self.conditions[self.own.conditions]


def hash_of(content: object) -> str:
    """Return the SHA-256 of a value of JSON that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_of_state(files: Mapping[str, str], state: object) -> str:
    """Return the hash of a checkpoint's content: of the SHA-256 of its files, by their names, and of the state besides tensors."""
    return hash_of({"files": dict(files), "state": state})


def state_of(manifest: Mapping[str, Any]) -> str:
    """Return `hash_of_state` of a checkpoint with this manifest."""
    return hash_of_state({name: entry["sha256"] for name, entry in manifest["files"].items()}, manifest["state"])


def conditions_of(run_folder: Path, plan: Mapping[str, Any]) -> Conditions | None:
    """Return what computes the steps of a run, from what its folder says; None if the folder does not say it.

    Args:
        run_folder: The run's folder.
        plan: The content of its `plan.json`.
    """
    code, environment = (
        read_object_if_any(run_folder / name) for name in (contract.CODE_FILE, contract.ENVIRONMENT_FILE)
    )
    if not code or not environment:
        return None
    found = parse(
        Conditions,
        {
            "recipe": plan["recipe"]["name"],
            "code": (code.get("recipe") or {}).get("tree"),
            "ttlaunch": (code.get("kept") or {}).get("package"),
            "configuration": hash_of(plan["config"]),
            "data": (plan.get("data") or {}).get("sha256"),
            "libraries": environment.get("versions"),
            "cpu": environment.get("cpu"),
            "start": _state_at_start(plan.get("start")),
        },
    )
    return None if isinstance(found, BadRecord) else found


def _state_at_start(start: Mapping[str, Any] | None) -> str | None:
    if not start:
        return None
    return hash_of_state({Path(one["path"]).name: one["sha256"] for one in start["files"]}, start.get("state"))


def keep_chain(run_folder: Path, start: Mapping[str, Any] | None) -> None:
    """Keep the chain of the checkpoint from which a run begins in the run's folder: the checkpoint may be gone when it is needed.

    Raises:
        OSError: The file cannot be written.
    """
    if start and start["step"]:
        manifest = read_object_if_any(Path(start["origin"]) / contract.CHECKPOINT_MANIFEST)
        if isinstance(read_provenance(manifest), Provenance):
            text = json.dumps(manifest[KEY]) + "\n"
            (run_folder / contract.PROVENANCE_FILE).write_text(text, encoding="utf-8")


def provenance_of_next(
    run_folder: Path, plan: Mapping[str, Any], content: Mapping[str, Any], *, before: Path | None
) -> dict[str, Any]:
    """Return what a new checkpoint's manifest has of where it comes from; empty if the run's folder does not say it.

    Args:
        run_folder: The run's folder.
        plan: The content of its `plan.json`.
        content: The manifest without it.
        before: The run's newest checkpoint before this one; None if it is the first.
    """
    conditions = conditions_of(run_folder, plan)
    if conditions is None:
        return {}
    after, manifest = _predecessor(run_folder, plan, before)
    found = read_provenance(manifest)
    known = found if isinstance(found, Provenance) else None
    earlier = manifest[KEY] if known else {"links": [], "conditions": {}}
    own = hash_of(vars(conditions))
    link = {
        "run": content["run"],
        "step": content["step"],
        "after": after,
        "conditions": own,
        "state": state_of(content),
        "predecessor": known.sha256 if known else None,
    }
    # As they were read: their hashes are also of keys that a later version may have added.
    links = [*earlier["links"], link]
    kept = links[-MOST_LINKS:]
    needed = {one["conditions"] for one in kept}
    by_hash = {**earlier["conditions"], own: vars(conditions)}
    return {
        KEY: {
            "links": kept,
            "conditions": {name: one for name, one in by_hash.items() if name in needed},
            "left_out": (known.left_out if known else 0) + len(links) - len(kept),
            "sha256": hash_of(link),
        }
    }


def _predecessor(run_folder: Path, plan: Mapping[str, Any], before: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the step from which a run has computed its next checkpoint, and a manifest with the chain of that step, if there is one."""
    if before is not None:
        manifest = read_object_if_any(before / contract.CHECKPOINT_MANIFEST)
        return manifest.get("step"), manifest
    after = (plan.get("start") or {}).get("step", 0)
    return after, {KEY: read_object_if_any(run_folder / contract.PROVENANCE_FILE)} if after else {}


def read_provenance(manifest: Mapping[str, Any]) -> Provenance | BadRecord | None:
    """Read the chain of a checkpoint; None if its manifest has none, because an older ttlaunch made it."""
    content = manifest.get(KEY)
    if content is None or content == {}:
        return None
    found = parse(Provenance, content)
    if isinstance(found, BadRecord):
        return BadRecord(f"`{KEY}` cannot be read: {found.reason}")
    problem = next(_breaks(content, found), None)
    return found if problem is None else BadRecord(problem)


def hash_of_provenance(manifest: Mapping[str, Any]) -> str | None:
    """Return the hash that stands for the whole chain of a checkpoint; None if it has no usable one."""
    found = read_provenance(manifest)
    return found.sha256 if isinstance(found, Provenance) else None


def _breaks(content: Mapping[str, Any], chain: Provenance) -> Iterator[str]:
    """Yield where a chain does not fit together, as clauses; hashes are those of the content as it was written."""
    if not chain.links:
        yield "its chain has no link"
        return
    for name, conditions in content["conditions"].items():
        if hash_of(conditions) != name:
            yield f"what it says of code, configuration and libraries was changed: their hash is not {shown(name[:12])}…"
    for link in chain.links:
        if link.conditions not in chain.conditions:
            yield f"its chain does not say what computed step {link.step} of {shown(link.run)}"
    hashes = [hash_of(link) for link in content["links"]]
    for before, sha256, link in zip(chain.links, hashes, chain.links[1:], strict=False):
        if link.predecessor != sha256 or link.after != before.step:
            names = f"step {link.step} of {shown(link.run)}"
            yield f"its chain is broken: {names} has another predecessor than step {before.step} of {shown(before.run)}"
    if chain.sha256 != hashes[-1]:
        yield f"its chain was changed: the hash of step {chain.own.step} is another one"


def contradictions(manifest: Mapping[str, Any], chain: Provenance) -> Iterator[str]:
    """Yield what a checkpoint's manifest says otherwise than its own link, as clauses."""
    own, conditions = chain.own, chain.own_conditions
    for what, recorded, found in (
        ("step", own.step, manifest["step"]),
        ("run", own.run, manifest.get("run")),
        ("content", own.state, state_of(manifest)),
        ("configuration", conditions.configuration, hash_of(manifest["config"])),
        ("training text", conditions.data, manifest.get("text_sha256")),
    ):
        if recorded != found:
            yield f"its {what} is another one than that of its provenance"
