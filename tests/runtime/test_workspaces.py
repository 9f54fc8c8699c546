"""What libraries take beside tensors is measured in the process that predicts, by computing (E9)."""

import mmap
import time
from dataclasses import replace

import pytest
import torch

from ttlaunch.runtime import workspaces
from ttlaunch.runtime.hollow import Hollow
from ttlaunch.runtime.workspaces import Product, Products, grown_by, kept_by, take_small_step

MB = 10**6
LAYER = Product(64, 32, 48, first_by_columns=False, second_by_columns=True, dtype=torch.float32)


def noted(action):
    products = Products()
    with Hollow(spend=products.note):
        action()
    return list(products)


def test_the_products_of_a_pass_are_noted_once_in_their_order():
    weight_OI = torch.zeros(48, 32, requires_grad=True)

    def passes():
        for _ in range(2):
            torch.nn.functional.linear(torch.zeros(64, 32), weight_OI).square().sum().backward()

    gradient = Product(48, 64, 32, first_by_columns=True, second_by_columns=False, dtype=torch.float32)
    assert [LAYER, gradient] == noted(passes)


@pytest.mark.parametrize("multiply", [torch.bmm, lambda one, two: torch.baddbmm(torch.zeros(2, 5, 7), one, two)])
def test_products_in_a_batch_count_as_one_of_them(multiply):
    (found,) = noted(lambda: multiply(torch.zeros(2, 5, 6), torch.zeros(2, 6, 7)))

    assert (5, 6, 7) == (found.rows, found.inner, found.columns)


def test_a_large_product_is_shortened_and_a_small_one_is_not():
    huge = replace(LAYER, rows=10**6, inner=10**5, columns=10**5).shortened()

    assert huge.rows * huge.columns <= 4 * 2**20
    assert huge == huge.shortened()
    assert LAYER == LAYER.shortened()


def test_a_fork_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(Product, "compute", lambda _: time.sleep(5))
    monkeypatch.setattr(workspaces, "_LONGEST_S", 0.1)
    began = time.monotonic()

    assert 0 == kept_by([LAYER], threads=1)
    assert time.monotonic() - began < 4


def test_what_is_kept_is_measured_in_another_process(monkeypatch):
    kept = []

    def keep(one):
        pages = mmap.mmap(
            -1, one.columns * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # not from what earlier tests have freed
        pages.write(b"x" * len(pages))
        kept.append(pages)

    monkeypatch.setattr(Product, "compute", keep)

    assert 0 == kept_by([], threads=1)
    assert 20 * MB <= kept_by([replace(LAYER, columns=8), replace(LAYER, columns=12)], threads=1) <= 24 * MB
    assert [] == kept


def test_a_small_step_leaves_little_behind():
    take_small_step()  # what torch loads for it is there now

    assert grown_by(take_small_step).own < MB
