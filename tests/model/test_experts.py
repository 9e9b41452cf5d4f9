"""Experts against a loop over tokens: output, gradients, losses, capacity, and loads of every kind."""

import pytest
import torch
from torch.nn import functional as F

from steelyard.core.recipe.blocks import ExpertsBlock, Routing
from steelyard.model.experts import (
    DROPPED,
    ENTROPY,
    TOKENS,
    ExpertLinear,
    Experts,
    grouped_linear,
    grouped_mm,
    with_router_loss,
)

ROWS, LENGTH, HIDDEN, WIDTH, EXPERTS, TOP = 2, 12, 16, 8, 6, 2


def experts(shared=None, **routing):
    block = ExpertsBlock(HIDDEN, WIDTH, "silu", Routing(EXPERTS, TOP, **routing), shared)
    module = Experts(block)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def drawn():
    return torch.randn(ROWS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()


def by_token(module, x_BLD):
    """The same output, token by token. Returns the scores too, which sum to 1."""
    routing, outputs, shares = module.block.routing, [], []
    for x in x_BLD.flatten(0, 1):
        logits = module.router.weight @ x
        scores = logits.softmax(0) if routing.score == "softmax" else logits.sigmoid()
        balance = 0 if module.router.balance is None else module.router.balance
        chosen = (scores + balance).argsort(descending=True)[: routing.top_k]
        weights = scores[chosen] / (scores[chosen].sum() if routing.normalizes else 1) * routing.scale
        outputs.append(sum(w * mlp(module.experts, e, x) for w, e in zip(weights, chosen, strict=True)))
        if module.shared is not None:
            outputs[-1] = outputs[-1] + module.shared(x[None])[0]
        shares.append((scores / scores.sum(), chosen))
    return torch.stack(outputs).view_as(x_BLD), shares


def mlp(stack, expert, x):
    gate, up, down = (each.weight[expert] for each in (stack.gate, stack.up, stack.down))
    return down @ (F.silu(gate @ x) * (up @ x))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"score": "sigmoid", "bias_rate": 0.1, "scale": 2.5},
        {"normalizes": False, "shared": 10},
        {"score": "sigmoid", "normalizes": False},
    ],
)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(settings):
    module, x = experts(**settings), drawn()
    expected, _ = by_token(module, x)
    found, _ = module(x)
    torch.testing.assert_close(found, expected)
    leaves = [x, *(each for each in module.parameters() if each.requires_grad)]
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), leaves), wanted)


def test_the_losses_of_the_router_are_their_formulas():
    module, x = experts(aux_loss=0.3, z_loss=0.2), drawn()
    _, routed = module(x)
    _, shares = by_token(module, x)
    expected = 0.2 * (x @ module.router.weight.t()).logsumexp(-1).square().sum()
    for row in range(ROWS):
        tokens = shares[row * LENGTH : (row + 1) * LENGTH]
        load = torch.stack([chosen for _, chosen in tokens]).flatten().bincount(minlength=EXPERTS) / (LENGTH * TOP)
        expected = expected + 0.3 * EXPERTS * (load * sum(share for share, _ in tokens)).sum()
    torch.testing.assert_close(routed.loss, expected)
    through = with_router_loss(drawn(), routed.loss, torch.tensor(7.0)).sum()
    wanted = torch.autograd.grad(7 * expected, module.router.weight)
    torch.testing.assert_close(torch.autograd.grad(through, module.router.weight), wanted)
    assert routed.stats[TOKENS] == ROWS * LENGTH
    assert routed.stats[:TOKENS].sum() == ROWS * LENGTH * TOP
    entropy = -sum((share * share.log()).sum() for share, _ in shares)
    torch.testing.assert_close(routed.stats[ENTROPY], entropy.detach())


def test_a_capacity_drops_the_last_tokens_of_a_sequence():
    module, x = experts(capacity=0.5), drawn()
    limit = 2  # half of 12 tokens x 2 experts / 6 experts
    found, routed = module(x)
    _, shares = by_token(module, x)
    taken, dropped = torch.zeros(ROWS, EXPERTS), 0
    for token, (row, place) in enumerate((row, place) for row in range(ROWS) for place in range(LENGTH)):
        scores, chosen = shares[token]
        expected = torch.zeros(HIDDEN)
        for expert in chosen.tolist():
            taken[row, expert] += 1
            if taken[row, expert] <= limit:
                expected += scores[expert] / scores[chosen].sum() * mlp(module.experts, expert, x[row, place])
            else:
                dropped += 1
        torch.testing.assert_close(found[row, place], expected)
    assert routed.stats[DROPPED] == dropped > 0
    everything, _ = by_token(module, x)
    torch.testing.assert_close(module.eval()(x)[0], everything)


def test_what_a_kernel_leaves_in_dropped_slots_reaches_no_token(monkeypatch):
    """Neither its product nor its gradient: the kernel of a GPU writes nothing there."""

    class Leaving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, computed):
            ctx.computed = computed
            return spoiled(y, computed)

        @staticmethod
        def backward(ctx, grad):
            return spoiled(grad, ctx.computed), None

    def spoiled(y, computed):
        y = y.clone()
        y[computed:] = torch.nan
        return y

    def product(x, weight, counts):
        computed = int(counts.sum())
        return Leaving.apply(grouped_linear(Leaving.apply(x, computed), weight, counts), computed)

    module, x = experts(capacity=0.5), drawn()
    expected, _ = module(x)
    wanted = torch.autograd.grad(expected.square().sum(), [x, module.router.weight])
    monkeypatch.setattr(ExpertLinear, "product", staticmethod(product))
    found, _ = module(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [x, module.router.weight]), wanted)


def test_scores_that_vanish_give_no_nan():
    module, x = experts(score="sigmoid"), drawn()
    module.router.weight.data.fill_(-1e3)
    output, routed = module(x.detach().abs() + 1)
    assert output.isfinite().all()
    assert routed.loss.isfinite()


def by_kernel(x, weight, counts):
    """The kernel of `grouped_kernels`, interpreted or on a GPU."""
    grouped_kernels = pytest.importorskip("steelyard.model.grouped_kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return grouped_kernels.product(x.to(device), weight.to(device), counts.to(device)).cpu()


@pytest.mark.parametrize(
    "counts", [[4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 16], [0, 1, 15, 0], [3, 0, 5, 2], [0, 0, 0, 0]]
)
def test_grouped_products_are_those_of_each_expert_for_any_load(counts):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator).requires_grad_()
    weight = torch.randn(4, 24, 32, generator=generator).requires_grad_()
    expected = torch.zeros(16, 24)
    first = 0
    for number, count in enumerate(counts):
        expected[first : first + count] = x[first : first + count] @ weight[number].t()
        first += count
    computed, upstream = sum(counts), torch.randn(16, 24, generator=generator)
    wanted = torch.autograd.grad((expected * upstream)[:computed].sum(), (x, weight), allow_unused=True)
    for product in (grouped_linear, grouped_mm, by_kernel):
        found = product(x, weight, torch.tensor(counts))[:computed]
        torch.testing.assert_close(found, expected[:computed])
        ours, theirs = torch.autograd.grad((found * upstream[:computed]).sum(), (x, weight)), wanted
        for one, other in zip((ours[0][:computed], ours[1]), (theirs[0], theirs[1]), strict=True):
            other = torch.zeros_like(one) if other is None else other[: len(one)]
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_takes_sizes_that_fill_no_block(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(210, 40, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, 70, 40, generator=generator).to(dtype).requires_grad_()
    counts, upstream = torch.tensor([70, 0, 133]), torch.randn(203, 70, generator=generator).to(dtype)
    results = []
    for product in (grouped_linear, by_kernel):
        found = product(x, weight, counts)[:203]
        grad_x, grad_weight = torch.autograd.grad(found, (x, weight), upstream)
        results.append((found, grad_x[:203], grad_weight))
    torch.testing.assert_close(*results[::-1], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"capacity": 0.5}, {"score": "sigmoid", "bias_rate": 0.1}], ids=str)
@pytest.mark.parametrize("prefers", [0.0, 30.0], ids=["any expert", "the first experts"])
def test_a_gpu_computes_what_a_cpu_computes(prefers, settings, compiled):
    """In bf16 with `grouped_mm`; the memory that the kernel leaves unwritten holds NaNs."""
    reference, x = experts(**settings), drawn()
    with torch.no_grad():
        x += 1
        reference.router.weight[TOP:] -= prefers / HIDDEN
        for parameter in (*reference.parameters(), x):
            parameter.copy_(parameter.bfloat16())
    module = experts(**settings).cuda()
    module.load_state_dict(reference.state_dict())
    poison = torch.full((2**26,), torch.nan, device="cuda")
    del poison
    ours = x.detach().to("cuda", torch.bfloat16).requires_grad_()
    compute = torch.compile(module) if compiled else module
    output, routed = compute(ours)
    expected, routed_there = reference(x)
    assert torch.equal(routed.stats[:TOKENS].cpu(), routed_there.stats[:TOKENS])
    output.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(output, expected), (ours.grad, x.grad)]
    pairs += [
        (a.grad, b.grad) for a, b in zip(module.parameters(), reference.parameters(), strict=True) if a.requires_grad
    ]
    for found, wanted in pairs:
        # Normalized scores that are all 1 have gradients near zero, which are rounding.
        assert (found.float().cpu() - wanted).abs().max() < 0.03 * wanted.abs().max() + 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"capacity": 0.5}, {"score": "sigmoid", "bias_rate": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_gpu_is_asked_for_no_number(dtype, settings):
    module = experts(**settings).cuda()
    for step in range(2):
        ours = drawn().detach().to("cuda", dtype).requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # The first step loads kernels.
        try:
            output, _ = module(ours)
            output.float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert ours.grad.isfinite().all()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            module(ours)[0].sum().item()  # What the mode detects.
    finally:
        torch.cuda.set_sync_debug_mode("default")
