"""AdamW's kernel against torch's: on a GPU where there is one, otherwise interpreted."""

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def test_the_kernel_moves_a_tensor_as_torchs_fused_adamw_does_and_skips_what_overflowed():
    from steelyard.training.optimizers.adamw_kernel import move

    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(5001, generator=generator).to(DEVICE)
    theirs = ours.clone().requires_grad_()
    state = {"exp_avg": torch.zeros_like(ours), "exp_avg_sq": torch.zeros_like(ours), "step": ours.new_zeros(())}
    adamw = torch.optim.AdamW([theirs], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    for step in range(5):
        gradient = torch.randn(5001, generator=generator).to(DEVICE)
        overflowed = step == 2
        scale, found = ours.new_tensor(8.0), ours.new_tensor(float(overflowed))
        scaled = gradient * 8 if not overflowed else gradient * torch.inf
        move(ours, scaled, state, scale, found, RATE, BETAS, EPS, DECAY)
        state["step"] += 1 - found
        if not overflowed:
            theirs.grad = gradient
            adamw.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    assert state["step"] == 4


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU to wait for")
def test_a_step_asks_the_gpu_for_no_number():
    from steelyard.training.optimizers.adamw import LARGE, AdamW

    tensors = [torch.randn(LARGE, device=DEVICE, requires_grad=True), torch.randn(8, device=DEVICE, requires_grad=True)]
    adamw = AdamW(tensors, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    adamw.grad_scale, adamw.found_inf = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    for step in range(3):
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # The first step makes the state.
        try:
            adamw.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {adamw.state[tensor]["step"].item() for tensor in tensors} == {3.0}
