"""The tuner's storage: Optuna's own tables and one beside them, in SQLite or PostgreSQL.

Several tuners may use it at once. On SQLite every transaction takes the write lock at its beginning
(one that reads first and writes later cannot wait for it, and fails at once with "database is
locked"), and tables are made under a lock file; on PostgreSQL under an advisory lock.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import platformdirs

from broker.errors import ConfigError, PipesdError

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from sqlalchemy import Connection, Engine, Table

log = logging.getLogger(__name__)

#: Of the tuner's own tables. A later version's are left alone.
SCHEMA = 1
#: Seconds for which a locked database is waited for, and others that make the tables.
BUSY_S = 5.0
CREATE_S = 60.0
_OPEN_TRIES = 5
_ADVISORY_LOCK = 0x70697065  # any number that others do not use


class StudyError(PipesdError):
    """The storage does not answer, or not as it should; another try may help."""


class BrokenStudyError(StudyError):
    """What stands in one study makes no sense, or is gone: the others are as they were."""


def default_url() -> str:
    """A SQLite file in the user's data directory, made on first use."""
    folder = Path(platformdirs.user_data_dir("pipesd"))
    return f"sqlite:///{folder / 'tuner.sqlite3'}"


class Database:
    """Open ``url``, and make or bring up to date what belongs in it.

    ``studies``: Optuna's storage. ``devices``: the tuner's own table. ``busy_s``: how long one
    transaction may wait for others. Raises ConfigError for what cannot be used.
    """

    def __init__(self, url: str, *, busy_s: float = BUSY_S) -> None:
        try:
            import sqlalchemy
            from sqlalchemy.engine import make_url
            from sqlalchemy.exc import ArgumentError
        except ModuleNotFoundError as error:
            raise not_installed(error) from None
        try:
            parsed = make_url(url)
        except ArgumentError:
            raise ConfigError(f"--storage {url!r} is no URL: give sqlite:///FILE") from None
        backend = parsed.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"--storage {backend}:// is not supported: sqlite:// or postgresql://"
            )
        if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
            raise ConfigError(f"--storage {url} names no file: give sqlite:///FILE")
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        self.shown = parsed.render_as_string(hide_password=True)
        self._sqlite = backend == "sqlite"
        self._file = Path(parsed.database) if self._sqlite and parsed.database else None
        self._text = parsed.render_as_string(hide_password=False)
        self._busy_s = busy_s
        self._sqlalchemy: Any = sqlalchemy
        self.devices, self._meta = _tables()
        try:
            self.studies = self._open()
        except (sqlalchemy.exc.SQLAlchemyError, OSError, filelock.Timeout) as error:
            raise ConfigError(
                f"cannot use --storage {self.shown}: {_first_line(error)}: see who holds it and "
                "whether it is whole, or give another"
            ) from None

    @contextlib.contextmanager
    def _alone(self, engine: Callable[[], Engine]) -> Iterator[None]:
        """While tables are made: a lock file beside a SQLite file, or a lock of PostgreSQL's."""
        if not self._sqlite:
            lock = engine()
            with lock.connect() as connection:
                connection.exec_driver_sql(f"SELECT pg_advisory_lock({_ADVISORY_LOCK})")
                yield  # the end of the connection is the end of the lock
            lock.dispose()
        else:
            assert self._file is not None
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{self._file}.lock", timeout=CREATE_S):
                yield

    def _open(self) -> RDBStorage:
        try:
            import optuna
            from optuna.storages import RDBStorage
            from sqlalchemy import create_engine
        except ModuleNotFoundError as error:
            raise not_installed(error) from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        options: dict[str, Any] = {"pool_pre_ping": not self._sqlite}
        if self._sqlite:
            options["connect_args"] = {"timeout": self._busy_s}
        try:
            with self._alone(lambda: create_engine(self._text)):
                for left in reversed(range(_OPEN_TRIES)):
                    try:
                        storage = RDBStorage(
                            self._text, engine_kwargs=options, skip_compatibility_check=True
                        )
                        break
                    except Exception as error:
                        # A tuner that is running already writes without the lock file.
                        if not left or "locked" not in str(error):
                            raise
                if self._sqlite:
                    _lock_first(storage.engine)
                    storage.scoped_session.remove()
                    storage.engine.dispose()
                with storage.engine.begin() as connection:
                    self._make_own(connection)
                self._bring_up_to_date(storage)
        except ImportError:
            raise ConfigError(
                "psycopg is not installed, which PostgreSQL needs: pip install 'psycopg[binary]'"
            ) from None
        return storage

    def _make_own(self, connection: Connection) -> None:
        self._meta.metadata.create_all(connection)
        found = connection.execute(self._meta.select()).first()
        if found is None:
            connection.execute(self._meta.insert().values(schema=SCHEMA))
        elif found.schema > SCHEMA:
            raise ConfigError(
                f"--storage {self.shown} is of a later version ({found.schema}, this is {SCHEMA}): "
                "update this program, or give another"
            )

    def _bring_up_to_date(self, storage: RDBStorage) -> None:
        current, head = storage.get_current_version(), storage.get_head_version()
        if current == head:
            return
        if current not in storage.get_all_versions():
            raise ConfigError(
                f"--storage {self.shown} was made by a later Optuna ({current}): "
                "update optuna, or give another"
            )
        log.warning("bringing %s from Optuna's form %s to %s", self.shown, current, head)
        storage.upgrade()

    @property
    def engine(self) -> Engine:
        return self.studies.engine

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction. Raises StudyError when the database fails."""
        with self.guarded(), self.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn what a storage raises into StudyError."""
        from optuna.exceptions import StorageInternalError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (StorageInternalError, self._sqlalchemy.exc.SQLAlchemyError) as error:
            cause = error.__cause__ or error
            raise StudyError(f"{self.shown}: {_first_line(cause)}") from None

    def close(self) -> None:
        """Give the connections back."""
        self.studies.scoped_session.remove()
        self.engine.dispose()


def not_installed(error: ModuleNotFoundError) -> ConfigError:
    """What to say where a library of the extra is missing."""
    return ConfigError(f"{error.name} is not installed: pip install 'pipesd[fleet]'")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _tables() -> tuple[Table, Table]:
    from sqlalchemy import BigInteger, Column, Float, Integer, MetaData, String, Table

    metadata = MetaData()
    devices = Table(
        "pipesd_tuner_devices",
        metadata,
        Column("device", String(64), primary_key=True),
        Column("owner", String(128), nullable=False, default=""),
        Column("beat", BigInteger, nullable=False, default=0),
        Column("campaign", Integer, nullable=False, default=1),
        Column("device_class", String(512), nullable=False, default=""),
        Column("r1", Float),
        Column("r2", Float),
        Column("tpt", Float),
        Column("trials", Integer, nullable=False, default=0),
        Column("settled", BigInteger, nullable=False, default=0),
        Column("pin_r1", Float),
        Column("pin_r2", Float),
    )
    meta = Table("pipesd_tuner_meta", metadata, Column("schema", Integer, primary_key=True))
    return devices, meta


def _lock_first(engine: Engine) -> None:
    from sqlalchemy import event

    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would come too late
        # A trial makes a dozen small transactions. A power cut may take the last of them away, and
        # nothing else; where the file's system cannot do this the old way stays.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
