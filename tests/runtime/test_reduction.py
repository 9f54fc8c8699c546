"""The canonical order of adding gradients: the same bits for any number of workers."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.runtime.comm.reduction import GradientTree, aligned_subtrees, contiguous_blocks
from ttlaunch.runtime.comm.tree_exchange import add_up, add_up_rows

VALUES = 7


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_rows_of_numbers_are_added_like_tensors(count, parts, seed):
    rows = leaves(count, seed).double()
    nodes = [node for block in contiguous_blocks(count, parts) for node in aligned_subtrees(block)]
    expected = add_up([(node, rows[node.start].clone(), None) for node in nodes])
    assert expected.tolist() == add_up_rows([(node, rows[node.start].tolist()) for node in nodes])


def leaves(micro_batches, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 6, (micro_batches, 1), generator=generator)
    return torch.randn(micro_batches, VALUES, generator=generator) * scale


def mean_of(gradients, blocks, *, opens_last=False):
    """The mean gradient with a worker for each block; returns it with loss and tokens."""
    sums, counts = [], []
    for block in blocks:
        worker = GradientTree(VALUES)
        for index in block:
            if opens_last and index == block[-1]:
                worker.open_leaf(index, gradients[index].clone(), tokens=index + 1, loss=0.1 * index)
                for part in contiguous_blocks(VALUES, 3):
                    worker.complete(part)
            else:
                worker.add(index, gradients[index], tokens=index + 1, loss=0.1 * index)
        assert list(aligned_subtrees(block)) == [node.leaves for node in worker.subtrees()]
        sums += [(node.leaves, node.gradient_N.clone(), None) for node in worker.subtrees()]
        counts += [
            (node.leaves, torch.tensor([node.loss, node.tokens], dtype=torch.float64), None)
            for node in worker.subtrees()
        ]
    loss, tokens = add_up(counts).tolist()
    return add_up(sums).div_(tokens), loss / tokens, tokens


@settings(deadline=None, max_examples=examples(200))
@given(st.data(), st.integers(1, 40), st.integers(0, 10**6))
def test_any_cut_into_blocks_gives_the_bits_of_one_process(data, micro_batches, seed):
    """A5, A9."""
    borders = data.draw(st.lists(st.integers(1, max(1, micro_batches - 1)), max_size=6, unique=True).map(sorted))
    ends = [0, *[border for border in borders if border < micro_batches], micro_batches]
    blocks = [range(start, end) for start, end in pairwise(ends)]
    gradients = leaves(micro_batches, seed)
    whole = mean_of(gradients, [range(micro_batches)])
    for opens_last in (False, True):
        cut = mean_of(gradients, blocks, opens_last=opens_last)
        assert torch.equal(whole[0], cut[0])
        assert whole[1:] == cut[1:]


def test_one_process_is_one_block():
    """What `mean_of` gives is what the tree itself makes of all micro-batches."""
    gradients = leaves(11, 3)
    tree, out_N = GradientTree(VALUES), torch.empty(VALUES)
    for index in range(11):
        tree.add(index, gradients[index], tokens=index + 1, loss=0.1 * index)
    loss, tokens = tree.mean(out_N, micro_batches=11)
    expected = mean_of(gradients, contiguous_blocks(11, 3))
    assert torch.equal(expected[0], out_N)
    assert expected[1:] == (pytest.approx(loss), tokens)


def test_the_order_is_the_one_of_the_picture():
    gradients = leaves(6, 1)
    expected = ((gradients[0] + gradients[1]) + (gradients[2] + gradients[3])) + (gradients[4] + gradients[5])
    found, _, tokens = mean_of(gradients, [range(6)])
    assert tokens == 21
    assert torch.equal(expected / tokens, found)


def test_the_mean_is_the_mean_over_tokens():
    gradients = leaves(9, 2)
    found, loss, tokens = mean_of(gradients, contiguous_blocks(9, 4))
    assert tokens == 45
    torch.testing.assert_close(gradients.double().sum(0) / 45, found.double(), rtol=1e-5, atol=1e-5)
    assert abs(0.1 * 36 / 45 - loss) < 1e-12


@given(st.integers(1, 200), st.integers(1, 20))
def test_blocks_are_contiguous_complete_and_of_almost_equal_size(count, parts):
    blocks = contiguous_blocks(count, parts)
    assert list(range(count)) == [index for block in blocks for index in block]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(st.integers(0, 500), st.integers(1, 500))
def test_subtrees_are_whole_nodes_and_as_few_as_possible(start, length):
    block = range(start, start + length)
    nodes = list(aligned_subtrees(block))
    assert list(block) == [index for node in nodes for index in node]
    for node in nodes:
        assert len(node).bit_count() == 1
        assert node.start % len(node) == 0
    for left, right in pairwise(nodes):
        assert len(left) != len(right) or left.start % (2 * len(left))


def test_a_worker_sends_one_message_where_its_block_is_a_node():
    """A12: 2S a step, one further S for each further subtree."""
    assert [1, 1] == [len(list(aligned_subtrees(block))) for block in contiguous_blocks(8, 2)]
    assert [2, 2, 1] == [len(list(aligned_subtrees(block))) for block in contiguous_blocks(8, 3)]


def test_a_missing_micro_batch_is_named():
    tree = GradientTree(VALUES)
    tree.add(0, torch.ones(VALUES), tokens=1, loss=0.0)
    with pytest.raises(ValueError, match="micro-batch 2 cannot follow 0"):
        tree.add(2, torch.ones(VALUES), tokens=1, loss=0.0)
    with pytest.raises(ValueError, match="up to 1 of 2"):
        tree.mean(torch.empty(VALUES), micro_batches=2)


def test_memory_is_reused_from_step_to_step():
    tree = GradientTree(VALUES)
    used = set()
    for step in range(5):
        for index in range(8):
            tree.add(index, torch.full((VALUES,), float(step)), tokens=1, loss=0.0)
        used |= {subtree.gradient_N.data_ptr() for subtree in tree.subtrees()}
        out_N = torch.empty(VALUES)
        tree.mean(out_N, micro_batches=8)
        assert torch.equal(torch.full((VALUES,), float(step)), out_N)
    assert len(used) == 1


@pytest.mark.parametrize(("micro_batches", "buffers"), [(1, 1), (2, 1), (4, 2), (8, 3), (16, 4), (13, 3)])
def test_only_a_sum_that_waits_for_its_sibling_has_a_buffer(micro_batches, buffers):
    tree = GradientTree(VALUES)
    for index in range(micro_batches):
        tree.add(index, torch.ones(VALUES), tokens=1, loss=0.0)
    assert buffers == len(tree._stack) + len(tree._free)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 6, 8, 11])
def test_siblings_may_come_as_their_sum(micro_batches):
    """As a backward pass leaves it that adds to the gradients of the one before."""
    grads = torch.rand(micro_batches, 5)
    single, paired = (GradientTree(5) for _ in range(2))
    for index in range(micro_batches):
        single.add(index, grads[index], tokens=index, loss=float(index))
    for index in range(0, micro_batches, 2):
        leaves = min(2, micro_batches - index)
        both = grads[index] + grads[index + 1] if leaves == 2 else grads[index]
        count = sum(range(index, index + leaves))
        paired.add(index, both, tokens=count, loss=float(count), leaves=leaves)
    found = [torch.empty(5), torch.empty(5)]
    answers = [
        tree.mean(out_N, micro_batches=micro_batches) for tree, out_N in zip((single, paired), found, strict=True)
    ]
    assert answers[0][1] == answers[1][1]
    assert torch.equal(*found)


@pytest.mark.parametrize(("index", "leaves"), [(1, 2), (0, 3), (0, 0)])
def test_only_siblings_come_together(index, leaves):
    tree = GradientTree(2)
    for before in range(index):
        tree.add(before, torch.ones(2), tokens=1, loss=0.0)
    with pytest.raises(ValueError, match="not a node of the tree"):
        tree.add(index, torch.ones(2), tokens=1, loss=0.0, leaves=leaves)


@settings(deadline=None, max_examples=examples(100))
@given(st.data(), st.integers(1, 24))
def test_what_an_interrupted_step_leaves_completes_to_the_bits_of_one_process(data, micro_batches):
    """The step stops at any leaf of a block, in the middle of its backward pass or behind it; the others are computed anew."""
    first, last = sorted(data.draw(st.tuples(st.integers(0, micro_batches - 1), st.integers(0, micro_batches - 1))))
    known = data.draw(st.integers(0, VALUES))
    gradients, tree = leaves(micro_batches, 7), GradientTree(VALUES)
    for index in range(first, last):
        tree.add(index, gradients[index], tokens=index + 1, loss=0.1 * index)
    leaf_N = gradients[last].clone()
    tree.open_leaf(last, leaf_N, tokens=last + 1, loss=0.1 * last)
    tree.complete(range(known))
    kept = tree.take()
    assert list(range(first, last + (known == VALUES))) == [leaf for node in kept for leaf in node.leaves]
    leaf_N.fill_(float("nan"))  # the next backward pass uses this memory

    missing = [leaf for leaf in range(micro_batches) if not any(leaf in node.leaves for node in kept)]
    for index in missing:
        tree.add(index, gradients[index], tokens=index + 1, loss=0.1 * index)
        kept += tree.take()
    kept.sort(key=lambda node: node.start)
    counts = [(node.leaves, torch.tensor([node.loss, node.tokens], dtype=torch.float64), None) for node in kept]
    loss, tokens = add_up(counts).tolist()
    mean_N = add_up((node.leaves, node.gradient_N, None) for node in kept).div_(tokens)
    whole = mean_of(gradients, [range(micro_batches)])
    assert torch.equal(whole[0], mean_N)
    assert whole[1:] == (loss / tokens, tokens)


def test_nodes_that_were_handed_over_and_given_back_cost_no_further_memory():
    tree, gradient_N = GradientTree(VALUES), torch.ones(VALUES)
    seen = set()
    for _ in range(5):
        tree.add(0, gradient_N, tokens=1, loss=1.0)
        nodes = tree.take()
        seen |= {node.gradient_N.data_ptr() for node in nodes}
        tree.give_back(nodes)
    assert 1 == len(seen)
