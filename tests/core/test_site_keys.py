"""Keys of a site that only Slurm reads stand under `[site.slurm]`; files with old keys are refused, and rewritten."""

from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.renamed_keys import migrate_text, migrate_values
from steelyard.core.recipe.toml import parse


def test_an_old_key_of_a_site_is_refused_with_the_new_one():
    with pytest.raises(UserError, match=r"site\.account: this key is now called site\.slurm\.account"):
        load_recipe("gpt2-small", ["site.account=nlp"])
    assert load_recipe("gpt2-small", ["site.slurm.account=nlp"]).site.slurm.account == "nlp"


@pytest.mark.parametrize("is_sites", [False, True], ids=["recipe", "sites.toml"])
def test_old_keys_of_a_site_are_rewritten_in_place(is_sites: bool):
    table = "campus" if is_sites else "site"
    text = f'[{table}]\naccount = "nlp"  # ours\nport = 7\nrequeue = false\n\n[{table}.mpi]\ncpus_per_rank = 2\n'
    new, found = migrate_text(text, is_sites)
    assert new == text.replace("account", "slurm.account").replace("requeue", "slurm.requeue")
    assert found == ["site.account", "site.requeue"]
    assert parse(new, "x")[0][table]["slurm"] == {"account": "nlp", "requeue": False}


def test_a_recipe_of_an_earlier_run_folder_is_migrated_when_it_is_read(tmp_path: Path):
    old = {"site": {"account": "nlp", "port": 7, "slurm": {"gres": "gpu:1"}}}
    assert migrate_values(old) == {"site": {"port": 7, "slurm": {"gres": "gpu:1", "account": "nlp"}}}
    assert old["site"]["slurm"] == {"gres": "gpu:1"}
