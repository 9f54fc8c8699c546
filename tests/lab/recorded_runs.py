"""Folders of runs that were made in this process: what a run records, with the bits that it has, without starting ranks."""

import json
import os
from contextlib import contextmanager

import torch

from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.runs.record_inputs import write_inputs
from ttlaunch.running.runs.registry import find_registry
from ttlaunch.running.runs.run_folder import create_run_folder
from ttlaunch.runtime.simulate import simulate_ranks
from ttlaunch.runtime.world import read_world
from ttlaunch.spec.recipe.config import render_resolved

TINY = {
    "training_config.steps": 7,
    "training_config.batch_size": 4,
    "training_config.micro_batch_size": 1,
    "training_config.verify_interval": 2,
    "training_config.validation_sequences": 4,
    "transformer_config.num_blocks": 2,
    "transformer_config.num_heads": 2,
    "transformer_config.embedding_dim": 16,
    "transformer_config.max_sequence_length": 16,
    "scheduler_config.warmup_steps": 1,
    "checkpoint_config.interval": 4,
    "multihost_config.num_workers": 2,
}


def record_run(target, runs_dir, *, ranks=None, changed=None, during=None, resume=None, order=()):
    """Train in this process, and return the folder that a run would have left; `during` is a context in which ranks run.

    `order`: the rank whose gradient makes each update of an asynchronous recipe.
    """
    values = {**TINY, **(changed or {})}
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    spec = RunSpec(
        target=str(target),
        overrides=overrides,
        ranks=ranks,
        resume=resume and str(resume),
        replay=order,
        runs_dir=runs_dir,
    )
    plan = plan_simulation(spec, Unattended())
    folder = create_run_folder(runs_dir)
    content = plan.as_json()
    find_registry(os.environ).enter(folder.path, name="test", plan_hash=content["hash"], ranks=plan.world_size)
    choice = resolve(spec).choice
    write_inputs(plan, folder, resolved_config=render_resolved(choice.recipe, choice.loaded), shell={})
    threads = torch.get_num_threads()
    try:
        with during or nothing():
            outcome, _ = simulate_ranks(read_world(folder.file(contract.PLAN_FILE)), folder.path, saves=True)
    finally:
        torch.set_num_threads(threads)
    complete_checkpoints(folder.path, content, run_id=folder.run_id)
    failed = next(iter(outcome.errors.values()), None)
    report = {"status": "failed" if failed else "done", "run_id": folder.run_id}
    folder.file(contract.REPORT_FILE).write_text(json.dumps(report), encoding="utf-8")
    return folder.path


@contextmanager
def nothing():
    yield
