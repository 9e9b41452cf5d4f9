"""Where a study is kept: an SQLite file in its folder, or any database that Optuna knows, shared by many hosts."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from steelyard.core import secrets
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe.renamed_keys import RENAMED_KEYS, migrate_dotted
from steelyard.tune.objective import Goal

if TYPE_CHECKING:
    from optuna.study import Study

T = TypeVar("T")
DATABASE = "study.db"
SECONDS_TO_WAIT = 60  # for another worker's turn at an SQLite file
TRIES, SECONDS_BETWEEN_TRIES = 30, 0.1
CONNECTIONS_LIVE = 300  # seconds, before a server or a wall in between may have dropped them


def url_of(folder: Path, given: str | None) -> str:
    """The address of the database. A password in it is never printed."""
    if given is None:
        return f"sqlite:///{folder.resolve() / DATABASE}"
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(given)
    except ArgumentError:
        raise UserError("--storage is no address of a database", hint="one is postgresql://host/database") from None
    if url.password:
        secrets.hide(str(url.password))
    if url.drivername in ("postgresql", "postgres"):  # SQLAlchemy would take a driver that we do not bring.
        url = url.set(drivername="postgresql+psycopg")
        if find_spec("psycopg") is None:
            raise UserError("PostgreSQL needs a driver", hint="pip install 'steelyard[postgresql]'")
    return url.render_as_string(hide_password=False)


def shown(url: str) -> str:
    """The address without what is secret in it."""
    from sqlalchemy.engine import make_url

    made = make_url(url)
    secret = {name: "***" for name in made.query if "pass" in name.lower() or secrets.is_secret(f"?{name}=x")}
    return made.update_query_dict(secret).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


@contextlib.contextmanager
def faults(file: Path | None = None) -> Iterator[None]:
    """What a database says becomes one message; `file` is where it was, if it is one."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    try:
        yield
    except (NoSuchModuleError, ImportError) as error:
        first = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"there is no driver for this database: {first}", hint="install its Python driver") from None
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        first = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        if file is not None and not file.is_file():  # SQLite calls that read-only.
            hint = "each trial's trial.json still says what it measured; the same command begins anew"
            raise RuntimeFailure(f"the study's database {file} is gone", hint=hint) from None
        raise RuntimeFailure(
            f"the study's database: {first}", hint="trials that ended are kept; see that it answers"
        ) from None


def quiet() -> None:
    """Optuna's own messages are not for our users: what counts is said by us."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", module=r"optuna\..*")


def connect(url: str) -> Any:
    """Optuna's storage at an address; several workers may make its tables at the same time."""
    from optuna.storages import RDBStorage

    quiet()
    if url.startswith("sqlite"):
        options: dict[str, Any] = {"connect_args": {"timeout": SECONDS_TO_WAIT}}
    else:
        options = {"pool_pre_ping": True, "pool_recycle": CONNECTIONS_LIVE}
    with faults():
        return persistently(lambda: RDBStorage(url, engine_kwargs=options))


def open_study(url: str, name: str, directions: Sequence[Goal]) -> Study:
    """The study of this name, made where it is not there."""
    import optuna

    storage = connect(url)
    with faults():
        migrate_keys(storage, name)
        study = persistently(
            lambda: optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
        )
        kept = [direction.name.lower() for direction in study.directions]
    if kept != list(directions):
        raise UserError(f"the study {name} in this database has other objectives", hint="give the study another name")
    return study


def forget(study: Study) -> None:
    """Remove a study and its trials, unless another worker has just done so."""
    with contextlib.suppress(KeyError):
        study._storage.delete_study(study._study_id)


def own_file(url: str) -> Path | None:
    """The file of a study that is kept in one."""
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None


def load_study(url: str, name: str) -> Study:
    """The study of this name, which must be there."""
    import optuna

    file = own_file(url)
    if file is not None and not file.is_file():  # To connect would make an empty one.
        hint = "each trial's trial.json still says what it measured; the study's command begins anew"
        raise UserError(f"the study's database {file} is gone", hint=hint)
    storage = connect(url)
    with faults():
        try:
            migrate_keys(storage, name)
            return optuna.load_study(storage=storage, study_name=name)
        except KeyError:
            raise UserError(f"there is no study {name} in this database", hint="steelyard tune makes one") from None


def migrate_keys(storage: Any, name: str) -> None:
    """Rename what a study stored under the old name of a recipe key: parameters, and names inside attributes.

    Optuna has no call for that, so its tables are changed before it reads them.
    """
    from sqlalchemy import text

    study = "study_id IN (SELECT study_id FROM studies WHERE study_name = :name)"
    trials = f"trial_id IN (SELECT trial_id FROM trials WHERE {study})"  # noqa: S608 names of tables, no input
    attributes = {"study_user": study, "trial_user": trials, "trial_system": trials}
    with storage.engine.begin() as connection:
        for old, new in RENAMED_KEYS.items():
            rename = f"UPDATE trial_params SET param_name = :new WHERE param_name = :old AND {trials}"  # noqa: S608
            connection.execute(text(rename), {"old": old, "new": new, "name": name})
        for kind, owned in attributes.items():
            table, key = f"{kind}_attributes", f"{kind}_attribute_id"
            chosen = text(f"SELECT {key}, value_json FROM {table} WHERE {owned}")  # noqa: S608
            change = text(f"UPDATE {table} SET value_json = :value WHERE {key} = :row")  # noqa: S608
            for row, value in connection.execute(chosen, {"name": name}).all():
                if (migrated := migrate_dotted(value)) != value:
                    connection.execute(change, {"value": migrated, "row": row})


def persistently(do: Callable[[], T]) -> T:
    """Do what two workers may be doing at the same moment: make tables, a study, an attribute of it.

    Whoever comes second is refused by the database, table after table perhaps, and tries again.
    """
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    for _ in range(TRIES):
        try:
            return do()
        except (IntegrityError, ProgrammingError):
            time.sleep(SECONDS_BETWEEN_TRIES)
        except OperationalError as error:
            if "already exists" not in str(error):
                raise
            time.sleep(SECONDS_BETWEEN_TRIES)
    return do()
