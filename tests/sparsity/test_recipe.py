"""`[sparsity]` is refused before work begins where it contradicts itself, the model or the layout."""

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe, to_toml
from tests.conftest import TINY

LEARNED = "sparsity={method='learned', base='here'}"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (["sparsity.method=lerned"], "sparsity.method"),
        (["sparsity.method=learned"], "sparsity.base: mask learning needs existing weights"),
        (["sparsity={method='learned', base='x', pattern='4:8'}"], "masks of 4:8 cannot be learned"),
        (["sparsity={method='sr-ste', pattern='4:2'}"], 'must be kept:group, like "2:4"'),
        (["sparsity={method='sr-ste', temperature=[1.0, 2.0]}"], "sparsity.temperature: is not used with"),
        (["sparsity={method='learned', base='x', mask='y'}"], "sparsity.mask: is not used with"),
        (["sparsity={method='learned', base='x', temperature=[1.0]}"], "sparsity.temperature"),
        (["sparsity={method='learned', base='x', temperature=[1.0, 0.0]}"], "sparsity.temperature"),
        (["sparsity={method='learned', base='x', temprature=[1.0, 0.5]}"], "sparsity.temperature?"),
        (
            ["sparsity={method='learned', base='x', learning_rate=1.0, learning_rate_multiplier=2.0}"],
            "choose one of the two",
        ),
        ([LEARNED, "train.precision=fp8"], "do not support fp8"),
        ([LEARNED, "model.ffn=18"], "groups of 4 do not divide model.ffn = 18"),
        ([LEARNED, "model.ffn=20", "parallel.tensor=2"], "model.ffn must be a multiple of 8"),
        (["sparsity.method=joint"], "train.init_from: joint training starts from dense weights"),
        (["sparsity={method='joint', decay=0.1}", "train.init_from=x"], "sparsity.decay: is not used with"),
        (["sparsity={method='joint', freeze_after=1.5}", "train.init_from=x"], "sparsity.freeze_after"),
        (["sparsity={method='sr-ste', mask_every=5}"], 'sparsity.mask_every: is not used with method = "sr-ste"'),
        (["sparsity={method='fixed', distill=1.0}", "train.init_from=x"], "sparsity.distill: is not used with"),
        (["sparsity.method=fixed"], "train.init_from: fixed masks need pruned weights"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(recipe, overrides, reported):
    with pytest.raises(UserError) as refused:
        load_recipe(recipe, overrides)
    assert refused.value.exit_code == 2
    assert reported in str(refused.value)


def test_a_resolved_recipe_loads_again(recipe, tmp_path):
    for overrides in ([LEARNED], ["sparsity.method=sr-ste"], ["sparsity={method='joint'}", "train.init_from=x"]):
        resolved = load_recipe(recipe, overrides)
        again = tmp_path / "again.toml"
        again.write_text(to_toml(resolved.settings()))
        assert load_recipe(again).settings() == resolved.settings()
