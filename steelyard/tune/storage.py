"""Storage of a study: an SQLite file in its folder, or any database that Optuna supports, shared by many hosts."""

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
SECONDS_TO_WAIT = 60  # for the lock of an SQLite file
TRIES, SECONDS_BETWEEN_TRIES = 30, 0.1
CONNECTIONS_LIVE = 300  # seconds before a server or a firewall may have dropped them


def url_of(folder: Path, given: str | None) -> str:
    """The URL of the database. Its password is never printed."""
    if given is None:
        return f"sqlite:///{folder.resolve() / DATABASE}"
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(given)
    except ArgumentError:
        raise UserError("--storage is not a database URL", hint="for example postgresql://host/database") from None
    if url.password:
        secrets.hide(str(url.password))
    if url.drivername in ("postgresql", "postgres"):  # SQLAlchemy's default driver is not a dependency.
        url = url.set(drivername="postgresql+psycopg")
        if find_spec("psycopg") is None:
            raise UserError("PostgreSQL needs a driver", hint="pip install 'steelyard[postgresql]'")
    return url.render_as_string(hide_password=False)


def shown(url: str) -> str:
    """The URL without secrets."""
    from sqlalchemy.engine import make_url

    made = make_url(url)
    secret = {name: "***" for name in made.query if "pass" in name.lower() or secrets.is_secret(f"?{name}=x")}
    return made.update_query_dict(secret).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


@contextlib.contextmanager
def database_errors(file: Path | None = None) -> Iterator[None]:
    """Turn database errors into one message; `file` is the database file, if it is one."""
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
        if file is not None and not file.is_file():  # SQLite reports a missing file as read-only.
            hint = "each trial's trial.json still has its results; the same command starts a new study"
            raise RuntimeFailure(f"the study's database {file} is missing", hint=hint) from None
        raise RuntimeFailure(
            f"the study's database: {first}", hint="finished trials are saved; check that the database is reachable"
        ) from None


def quiet() -> None:
    """Silence Optuna's own messages; steelyard reports what matters."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", module=r"optuna\..*")


def connect(url: str) -> Any:
    """Optuna's storage for a URL. Several workers may create its tables at the same time."""
    from optuna.storages import RDBStorage

    quiet()
    if url.startswith("sqlite"):
        options: dict[str, Any] = {"connect_args": {"timeout": SECONDS_TO_WAIT}}
    else:
        options = {"pool_pre_ping": True, "pool_recycle": CONNECTIONS_LIVE}
    with database_errors():
        return persistently(lambda: RDBStorage(url, engine_kwargs=options))


def open_study(url: str, name: str, directions: Sequence[Goal]) -> Study:
    """The study of this name, created if it does not exist."""
    import optuna

    storage = connect(url)
    with database_errors():
        migrate_keys(storage, name)
        study = persistently(
            lambda: optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
        )
        stored = [direction.name.lower() for direction in study.directions]
    if stored != list(directions):
        raise UserError(
            f"the study {name} in this database has other objectives", hint="choose another name for the study"
        )
    return study


def forget(study: Study) -> None:
    """Delete a study and its trials, unless another worker has just done so."""
    with contextlib.suppress(KeyError):
        study._storage.delete_study(study._study_id)


def own_file(url: str) -> Path | None:
    """The SQLite file of a study; None for other databases."""
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None


def load_study(url: str, name: str) -> Study:
    """The study of this name, which must exist."""
    import optuna

    file = own_file(url)
    if file is not None and not file.is_file():  # Connecting would create an empty one.
        hint = "each trial's trial.json still has its results; the study's command starts a new study"
        raise UserError(f"the study's database {file} is missing", hint=hint)
    storage = connect(url)
    with database_errors():
        try:
            migrate_keys(storage, name)
            return optuna.load_study(storage=storage, study_name=name)
        except KeyError:
            raise UserError(
                f"there is no study {name} in this database", hint="create one with steelyard tune"
            ) from None


def migrate_keys(storage: Any, name: str) -> None:
    """Rename parameters, and names inside attributes, that a study stored under the old name of a recipe key.

    Optuna has no API for this, so its tables are changed before it reads them.
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
    """Retry an operation that two workers may do at the same time: create tables, a study, or one of its attributes.

    The database rejects the second worker, possibly once per table, and it tries again.
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
